"""Builds the summary layer: one row for each cell and variant, one cell at a time."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import pyarrow.parquet as pq

from ringfence_lab.bench import names
from ringfence_lab.bench.intervals import MIN_ROUNDS, distance_from_one, interval
from ringfence_lab.study.folder import Folder, digest_of, replaced
from ringfence_lab.study.schema import (
    MACHINES,
    MADE_FROM,
    ORIGIN_COLUMNS,
    SETTING_COLUMNS,
    STAGE_COLUMNS,
    SUMMARY,
    TEE_COLUMNS,
    TIDY,
    Row,
    batches,
    checked,
    made_from,
    opened,
    origin,
)

SCORED: Final = 0.10  # cells in which the baseline reads more than this from itself are shown, not scored
_BATCH: Final = 1_000
_CHUNK: Final = 2_000


def summarise(folder: Folder) -> bool:
    """Build the layer from the tidy one; return whether it was out of date."""
    made = origin(digest_of([folder.tidy]))
    if made_from(folder.summary, SUMMARY) == made and folder.summary_json.exists() and folder.machines.exists():
        return False
    source = opened(folder.tidy, TIDY)
    machines = (source.metadata.metadata or {}).get(MACHINES, b"{}")
    with replaced(folder.machines) as file:
        file.write(json.dumps(json.loads(machines), indent=1).encode() + b"\n")
    with (
        replaced(folder.summary) as target,  # the last to be replaced: it says what all of the layer was made from
        pq.ParquetWriter(target, SUMMARY, compression="zstd") as writer,
        replaced(folder.summary_json) as text,
    ):
        before = b"[\n"
        for batch in batches(_summarised(source), SUMMARY, _CHUNK, folder.tidy):
            writer.write_batch(batch)
            for row in batch.to_pylist():
                text.write(before + json.dumps(row).encode())
                before = b",\n"
        text.write(b"\n]\n" if before != b"[\n" else b"[]\n")
        writer.add_key_value_metadata({MADE_FROM: made.encode(), MACHINES: machines})
    return True


def _summarised(source: Any) -> Iterator[Row]:
    for _, rows in itertools.groupby(_tidy_rows(source), key=lambda row: row["cell"]):
        yield from summary_of(list(rows))


def _tidy_rows(source: Any) -> Iterator[Row]:
    for group in range(source.num_row_groups):  # one after the other: asked for all, Arrow reads ahead
        for batch in source.iter_batches(batch_size=_BATCH, row_groups=[group]):
            yield from checked(batch, TIDY, "the tidy layer").drop_columns(["run", "date"]).to_pylist()


def summary_of(rows: Sequence[Row]) -> Iterator[Row]:
    """Yield the summary of one cell, a row for each variant in the order of their first rounds."""
    by_variant: dict[str, dict[int, Row]] = {}
    for row in rows:
        by_variant.setdefault(row["variant"], {})[row["round"]] = row
    first, second = (by_variant.get(name, {}) for name in names.study_baseline(rows[0]["kind"]))
    both = first.keys() & second.keys()
    baseline = {number: (first[number]["seconds"] + second[number]["seconds"]) / 2 for number in both}
    if not baseline:
        return  # without a round of the baseline there is nothing to compare with
    order = sorted(baseline)
    itself = distance_from_one(sorted(second[n]["seconds"] / first[n]["seconds"] for n in order))
    for samples in by_variant.values():
        rounds = [samples[number] for number in order if number in samples]
        if rounds:
            scored = itself <= SCORED and len(rounds) >= MIN_ROUNDS
            yield {**_line(rounds, baseline), "resolution": itself, "scored": scored}


def _line(rounds: Sequence[Row], baseline: Mapping[int, float]) -> Row:
    # Sorted: the interval of a cell does not depend on the order of its rounds.
    seconds = interval(sorted(row["seconds"] for row in rounds))
    ratio = interval(sorted(row["seconds"] / baseline[row["round"]] for row in rounds))
    return {
        **{name: rounds[-1][name] for name in (*SETTING_COLUMNS, *ORIGIN_COLUMNS)},
        "rounds": len(rounds),
        "seconds": seconds.median,
        "seconds_low": seconds.low,
        "seconds_high": seconds.high,
        "cpu_seconds": statistics.median(row["cpu_seconds"] for row in rounds),
        "sent_bytes": statistics.median(row["sent_bytes"] for row in rounds),
        "ratio": ratio.median,
        "ratio_low": ratio.low,
        "ratio_high": ratio.high,
        **{name: _of_known(statistics.fmean, rounds, name) for name in STAGE_COLUMNS},
        **{name: rounds[-1][name] for name in TEE_COLUMNS},
        **{name: _of_known(statistics.median, rounds, name) for name in ("wall_seconds", "late_seconds")},
    }


def _of_known(function: Callable[[list[float]], float], rounds: Sequence[Row], name: str) -> float | None:
    known = [row[name] for row in rounds if row[name] is not None]
    return function(known) if known else None
