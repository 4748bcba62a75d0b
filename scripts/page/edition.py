"""What a folder of samples says about one machine and one version of the code: the last that was measured there."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ringfence_lab.bench import memory_use as memory
from ringfence_lab.bench.measure import Measured
from ringfence_lab.bench.names import PROFILED
from ringfence_lab.bench.results import Result, VariantResult, result
from ringfence_lab.bench.samples import FILE

SEALED: Final = "ringfence"
CALLS: Final = "call-latency.json"
BOUNDS: Final = {"": "bounds.json", ", without VAES": "bounds-without-vaes.json"}
MACHINES: Final = "machines"  # the folder of the study of machines x workers
INT8: Final = "int8"  # the folder of all-reduces quantised to int8, beside others


@dataclass
class Edition:
    """Everything that was measured with one machine and one version of the code."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    dates: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    memory: list[memory.MemoryResult] = field(default_factory=list)
    calls: Mapping[str, Any] = field(default_factory=dict)  # what `ringfence bench latency --json` printed
    bounds: dict[str, Mapping[str, Any]] = field(default_factory=dict)  # of `bench bounds --json`, by instructions
    machines: Edition | None = None  # of the study of machines x workers, which has a machine and a date of its own
    int8: Edition | None = None

    def collective(
        self,
        operation: str,
        size: int,
        workers: int,
        *,
        busy: bool = False,
        rate: str | None = None,
        profiled: bool = False,
    ) -> Result | None:
        hosts = workers if rate else 0
        wanted = {"operation": operation, "size": size, "workers": workers, "busy": busy, "hosts": hosts, "rate": rate}
        found = self._matching({"kind": "collective", **wanted})
        return next((each for each in found if (PROFILED in each.case["variants"]) is profiled), None)

    def training(self, model: str, strategy: str, workers: int, bucket_mb: float | None = None) -> Result | None:
        bucket = bucket_mb if strategy == "ddp" else 0.0
        wanted = {"model": model, "strategy": strategy, "workers": workers, "bucket_mb": bucket, "rate": None}
        return next(iter(self._matching({"kind": "training", **wanted})), None)

    def _matching(self, wanted: Mapping[str, Any]) -> list[Result]:
        """Those with the most variants first."""
        found = [each for each in self.results if wanted.items() <= each.case.items()]
        return sorted(found, key=lambda each: (-len(each.lines), -each.rounds))


def line_of(result: Result | None, variant: str = SEALED) -> VariantResult | None:
    """A variant's line of a result, where it took part."""
    return next((line for line in result.lines if line.variant == variant), None) if result else None


def read(folder: Path) -> Edition:
    """The last edition in a folder. Samples of other machines, or of other code, are left alone."""
    edition = _read([folder / FILE])
    if (folder / CALLS).exists():
        edition.calls = json.loads((folder / CALLS).read_text())
    edition.bounds = {
        name: json.loads((folder / file).read_text()) for name, file in BOUNDS.items() if (folder / file).exists()
    }
    if (folder / INT8).exists():
        edition.int8 = _read([folder / INT8 / FILE])
    if cells := sorted((folder / MACHINES / "raw").glob("*.jsonl")):
        edition.machines = _read(cells)
    return edition


def _read(paths: Sequence[Path]) -> Edition:
    records = [json.loads(line) for path in paths if path.exists() for line in path.read_text().splitlines()]
    cases = [record for record in records if "case" in record]
    if not cases:
        return Edition()
    machine = cases[-1]["case"]["machine"]
    cases = [record for record in cases if record["case"]["machine"] == machine]
    used = {record["run"] for record in cases}
    runs = [record for record in records if "machine" in record and record["run"] in used]
    edition = Edition(
        facts={name: fact for run in runs for name, fact in run["machine"].items()},  # not every run has Gloo's
        dates=sorted({run["date"][:10] for run in runs}),
        commands=list(dict.fromkeys(run["command"] for run in runs)),
    )
    rounds: dict[str, Measured] = {}
    for record in cases:
        key = json.dumps(record["case"], sort_keys=True)
        rounds.setdefault(key, Measured(record["case"], [])).rounds.append(record["samples"])
    for measured in rounds.values():
        _sort_in(edition, measured)
    return edition


def _sort_in(edition: Edition, measured: Measured) -> None:
    if measured.case["kind"] == "memory":
        edition.memory.append(memory.result(measured))
    elif measured.case["kind"] in ("collective", "training"):  # older samples have kinds that nothing shows any more
        edition.results.append(result(measured))
