"""From raw samples to tidy ones: a row for each round and variant, in chunks, so that memory does not grow with the rows.

A raw file may hold rounds of several machines, or of several versions of the measured code. They are never put together: the
rows of a cell are those of the circumstances that `shown` names.
"""

from __future__ import annotations

import datetime
import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pyarrow.parquet as pq

from ringfence.errors import ConfigurationError
from ringfence_lab.bench.names import STAGES
from ringfence_lab.bench.netns import bits_per_second
from ringfence_lab.study import selection
from ringfence_lab.study.folder import Folder, digest_of, replaced
from ringfence_lab.study.schema import MACHINES, MADE_FROM, TIDY, Row, batches, made_from, origin

CHUNK: Final = 20_000  # rows that are in memory at once


def tidy(folder: Folder, chunk: int = CHUNK) -> bool:
    """Build the layer from all raw files; return whether it was out of date."""
    files = folder.raw_files()
    made = origin(digest_of(files))
    if made_from(folder.tidy, TIDY) == made:
        return False
    machines: dict[str, Any] = {}
    with replaced(folder.tidy) as target, pq.ParquetWriter(target, TIDY, compression="zstd") as writer:
        rows = itertools.chain.from_iterable(_rows(file, machines) for file in files)
        for batch in batches(rows, TIDY, chunk, folder.raw):
            writer.write_batch(batch)
        writer.add_key_value_metadata({MADE_FROM: made.encode(), MACHINES: json.dumps(machines).encode()})
    return True


def _rows(file: Path, machines: dict[str, Any]) -> Iterator[Row]:
    """Yield the rows of one cell; record their machine in `machines`."""
    case = selection.case_of(file)
    if case is None:  # nothing measured yet, or not to be read: then the line is named
        for _ in _records(file):
            pass
        return
    runs: dict[str, dict[str, Any]] = {}
    shared = _settings(file, case)
    for number, record in _records(file):
        try:
            if selection.NOTE in record:
                continue
            if "case" not in record:
                runs[record["run"]] = record
            elif record["case"] == case:
                run = runs[record["run"]]
                machines.setdefault(case["machine"], {**run["machine"], "command": run["command"], "date": run["date"]})
                date, source = datetime.datetime.fromisoformat(run["date"]), run["machine"]["source"]
                here = {**shared, "run": record["run"], "date": date, "source": source}
                yield from _of_round(record, case["variants"], here)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            what = f"{type(error).__name__}: {error}"
            raise ConfigurationError(
                f"{file}, line {number}: no sample of a study ({what}); move the file away"
            ) from None


def _settings(file: Path, case: Mapping[str, Any]) -> Row:
    """Return the columns that all rows of a cell share."""
    same = ("kind", "operation", "size", "model", "strategy", "device", "bucket_mb", "wire", "workers", "hosts", "busy")
    try:
        return {
            "cell": file.stem,
            **{name: case[name] for name in (*same, "machine")},
            "rate_bits": bits_per_second(case["rate"]) if case["rate"] else None,
            "scaled": float(case.get("scaled", 1.0)),
            **{name: case.get(name) for name in ("preset", "changed", "samples", "all_reduces", "load", "host_cores")},
        }
    except (KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{file}: its cases lack {error}, so they are of no study; move the file away"
        ) from None


def _of_round(record: Mapping[str, Any], variants: list[str], shared: Row) -> Iterator[Row]:
    for variant in variants:
        sample = record["samples"].get(variant)
        if sample is None:  # the rings have no all-to-all
            continue
        shares, mean = sample.get("stages"), sample.get("mean", 0.0) * 1e9
        yield {
            **shared,
            "variant": variant,
            "round": record["round"],
            "seconds": sample["seconds"],
            "cpu_seconds": sample["cpu"],
            "sent_bytes": float(sample["sent"]),
            "dilation": sample.get("dilation"),
            "wall_seconds": sample.get("wall"),
            "late_seconds": sample.get("late"),
            **{f"stage_{stage}": shares[stage] * mean if shares else None for stage in STAGES},
        }


def _records(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the lines of a file without a last incomplete line, which a killed study left."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                return
            try:
                record = json.loads(line)
            except ValueError:
                raise ConfigurationError(f"{file}, line {number}: not JSON; move the file away") from None
            if not isinstance(record, dict):
                raise ConfigurationError(f"{file}, line {number}: not a record; move the file away")
            yield number, record
