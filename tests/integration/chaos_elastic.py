"""An elastic training that loses a node, goes on with the others, and takes the node back."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.integration.chaos import POLL
from tests.integration.chaos_nodes import Nodes, Shape
from tests.limits import HANG

BEFORE = 6  # steps before the node is killed: one more than to the first checkpoint


@dataclass
class ElasticOutcome:
    """What became of the run. Times are in seconds; None: it did not happen."""

    shrunk: float | None = None  # from the kill of a node until all other ranks have taken a step in the smaller world
    grown: float | None = None  # from the start of the new agent until all ranks have taken a step in the full world


def shrink_and_grow(shape: Shape, folder: Path, node: int = 1) -> ElasticOutcome:
    """Kill a node, wait for the others to go on, start it again and wait for all. The training needs enough steps."""
    outcome = ElasticOutcome()
    with Nodes(shape, folder) as nodes:

        def wait(until: Callable[[], bool]) -> bool:
            end = time.time() + HANG
            while not (found := until()) and time.time() < end:
                time.sleep(POLL)
                nodes.read_events()
            return found

        def ranks(world: int, since: float) -> set[int]:
            return {
                event["rank"]
                for event in nodes.events
                if event["event"] == "step" and event["time"] > since and event["world"] == world
            }

        for each in range(shape.nodes):
            nodes.start(each)
        if not wait(lambda: nodes.last_step() >= BEFORE):
            return outcome
        killed = time.time()
        nodes.kill_node(node)
        fewer = shape.ranks - shape.workers
        if not wait(lambda: len(ranks(fewer, killed)) == fewer):
            return outcome
        outcome.shrunk = time.time() - killed
        started = time.time()
        nodes.start(node)
        if wait(lambda: len(ranks(shape.ranks, started)) == shape.ranks):
            outcome.grown = time.time() - started
    return outcome
