"""Certificates are renewed while a run goes on: its next session is admitted by the new ones."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import ports
from tests.certificates import HOUR
from tests.integration.launched_node import Node
from tests.integration.test_readme import environment
from tests.integration.test_revocation import TODAY, Site

pytestmark = pytest.mark.processes

SCRIPT = """
import os, pathlib, signal, sys, torch, torch.distributed as dist
dist.init_process_group("ringfence")
renewed, killed = torch.zeros(1), pathlib.Path(sys.argv[1] + ".killed")
print("training", flush=True)
while not killed.exists():
    renewed.fill_(os.path.exists(sys.argv[1]))
    dist.all_reduce(renewed)
    if renewed.item() and dist.get_rank() == 1:
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(renewed)
"""


def test_a_certificate_is_renewed_while_a_run_goes_on(tmp_path: Path) -> None:
    """The ones of before are revoked, so they would admit nobody. The agents, which stay, have them from their start."""
    site = Site(tmp_path / "site", 2)
    site.publish(number=1, start=TODAY - HOUR)
    (tmp_path / "train.py").write_text(SCRIPT)
    run = [sys.executable, "-m", "ringfence.cli", "run", "--nnodes", "2", "--rdzv-id", "renewal", "--max-restarts", "1"]
    run += ["--rdzv-endpoint", f"127.0.0.1:{ports.port()}"]
    script = [str(tmp_path / "train.py"), str(tmp_path / "renewed")]
    nodes = [
        Node([*run, "--node-rank", str(rank), *script], {**environment(tmp_path), **site.environment(rank)})
        for rank in range(2)
    ]
    try:
        for node in nodes:
            node.wait_for("^training$")
        for number in site.machines:
            site.issue(number, 200 + number)
        site.publish(100, 101, number=2)
        (tmp_path / "renewed").touch()
        assert [node.end() for node in nodes] == [0, 0], "\n".join(nodes[0].lines[-20:])
        sessions = [node.matches(r"2 workers, run renewal, .* admitted by certificate") for node in nodes]
        assert sum(map(len, sessions)) >= 2, "a round that ends while it forms is tried again"
    finally:
        for node in nodes:
            node.kill()
