"""Figures of GPU TEEs: overhead by model, devices and all-reduces, the three switches, ringfence, dilation, sensitivity."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Final

from ringfence_lab.report.figure import Figure, Missing, Table
from ringfence_lab.report.labels import percent
from ringfence_lab.report.study import Cell, Study
from ringfence_lab.report.tee_cells import (
    ALL,
    CONFIDENTIAL,
    NAMES,
    SEALED,
    SWITCHES,
    default_buckets,
    factor,
    fully,
    having,
    point,
    presets,
    steps,
    what,
)
from ringfence_lab.report.tee_published import AVERAGE, ENLARGED, FASTRACK, GPUS, LEE, SAVED, WORST, reduction

Found = Sequence[Figure | Missing]
_READING: Final = (
    "Points: median of the simulated time over that of the same step without a TEE. Whiskers: 95 % interval over the "
    "rounds. Dashed: published, measured on other hardware."
)
_RINGS: Final = (CONFIDENTIAL, ALL, SEALED)


def models(study: Study) -> Found:
    title = "Overhead by model"
    cells = having(default_buckets([cell for cell in steps(study) if cell.workers == GPUS]), CONFIDENTIAL)
    if not cells:
        return [Missing("tee-models", title, f"no step was measured on {GPUS} devices with default buckets")]
    series = {
        NAMES[name]: [point(f"{cell.model},\n{cell.preset}", cell, name) for cell in having(cells, name)]
        for name in _RINGS
    }
    ranked = sorted(cells, key=lambda cell: factor(cell).median)
    says = (
        f"On {GPUS} devices a confidential step takes {factor(ranked[0]).median:.1f} ({ranked[0].model}, "
        f"{ranked[0].preset}) to {factor(ranked[-1]).median:.1f} ({ranked[-1].model}, {ranked[-1].preset}) times the "
        f"step without a TEE. {LEE} publish {AVERAGE} on average and {WORST} for GPT-2 XL."
    )
    published = {f"{LEE}, average": [AVERAGE], f"{LEE}, GPT-2 XL": [WORST]}
    numbers = {"series": _present(series), "published": published}
    return [Figure("tee-models", "tee-factors", title, says, _READING, numbers, cells)]


def devices(study: Study) -> Found:
    title = "Overhead by number of devices"
    cells = having(default_buckets(steps(study)), CONFIDENTIAL)
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(f"{cell.model}, {cell.preset}", []).append(cell)
    groups = {name: some for name, some in groups.items() if len(some) > 1}
    if not groups:
        return [Missing("tee-devices", title, "no step was measured with more than one number of devices")]
    panels = {
        name: _present(
            {
                NAMES[variant]: [{**point("", cell, variant), "x": cell.workers} for cell in having(some, variant)]
                for variant in _RINGS
            }
        )
        for name, some in groups.items()
    }
    ends = [
        f"{name} {factor(some[0]).median:.1f} with {some[0].workers} and {factor(some[-1]).median:.1f} with "
        f"{some[-1].workers}"
        for name, some in groups.items()
    ]
    growing = all(_grows([factor(cell).median for cell in some]) for some in groups.values())
    says = (
        f"Confidential, hop by hop: {'; '.join(ends)}. It {'grows' if growing else 'does not always grow'} with the "
        f"number of devices; {LEE} say that it grows, since a ring has two more sub-steps for each."
    )
    used = [cell for some in groups.values() for cell in some]
    numbers = {"panels": panels, "published": {}}
    return [Figure("tee-devices", "tee-growth", title, says, _READING, numbers, used, axis="devices")]


def all_reduces(study: Study) -> Found:
    title = "Number of all-reduces against overhead"
    cells = having([cell for cell in steps(study) if cell.workers == GPUS and cell.all_reduces], CONFIDENTIAL)
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(f"{cell.model}, {cell.preset}", []).append(cell)
    groups = {
        name: sorted(some, key=lambda cell: cell.all_reduces or 0)
        for name, some in groups.items()
        if len({cell.all_reduces for cell in some}) > 1
    }
    if not groups:
        return [Missing("tee-all-reduces", title, "no model was measured with more than one size of buckets")]
    panels = {
        name: _present(
            {
                NAMES[variant]: [{**point("", cell, variant), "x": cell.all_reduces} for cell in having(some, variant)]
                for variant in _RINGS
            }
        )
        for name, some in groups.items()
    }
    ends = [
        f"{name} {factor(some[0]).median:.1f} with {some[0].all_reduces} and {factor(some[-1]).median:.1f} with "
        f"{some[-1].all_reduces}"
        for name, some in groups.items()
    ]
    says = (
        f"The same bytes in more all-reduces of a step (smaller buckets): {'; '.join(ends)}. {LEE} publish {WORST} for "
        f"GPT-2 XL with default buckets and {ENLARGED} with larger ones; which size that was is not known."
    )
    published = {f"{LEE}, GPT-2 XL": [WORST], f"{LEE}, larger buckets": [ENLARGED]}
    used = [cell for some in groups.values() for cell in some]
    numbers = {"panels": panels, "published": published}
    return [Figure("tee-all-reduces", "tee-growth", title, says, _READING, numbers, used, axis="all-reduces of a step")]


def switches(study: Study) -> Found:
    title = "The three optimisations"
    cells = having(default_buckets(steps(study)), CONFIDENTIAL, *SWITCHES, ALL)
    if not cells:
        return [Missing("tee-switches", title, "no step was measured with each switch alone and with all of them")]
    shown = [max((cell for cell in cells if cell.preset == name), key=_bytes) for name in presets(cells)]
    panels = {
        f"{cell.model}, {cell.preset}, {cell.workers} devices": [
            {
                "label": NAMES[name],
                "ratio": round(factor(cell, name).median, 4),
                "saved": round(reduction(cell, name), 4),
                "alone": name in SWITCHES,
            }
            for name in (CONFIDENTIAL, *SWITCHES, ALL)
        ]
        for cell in shown
    }
    best = max(cells, key=lambda cell: reduction(cell, ALL))
    says = (
        f"All three together save {percent(reduction(best, ALL))} of the confidential step at most ({fully(best)}); "
        f"{FASTRACK} publishes up to {SAVED:.1%}".replace("%", " %").replace("  ", " ")
        + " of the run time."
    )
    rows = {
        fully(cell): [
            (NAMES[name], f"{factor(cell, name).median:.2f}", percent(reduction(cell, name)))
            for name in (CONFIDENTIAL, *SWITCHES, ALL)
        ]
        for cell in cells
    }
    table = Table(("variant", "over no TEE", "saved of confidential"), rows)
    reading = (
        "Left: the confidential step over the one without a TEE. Hanging: what each switch saves alone. Right: what is "
        "left with all three. Dashed: what the published reduction would leave."
    )
    numbers = {"panels": panels, "published": {f"{FASTRACK}, up to": SAVED}}
    return [Figure("tee-switches", "tee-waterfall", title, says, reading, numbers, cells, table)]


def _bytes(cell: Cell) -> tuple[int, str]:
    return cell.all_reduces or 0, cell.model or ""


def ringfence(study: Study) -> Found:
    title = "ringfence beside hop by hop"
    cells = having(steps(study), CONFIDENTIAL, SEALED)
    if not cells:
        return [
            Missing("tee-ringfence", title, "no cell has ringfence: its hosts are network namespaces, which need root")
        ]
    series = {
        NAMES[name]: [point(f"{what(cell)}\n{cell.preset}, {cell.workers} devices", cell, name) for cell in cells]
        for name in (CONFIDENTIAL, SEALED)
    }
    over = sorted(
        (cell.lines[SEALED].seconds.median / cell.lines[CONFIDENTIAL].seconds.median, fully(cell)) for cell in cells
    )
    (best, best_name), (worst, worst_name) = over[0], over[-1]
    faster = sum(each < 1 for each, _ in over)
    cores = sorted({cell.host_cores for cell in cells if cell.host_cores})
    says = (
        f"ringfence takes {best:.2f} ({best_name}) to {worst:.2f} ({worst_name}) times as long as the ring that seals hop "
        f"by hop, and less in {faster} of {len(over)} cells. Each device's host seals, sends, receives, opens and adds "
        f"with {' or '.join(f'{each:g}' for each in cores)} core{'' if cores == [1] else 's'}, at the planner's figures for "
        "a trust domain."
    )
    numbers = {"series": series, "published": {}}
    return [Figure("tee-ringfence", "tee-factors", title, says, _READING, numbers, cells)]


def _present(series: dict[str, Any]) -> dict[str, Any]:
    """Return the series that have points."""
    return {name: points for name, points in series.items() if points}


def _grows(values: Sequence[float]) -> bool:
    return all(before < after for before, after in itertools.pairwise(values))
