"""Cells: what is measured as one, by its settings. The name of a cell is the name of its file of raw samples."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, NamedTuple

from ringfence_lab.bench.units import size_text

SETTINGS: Final = (
    *("kind", "operation", "size", "model", "strategy", "device", "bucket_mb"),
    *("wire", "workers", "busy", "hosts", "rate", "variants"),
)

TEE: Final = "gpu-tee"  # the kind of cells that run on simulated GPU TEEs

Step = tuple[int, float]  # bytes of a bucket, seconds of computing before it


class Pool(NamedTuple):
    """The processes that measure a cell: workers, on hosts with a rate, or the devices of a simulated machine."""

    hosts: int
    rate: str  # "" where links are not limited
    workers: int
    devices: bool


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
    def worker_pool(self) -> Pool:
        """Cells that are equal in this share their processes."""
        settings = self.settings
        return Pool(settings["hosts"], settings["rate"] or "", settings["workers"], settings["kind"] == TEE)


def _words(settings: Mapping[str, Any]) -> list[str]:
    bucket = [f"{settings['bucket_mb']:g}MiB"] if settings["bucket_mb"] else []
    if settings["operation"]:
        words = [settings["operation"], size_text(settings["size"]).replace(" ", "")]
    elif settings["kind"] == TEE:
        words = [settings["model"], *bucket]
    else:
        what = settings["strategy"] if settings["kind"] == "training" else f"trace-{settings['device']}"
        words = [settings["model"], what, *bucket]
    if settings["kind"] == TEE:
        words += ["tee", settings["preset"], f"{settings['workers']}d", settings["changed"].replace(" ", "-")]
        return [*filter(None, words), f"{settings['load']:g}-cores"]
    words += [settings["wire"]] if settings["wire"] != "float32" else []
    words += [f"{settings['workers']}w", "busy" if settings["busy"] else ""]
    words += [f"{settings['hosts']}h" if settings["hosts"] else "", settings["rate"] or ""]
    return list(filter(None, words))


def label(settings: Mapping[str, Any]) -> str:
    """Return the label of a cell from its settings or from a row of a layer."""
    if settings["operation"]:
        what = f"{settings['operation']} {size_text(settings['size'])}"
    elif settings["kind"] == TEE:
        what = settings["model"]
    elif settings["kind"] == "training":
        what = f"{settings['model']}, {settings['strategy']}"
    else:
        what = f"{settings['model']}, trace ({settings['device']})"
    if settings["bucket_mb"]:
        what += f", buckets of {settings['bucket_mb']:g} MiB"
    if settings["kind"] == TEE:
        what += f", {settings['preset']}"
        what += f", {settings['changed']}" if settings["changed"] else ""
    if settings["wire"] != "float32":
        what += f", {settings['wire']}"
    return what + (", caller busy" if settings["busy"] else "")
