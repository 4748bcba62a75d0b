"""Search for the input that costs the most CPU time: `python -m tests.fuzz --cpu certificate --seconds 600`, or `all`.

Seeds are changed at random, and the changed ones that cost more than what is there, in all or for each byte, take its place.
What is found is measured again, several times, and printed as a line of JSON; the dearest input goes to `--finds`.
`--table FILE` prints such lines as a table.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path

from tests.attack.expensive import reference_seconds
from tests.fuzz.cpu_targets import TARGETS, CpuTarget
from tests.fuzz.mutate import _change

POOL = 24
LEAST = 16  # inputs that a search tries


@dataclass(frozen=True)
class Found:
    seconds: float
    size: int  # on the wire
    data: bytes

    @property
    def per_byte(self) -> float:
        return self.seconds / max(self.size, 256)  # a frame and TLS's own bytes are there in any case


def measured(target: CpuTarget, data: bytes, times: int = 1) -> Found:
    """With the CPU seconds of the fastest of some runs."""
    return Found(*min(target.cost(data) for _ in range(times)), data)


def search(target: CpuTarget, seconds: float, number: int = 0, least: int = LEAST) -> tuple[Found, Found, int]:
    """The dearest input in all, the dearest for each byte, and how many were tried: at least `least`, on any machine."""
    chance, tried = random.Random(number), 0
    seeds = [each[: target.longest] for each in target.seeds()]
    for each in seeds:
        target.cost(each)  # modules and caches
    pool = [measured(target, each, 3) for each in seeds]
    end = time.monotonic() + seconds
    while tried < least or time.monotonic() < end:
        tried += 1
        data = _changed(chance.choice(pool).data if chance.random() < 0.8 else chance.choice(seeds), seeds, chance)
        data = data[: target.longest]
        one = measured(target, data)
        if len(pool) < POOL or one.seconds > pool[0].seconds or one.per_byte > pool[-1].per_byte:
            one = measured(target, data, 4)  # a busy machine makes anything slow once
            pool = _keep([*pool, one])
    pool = [measured(target, each.data, 9) for each in pool]
    return max(pool, key=lambda each: each.seconds), max(pool, key=lambda each: each.per_byte), tried


def _keep(pool: list[Found]) -> list[Found]:
    """The dearest half in all, and the dearest half for each byte."""
    whole = sorted(pool, key=lambda each: -each.seconds)[: POOL // 2]
    each_byte = sorted((each for each in pool if each not in whole), key=lambda each: -each.per_byte)
    return whole + each_byte[: POOL // 2]


def _changed(data: bytes, seeds: list[bytes], chance: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(1 << chance.randrange(4)):
        if changed and chance.random() < 0.15:  # the same again and again: lists that grow
            start = chance.randrange(len(changed))
            piece = changed[start : start + (1 << chance.randrange(9))]
            changed[start:start] = piece * (1 << chance.randrange(8))
        else:
            _change(changed, chance, seeds, ())
    return bytes(changed)


def table(path: Path) -> str:
    """Format the results of a search for a document."""
    heads = (
        "what is sent",
        "bytes",
        "CPU time, ms",
        "in P-256 verifications",
        "budget",
        "most for a byte, ns",
        "inputs",
    )
    rows = [f"| {' | '.join(heads)} |"]
    rows.append("|---|---:|---:|---:|---:|---:|---:|")
    for line in map(json.loads, path.read_text().splitlines()):
        numbers = [f"{line['bytes']:,}", f"{line['milliseconds']:.2f}", f"{line['p256_verifications']:.1f}"]
        numbers += [str(TARGETS[line["target"]].budget), f"{line['nanoseconds_per_byte']:,}", f"{line['inputs']:,}"]
        rows.append(f"| {line['target']} | " + " | ".join(numbers) + " |")
    return "\n".join(rows)


def run(names: list[str], seconds: float, number: int, finds: Path) -> None:
    for name in names:
        target = TARGETS[name]
        dearest, densest, tried = search(target, seconds, number)
        line = {
            "target": name,
            "inputs": tried,
            "seconds_of_search": seconds,
            "bytes": dearest.size,
            "milliseconds": round(1000 * dearest.seconds, 3),
            "p256_verifications": round(dearest.seconds / reference_seconds(), 1),
            "nanoseconds_per_byte": round(1e9 * densest.per_byte),
            "bytes_of_the_densest": densest.size,
        }
        finds.mkdir(parents=True, exist_ok=True)
        (finds / f"cpu-{name}-{hashlib.sha256(dearest.data).hexdigest()[:16]}").write_bytes(dearest.data)
        print(json.dumps(line), flush=True)
