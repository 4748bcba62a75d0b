"""Two sites that train with DiLoCo (diloco_training.py), on one machine or on two, and what their log must show.

    python -m tests.integration.across_regions

prints how long a kill and an outage of 60 s stop them.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from tests.integration.chaos_nodes import Nodes, Shape
from tests.integration.netns import ADDRESSES, Hosts
from tests.integration.rejoins import Watched
from tests.limits import HANG

SCRIPT = ("-m", "tests.integration.diloco_training")
ENDLESS = 100_000  # rounds


def shape(workers: int, rounds: int = ENDLESS, least: int = 1) -> Shape:
    """A training that begins and goes on with at least so many sites."""
    return Shape(
        "ringfence", 2, workers, min_nodes=least, steps=rounds, restarts=20, flags=("--rejoin",), script=SCRIPT
    )


class Distant(Nodes):
    """Two nodes on two machines, as network namespaces."""

    def __init__(self, hosts: Hosts, given: Shape, folder: Path, *variables: str) -> None:
        super().__init__(given, folder)
        self._hosts, self._variables = hosts, variables

    def command(self, node: int) -> list[str]:
        found = super().command(node)
        found[found.index("--rdzv-endpoint") + 1] = f"{ADDRESSES['near']}:29400"
        return [*self._hosts.prefix(list(ADDRESSES)[node]), "env", *self._variables, *found]


class Sites(Watched):
    """A training of sites whose log is followed."""

    def rounds(self, since: float = 0.0) -> list[dict[str, Any]]:
        return [each for each in self.nodes.events if each["event"] == "round" and each["time"] > since]

    def all_average(self, count: int, since: float, world: int) -> float:
        """Wait until every rank of a world of this size has taken so many outer steps; return when the first was taken."""

        def found() -> list[float]:
            times = [[each["time"] for each in self.rounds(since) if each["rank"] == rank] for rank in range(world)]
            return [each[0] for each in times] if all(len(each) >= count for each in times) else []

        return float(max(self.wait(found, HANG)))

    def assert_agreed(self) -> None:
        """After each outer step, all who took it have the same agreed parameters and momentum; rank 0 took none twice.

        An outer step that was interrupted is taken in `catch_up`, and not logged.
        """
        digests: dict[int, set[str]] = {}
        for each in self.rounds():
            digests.setdefault(each["step"], set()).add(each["digest"])
        assert all(len(found) == 1 for found in digests.values()), digests
        of_rank_0 = [each["step"] for each in self.rounds() if each["rank"] == 0]
        assert of_rank_0 == sorted(set(of_rank_0))


def killed(folder: Path, workers: int) -> tuple[float, float]:
    """Kill a site, and start it again. Return after how many seconds the other site trains on, and both again.

    The latter is counted from the start. The other site's workers keep their processes.
    """
    with Nodes(shape(workers), folder) as nodes:
        run = Sites(nodes)
        for node in range(2):
            nodes.start(node)
        run.all_average(2, 0.0, 2 * workers)
        stay = set(nodes.workers(0))
        began = time.time()
        nodes.kill_node(1)
        alone = run.all_step(began, workers)
        run.all_average(2, alone, workers)
        started = time.time()
        nodes.start(1)
        together = run.all_step(started, 2 * workers)
        run.all_average(2, together, 2 * workers)
        run.assert_agreed()
        assert {each["pid"] for each in run.rounds(began) if each["rank"] < workers} <= stay
        back = min(each["step"] for each in run.rounds(together) if each["rank"] >= workers)
        assert back > max(each["step"] for each in run.rounds() if each["world"] == workers)
    return alone - began, together - started


def outage(hosts: Hosts, folder: Path, seconds: float, timeout: float, workers: int = 1) -> tuple[float, float]:
    """Cut the network for longer than the timeout. Return after how many seconds the near site trains on, and both again.

    The latter is counted from the end of the outage.
    """
    with Distant(hosts, shape(workers), folder, f"RINGFENCE_OUTAGE_TIMEOUT={timeout:g}") as nodes:
        run = Sites(nodes)
        for node in range(2):
            nodes.start(node)
        run.all_average(2, 0.0, 2 * workers)
        began = time.time()
        hosts.cut("switch")
        alone = run.all_step(began, workers)
        run.all_average(2, alone, workers)
        time.sleep(max(0.0, began + seconds - time.time()))
        hosts.restore("switch")
        ended = time.time()
        together = run.all_step(ended, 2 * workers)
        run.all_average(2, together, 2 * workers)
        run.assert_agreed()
    return alone - began, together - ended


def main() -> None:
    seconds, timeout = 60.0, 20.0
    with tempfile.TemporaryDirectory(prefix="ringfence-across-") as folder, Hosts() as hosts:
        alone, together = killed(Path(folder, "killed"), 2)
        print("a site of 2 workers is killed; last_call_timeout=2:")
        print(f"the other site trains on {alone:.1f} s later, both {together:.1f} s after its start", flush=True)
        alone, together = outage(hosts, Path(folder, "outage"), seconds, timeout)
        print(f"outage of {seconds:g} s; RINGFENCE_OUTAGE_TIMEOUT={timeout:g}, last_call_timeout=2:")
        print(f"the other site trains on {alone:.1f} s after its beginning, both {together:.1f} s after its end")


if __name__ == "__main__":
    main()
