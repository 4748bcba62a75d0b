"""Calibration: a hardware profile of a machine from the summary of a study that was measured on it.

Eight numbers are fitted for each variant: the factor of its cost per byte to that of the stages, its per-message overhead, the
delay of a message for each worker that shares a core, the share of its time in which a worker's thread waits, the cost of
memory outside of the caches, the cost of adding bfloat16, the ratio of the end of a step on a GPU to the model's, and the
growth of its core seconds beside computing on the same cores. Gloo has two more, for the memory in which torch lets it gather
and scatter. A study with machines (hosts) has further ones: what the network stack costs between them, and, with several
workers on a machine, what a copy and a message in shared memory cost. All collectives share them. Computing is not fitted: the
study measured it (`alone`). With more workers than cores, that measurement already contains their contention for the cores.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from ringfence.collectives import Collective, ScheduleId, Thresholds, choose
from ringfence.errors import ConfigurationError
from ringfence_lab.plan.fit import Vector, nearest
from ringfence_lab.plan.hardware import FIGURES, FROM_STUDY, VARIANT_FIGURES, Figure, Hardware
from ringfence_lab.plan.predict import BASELINE, MEASURED, covered, predict, workers_per_machine
from ringfence_lab.plan.schedules import usual
from ringfence_lab.plan.work import VARIANTS, load

Row = Mapping[str, Any]
Cells = dict[str, dict[str, Row]]  # cell -> variant -> row

_SEALED: Final = "ringfence"
_UNSCORED: Final = 0.1  # the weight of a cell whose two runs of Gloo differ too much
_STAGES: Final = {"seal": "sealed", "open": "opened", "send": "sent", "receive": "received", "reduce": "reduced"}
# Where nothing was profiled: one core of a Xeon with VAES, `ringfence bench --profile`, 2026-11-15. Their ratios matter.
_USUAL: Final = {"seal": 0.095, "open": 0.097, "send": 0.12, "receive": 0.10, "reduce": 0.053, "copy": 0.08}
_IN_VARIANTS: Final = (("core", "message"), ("core", "switch"))
# Per-message overhead and cost per byte are not distinguishable where all messages are long: they stay near the start.
_PENALTY: Final = 0.002
# For each figure of a variant: the start of its fit and its bounds.
_FITTED: Final = {
    "factor": (1.3, 0.05, 50.0),
    "message": (20.0, 0.1, 8000.0),
    "switch": (40.0, 0.01, 8000.0),
    "idle": (0.2, 0.01, 0.7),
    "tail": (1.0, 0.15, 2.7),
    "beside": (1.0, 0.15, 2.7),
    "cold": (0.3, 0.01, 2.0),
    "half": (1.5, 0.2, 20.0),
    "staged": (0.15, 0.01, 2.0),
    "fresh": (0.4, 0.01, 4.0),
    "between": (1.3, 0.5, 6.0),
    "copy": (0.08, 0.005, 2.0),
    "inside message": (5.0, 0.1, 2000.0),
}
_OF_GLOO: Final = ("staged", "fresh")
_OF_MACHINES: Final = ("between",)
_INSIDE: Final = {"copy": ("inside", "copy"), "inside message": ("inside", "message")}


def grouped(rows: Iterable[Row]) -> Cells:
    """Return rows by cell and variant; the two runs of Gloo become one, by their mean."""
    cells: dict[str, dict[str, Row]] = defaultdict(dict)
    for row in rows:
        cells[str(row["cell"])][str(row["variant"])] = row
    for variants in cells.values():
        if "gloo-a" in variants and "gloo-b" in variants:
            mean = (variants["gloo-a"]["seconds"] + variants["gloo-b"]["seconds"]) / 2
            variants[BASELINE] = {**variants["gloo-a"], "variant": BASELINE, "seconds": mean, "ratio": 1.0}
    return dict(cells)


def alone(variants: Mapping[str, Row]) -> float | None:
    """Return the time of a step of this cell without communication, if it was measured."""
    found = variants.get("alone")
    return float(found["seconds"]) if found is not None else None


def usable(variants: Mapping[str, Row], variant: str) -> bool:
    """Return whether this cell measured a variant that the model can predict."""
    row = variants.get(variant)
    if row is None or BASELINE not in variants or not covered(row):
        return False
    return row["kind"] == "collective" or alone(variants) is not None


def calibrate(rows: Iterable[Row], cores: int = 2) -> Hardware:
    """Return the profile of the machine on which these summary rows were measured.

    Raises ConfigurationError if fewer than four cells are usable.
    """
    cells = grouped(rows)
    known = [cell for cell in cells.values() if usable(cell, BASELINE)]
    if len(known) < 4:
        raise ConfigurationError(f"a calibration needs at least four cells with both Gloo runs; there are {len(known)}")
    hardware = _ground(cores, _stage_costs(cells, cores))
    if any(workers_per_machine(cell[BASELINE]) > 1 for cell in known):
        hardware = _with_inside(hardware, known)
    variants = {}
    for variant in MEASURED:
        if mine := [cell for cell in known if usable(cell, variant)]:
            variants[variant] = _nearest(hardware, mine, variant, _names(mine, variant))
    return Hardware(hardware.name, hardware.title, hardware.figures, variants)


def _with_inside(hardware: Hardware, cells: Sequence[Mapping[str, Row]]) -> Hardware:
    """Return the profile with the costs inside a machine, fitted together with those of ringfence."""
    figures = {**hardware.figures, ("inside", "sealed"): Figure(0.0, FROM_STUDY, False)}
    hardware = Hardware(hardware.name, hardware.title, figures, hardware.variants)
    if mine := [cell for cell in cells if usable(cell, _SEALED)]:
        found = _nearest(hardware, mine, _SEALED, [*_names(mine, _SEALED), *_INSIDE])
        figures |= {key: Figure(found[name], FROM_STUDY, False) for name, key in _INSIDE.items()}
    return Hardware(hardware.name, hardware.title, figures, hardware.variants)


def _ground(cores: int, stages: Mapping[str, float]) -> Hardware:
    """Return the profile before the fit: all workers share the cores of one machine, without a network card."""
    known = {**_USUAL, **stages}
    here = {
        ("network", "rate"): 1000.0,
        ("node", "workers"): 1024.0,
        ("node", "cores"): float(cores),
        ("memory", "rate"): 1e6,
        ("inside", "sealed"): 1.0,
        ("device", "overlap"): 1.0,
        ("device", "computing"): 1.0,
        ("compute", "flops"): 0.4,
        ("compute", "utilisation"): 1.0,
        ("compute", "busy"): 1.0,
        **{("core", stage): cost for stage, cost in known.items()},
    }
    reasons = {
        "memory": "no bound of its own: it is in what was fitted",
        "compute": "give --compute for a plan",
        "core": "usual for one core with VAES, not profiled here: only the ratios matter, `factor` in variants was fitted",
    }
    in_variants = "not a figure of the core here: it is in variants, fitted for each variant"
    figures = {}
    for key in FIGURES:
        measured = key == ("node", "cores") or (key[0] == "core" and key[1] in stages)
        reason = in_variants if key in _IN_VARIANTS else reasons.get(key[0], "everything is on one machine")
        figures[key] = Figure(here.get(key, 0.0), FROM_STUDY if measured else reason, not measured)
    return Hardware("here", f"this machine: {cores} cores, all workers on it", figures)


def _stage_costs(cells: Cells, cores: int) -> dict[str, float]:
    """Nanoseconds per byte of the stages that were profiled in collectives, by the mean of the workers.

    Only where each worker had a core to itself: otherwise a stage's time includes that of other workers on the core.
    """
    found: dict[str, list[float]] = defaultdict(list)
    for variants in cells.values():
        row = variants.get("ringfence-profiled")
        if row is None or row["kind"] != "collective" or row["size"] < 1 << 20 or row["workers"] > cores:
            continue
        if workers_per_machine(row) > 1:  # stages are those of a byte that is sealed
            continue
        schedule = choose(Collective[row["operation"].upper()], row["workers"], 0, 0, row["size"], Thresholds())
        counted = usual(ScheduleId(schedule.identifier), row["workers"])
        done = load(VARIANTS["ringfence"], counted, row["size"])._asdict()
        for stage, through in _STAGES.items():
            spent = row.get(f"stage_{stage}")
            if spent and done[through]:
                found[stage].append(spent / done[through])
    return {stage: statistics.median(costs) for stage, costs in found.items()}


def _names(cells: Sequence[Mapping[str, Row]], variant: str) -> list[str]:
    """Return the figures to fit for a variant: those that these cells say something about."""
    machines = any(workers_per_machine(cell[variant]) for cell in cells)
    left_out = {*([] if variant == BASELINE else _OF_GLOO), *([] if machines else _OF_MACHINES), *_INSIDE}
    return [name for name in _FITTED if name not in left_out]


def _nearest(
    hardware: Hardware, cells: Sequence[Mapping[str, Row]], variant: str, names: Sequence[str]
) -> dict[str, float]:
    """Return the named figures that minimize the relative error of predictions; the other figures are 0, and factors 1."""
    weights = [1.0 if cell[variant]["scored"] else _UNSCORED for cell in cells]

    def figures(point: Vector) -> dict[str, float]:
        unknown = {**dict.fromkeys(VARIANT_FIGURES, 0.0), **dict.fromkeys(_OF_MACHINES, 1.0)}
        return {**unknown, **dict(zip(names, map(math.exp, point), strict=True))}

    def residuals(point: Vector) -> Vector:
        fitted = figures(point)
        inside = {key: Figure(fitted.pop(name), "", False) for name, key in _INSIDE.items() if name in fitted}
        trial = Hardware(hardware.name, hardware.title, {**hardware.figures, **inside}, {variant: fitted})
        return tuple(
            math.log(predict(trial, cell[variant], variant, alone(cell)) / cell[variant]["seconds"]) for cell in cells
        )

    begin, *bounds = ([math.log(value) for value in column] for column in zip(*map(_FITTED.get, names), strict=True))
    return figures(nearest(residuals, weights, begin, list(zip(*bounds, strict=True)), penalty=_PENALTY * sum(weights)))
