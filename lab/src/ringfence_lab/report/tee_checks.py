"""Figures of GPU TEEs that say how far the others can be trusted: communication alone, dilation, sensitivity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from ringfence_lab.bench.intervals import Interval
from ringfence_lab.report.figure import Figure, Missing, Table
from ringfence_lab.report.labels import percent
from ringfence_lab.report.study import Cell, Study
from ringfence_lab.report.tee_cells import (
    ALL,
    CONFIDENTIAL,
    KIND,
    NAMES,
    SEALED,
    brief,
    changes,
    dilated_twice,
    factor,
    fully,
    having,
    order,
    point,
    presets,
    what,
)
from ringfence_lab.report.tee_published import COPIES, FASTRACK, outside

Found = Sequence[Figure | Missing]
_SAME: Final = 0.01  # by which medians may differ and still be called the same
_INPUTS: Final = {
    "copy_overhead": "overhead of a copy",
    "cpu_rate": "CPU's encryption rate",
    "cpu_threads": "driver threads",
    "link_rate": "PCIe rate",
    "device_rate": "device's encryption rate",
    "authentication_rate": "device's authentication rate",
    "authentication_parts": "pieces authenticated at once",
    "piece_bytes": "bytes of a piece",
    "peer_rate": "rate between devices without a TEE",
    "peer_overhead": "overhead between devices without a TEE",
    "plain_overhead": "overhead of a copy without a TEE",
    "samples": "batch size",
    "host_cores": "cores of a host",
}


def communication(study: Study) -> Found:
    title = "Communication alone"
    cells = [cell for cell in study.cells if cell.kind == KIND and cell.operation and not cell.changed]
    cells = sorted(having(cells, CONFIDENTIAL), key=order)
    if not cells:
        return [Missing("tee-communication", title, "no copy and no all-reduce was measured by itself")]
    series = {
        NAMES[name]: [point(f"{what(cell)},\n{cell.preset}", cell, name) for cell in having(cells, name)]
        for name in (CONFIDENTIAL, ALL, SEALED)
    }
    copies = [cell for cell in cells if cell.operation == "copy"]
    said = [f"{factor(cell).median:.1f} ({fully(cell)}: {outside(factor(cell).median, *COPIES)})" for cell in copies]
    says = f"A confidential host-device copy takes {'; '.join(said)} times a plain one. " if said else ""
    says += f"{FASTRACK} publishes {COPIES[0]} to {COPIES[1]} for communication between CPU and GPU. "
    says += "The authentication rate of the preset software was chosen so that a large copy lies in that range."
    reading = (
        "Points: median of the time over that without a TEE; whiskers: 95 % interval. Grey: the range that was published "
        "for copies between CPU and GPU."
    )
    numbers = {
        "series": {name: points for name, points in series.items() if points},
        "published": {f"{FASTRACK}, copies": list(COPIES)},
    }
    return [Figure("tee-communication", "tee-factors", title, says, reading, numbers, cells)]


def dilation(study: Study) -> Found:
    title = "The same ratios at two dilations"
    pairs = dilated_twice(study)
    shared = [(one, other, name) for one, other in pairs for name in _shared(one, other)]
    if not shared:
        return [Missing("tee-dilation", title, "no cell was measured at two dilations")]
    series: dict[str, list[dict[str, Any]]] = {"as measured": [], "dilated twice as much": []}
    rows: dict[str, list[tuple[str, ...]]] = {}
    apart = []
    for one, other, name in shared:
        label = f"{what(one)}, {one.preset},\n{NAMES[name]}"
        series["as measured"].append(point(label, one, name))
        series["dilated twice as much"].append(point(label, other, name))
        first, second = factor(one, name), factor(other, name)
        apart.append(abs(second.median / first.median - 1))
        rows.setdefault(f"{what(one)}, {one.preset}, {one.workers} devices", []).append(
            (NAMES[name], *_at(one, name), *_at(other, name), _agreement(first, second))
        )
    overlapping = sum(_agree(factor(one, name), factor(other, name)) for one, other, name in shared)
    most = max(cell.lines[name].cores for one, other, name in shared for cell in (one, other))
    cores = study.facts.get("cores")
    says = (
        f"Of {len(shared)} ratios, {overlapping} agree within their intervals or {percent(_SAME)}; the largest difference is "
        f"{100 * max(apart):.1f} %. At most {most:.2f} of {cores or 'the'} cores were in use."
    )
    header = ("variant", "ratio", "dilation", "cores", "late", "ratio", "dilation", "cores", "late", "difference")
    reading = (
        "Points: median of the simulated time over that without a TEE; whiskers: 95 % interval. If contention of the "
        "machine were measured, more dilation would change the ratios. Cores: processor time over wall time. Late: share of "
        "the wall time in which simulated time stood still, because the machine had to catch up."
    )
    used = [cell for pair in pairs for cell in pair]
    numbers = {"series": series, "published": {}}
    return [Figure("tee-dilation", "tee-factors", title, says, reading, numbers, used, Table(header, rows))]


def _shared(one: Cell, other: Cell) -> list[str]:
    return [name for name in one.lines if name in other.lines and name not in ("plain", "plain-again")]


def _at(cell: Cell, name: str) -> tuple[str, ...]:
    line, ratio = cell.lines[name], factor(cell, name)
    interval = f"{brief(ratio.median)} [{brief(ratio.low)}, {brief(ratio.high)}]"
    return interval, f"{line.dilation:g}", f"{line.cores:.2f}", late_text(cell, name)


def late_text(cell: Cell, name: str) -> str:
    """Return for how much of the wall time simulated time stood still."""
    line = cell.lines[name]
    return percent(line.late_seconds / line.wall_seconds) if line.wall_seconds else "–"


def _agreement(first: Interval, second: Interval) -> str:
    apart = f"{100 * (second.median / first.median - 1):+.1f} %"
    return apart if _agree(first, second) else f"{apart}, apart"


def _agree(first: Interval, second: Interval) -> bool:
    """Return whether two intervals have a value in common, or medians that are nearly the same."""
    common = first.low <= second.high and second.low <= first.high
    return common or abs(second.median / first.median - 1) <= _SAME


def sensitivity(study: Study) -> Found:
    title = "Which input decides"
    panels: dict[str, Any] = {}
    rows: dict[str, list[tuple[str, ...]]] = {}
    used: list[Cell] = []
    for preset in presets([cell for cell in study.cells if cell.kind == KIND]):
        for variant in (CONFIDENTIAL, SEALED):
            varied = changes(study, preset, variant)
            base = _base(study, varied, variant)
            if base is None:
                continue
            name = f"{base.model}, {preset}, {base.workers} devices, {NAMES[variant]}"
            panels[name], rows[name] = _inputs(base, varied, variant)
            used += [base, *(cell for some in varied.values() for cell in some.values())]
    if not panels:
        return [Missing("tee-sensitivity", title, "no input was halved and doubled")]
    most = [f"{each['inputs'][0]['label']} ({name})" for name, each in panels.items() if each["inputs"]]
    says = f"The input that moves the result most: {'; '.join(most)}."
    header = ("input", "halved", "doubled", "from end to end")
    reading = "Bars: how far the ratio to the step without a TEE moves when one input is halved or doubled."
    return [
        Figure("tee-sensitivity", "tee-tornado", title, says, reading, {"panels": panels}, used, Table(header, rows))
    ]


def _base(study: Study, varied: Mapping[str, Mapping[str, Cell]], variant: str) -> Cell | None:
    """Return the cell that differs from the varied ones in nothing but the input."""
    one = next((cell for some in varied.values() for cell in some.values()), None)
    if one is None:
        return None
    found = [
        cell
        for cell in having(study.cells, variant)
        if not cell.changed
        and (cell.kind, cell.preset, cell.model, cell.workers, cell.bucket_mb, cell.scaled, cell.load)
        == (one.kind, one.preset, one.model, one.workers, one.bucket_mb, one.scaled, one.load)
    ]
    return found[0] if found else None


def _inputs(
    base: Cell, varied: Mapping[str, Mapping[str, Cell]], variant: str
) -> tuple[dict[str, Any], list[tuple[str, ...]]]:
    middle = factor(base, variant).median
    inputs: list[dict[str, Any]] = []
    for name, cells in varied.items():
        found = {end: cells.get(times) for end, times in (("halved", "x0.5"), ("doubled", "x2"))}
        ratios = {end: factor(cell, variant).median if cell else None for end, cell in found.items()}
        known = [middle, *(ratio for ratio in ratios.values() if ratio is not None)]
        ratios = {end: None if ratio is None else round(ratio, 4) for end, ratio in ratios.items()}
        inputs.append({"label": _INPUTS.get(name, name), **ratios, "swing": round(max(known) / min(known), 4)})
    inputs.sort(key=lambda each: -each["swing"])
    rows = [
        (each["label"], *(_text(each[end]) for end in ("halved", "doubled")), f"{each['swing']:.2f} times")
        for each in inputs
    ]
    return {"base": round(middle, 4), "inputs": inputs}, rows


def _text(ratio: float | None) -> str:
    return "–" if ratio is None else brief(ratio)
