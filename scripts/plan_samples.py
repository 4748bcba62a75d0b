"""The benchmark's samples as rows of a study's summary: what the planner is tried on where there is no study."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from scripts.page.edition import read

SAMPLES: Final = Path(__file__).parents[1] / "docs" / "results"


def bench_rows() -> list[dict[str, Any]]:
    """The benchmark's samples as a study would summarise them."""
    rates = {"1gbit": 10**9, "2.5gbit": 2_500_000_000, "10gbit": 10**10}
    rows = []
    for result in read(SAMPLES).results:
        case = result.case
        if case["kind"] != "collective" or case.get("busy"):
            continue
        around = f"-{case['hosts']}h-{case['rate']}" if case["rate"] else ""
        profiled = "-profiled" if "ringfence-profiled" in case["variants"] else ""
        name = f"{case['operation']}-{case['size'] >> 10}KiB-{case['workers']}w{around}{profiled}"
        for line in result.lines:
            shares = line.stages or {}
            stages = {f"stage_{stage}": share * line.seconds * 1e9 for stage, share in shares.items()}
            row = {
                "cell": name,
                "variant": line.variant,
                "seconds": line.seconds,
                "ratio": line.ratio.median,
                **stages,
            }
            rows.append({**row, **case, "rate_bits": rates.get(case["rate"]), "scored": result.resolution <= 0.10})
    return rows
