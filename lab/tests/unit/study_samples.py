"""Raw samples that nobody measured, in the form of a study's, and what it takes to make the layers from them.

python -m lab.tests.unit.study_samples 1000000        prints rows, seconds and the peak of resident memory as JSON
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ringfence_lab.bench.kernel_counters import peak_bytes
from ringfence_lab.bench.samples import Samples
from ringfence_lab.study.cells import Cell
from ringfence_lab.study.folder import Folder
from ringfence_lab.study.summary import summarise
from ringfence_lab.study.tidy import tidy

VARIANTS = ("gloo-a", "gloo-b", "ringfence", "ringfence-profiled")
STAGES = ("seal", "open", "lock", "reduce", "send", "receive", "wait", "rest")
MACHINE = {"cpu": "a drawing of one", "cores": 2, "source": "0123456789ab"}
DATE = "2026-11-15T12:00:00+00:00"


def cell(size: int, variants: Sequence[str] = VARIANTS, **others: Any) -> Cell:
    settings = {
        "kind": "collective", "operation": "all_reduce", "size": size, "model": None, "strategy": None, "device": None,
        "bucket_mb": None, "wire": "float32", "workers": 2, "busy": False, "hosts": 0, "rate": None,
        "variants": list(variants),
    }  # fmt: skip
    return Cell({**settings, **others}, rounds=7)


def a_round(variants: Sequence[str], draw: random.Random) -> dict[str, dict[str, Any]]:
    """One round's samples, in the order in which the variants took turns."""
    samples: dict[str, dict[str, Any]] = {}
    for name in draw.sample(list(variants), len(variants)):
        seconds = draw.uniform(0.01, 0.02)
        samples[name] = {"seconds": seconds, "cpu": 1.5 * seconds, "sent": 1000.5, "repeats": 3}
        if name == "ringfence-profiled":
            samples[name] |= {"mean": 0.9 * seconds, "stages": dict.fromkeys(STAGES, 0.125)}
    return samples


def write(
    folder: Folder, what: Cell, rounds: int, draw: random.Random, machine: str = "m1", source: str = "0123456789ab"
) -> Path:
    """Append rounds to a cell's raw file, as a run of the study does; where they are."""
    folder.make()
    samples = Samples(folder.raw, f"{what.name}.jsonl")
    samples.run = f"{draw.getrandbits(32):08x}"
    samples.begin({**MACHINE, "source": source}, "ringfence study", DATE)
    for _ in range(rounds):
        samples.add({**what.settings, "machine": machine}, a_round(what.settings["variants"], draw))
    return samples.path


def lines(what: Cell, rounds: int, draw: random.Random) -> Iterator[str]:
    """A raw file's lines, without opening the file anew for each: for very many of them."""
    yield json.dumps({"run": "00000000", "machine": MACHINE, "command": "ringfence study", "date": DATE}) + "\n"
    case = {**what.settings, "machine": "m1"}
    for number in range(rounds):
        samples = a_round(what.settings["variants"], draw)
        yield json.dumps({"run": "00000000", "case": case, "round": number, "samples": samples}) + "\n"


def make(folder: Folder, rows: int, rounds: int = 25) -> None:
    """As many cells as have so many rows together, with a seed."""
    folder.make()
    draw = random.Random(1)
    for number in range(rows // rounds // len(VARIANTS)):
        what = cell(4096 * (number + 1))
        with (folder.raw / f"{what.name}.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(lines(what, rounds, draw))


def main() -> None:
    rows = int(sys.argv[1])
    with tempfile.TemporaryDirectory() as path:
        folder = Folder(Path(path))
        make(folder, rows)
        start = peak_bytes()
        begun = time.perf_counter()
        tidy(folder)
        tidied = time.perf_counter()
        summarise(folder)
        done = time.perf_counter()
        from ringfence_lab.study.schema import SUMMARY, TIDY, opened

        counts = {"tidy": opened(folder.tidy, TIDY).metadata.num_rows}
        counts["summary"] = opened(folder.summary, SUMMARY).metadata.num_rows
    seconds = {"tidy": round(tidied - begun, 2), "summary": round(done - tidied, 2)}
    print(json.dumps({"rows": counts, "seconds": seconds, "start_mib": start >> 20, "peak_mib": peak_bytes() >> 20}))


if __name__ == "__main__":
    main()
