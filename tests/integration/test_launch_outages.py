"""`ringfence run` on two machines, as network namespaces, through an interruption of the network between them."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from ringfence.config.private_files import new_secret_file
from tests.integration.launched_node import Node
from tests.integration.netns import ADDRESSES, Hosts
from tests.integration.test_readme import environment

pytestmark = pytest.mark.processes

SCRIPT = Path(__file__).with_name("launch_outage_script.py")
ENDPOINT = f"{ADDRESSES['near']}:29400"
SILENT = re.compile(r"no answer from (\w+) .* for \d+ s: a machine or the network is down\. Waiting for up to 300 s")
PEER = re.compile(r"(?:node|worker) \d+")
BACK = re.compile(r"(node|worker) .* answered again after (\d+) s")


@contextlib.contextmanager
def started(hosts: Hosts, folder: Path, workers: int, steps: int) -> Iterator[list[Node]]:
    """Start the script on both machines."""
    env = {**environment(folder), "RINGFENCE_SECRET_FILE": str(folder / "secret")}
    run = [sys.executable, "-m", "ringfence.cli", "run", "--nnodes", "2", "--rdzv-endpoint", ENDPOINT]
    run += ["--rdzv-id", "outages", "--nproc-per-node", str(workers)]
    script = [str(SCRIPT), str(folder / "stop"), str(steps)]
    nodes: list[Node] = []
    try:
        for rank, side in enumerate(ADDRESSES):
            nodes.append(Node([*hosts.prefix(side), *run, "--node-rank", str(rank), *script], env))
        yield nodes
    finally:
        for node in nodes:
            node.kill()


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_a_run_goes_on_after_an_outage_and_both_sides_say_so(tmp_path: Path, workers: int, full: bool) -> None:
    """Until both sides have announced it; in the long form outages of 20, 80 and 200 s."""
    new_secret_file(tmp_path / "secret")
    with Hosts() as hosts:
        with started(hosts, tmp_path, workers, 0) as nodes:
            for node in nodes:
                node.wait_for("^training$")
            for seconds in (20, 80, 200) if full else (0,):
                end = hosts.cut("switch") + seconds
                for node in nodes:
                    node.wait_for(SILENT, "node", "worker")
                time.sleep(max(0.0, end - time.monotonic()))
                hosts.restore("switch")
                for node in nodes:
                    node.wait_for(BACK, "node", "worker")
                    node.wait_until(partial(every_peer_is_back, node))  # or the next outage is a part of this one
                    print("\n".join(found.string for found in (*node.matches(SILENT), *node.matches(BACK))))
                    assert all(int(found[2]) >= max(5, seconds) for found in node.matches(BACK))
                    node.looked_at = len(node.lines)
            (tmp_path / "stop").touch()
            assert [node.end() for node in nodes] == [0, 0]
        for node in nodes:
            node.looked_at = 0
        disturbed = results(nodes)
        assert sum(len(node.matches(r"workers, run outages, ")) for node in nodes) == 1, "one session"
        (tmp_path / "stop").unlink()
        with started(hosts, tmp_path, workers, disturbed[0]) as nodes:
            assert [node.end() for node in nodes] == [0, 0]
        assert results(nodes) == disturbed


def every_peer_is_back(node: Node) -> bool:
    """Whether as many peers answered again, on this machine, as did not answer."""
    silent, back = (
        sorted(name for found in node.matches(pattern) for name in PEER.findall(found.string))
        for pattern in (SILENT, BACK)
    )
    return silent == back


def results(nodes: list[Node]) -> tuple[int, list[str]]:
    """The number of steps, and what each rank says of its losses."""
    found = sorted(match[0] for node in nodes for match in node.matches(r"^rank \d+: (\d+) steps, losses \w+$"))
    return int(found[0].split()[2]), found
