"""What admission costs: admission*.json, which `ringfence bench admission --json` printed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from ringfence_lab.bench.units import size_text, time_text
from scripts.generated import table
from scripts.page import ROOT

KIND: Final = "admission"
PAGES: Final = (ROOT / "docs" / "benchmarks" / "benchmark.md",)
FILES: Final = ("admission", "admission-certificate", "admission-agreement", "admission-everybody")
HEADER: Final = (
    "workers", "depth", "handshakes a worker, mean (most)", "sent by a worker, mean (most)", "CPU of a worker, mean",
    "of rank 0", "CPU time on the critical path",
)  # fmt: skip

Results = dict[str, Any]  # name of a file: what it holds


def read(results: Path) -> Results:
    return {name: json.loads((results / f"{name}.json").read_text()) for name in FILES}


def _costs(found: Any) -> str:
    """The groups that were measured, and those that were predicted from them."""
    rows = [_row(each) for each in found["groups"]] + [_row(each, ", predicted") for each in found["predicted"]]
    return table(HEADER, rows, left=0)


def _row(cost: Any, note: str = "") -> tuple[str, ...]:
    return (
        f"{cost['workers']:,}{note}",
        str(cost["depth"]),
        f"{cost['handshakes_mean']:.2f} ({cost['handshakes_max']})",
        f"{size_text(cost['bytes_mean'])} ({size_text(cost['bytes_max'])})",
        time_text(cost["cpu_seconds"]),
        time_text(sum(cost["cpu_root"].values())),
        time_text(cost["critical_path_seconds"]),
    )


def _groups(results: Results) -> str:
    found, machine = results["admission"], results["admission"]["machine"]
    version = " ".join(machine["openssl"].split()[:2])
    return (
        f"The second command, on {machine['cores']} cores of an {machine['cpu']} that others were using too "
        f"({machine['kernel']}, Python {machine['python']}, {version}), on {found['date']}:\n\n{_costs(found)}"
    )


def _fit(results: Results) -> str:
    """How far the fit was off for the largest group, made from the smaller ones."""
    found = results["admission"]
    measured, fitted = found["groups"][-1], found["last_group_predicted_from_the_others"]
    handshake = measured["cpu_mean"]["handshakes"] / measured["handshakes_mean"]
    each = (measured["cpu_mean"]["roster"] + measured["cpu_mean"]["check"]) / measured["workers"]
    return (
        "A worker makes the same few handshakes in a group of any size, "
        f"{time_text(handshake)} each in that of {measured['workers']:,}. What grows is the roster: "
        f"{measured['bytes_mean'] / measured['workers']:.0f} bytes and {time_text(each)} for each worker in it. "
        f"Made from the smaller groups for {measured['workers']:,}, the prediction was "
        f"{_off(fitted, measured, 'cpu_seconds')} in CPU time and {_off(fitted, measured, 'bytes_mean')} in bytes."
    )


def _off(fitted: Any, measured: Any, what: str) -> str:
    off = fitted[what] / measured[what] - 1
    return f"{abs(off):.1%} {'low' if off < 0 else 'high'}"


def _everybody(results: Results) -> str:
    group = results["admission-everybody"]["groups"][0]
    said = f"With every one of {group['verifiers']:,} workers parsing and verifying the whole roster (`--verifiers 0`):"
    return f"{said}\n\n{table(HEADER, [_row(group)], left=0)}"


def _certificates(results: Results) -> str:
    found = results["admission-certificate"]
    measured, fitted = found["groups"][-1], found["last_group_predicted_from_the_others"]
    fit = f"this fit was {_off(fitted, measured, 'cpu_seconds')} in CPU time"
    return f"{_costs(found)}\n\n(Made for {measured['workers']:,} from the smaller groups, {fit}.)"


def _agreement(results: Results) -> str:
    group = results["admission-agreement"]["groups"][-1]
    cpu = group["cpu_mean"]
    return (
        f"In a run of {group['workers']:,} workers with certificates, verifying the signatures of the roster takes a worker "
        f"{time_text(cpu['agreement'])} of CPU, and checking the endorsements {time_text(cpu['check'])}. A worker sends "
        f"{size_text(group['bytes_go_mean'])} of acknowledgements on average ({size_text(group['bytes_go_max'])} at most) of "
        f"{size_text(group['bytes_mean'])} in all, in messages that are sent anyway: no round trip is added."
    )


TABLES: Final[dict[str, Callable[[Results], str]]] = {
    "groups": _groups,
    "fit": _fit,
    "everybody": _everybody,
    "certificates": _certificates,
    "agreement": _agreement,
}
