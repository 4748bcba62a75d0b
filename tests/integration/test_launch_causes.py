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

# As torch writes it, by a worker that another one's failure ends at that moment.
CUT_SHORT = """
import os, signal, torch, torch.distributed as dist
dist.init_process_group("ringfence")
dist.all_reduce(torch.ones(1))
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
        file.write('{"message": ')
    os.kill(os.getpid(), signal.SIGKILL)
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


def test_workers_start_again_if_one_was_ended_while_it_wrote_its_error(tmp_path: Path) -> None:
    """torchrun reads what it has written, and fails itself if that is no JSON."""
    new_secret_file(tmp_path / "secret")
    (tmp_path / "train.py").write_text(CUT_SHORT)
    env = {**environment(tmp_path), "RINGFENCE_SECRET_FILE": str(tmp_path / "secret")}
    run = [sys.executable, "-m", "ringfence.cli", "run", "--nproc-per-node", "2", "--max-restarts", "1"]
    node = Node([*run, str(tmp_path / "train.py")], env)
    try:
        assert node.end() == 0, "\n".join(node.lines)
        assert node.matches(r"failed \(exitcode: -9\)"), "\n".join(node.lines)
    finally:
        node.kill()
