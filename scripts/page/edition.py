"""What a folder of samples says about one machine and one version of the code: the last that was measured there."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ringfence_lab.bench import link
from ringfence_lab.bench import memory_use as memory
from ringfence_lab.bench.measure import Measured
from ringfence_lab.bench.names import PROFILED
from ringfence_lab.bench.results import Result, result
from ringfence_lab.bench.samples import FILE

SIZES: Final = (4 << 10, 64 << 10, 1 << 20, 25 << 20, 100 << 20)
LARGE: Final = (25 << 20, 100 << 20)
OTHERS: Final = ("all_gather", "reduce_scatter", "broadcast", "all_to_all")
MODELS: Final = ("resnet50", "bert-base", "gpt2")
RATES: Final = ("1gbit", "2.5gbit", "10gbit")
PROFILES: Final = (
    *(("all_reduce", size, workers) for workers in (2, 4) for size in LARGE),
    *((operation, 25 << 20, 2) for operation in OTHERS),
)
CALLS: Final = "call-latency.json"
TUNNELS: Final = "tunnels.json"
MACHINES: Final = "machines"  # the folder of the study of machines x workers
FULL_ROUNDS: Final = 15  # fewer are a trial: the page says so, and the README does not show them


@dataclass
class Edition:
    """Everything that was measured with one machine and one version of the code."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    dates: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    links: list[link.LinkResult] = field(default_factory=list)
    memory: list[memory.MemoryResult] = field(default_factory=list)
    lower_bounds: dict[tuple[str, int, int], float] = field(default_factory=dict)  # CPU seconds by call, size, workers
    calls: Mapping[str, Any] = field(default_factory=dict)  # what `ringfence bench latency --json` printed
    tunnels: Mapping[str, Any] = field(default_factory=dict)  # of commit 569d0fa, whose scripts/tunnels.py measured it
    machines: Edition | None = None  # of the study of machines x workers, which has a machine and a date of its own

    def collective(
        self, operation: str, size: int, workers: int, *, busy: bool = False, rate: str | None = None
    ) -> Result | None:
        filters = {"operation": operation, "size": size, "workers": workers, "busy": busy, "rate": rate}
        found = self._matching({"kind": "collective", **filters})
        return next((each for each in found if PROFILED not in each.case["variants"]), None)

    def profile(self, operation: str, size: int, workers: int) -> Result | None:
        filters = {"operation": operation, "size": size, "workers": workers, "busy": False, "rate": None}
        found = self._matching({"kind": "collective", **filters})
        return next((each for each in found if PROFILED in each.case["variants"]), None)

    def training(self, model: str, strategy: str, workers: int, bucket_mb: float | None = None) -> Result | None:
        bucket = bucket_mb if strategy == "ddp" else 0.0
        filters = {"model": model, "strategy": strategy, "workers": workers, "bucket_mb": bucket, "rate": None}
        return next(iter(self._matching({"kind": "training", **filters})), None)

    def _matching(self, filters: Mapping[str, Any]) -> list[Result]:
        """Those with the most variants first."""
        found = [each for each in self.results if filters.items() <= each.case.items()]
        return sorted(found, key=lambda each: (-len(each.lines), -each.rounds))

    @property
    def buckets(self) -> list[float | None]:
        """The bucket sizes that gpt2 was trained with; DDP's own first."""
        cases = [each.case for each in self.results if each.case["kind"] == "training"]
        sizes = {case["bucket_mb"] for case in cases if case["strategy"] == "ddp" and case["model"] == "gpt2"}
        own: list[float | None] = [None] if None in sizes else []
        return own + sorted(size for size in sizes if size is not None)

    @property
    def full(self) -> bool:
        """Whether the all-reduce that everything else is compared with was measured in full."""
        filters = [self.collective("all_reduce", size, workers) for workers in (2, 4) for size in SIZES]
        return all(each is not None and each.rounds >= FULL_ROUNDS for each in filters)


def read(folder: Path) -> Edition:
    """The last edition in a folder. Samples of other machines, or of other code, are left alone."""
    edition = _read([folder / FILE])
    if (folder / CALLS).exists():
        edition.calls = json.loads((folder / CALLS).read_text())
    if (folder / TUNNELS).exists():
        edition.tunnels = json.loads((folder / TUNNELS).read_text())
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
    for measured in _together(cases):
        _sort_in(edition, measured)
    return edition


def _together(cases: list[dict[str, Any]]) -> list[Measured]:
    rounds: dict[str, Measured] = {}
    for record in cases:
        key = json.dumps(record["case"], sort_keys=True)
        rounds.setdefault(key, Measured(record["case"], [])).rounds.append(record["samples"])
    return list(rounds.values())


def _sort_in(edition: Edition, measured: Measured) -> None:
    match measured.case["kind"]:
        case "lower_bound":
            if (
                "operation" in measured.case
            ):  # the others are the costs of the stages, from which lower bounds were computed
                place = (measured.case["operation"], measured.case["size"], measured.case["workers"])
                edition.lower_bounds[place] = measured.rounds[0]["lower_bound"]["cpu_seconds"]
        case "link":
            edition.links.append(link.result(measured))
        case "memory":
            edition.memory.append(memory.result(measured))
        case _:
            edition.results.append(result(measured))
