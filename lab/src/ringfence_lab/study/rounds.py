"""The rounds in a cell's raw file: a row for each round and variant that took part in it.

A raw file may hold rounds of several machines, or of several versions of the measured code. They are never put together: the
rows of a cell are those of the circumstances that are selected (`selection`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from ringfence.errors import ConfigurationError
from ringfence_lab.bench.names import STAGES
from ringfence_lab.bench.netns import bits_per_second
from ringfence_lab.bench.samples import records
from ringfence_lab.study import selection

_SAME: Final = ("kind", "operation", "size", "model", "strategy", "device", "bucket_mb", "wire", "workers", "hosts")
TEE_SETTINGS: Final = ("preset", "changed", "samples", "all_reduces", "load", "host_cores")

Row = dict[str, Any]


def rows_of(file: Path, machines: dict[str, Any]) -> Iterator[Row]:
    """Yield the rows of one cell; record their machine in `machines`, with the command and the dates of its runs.

    Raises ConfigurationError, which names the line, if the file is not of a study.
    """
    case = selection.case_of(file)
    if case is None:  # nothing measured yet, or not to be read: then the line is named
        for _ in records(file):
            pass
        return
    runs: dict[str, dict[str, Any]] = {}
    shared = _settings(file, case)
    for number, record in records(file):
        try:
            if selection.NOTE in record:
                if record[selection.NOTE] == case and case["machine"] in machines:
                    _used(machines[case["machine"]], record.get("date", ""))
            elif "case" not in record:
                runs[record["run"]] = record
            elif record["case"] == case:
                run = runs[record["run"]]
                about = {**run["machine"], "command": run["command"], "date": run["date"]}
                _used(machines.setdefault(case["machine"], about), run["date"])
                yield from _of_round(record, case["variants"], {**shared, "source": run["machine"]["source"]})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            what = f"{type(error).__name__}: {error}"
            raise ConfigurationError(
                f"{file}, line {number}: no sample of a study ({what}); move the file away"
            ) from None


def _used(machine: dict[str, Any], date: str) -> None:
    """Note when a machine measured, or when a study last selected its rounds."""
    machine["date"] = min(machine["date"], date or machine["date"])
    machine["last_date"] = max(machine.get("last_date", ""), date)


def _settings(file: Path, case: Mapping[str, Any]) -> Row:
    """Return the columns that all rows of a cell share."""
    try:
        return {
            "cell": file.stem,
            **{name: case[name] for name in _SAME},
            "rate_bits": bits_per_second(case["rate"]) if case["rate"] else None,
            "busy": case["busy"],
            "machine": case["machine"],
            "scaled": float(case.get("scaled", 1.0)),
            **{name: case.get(name) for name in TEE_SETTINGS},
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
        seconds, cpu, sent = (_number(sample, name) for name in ("seconds", "cpu", "sent"))
        if not seconds > 0:
            raise ValueError("seconds must be above zero")
        yield {
            **shared,
            "variant": variant,
            "round": record["round"],
            "seconds": seconds,
            "cpu_seconds": cpu,
            "sent_bytes": sent,
            "dilation": sample.get("dilation"),
            "wall_seconds": sample.get("wall"),
            "late_seconds": sample.get("late"),
            **{f"stage_{stage}": shares[stage] * mean if shares else None for stage in STAGES},
        }


def _number(sample: Mapping[str, Any], name: str) -> float:
    value = sample[name]
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}, and no finite number")
    return float(value)
