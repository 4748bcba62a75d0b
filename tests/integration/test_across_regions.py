"""Two sites train with DiLoCo under `ringfence run`: a site is killed and comes back, or the network between them fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.across_regions import Distant, Sites, killed, outage, shape
from tests.integration.chaos import tails
from tests.integration.netns import Hosts
from tests.limits import HANG

pytestmark = [pytest.mark.processes, pytest.mark.real_start, pytest.mark.timeout(1800)]


@pytest.mark.nightly  # test_diloco.py loses a worker in the gate
def test_a_killed_site_comes_back_and_takes_what_the_other_has_learnt(tmp_path: Path) -> None:
    alone, together = killed(tmp_path, workers=2)
    assert min(alone, together) > 0.0


@pytest.mark.nightly  # test_launch_outages.py has one in the gate
def test_a_short_outage_changes_nothing(tmp_path: Path) -> None:
    """Both sites say that the other does not answer, and go on in one session, to the end."""
    with Hosts() as hosts, Distant(hosts, shape(1, 6, least=2), tmp_path, "RINGFENCE_OUTAGE_TIMEOUT=600") as nodes:
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
