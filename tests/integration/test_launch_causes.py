"""A worker of one node fails: every node says which, where and why."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from ringfence.config.private_files import new_secret_file
from tests import ports
from tests.integration.launched_node import Node
from tests.integration.test_readme import environment

pytestmark = pytest.mark.processes

SCRIPT = """
import os, signal, torch, torch.distributed as dist
dist.init_process_group("ringfence")
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)
if dist.get_rank() == 1:
    raise ValueError("the batch is empty\\nat sample 7")
dist.all_reduce(torch.ones(1))
"""


def test_every_node_learns_what_failed(tmp_path: Path) -> None:
    """The second worker is killed, and in the next round it raises. The first one, on another node, only loses its peer."""
    new_secret_file(tmp_path / "secret")
    (tmp_path / "train.py").write_text(SCRIPT)
    env = {**environment(tmp_path), "RINGFENCE_SECRET_FILE": str(tmp_path / "secret")}
    run = [sys.executable, "-m", "ringfence.cli", "run", "--nnodes", "2", "--rdzv-id", "causes", "--max-restarts", "1"]
    run += ["--rdzv-endpoint", f"127.0.0.1:{ports.port()}"]
    nodes = [Node([*run, "--node-rank", str(rank), str(tmp_path / "train.py")], env) for rank in range(2)]
    try:
        assert [node.end() for node in nodes] == [1, 1]
        where = f"on {socket.gethostname()}$"
        for node in nodes:
            assert node.matches(f"a worker has failed: rank 1 ended with SIGKILL, {where}"), "\n".join(node.lines)
        last = (
            f"a worker has failed: rank 1 ended with exit code 1: ValueError: the batch is empty at sample 7, {where}"
        )
        assert nodes[0].matches(last), "\n".join(nodes[0].lines)
        assert nodes[1].matches("^ +ValueError: the batch is empty$"), "torchrun's own report has the traceback"
    finally:
        for node in nodes:
            node.kill()
