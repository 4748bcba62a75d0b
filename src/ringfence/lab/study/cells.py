"""Cells: what is measured as one, by its settings. The name of a cell is the name of its file of raw samples."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

from ringfence.lab.bench.units import size_text

SETTINGS: Final = (
    "kind",
    "operation",
    "size",
    "model",
    "strategy",
    "device",
    "bucket_mb",
    "wire",
    "workers",
    "busy",
    "hosts",
    "rate",
    "variants",
)

Step = tuple[int, float]  # bytes of a bucket, seconds of computing before it


@dataclass(frozen=True)
class Cell:
    """A cell. `settings` has all of SETTINGS (None where one does not apply) and what else distinguishes this cell."""

    settings: Mapping[str, Any]
    rounds: int
    trace: tuple[Step, ...] = ()  # what a cell of that kind replays

    @cached_property
    def name(self) -> str:
        """A readable name with a digest of all settings, so that no two cells share a file."""
        digest = hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode()).hexdigest()[:8]
        return "-".join([*_words(self.settings), digest])

    def without(self, variant: str) -> Cell:
        """Return the cell without a variant, which is another cell."""
        kept = [name for name in self.settings["variants"] if name != variant]
        return replace(self, settings={**self.settings, "variants": kept})

    @property
    def worker_pool(self) -> tuple[int, str, int]:
        """Hosts, rate and workers: cells that are equal in these share a worker pool."""
        return self.settings["hosts"], self.settings["rate"] or "", self.settings["workers"]


def _words(settings: Mapping[str, Any]) -> list[str]:
    if settings["kind"] == "collective":
        words = [settings["operation"], size_text(settings["size"]).replace(" ", "")]
    else:
        what = settings["strategy"] if settings["kind"] == "training" else f"trace-{settings['device']}"
        bucket = settings["bucket_mb"]
        words = [settings["model"], what, *([f"{bucket:g}MiB"] if bucket else [])]
    if settings["wire"] != "float32":
        words.append(settings["wire"])
    words.append(f"{settings['workers']}w")
    if settings["busy"]:
        words.append("busy")
    if settings["hosts"]:
        words.append(f"{settings['hosts']}h")
    return [*words, *([settings["rate"]] if settings["rate"] else [])]


def label(settings: Mapping[str, Any]) -> str:
    """Return the label of a cell from its settings or from a row of a layer."""
    if settings["kind"] == "collective":
        what = f"{settings['operation']} {size_text(settings['size'])}"
    elif settings["kind"] == "training":
        what = f"{settings['model']}, {settings['strategy']}"
    else:
        what = f"{settings['model']}, trace ({settings['device']})"
    if settings["bucket_mb"]:
        what += f", buckets of {settings['bucket_mb']:g} MiB"
    if settings["wire"] != "float32":
        what += f", {settings['wire']}"
    return what + (", caller busy" if settings["busy"] else "")
