"""What verification again costs: CPU time of 8 workers with certificates for each interval, and of 4,096 by the model.

    python -m tests.integration.verified_cost [INTERVALS]

A worker reads policy, list and certificate once in an interval, and makes and verifies one proof for each of its edges in the
tree: at most five, whatever the size of the run. So the model is `reading + edges * edge`, fitted to the workers measured.
"""

from __future__ import annotations

import importlib
import statistics
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch.distributed as dist

from ringfence.admission.tree import children_of
from tests.integration.test_verified_again import VerifiedSite, proofs, verify_now
from tests.limits import FAR
from tests.pool import Pool, values

WORKERS: Final = 8
MANY: Final = 4096


def cpu_of_intervals(count: int) -> list[float]:
    """Let so many intervals end; return the CPU time of this worker's thread in each."""
    thread, edges = proofs(), len(dist.group.WORLD._session.engine.edges)
    found, idle = [], threading.Event()
    for number in range(1, count + 1):
        before = thread.cpu_seconds
        dist.barrier()
        verify_now()
        while (thread.verifications, thread.proofs) < (number * edges, number * edges) or thread.is_working:
            idle.wait(0.002)
        found.append(thread.cpu_seconds - before)
    return found


def edges_of(rank: int, size: int) -> int:
    return len(children_of(rank, size)) + (rank > 0)


def fitted(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return reading and edge by least squares."""
    slope, start = statistics.linear_regression([x for x, _ in points], [y for _, y in points])
    return start, slope


def main() -> None:
    here = importlib.import_module("tests.integration.verified_cost")  # workers import it by this name
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    with tempfile.TemporaryDirectory() as folder, Pool() as pool:
        site = VerifiedSite(Path(folder), WORKERS)
        values(pool.join("ringfence", WORKERS, env=site.environments(), seconds=FAR))
        measured = values(pool.start(here.cpu_of_intervals, WORKERS, (count,)).wait(FAR))
    medians = [statistics.median(each) for each in measured]
    for rank, median in enumerate(medians):
        print(f"rank {rank}: {edges_of(rank, WORKERS)} edges, {1000 * median:.2f} ms of CPU time in an interval")
    reading, edge = fitted([(edges_of(rank, WORKERS), median) for rank, median in enumerate(medians)])
    print(
        f"{WORKERS} workers: {1000 * sum(medians):.1f} ms; model: {1000 * reading:.2f} + {1000 * edge:.2f} ms an edge"
    )
    many = [reading + edge * edges_of(rank, MANY) for rank in range(MANY)]
    share = 100 * max(many) / 600
    print(
        f"{MANY} workers by the model: {1000 * max(many):.1f} ms for the busiest, {1000 * statistics.mean(many):.1f} ms "
        f"on average, {sum(many):.1f} s in all; with an interval of 10 minutes {share:.4f} % of the busiest worker's core"
    )


if __name__ == "__main__":
    main()
