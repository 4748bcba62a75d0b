"""Random collectives on eight workers: all are correct, and memory does not grow."""

from __future__ import annotations

import ctypes
import random
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.cases import DTYPES, GROUPS, LAYOUTS, MODES, MOVING, OPS, REDUCING, SIZES, Case, is_defined
from tests.conformance.collectives import RIGHT, play
from tests.conformance.gloo_differences import difference
from tests.limits import HANG
from tests.pool import Pool

WORLD = 8
SEED = 2026
BOUNDED, FULL = 300, 2_000
SLACK = 16 << 20  # bytes: the resident size of a worker of 260 MiB varies by half of that


def random_case(chance: random.Random) -> Case:
    while True:
        collective = chance.choice((*REDUCING, *MOVING))
        row: dict[str, Any] = {
            "collective": collective,
            "dtype": chance.choice(DTYPES),
            "op": chance.choice(OPS) if collective in REDUCING else "",
            "size": chance.choice((*SIZES, chance.randrange(2000))),
            "layout": chance.choice(LAYOUTS),
            "mode": chance.choice(MODES),
            "group": chance.choice(GROUPS),
        }
        if not row["op"] or is_defined(row["op"], row["dtype"]):
            return Case(world=WORLD, **row)


def resident() -> int:
    """The resident size of this process in bytes, after the allocator has released free memory."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def play_and_weigh(cases: list[tuple[int, Case]]) -> tuple[list[tuple[int, str]], int]:
    faults = [
        (number, report) for (number, _), report in zip(cases, play(cases), strict=True) if report not in (None, RIGHT)
    ]
    return faults, resident()


@pytest.mark.long
@pytest.mark.nightly
def test_random_collectives_are_correct_without_memory_growth(pool: Pool, backend: str, full: bool) -> None:
    count = FULL if full else BOUNDED
    chance = random.Random(SEED)
    cases: list[tuple[int, Case]] = []
    while len(cases) < count:
        case = random_case(chance)
        if backend != "gloo" or difference(case) is None:
            cases.append((len(cases), case))
    thirds = [cases[start : start + count // 3 + 1] for start in range(0, count, count // 3 + 1)]
    played = [pool.check(play_and_weigh, WORLD, backend, (third,), timeout=HANG) for third in thirds]
    faults = [f"{cases[number][1]}: {report}" for third in played for faults, _ in third for number, report in faults]
    growth = [last[1] - first[1] for first, last in zip(played[0], played[-1], strict=True)]
    print(
        f"{count} random collectives on {WORLD} {backend} workers, growth of memory in KiB: {[g >> 10 for g in growth]}"
    )
    assert not faults
    if backend == "ringfence":  # Gloo's memory grows by up to a third in two thousand collectives
        assert max(growth) < SLACK
