"""Builds the summary of a study from its raw files: one row for each cell and variant, one cell at a time."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from ringfence.config.private_files import replace_file
from ringfence_lab.bench import names
from ringfence_lab.bench.intervals import MIN_ROUNDS, interval, resolution
from ringfence_lab.study.folder import Folder
from ringfence_lab.study.rounds import TEE_SETTINGS, Row, rows_of

SCORED: Final = 0.10  # cells in which the baseline reads more than this from itself are shown, not scored
_SETTINGS: Final = (
    *("cell", "kind", "operation", "size", "model", "strategy", "device", "bucket_mb", "wire", "workers", "hosts"),
    *("rate_bits", "busy", "variant"),
)
_OTHERS: Final = ("machine", "source", "scaled", *TEE_SETTINGS, "dilation")  # the same in all rounds


def summarise(folder: Folder) -> bool:
    """Build the summary; return whether it was out of date. Files that would not change are left alone."""
    machines: dict[str, Any] = {}
    rows = [json.dumps(row) for file in folder.raw_files() for row in summary_of(list(rows_of(file, machines)))]
    texts = {
        folder.machines: json.dumps(machines, indent=1) + "\n",
        folder.summary: "[\n" + ",\n".join(rows) + "\n]\n" if rows else "[]\n",
    }
    changed = {path: text for path, text in texts.items() if not path.exists() or path.read_text() != text}
    for path, text in changed.items():
        replace_file(path, text.encode(), 0o644)
    return bool(changed)


def summary_of(rows: Sequence[Row]) -> Iterator[Row]:
    """Yield the summary of one cell, a row for each variant in the order of their first rounds."""
    by_variant: dict[str, dict[int, Row]] = {}
    for row in rows:
        by_variant.setdefault(row["variant"], {})[row["round"]] = row
    if not rows:
        return
    first, second = (by_variant.get(name, {}) for name in names.study_baseline(rows[0]["kind"]))
    both = first.keys() & second.keys()
    baseline = {number: (first[number]["seconds"] + second[number]["seconds"]) / 2 for number in both}
    if not baseline:
        return  # without a round of the baseline there is nothing to compare with
    order = sorted(baseline)
    itself = resolution(sorted(second[n]["seconds"] / first[n]["seconds"] for n in order))
    for samples in by_variant.values():
        rounds = [samples[number] for number in order if number in samples]
        if rounds:
            yield _summarised(rounds, baseline, itself)


def _summarised(rounds: Sequence[Row], baseline: Mapping[int, float], itself: float) -> Row:
    # Sorted: the interval of a cell does not depend on the order of its rounds.
    seconds = interval(sorted(row["seconds"] for row in rounds))
    ratio = interval(sorted(row["seconds"] / baseline[row["round"]] for row in rounds))
    return {
        **{name: rounds[-1][name] for name in _SETTINGS},
        "rounds": len(rounds),
        "seconds": seconds.median,
        "seconds_low": seconds.low,
        "seconds_high": seconds.high,
        "cpu_seconds": statistics.median(row["cpu_seconds"] for row in rounds),
        "sent_bytes": statistics.median(row["sent_bytes"] for row in rounds),
        "ratio": ratio.median,
        "ratio_low": ratio.low,
        "ratio_high": ratio.high,
        "resolution": itself,
        "scored": itself <= SCORED and len(rounds) >= MIN_ROUNDS,
        **{f"stage_{stage}": _of_known(statistics.fmean, rounds, f"stage_{stage}") for stage in names.STAGES},
        **{name: rounds[-1][name] for name in _OTHERS},
        **{name: _of_known(statistics.median, rounds, name) for name in ("wall_seconds", "late_seconds")},
    }


def _of_known(function: Callable[[list[float]], float], rounds: Sequence[Row], name: str) -> float | None:
    known = [row[name] for row in rounds if row[name] is not None]
    return function(known) if known else None
