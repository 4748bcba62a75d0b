"""Two sites train with DiLoCo under `ringfence run`: a site is killed and comes back, or the network between them fails."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.integration.across_regions import Distant, Sites, outage, shape
from tests.integration.chaos import tails
from tests.integration.chaos_nodes import Nodes
from tests.integration.netns import Hosts
from tests.limits import HANG

pytestmark = [pytest.mark.processes, pytest.mark.real_start, pytest.mark.timeout(1800)]

WORKERS = 2  # of a site


def test_a_killed_site_comes_back_and_takes_what_the_other_has_learnt(tmp_path: Path) -> None:
    """The other site's workers keep their processes, and train on until it is back."""
    with Nodes(shape(WORKERS), tmp_path) as nodes:
        run = Sites(nodes)
        for node in range(2):
            nodes.start(node)
        run.all_average(2, 0.0, 2 * WORKERS)
        stay = set(nodes.workers(0))
        killed = time.time()
        nodes.kill_node(1)
        alone = run.all_average(2, killed, WORKERS)
        nodes.start(1)
        together = run.all_step(alone, 2 * WORKERS)
        run.all_average(2, together, 2 * WORKERS)
        run.assert_agreed()
        assert {each["pid"] for each in run.rounds(killed) if each["rank"] < WORKERS} <= stay
        back = min(each["step"] for each in run.rounds(together) if each["rank"] >= WORKERS)
        assert back > max(each["step"] for each in run.rounds() if each["world"] == WORKERS)


def test_a_short_outage_changes_nothing(tmp_path: Path) -> None:
    """Both sites say that the other does not answer, and go on in one session, to the end."""
    with Hosts() as hosts, Distant(hosts, shape(1, rounds=6), tmp_path, "RINGFENCE_OUTAGE_TIMEOUT=600") as nodes:
        run = Sites(nodes)
        for node in range(2):
            nodes.start(node)
        run.all_average(2, 0.0, 2)
        hosts.cut("switch")
        run.wait(lambda: all("no answer from worker" in said(tmp_path, node) for node in range(2)))
        hosts.restore("switch")
        for agent in nodes.agents.values():
            assert agent.wait(HANG) == 0, tails(tmp_path)
        nodes.read_events()
        run.assert_agreed()
        assert [each["step"] for each in run.rounds() if each["rank"] == 1] == list(range(1, 7))
        assert len({each["round"] for each in nodes.events}) == 1


def said(folder: Path, node: int) -> str:
    return "".join(log.read_text(errors="replace") for log in folder.glob(f"agent-{node}-*.log"))


@pytest.mark.nightly
def test_a_site_that_an_outage_has_cut_off_comes_back(tmp_path: Path) -> None:
    """A minute, with an outage timeout of 20 s: the near site goes on alone, and later with the other one."""
    with Hosts() as hosts:
        alone, together = outage(hosts, tmp_path, seconds=60.0, timeout=20.0)
    assert alone > 20.0
    assert together > 0.0
