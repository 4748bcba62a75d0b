"""The project's two figures, which are the same on every page: between two workers, and between machines of several workers.

Both are of an all-reduce of 25 MiB, the size of DDP's buckets, sealed, over plaintext Gloo. Between two workers it is the ratio
of median calls: means of small calls are dominated by Gloo's slowest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from ringfence_lab.bench.results import Line, Result
from ringfence_lab.bench.units import time_text
from scripts.page.edition import MODELS, Edition

SEALED: Final = "ringfence"
SIZE: Final = 25 << 20
VAES: Final = {  # the flags of the CPUs that were measured on, which samples do not record
    "Intel(R) Xeon(R) Processor": "with VAES",
    "Intel(R) Xeon(R) Processor @ 2.50GHz": "without VAES",
}


class MedianCall(NamedTuple):
    """Seconds of the median call of one size between two workers."""

    size: int
    gloo: float
    sealed: float
    rounds: int

    @property
    def ratio(self) -> float:
        return self.sealed / self.gloo


def median_calls(edition: Edition) -> dict[int, MedianCall]:
    """By size: what `ringfence bench latency` recorded."""
    found = {}
    for each in edition.calls.get("sizes", ()):
        gloo, sealed = (each[name]["median_after_barrier"] for name in ("gloo", SEALED))
        found[each["size"]] = MedianCall(each["size"], gloo, sealed, edition.calls["rounds"])
    return found


def cpu(facts: Mapping[str, Any]) -> str:
    """What matters of a CPU here: whether it has the instructions that seal fast."""
    return VAES.get(facts["cpu"], f"({facts['cpu']})")


def machines(edition: Edition, hosts: int, workers: int, rate: str | None = None) -> tuple[Result, Line] | None:
    """The cell of the study of machines x workers, and ringfence's line in it."""
    wanted = {"kind": "collective", "operation": "all_reduce", "size": SIZE, "hosts": hosts, "rate": rate}
    for each in edition.machines.results if edition.machines else ():
        if {**wanted, "workers": hosts * workers}.items() <= each.case.items():
            for line in each.lines:
                if line.variant == SEALED:
                    return each, line
    return None


def headline(edition: Edition) -> str:
    """The sentences of the README and the home page."""
    call, few, many = median_calls(edition).get(SIZE), machines(edition, 2, 1), machines(edition, 2, 4)
    if call is None or few is None or many is None or edition.machines is None:
        return "*Not measured yet.*"
    slow, took = cpu(edition.machines.facts), f"{time_text(call.sealed)} and {time_text(call.gloo)}"
    return (
        f"**A sealed 25 MiB all-reduce takes {call.ratio:.2f} times as long as plaintext Gloo** between two workers with a "
        f"core\neach (median call, {took}, loopback, a CPU {cpu(edition.calls['machine'])}). A study on a CPU {slow} (batches\n"
        f"of calls, machines as network namespaces) has {few[1].ratio.median:.2f} times there, and "
        f"**{many[1].ratio.median:.2f} times** between two machines\nof four workers each, which share memory, unsealed, "
        "inside a machine."
    )


def points(edition: Edition) -> dict[str, list[dict[str, Any]]]:
    """The picture of the README: the two figures, and training steps, by CPU."""
    found: dict[str, list[dict[str, Any]]] = {}
    for hosts, workers in ((2, 1), (2, 4)):
        cell = machines(edition, hosts, workers)
        if cell is not None and edition.machines is not None:
            point = _point(f"all-reduce, {hosts} machines x {workers}", *cell)
            found.setdefault(f"CPU {cpu(edition.machines.facts)}", []).append(point)
    call = median_calls(edition).get(SIZE)
    if call is not None:
        point = {"label": "all-reduce, 2 machines x 1", "ratio": [round(call.ratio, 4)] * 3, "resolution": 0.0}
        found.setdefault(f"CPU {cpu(edition.calls['machine'])}", []).append(point)
    for model in MODELS:
        result = edition.training(model, "ddp", 2)
        for line in result.lines if result else ():
            if result and line.variant == SEALED:
                found.setdefault(f"CPU {cpu(edition.facts)}", []).append(
                    _point(f"{model} step, 2 machines x 1", result, line)
                )
    return found


def _point(label: str, result: Result, line: Line) -> dict[str, Any]:
    ratio = [round(value, 4) for value in (line.ratio.low, line.ratio.median, line.ratio.high)]
    return {"label": label, "ratio": ratio, "resolution": round(result.resolution, 4)}
