"""Raw samples that nobody measured, in the form of a study's."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ringfence_lab.bench.samples import Samples
from ringfence_lab.study.cells import Cell
from ringfence_lab.study.folder import Folder

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
