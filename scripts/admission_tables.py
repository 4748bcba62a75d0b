"""`scripts/admission`: write the tables of the cost of admission into docs/benchmarks/benchmark.md, or --check them.

They come from docs/results: the files admission*.json are what `ringfence bench admission --json` printed,
peer-verification.json and link-handshake.json what the scripts of these names did. Nobody types a figure.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from ringfence_lab.bench.units import size_text, time_text
from scripts import generated

ROOT: Final = Path(__file__).parents[1]
RESULTS: Final = ROOT / "docs" / "results"
PAGE: Final = ROOT / "docs" / "benchmarks" / "benchmark.md"

_HEAD: Final = [
    "| workers | depth | handshakes a worker, mean (most) | sent by a worker, mean (most) | CPU of a worker, mean "
    "| of rank 0 | CPU time on the critical path |",
    "|---:|---:|---:|---:|---:|---:|---:|",
]

Results = dict[str, Any]  # name of a file: what it holds


def read(folder: Path) -> Results:
    names = (
        "admission",
        "admission-certificate",
        "admission-agreement",
        "admission-everybody",
        "peer-verification",
        "link-handshake",
    )
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in names}


def filled(page: str, results: Results) -> str:
    """The page with fresh tables at its markers; a marker that names no table is a mistake."""
    return generated.filled(page, "admission", lambda name: TABLES[name](results))


# -- tables ---------------------------------------------------------------------------------------------------------


def _groups(results: Results) -> str:
    found = results["admission"]
    machine = found["machine"]
    version = " ".join(machine["openssl"].split()[:2])
    lines = [
        f"The second command, on {machine['cores']} cores of an {machine['cpu']} that others were using too "
        f"({machine['kernel']}, Python {machine['python']}, {version}), on {found['date']}:",
        "",
        *_HEAD,
        *(_row(each) for each in found["groups"]),
        *(_row(each, ", predicted") for each in found["predicted"]),
        "",
        _processes(found["processes"]),
    ]
    return "\n".join(lines)


def _row(cost: Any, note: str = "") -> str:
    cells = (
        f"{cost['workers']:,}{note}",
        str(cost["depth"]),
        f"{cost['handshakes_mean']:.2f} ({cost['handshakes_max']})",
        f"{size_text(cost['bytes_mean'])} ({size_text(cost['bytes_max'])})",
        time_text(cost["cpu_seconds"]),
        time_text(sum(cost["cpu_root"].values())),
        time_text(cost["critical_path_seconds"]),
    )
    return f"| {' | '.join(cells)} |"


def _processes(joins: Any) -> str:
    seconds = sorted(each["seconds"] for each in joins["rounds"])
    cpu = statistics.median(each["cpu"] for each in joins["rounds"]) / joins["workers"]
    return (
        f"{joins['workers']} processes: {statistics.median(seconds):.2f} s (median of {len(seconds)} joins, "
        f"{seconds[0]:.2f} to {seconds[-1]:.2f}) from the word to join until the last was in; {time_text(cpu)} of CPU each."
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
    found = results["admission-everybody"]
    group = found["groups"][0]
    return "\n".join(
        (
            f"With every one of {group['verifiers']:,} workers parsing and verifying the whole roster (`--verifiers 0`):",
            "",
            *_HEAD,
            _row(group),
        )
    )


def _certificates(results: Results) -> str:
    found = results["admission-certificate"]
    measured, fitted = found["groups"][-1], found["last_group_predicted_from_the_others"]
    rows = (*(_row(each) for each in found["groups"]), *(_row(each, ", predicted") for each in found["predicted"]))
    fit = f"this fit was {_off(fitted, measured, 'cpu_seconds')} in CPU time"
    note = f"(Made for {measured['workers']:,} from the smaller groups, {fit}.)"
    return "\n".join((*_HEAD, *rows, "", note))


def _agreement(results: Results) -> str:
    group = results["admission-agreement"]["groups"][-1]
    cpu = group["cpu_mean"]
    return (
        f"In a run of {group['workers']:,} workers with certificates, verifying the signatures of the roster takes a worker "
        f"{time_text(cpu['agreement'])} of CPU, and checking the endorsements {time_text(cpu['check'])}. A worker sends "
        f"{size_text(group['bytes_go_mean'])} of acknowledgements on average ({size_text(group['bytes_go_max'])} at most) of "
        f"{size_text(group['bytes_mean'])} in all, in messages that are sent anyway: no round trip is added."
    )


def _handshake(results: Results) -> str:
    found = results["link-handshake"]
    times, sizes = found["microseconds of CPU, median"], found["bytes"]
    lines = ["| handshake of a link | CPU | bytes |", "|---|---:|---:|"]
    classical = times["without ML-KEM, each side"]
    lines.append(f"| without ML-KEM, each side | {classical:.0f} µs | {sizes['without ML-KEM']:,} |")
    for side in ("dialler", "acceptor"):
        lines.append(f"| with ML-KEM, {side} | {times[f'with ML-KEM, {side}']:.0f} µs | {sizes['with ML-KEM']:,} |")
    lines.append(
        f"| ML-KEM key, once for a worker and session | {times['ML-KEM key of a session, once for a worker']:.0f} µs | |"
    )
    return "\n".join(lines)


def _contact(results: Results) -> str:
    found = results["peer-verification"]
    lines = ["| proof | CPU of both ends (quartiles) | bytes of both ends |", "|---|---:|---:|"]
    for name, cost in found["peer_verification"].items():
        low, high = cost["cpu_seconds_quartiles"]
        cpu = f"{time_text(cost['cpu_seconds'])} ({time_text(low)} to {time_text(high)})"
        lines.append(f"| {name} | {cpu} | {cost['bytes']:,} |")
    link = found["first_link"]
    lines += [
        "",
        f"The first link itself, with a group's opening: {time_text(link['cpu_seconds'])} and {link['bytes']:,} bytes.",
    ]
    return "\n".join(lines)


TABLES: Final[dict[str, Callable[[Results], str]]] = {
    "groups": _groups,
    "fit": _fit,
    "everybody": _everybody,
    "certificates": _certificates,
    "agreement": _agreement,
    "peer-verification": _contact,
    "link-handshake": _handshake,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/admission", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the page is stale")
    options = parser.parse_args()
    before = PAGE.read_text()
    after = filled(before, read(RESULTS))
    if options.check:
        print("all is fresh" if before == after else f"{PAGE.name} is stale: scripts/admission writes it")
        return int(before != after)
    PAGE.write_text(after)
    print(f"wrote {PAGE.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
