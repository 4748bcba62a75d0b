"""Which chart shows which numbers. The charts themselves are those of `ringfence report`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from ringfence_lab.report.charts import across, panels, side_by_side, stacked
from ringfence_lab.report.style import Chart, save

PICTURES: Final[dict[str, Chart]] = {
    "all-reduce": panels("Sealed all-reduce, loopback; with 95 % intervals for 4 and 8 workers on 2 cores"),
    "headline": across("Sealed: 25 MiB all-reduce, and DDP steps; machines x workers"),
    "variants": across(
        "All-reduce of 25 MiB, loopback: other ways",
        under="time over sealed ringfence (1: as fast; left of it: faster)",
    ),
    "collectives": across("Collectives of 25 MiB, loopback, sealed"),
    "training": across("Training steps, loopback, sealed"),
    "rates": across("All-reduce between hosts with limited links, sealed"),
    "stages": stacked("Where the time of a sealed collective goes"),
    "buckets": side_by_side("GPT-2, 2 workers: larger buckets", "bucket_cap_mb of DDP"),
}


def draw(name: str, series: dict[str, Any], vectors: Path, pixels: Path) -> None:
    """One picture, as SVG for the documents and as PNG for eyes."""
    save(name, series, PICTURES[name], vectors, pixels)
