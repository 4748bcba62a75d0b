"""Lose a worker again and again, and count what the processes that stay hold: memory, descriptors, threads, children.

    python -m tests.integration.soak --seconds 3600 --json FILE

Two nodes train with one worker each. The worker of node 1 is killed as soon as both have gone on and its spare is ready; a
spare takes its place, and the worker of node 0 rejoins in its own process. Agents and this worker are sampled after each loss.
The worker collects garbage and trims malloc's memory every few steps: without, torch's allocations leave gaps that grow slowly.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.integration.chaos import BEGIN, NEVER, tails
from tests.integration.chaos_nodes import Nodes, Shape, is_spare, kill
from tests.integration.rejoins import SCRIPT, Watched

WARM = 3  # losses before the first sample: imports and caches of the first ones
STEADY_KIB = 8 * 1024  # by which the memory of a process may move between the halves of a soak


@dataclass(frozen=True)
class Sample:
    """What a process holds."""

    memory_kib: int
    descriptors: int
    threads: int
    children: int

    @classmethod
    def of(cls, pid: int) -> Sample:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return cls(
            memory_kib=int(status["VmRSS"].split()[0]),
            descriptors=len(os.listdir(f"/proc/{pid}/fd")),
            threads=int(status["Threads"]),
            children=len(children),
        )


@dataclass
class Soak:
    """What was seen: the seconds from each kill to the next step of both workers, and the samples of each process."""

    recovered: list[float]
    samples: dict[str, list[Sample]]

    def problems(self) -> list[str]:
        """Return what was not constant."""
        found = []
        for name, samples in self.samples.items():
            for what in ("descriptors", "threads", "children"):
                values = [getattr(each, what) for each in samples]
                if statistics.median(values[len(values) // 2 :]) > statistics.median(values[: len(values) // 2]):
                    found.append(f"{name}: {what} {values}")
            memory = [each.memory_kib for each in samples]
            grown = statistics.median(memory[len(memory) // 2 :]) - statistics.median(memory[: len(memory) // 2])
            if grown > STEADY_KIB:
                found.append(f"{name}: {grown:.0f} KiB more in the second half")
        return found


def soak(folder: Path, seconds: float) -> Soak:
    """Lose workers for this long, at least until there are four samples."""
    shape = Shape(
        nodes=2,
        workers=1,
        steps=10**9,
        restarts=10**6,
        flags=("--rejoin", "--rdzv-conf", "spares=0.1"),
        script=SCRIPT,
    )
    with Nodes(shape, folder) as nodes:
        run = Watched(nodes)
        for node in range(2):
            nodes.start(node)
        run.all_step(0.0, 2, BEGIN)
        stays = nodes.workers(0)[0]
        watched = {"agent 0": nodes.agents[0].pid, "agent 1": nodes.agents[1].pid, "worker": stays}
        result = Soak([], {name: [] for name in watched})
        end = time.monotonic() + seconds
        losses = 0
        while time.monotonic() < end or losses < WARM + 4:
            run.wait(lambda: any(is_waiting(pid) for pid, _ in nodes.processes(1)), NEVER)
            if (losses := losses + 1) > WARM:
                for name, pid in watched.items():
                    result.samples[name].append(Sample.of(pid))
            killed = time.time()
            kill(nodes.workers(1))
            result.recovered.append(run.all_step(killed, 2) - killed)
            if any(event["pid"] != stays for event in nodes.events if event["rank"] == 0):
                raise AssertionError(f"the worker of node 0 was started again\n{tails(folder)}")
            nodes.events.clear()  # the log of an hour is long
            nodes.events.extend(run.steps(killed))
        return result


def is_waiting(pid: int) -> bool:
    """Return whether a process is a spare that has imported torch and waits for an order."""
    if not is_spare(pid):
        return False
    try:
        return Path(f"/proc/{pid}/wchan").read_text() in ("pipe_read", "anon_pipe_read")
    except OSError:
        return False


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.integration.soak", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = soak(Path(folder), options.seconds)
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(result)) + "\n")
    times = sorted(result.recovered)
    print(
        f"{len(times)} losses; from a kill to the next step: median {statistics.median(times):.2f} s, worst {times[-1]:.2f} s"
    )
    for name, samples in result.samples.items():
        print(f"{name}: {samples[0]} at first, {samples[-1]} at the end")
    for problem in result.problems():
        print(f"NOT CONSTANT: {problem}")
    return int(bool(result.problems()))


if __name__ == "__main__":
    sys.exit(main())
