"""How fast one link could seal and open on 1, 2, … threads: a micro-benchmark of the cipher as the product drives it.

The counters of a link are handed out in wire order, before anything is sealed; so its segments can be sealed on several
threads without a change of the protocol, as long as they leave in order. `cryptography` releases the interpreter's lock
while it works. Here thread t of n takes segments t, t + n, …, all under the keys of one link; afterwards everything is
opened, on as many threads, and compared with what was sealed.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Barrier
from typing import Any, Final

from ringfence.cli.terminal import table, wrap
from ringfence.errors import RingfenceError
from ringfence.keys import KEY_BYTES, TAG_BYTES, Secret
from ringfence.link.frames import HEADER_BYTES, HOP_BYTES
from ringfence.link.seal import OriginKeys
from ringfence_lab.bench import machine
from ringfence_lab.bench.intervals import Interval, interval
from ringfence_lab.bench.measure import Measured, Setup
from ringfence_lab.bench.samples import Case, Round, Samples
from ringfence_lab.bench.units import size_text
from ringfence_lab.progress import Progress

STAGES: Final = ("seal", "open")
_AROUND: Final = 8 << 20  # bytes that take turns: more than the caches next to a core hold, as in a collective
_BATCH_BYTES: Final = 512 << 20  # of each stage and round: 50 ms at 10 GB/s
_RANK: Final = 0


class _Link:
    """The segments of one link, and threads that seal and open them."""

    def __init__(self, segment: int, threads: int) -> None:
        count = -(-max(_AROUND // segment, 2) // threads) * threads  # every thread has as many
        self._threads = threads
        self._passes = max(1, _BATCH_BYTES // (segment * count))
        self._keys = OriginKeys(Secret(os.urandom(KEY_BYTES)), _RANK)
        self._header = bytes(HEADER_BYTES - HOP_BYTES)
        self._plain = [memoryview(bytearray(os.urandom(segment))) for _ in range(count)]
        self._sealed = [memoryview(bytearray(segment + TAG_BYTES)) for _ in range(count)]
        self._opened = [memoryview(bytearray(segment)) for _ in range(count)]
        self._counters = [0] * count
        self.bytes = self._passes * count * segment

    def seal(self) -> Callable[[int, int], None]:
        """Seal all segments. Each segment of each pass has its own counter; those of the last pass are opened later."""
        counters = [[self._keys.take() for _ in self._plain] for _ in range(self._passes)]
        self._counters = counters[-1]

        def work(index: int, turn: int) -> None:
            self._keys.seal_into(counters[turn][index], self._header, self._plain[index], self._sealed[index])

        return work

    def open(self) -> Callable[[int, int], None]:
        def work(index: int, turn: int) -> None:
            counter, target = self._counters[index], self._opened[index]
            self._keys.open_into(_RANK, counter, self._header, self._sealed[index], target)

        return work

    def timed(self, work: Callable[[int, int], None]) -> dict[str, float]:
        """Time all passes over all segments, from the first thread's start to the last one's end."""
        together = Barrier(self._threads)

        def share(thread: int) -> tuple[int, int]:
            together.wait()
            start = time.perf_counter_ns()
            for turn in range(self._passes):
                for index in range(thread, len(self._plain), self._threads):
                    work(index, turn)
            return start, time.perf_counter_ns()

        with ThreadPoolExecutor(self._threads) as pool:
            cpu = time.process_time_ns()
            spans = list(pool.map(share, range(self._threads)))
            cpu = time.process_time_ns() - cpu
        seconds = (max(end for _, end in spans) - min(start for start, _ in spans)) / 1e9
        return {"seconds": seconds, "cpu": cpu / 1e9, "bytes": self.bytes}

    def check(self) -> None:
        """Check that the opened bytes are the sealed ones."""
        if self._opened != self._plain:
            raise RingfenceError("segments that several threads sealed do not open to what they were: tell us")


def measure_round(segment: int, threads: int) -> Round:
    """Measure one round of sealing and opening."""
    link = _Link(segment, threads)
    measured = {"seal": link.timed(link.seal()), "open": link.timed(link.open())}
    link.check()
    return measured


def measure(setup: Setup, segments: Sequence[int], threads: Sequence[int], facts: Mapping[str, Any]) -> list[Measured]:
    """Measure the missing rounds. Each round measures all cases in its own order."""
    around = {"machine": machine.digest(facts)}
    cases: list[dict[str, Any]] = [
        {"kind": "link", "segment": segment, "threads": count, **around} for segment in segments for count in threads
    ]
    samples = Samples(setup.results)
    missing = [(number, case) for case in cases for number in range(len(samples.rounds(case)), setup.rounds)]
    missing.sort(key=lambda one: (one[0], random.Random(str(one)).random()))  # noqa: S311 (an order, not a secret)
    if missing:
        samples.begin(facts, setup.command, machine.now())
    with Progress(len(missing)) as progress:
        for _, case in missing:
            progress.say(f"segments of {size_text(case['segment'])}, {case['threads']} threads")
            samples.add(case, measure_round(case["segment"], case["threads"]))
            progress.step()
    return [Measured(case, samples.rounds(case)[: setup.rounds]) for case in cases]


@dataclass(frozen=True)
class LinkResult:
    """One segment size and number of threads; rates in GB/s (10⁹ bytes)."""

    case: Case
    rounds: int
    rate: dict[str, Interval]  # by stage
    cpu_ns_per_byte: dict[str, float]

    def as_json(self) -> dict[str, Any]:
        rates = {stage: rate._asdict() for stage, rate in self.rate.items()}
        cpu = self.cpu_ns_per_byte
        return {"case": self.case, "rounds": self.rounds, "gb_per_second": rates, "cpu_ns_per_byte": cpu}


def result(measured: Measured) -> LinkResult:
    """Summarize the rounds of a case."""
    rate, cpu = {}, {}
    for stage in STAGES:
        samples = [samples[stage] for samples in measured.rounds]
        rate[stage] = interval([one["bytes"] / one["seconds"] / 1e9 for one in samples])
        cpu[stage] = statistics.median(one["cpu"] / one["bytes"] * 1e9 for one in samples)
    return LinkResult(measured.case, len(measured.rounds), rate, cpu)


def results_text(results: Sequence[LinkResult]) -> str:
    """Return the results as text for a terminal."""
    header = ("segments", "threads", "seal, GB/s", "open, GB/s", "CPU: seal, ns/B", "open, ns/B")
    rows = [
        (
            size_text(each.case["segment"]),
            str(each.case["threads"]),
            *(f"{rate.median:.2f} [{rate.low:.2f}, {rate.high:.2f}]" for rate in each.rate.values()),
            f"{each.cpu_ns_per_byte['seal']:.3f}",
            f"{each.cpu_ns_per_byte['open']:.3f}",
        )
        for each in results
    ]
    note = (
        "GB/s: 10⁹ bytes of plaintext a second; median and 95 % bootstrap interval over rounds. Memory only, no socket."
    )
    return "\n".join([table([header, *rows]), wrap(note)])
