"""Steps on simulated GPU TEEs: three figures, tables that say how far they can be trusted, and published figures beside them.

Nothing is fitted to the published figures, apart from the preset `published`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Final

from ringfence_lab.bench.names import TEE_BASELINE
from ringfence_lab.bench.units import size_text
from ringfence_lab.report.figure import Missing, Picture, Point, Table, grouped, having, over, point, ratio_of
from ringfence_lab.report.labels import cut_text, interval_text, percent, ratio_text
from ringfence_lab.report.study import CellSummary, Study

KIND: Final = "gpu-tee"
CONFIDENTIAL: Final = "confidential"
ALL: Final = "all"
SEALED: Final = "ringfence"
SWITCHES: Final = ("direct", "parallel-authentication", "overlap")
NAMES: Final = {
    **dict(zip(TEE_BASELINE, ("no TEE", "no TEE, again"), strict=True)),
    CONFIDENTIAL: "confidential, hop by hop",
    "direct": "direct channel",
    "parallel-authentication": "parallel authentication",
    "overlap": "overlap",
    ALL: "all three",
    SEALED: "ringfence",
}
LEE: Final = "Lee et al."
FASTRACK: Final = "Fastrack"
GPUS: Final = 4
LARGEST: Final = "gpt2-xl"
AVERAGE, WORST, ENLARGED = 8.68, 41.6, 3.03  # Lee et al.: all models, GPT-2 XL, GPT-2 XL with larger buckets
COPIES: Final = (12.69, 33.53)  # Fastrack: CPU-GPU communication
SAVED: Final = 0.846  # Fastrack: of the run time, at most
_READING: Final = (
    "Points: median of the simulated time over that of the same step without a TEE. Whiskers: 95 % interval over the "
    "rounds."
)
_OPTIONS: Final = {"under": "time over the same step without a TEE", "band": "no TEE against itself"}

Found = Sequence[Picture | Missing]


# -- cells ------------------------------------------------------------------------------------------------------------


def unchanged(study: Study) -> list[CellSummary]:
    """Return the cells with the inputs of their preset, on hosts with as many cores as most cells have."""
    cells = [cell for cell in study.cells if not cell.changed]
    cores = [cell.host_cores for cell in cells if cell.host_cores]
    usual = statistics.mode(cores) if cores else None
    return [cell for cell in cells if not cell.host_cores or cell.host_cores == usual]


def steps(study: Study, *variants: str) -> list[CellSummary]:
    """Return the steps with the inputs of their preset that have these variants: of two dilations, with more cores in use."""
    places = grouped((cell for cell in unchanged(study) if not cell.operation), _place)
    found = [max(same, key=lambda cell: cell.load or 0) for same in places.values()]
    return sorted(having(found, *variants), key=order)


def plain_steps(study: Study, *variants: str) -> list[CellSummary]:
    """Return the steps on as many devices as were published on, with default buckets."""
    return [cell for cell in steps(study, *variants) if cell.workers == GPUS and cell.bucket_mb is None]


def _place(cell: CellSummary) -> tuple[object, ...]:
    """Return what a cell has in common with the same at another dilation."""
    return (cell.preset, cell.model, cell.operation, cell.size, cell.bucket_mb, cell.workers, cell.samples, cell.scaled)


def order(cell: CellSummary) -> tuple[object, ...]:
    where = (cell.workers, cell.bucket_mb or 0)
    return (cell.preset or "", cell.operation or "", cell.size or 0, cell.model or "", *where)


def presets(cells: Iterable[CellSummary]) -> list[str]:
    return sorted({cell.preset for cell in cells if cell.preset})


def what(cell: CellSummary) -> str:
    """Return what was run, without the preset and the number of devices."""
    if cell.operation:
        return f"{'host-device copy' if cell.operation == 'copy' else 'all-reduce'}, {size_text(cell.size or 0)}"
    return f"{cell.model}" + (f", buckets of {cell.bucket_mb:g} MiB" if cell.bucket_mb else "")


def fully(cell: CellSummary) -> str:
    """Return the whole name of a cell."""
    parts = (
        what(cell),
        cell.preset,
        f"{cell.workers} devices",
        cut_text(cell) if cell.scaled != 1 else "",
        cell.changed,
    )
    return ", ".join(part for part in parts if part)


def saved(cell: CellSummary) -> float:
    """Return the share of the confidential step's time that all three optimisations save."""
    return 1 - over(cell, ALL, CONFIDENTIAL)


# -- figures ----------------------------------------------------------------------------------------------------------


def models(study: Study) -> Found:
    title = "Overhead by model"
    cells = plain_steps(study, CONFIDENTIAL)
    if not cells:
        return [Missing("tee-models", title, f"no step was measured on {GPUS} devices with default buckets")]
    ranked = sorted(cells, key=lambda cell: ratio_of(cell, CONFIDENTIAL).median)
    low, high = (
        f"{ratio_of(cell, CONFIDENTIAL).median:.1f} ({cell.model}, {cell.preset})" for cell in (ranked[0], ranked[-1])
    )
    says = (
        f"On {GPUS} devices a confidential step takes {low} to {high} times the step without a TEE. {LEE} publish {AVERAGE} "
        f"on average and {WORST} for GPT-2 XL."
    )
    numbers = _series(cells, (CONFIDENTIAL, ALL, SEALED))
    published: Point = {"ratio": [WORST] * 3, "resolution": 0.0}
    if largest := [cell for cell in cells if cell.model == LARGEST]:
        numbers["published"] = [{"label": _named(cell), **published} for cell in largest]
    reading = f"{_READING} Published: {LEE}, measured on other hardware."
    return [Picture("tee-models", "across", title, says, reading, numbers, cells, options=_OPTIONS)]


def switches(study: Study) -> Found:
    title = "The three optimisations"
    cells = [cell for cell in steps(study, CONFIDENTIAL, *SWITCHES, ALL) if cell.bucket_mb is None]
    if not cells:
        return [Missing("tee-switches", title, "no step was measured with each switch alone and with all of them")]
    best = max(cells, key=saved)
    says = (
        f"All three together save {percent(saved(best))} of the confidential step at most ({fully(best)}); "
        f"{FASTRACK} publishes up to {100 * SAVED:.1f} % of the run time."
    )
    numbers = _series(cells, (CONFIDENTIAL, *SWITCHES, ALL))
    return [Picture("tee-switches", "across", title, says, _READING, numbers, cells, options=_OPTIONS)]


def ringfence(study: Study) -> Found:
    title = "ringfence beside hop by hop"
    cells = steps(study, CONFIDENTIAL, SEALED)
    if not cells:
        why = "no cell has ringfence: its hosts are network namespaces, which need root"
        return [Missing("tee-ringfence", title, why)]
    times = sorted((over(cell, SEALED, CONFIDENTIAL), fully(cell)) for cell in cells)
    (best, best_name), (worst, worst_name) = times[0], times[-1]
    cores = sorted({cell.host_cores for cell in cells if cell.host_cores})
    says = (
        f"ringfence takes {best:.2f} ({best_name}) to {worst:.2f} ({worst_name}) times as long as the ring that seals hop "
        f"by hop, and less in {sum(each < 1 for each, _ in times)} of {len(times)} cells. Each device's host seals, sends, "
        f"receives, opens and adds with {' or '.join(f'{each:g}' for each in cores)} core{'' if cores == [1] else 's'}, at the "
        "planner's figures for a trust domain."
    )
    numbers = _series(cells, (CONFIDENTIAL, SEALED))
    return [Picture("tee-ringfence", "across", title, says, _READING, numbers, cells, options=_OPTIONS)]


def _named(cell: CellSummary) -> str:
    return f"{what(cell)}\n{cell.preset}, {cell.workers} devices"


def _series(cells: Sequence[CellSummary], variants: Sequence[str]) -> dict[str, list[Point]]:
    """Return the points of the variants that took part in any of the cells, by name."""
    found = {NAMES[name]: [point(_named(cell), cell, name) for cell in having(cells, name)] for name in variants}
    return {name: points for name, points in found.items() if points}


# -- tables -----------------------------------------------------------------------------------------------------------


def all_steps(study: Study) -> Table:
    """Return every step with its number of devices and of all-reduces, and its ratios."""
    rows = []
    for cell in steps(study, CONFIDENTIAL):
        ratios = [
            ratio_text(ratio_of(cell, name).median) if having([cell], name) else "–"
            for name in (CONFIDENTIAL, ALL, SEALED)
        ]
        beside = f"{over(cell, SEALED, CONFIDENTIAL):.2f}" if SEALED in cell.lines else "–"
        bucket = "default" if cell.bucket_mb is None else f"{cell.bucket_mb:g} MiB"
        rows.append(
            (f"{cell.model}", f"{cell.preset}", bucket, f"{cell.workers}", f"{cell.all_reduces}", *ratios, beside)
        )
    settings = ("model", "preset", "buckets", "devices", "all-reduces")
    return Table((*settings, "hop by hop", "all three", "ringfence", "over hop by hop"), {"": rows})


def distances(study: Study) -> Table:
    """Return every published figure for which the study has a number."""
    rows: list[tuple[str, ...]] = []
    for preset in presets(study.cells):
        cells = [cell for cell in steps(study, CONFIDENTIAL) if cell.workers == GPUS and cell.preset == preset]
        usual = [cell for cell in cells if cell.bucket_mb is None]
        if len(usual) > 1:
            mean = statistics.fmean(ratio_of(cell, CONFIDENTIAL).median for cell in usual)
            names = f"mean of {', '.join(str(cell.model) for cell in usual)} ({preset})"
            row = (f"{AVERAGE}", f"{mean:.1f}", names, distance(mean, AVERAGE))
            rows.append((LEE, "average of its models on four GPUs", *row))
        largest = [cell for cell in cells if cell.model == LARGEST]
        enlarged = sorted((cell for cell in largest if cell.bucket_mb), key=lambda cell: cell.bucket_mb or 0)
        for cell in [cell for cell in largest if cell in usual] + enlarged[-1:]:
            published, which = (ENLARGED, "larger") if cell.bucket_mb else (WORST, "default")
            here = ratio_of(cell, CONFIDENTIAL).median
            row = (f"{published}", f"{here:.1f}", fully(cell), distance(here, published))
            rows.append((LEE, f"GPT-2 XL on four GPUs, {which} buckets", *row))
    copies = [cell for cell in study.cells if cell.operation == "copy" and not cell.changed]
    for cell in sorted(having(copies, CONFIDENTIAL), key=order):
        here = ratio_of(cell, CONFIDENTIAL).median
        row = (f"{COPIES[0]} to {COPIES[1]}", f"{here:.1f}", fully(cell), outside(here, *COPIES))
        rows.append((FASTRACK, "CPU-GPU communication", *row))
    for same in grouped(steps(study, CONFIDENTIAL, ALL), lambda cell: cell.preset).values():
        best = max(same, key=saved)
        row = (
            f"{100 * SAVED:.1f} %",
            f"{100 * saved(best):.1f} %",
            fully(best),
            f"{100 * (saved(best) - SAVED):+.1f} points",
        )
        rows.append((FASTRACK, "run time saved by all three, at most", *row))
    return Table(("source", "of what", "published", "simulated", "cell", "distance"), {"": rows})


def distance(simulated: float, published: float) -> str:
    """Return such as "1.4 times above"."""
    times = simulated / published
    return f"{times:.2f} times above" if times >= 1 else f"{1 / times:.2f} times below"


def outside(simulated: float, low: float, high: float) -> str:
    """Return where a number lies, given a range."""
    if low <= simulated <= high:
        return "within the range"
    return distance(simulated, high if simulated > high else low)


def dilations(study: Study) -> Table:
    """Return the ratios of the cells that were measured with two numbers of cores in use: contention would change them."""
    rows = []
    for same in grouped(sorted(unchanged(study), key=order), _place).values():
        both = (max(same, key=lambda cell: cell.load or 0), min(same, key=lambda cell: cell.load or 0))
        for name in both[0].lines if both[0].load != both[1].load else ():
            if name in both[1].lines and name not in TEE_BASELINE:
                at = [(interval_text(cell.lines[name].ratio), f"{cell.lines[name].cores:.2f}") for cell in both]
                first, second = (ratio_of(cell, name) for cell in both)
                apart = "" if first.low <= second.high and second.low <= first.high else ", apart"
                difference = f"{100 * (second.median / first.median - 1):+.1f} %{apart}"
                rows.append((fully(both[0]), NAMES[name], *at[0], *at[1], difference))
    return Table(("cell", "variant", *("ratio", "cores in use") * 2, "difference"), {"": rows})


def sensitivity(study: Study) -> Table:
    """Return how far the ratio moves when one input is halved and doubled, the one that moves it most first."""
    rows = []
    changed = sorted((cell for cell in study.cells if cell.changed), key=order)
    for place, varied in grouped(changed, lambda cell: (cell.preset, cell.model, cell.workers)).items():
        for variant in (CONFIDENTIAL, SEALED):
            same = [cell for cell in steps(study, variant) if (cell.preset, cell.model, cell.workers) == place]
            base = [ratio_of(cell, variant).median for cell in same if cell.bucket_mb == varied[0].bucket_mb]
            found = []
            for name, cells in grouped(having(varied, variant), lambda cell: (cell.changed or "").split()[0]).items():
                ratios = {(cell.changed or "").split()[-1]: ratio_of(cell, variant).median for cell in cells}
                known = [*base, *ratios.values()]
                ends = (ratio_text(ratios[end]) if end in ratios else "–" for end in ("x0.5", "x2"))
                found.append((max(known) / min(known), (name, *ends)))
            title = f"{what(varied[0])}, {varied[0].preset}, {varied[0].workers} devices, {NAMES[variant]}"
            for swing, row in sorted(found, key=lambda each: -each[0]):
                rows.append((title, *row, f"{swing:.2f} times"))
    return Table(("cell", "input", "halved", "doubled", "from end to end"), {"": rows})
