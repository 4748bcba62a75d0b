"""Follow the log of a training whose workers rejoin (rejoin_training.py)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tests.integration.chaos import POLL, tails
from tests.integration.chaos_nodes import Nodes
from tests.limits import HANG

SCRIPT = ("-m", "tests.integration.rejoin_training")


class Watched:
    """A run whose log is followed."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes

    def wait(self, until: Callable[[], Any], seconds: float = HANG) -> Any:
        end = time.time() + seconds
        while not (found := until()) and time.time() < end:
            time.sleep(POLL)
            self.nodes.read_events()
        assert found, tails(self.nodes.folder)
        return found

    def steps(self, since: float = 0.0) -> list[dict[str, Any]]:
        return [each for each in self.nodes.events if each["event"] == "step" and each["time"] > since]

    def all_step(self, since: float, world: int, seconds: float = HANG) -> float:
        """Wait until every rank of a world of this size has taken a step; return when the last one did."""

        def first() -> list[float]:
            found = [each for each in self.steps(since) if each["world"] == world]
            times = [
                min((each["time"] for each in found if each["rank"] == rank), default=0.0) for rank in range(world)
            ]
            return times if all(times) else []

        return float(max(self.wait(first, seconds)))
