"""Calibration with simulated GPU TEEs: host-device copies in confidential mode, fitted to the gpu-tee cells of a study.

Two figures are fitted, the rate and the overhead of a copy, to the variant `confidential`. Whether computing goes on during
copies is taken from the same cells. The variants `plain` and `ringfence` are predicted and not fitted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from ringfence.errors import ConfigurationError
from ringfence_lab.accelerator import tee
from ringfence_lab.plan import models
from ringfence_lab.plan.fit import Vector, nearest
from ringfence_lab.plan.hardware import FIGURES, FROM_STUDY, Figure, Hardware, load
from ringfence_lab.plan.steps import Question, all_reduce, replayed
from ringfence_lab.plan.traces import as_replayed
from ringfence_lab.plan.work import VARIANTS

Row = Mapping[str, Any]

KIND: Final = "gpu-tee"
BEFORE: Final = "h100-cc"  # what the planner predicted from before it was calibrated: each GPU in a machine of its own
BASE: Final = "h100-cc-node"
PLAIN, FITTED, SEALED = "plain", "confidential", "ringfence"
_VARIANTS: Final = {PLAIN: "plaintext", FITTED: "hop-by-hop", SEALED: "ringfence"}
CALIBRATED: Final = ("copy_rate", "copy_overhead", "computing")  # figures of the section `device`
_START: Final = (4.0, 330.0)  # GB/s, µs
_BOUNDS: Final = ((0.01, 1000.0), (0.1, 100_000.0))
_LEAST_CELLS: Final = 3
_UNSCORED: Final = 0.1
_REPLAYED: Final = 64 << 20  # of memory: a replayed step with more uses it again, and its all-reduces follow each other
# The preset's inputs that the profile takes as they are, since the study has them from there as well.
_GIVEN: Final = {
    ("device", "peer_rate"): "peer_rate",
    ("device", "peer_overhead"): "peer_overhead",
    ("device", "plain_copy_rate"): "link_rate",
    ("device", "plain_copy_overhead"): "plain_overhead",
}
# In a cell of ringfence, all work of a host's core is in the rate between hosts.
_IN_THE_RATE: Final = dict.fromkeys(
    [f"core_{stage}" for stage in ("seal", "open", "send", "receive", "reduce", "copy", "message")], 0.0
)


def covered(row: Row, preset: str) -> bool:
    """Return whether the model predicts a row: a step or an all-reduce with the inputs of the preset."""
    if row["kind"] != KIND or row["preset"] != preset or row["changed"] or row["variant"] not in _VARIANTS:
        return False
    return row["operation"] in (None, "all_reduce") and (row["variant"] != SEALED or bool(row["rate_bits"]))


def presets(rows: Iterable[Row]) -> list[str]:
    """Return the presets of the gpu-tee cells."""
    return sorted({str(row["preset"]) for row in rows if row["kind"] == KIND})


def predict(hardware: Hardware, row: Row) -> float:
    """Return the simulated seconds of a row: the devices of one node, or with ringfence one device for each host."""
    changes: dict[str, float] = {"node_workers": row["workers"]}
    if row["variant"] == SEALED:
        rate = row["rate_bits"] * row["dilation"] / 1e9
        changes = {"node_workers": 1, "network_rate": rate, "network_latency": 0, **_IN_THE_RATE}
    return _seconds(hardware.with_values(**changes), row)


def predict_before(row: Row) -> float:
    """Return the same as it was predicted without calibration: through the hosts, in plaintext as well."""
    return _seconds(load(BEFORE), row)


def _seconds(hardware: Hardware, row: Row) -> float:
    variant, workers = VARIANTS[_VARIANTS[row["variant"]]], int(row["workers"])
    if row["operation"]:
        return all_reduce(hardware, variant, "ring", workers, float(row["size"])).seconds
    model, bucket = models.load(row["model"]), row["bucket_mb"]
    speed = hardware["compute", "flops"] * hardware["compute", "utilisation"]
    compute = model.step_flops(row["samples"]) / speed / row["scaled"]
    made = as_replayed(model, bucket, 4, compute, False, row["scaled"])
    if made.bytes > _REPLAYED:
        variant = replace(variant, at_once=1)
    return replayed(hardware, variant, made, Question(model, workers, bucket, schedule="ring")).seconds


def calibrate(rows: Iterable[Row], preset: str) -> Hardware:
    """Return the profile of the simulated GPU TEEs on which these summary rows were measured.

    Raises ConfigurationError if fewer than three cells have the variant `confidential`.
    """
    found = [row for row in rows if covered(row, preset) and row["variant"] == FITTED]
    if len(found) < _LEAST_CELLS:
        raise ConfigurationError(
            f"a calibration of {preset} needs at least {_LEAST_CELLS} gpu-tee cells with the variant {FITTED}; there are "
            f"{len(found)}: `ringfence study --grid gpu-tee` measures them"
        )
    base = _ground(preset)
    fits = [_fitted(base, found, computing) for computing in (1.0, 0.0)]
    return min(fits, key=lambda profile: _loss(profile, found))


def _ground(preset: str) -> Hardware:
    base, settings = load(BASE), tee.load(preset)
    figures = dict(base.figures)
    for key, name in _GIVEN.items():
        origin = settings.origins[name]
        text = origin.text if origin.assumed else f"{origin.text} ({origin.date})"
        figures[key] = Figure(float(f"{getattr(settings, name) / FIGURES[key][1]:.6g}"), text, origin.assumed)
    title = f"simulated GPU TEEs ({preset}): the devices of one machine, in confidential mode"
    return Hardware(
        preset, title, figures, notes=("Simulated: its inputs are those of the preset, some of them assumed.",)
    )


def _with(base: Hardware, copies: Sequence[float], computing: float) -> Hardware:
    values = zip(CALIBRATED, (*copies, computing), strict=True)
    figures = {**base.figures, **{("device", key): Figure(value, FROM_STUDY, False) for key, value in values}}
    return Hardware(base.name, base.title, figures, base.variants, base.notes)


def _fitted(base: Hardware, rows: Sequence[Row], computing: float) -> Hardware:
    def profile(point: Vector) -> Hardware:
        return _with(base, [math.exp(value) for value in point], computing)

    def residuals(point: Vector) -> Vector:
        return _residuals(profile(point), rows)

    weights = [1.0 if row["scored"] else _UNSCORED for row in rows]
    start = [math.log(value) for value in _START]
    bounds = [(math.log(low), math.log(high)) for low, high in _BOUNDS]
    return profile(nearest(residuals, weights, start, bounds))


def _residuals(hardware: Hardware, rows: Sequence[Row]) -> Vector:
    return tuple(math.log(predict(hardware, row) / row["seconds"]) for row in rows)


def _loss(hardware: Hardware, rows: Sequence[Row]) -> float:
    return sum(map(abs, _residuals(hardware, rows)))


@dataclass(frozen=True)
class Line:
    """One variant in one cell: its simulated seconds, and what was predicted without and with calibration."""

    cell: str
    variant: str
    scored: bool
    measured: float  # seconds, over those of `plain` where it is a ratio
    before: float
    after: float  # by a profile that was calibrated without the cell
    measured_ratio: float
    before_ratio: float
    after_ratio: float

    @property
    def error(self) -> float:
        """The relative error of the seconds, after calibration."""
        return self.after / self.measured - 1

    @property
    def error_before(self) -> float:
        return self.before / self.measured - 1


def validate(rows: Iterable[Row], preset: str) -> list[Line]:
    """Divide the cells into two halves and predict each from the other; equal settings are in the same half."""
    known = [row for row in rows if covered(row, preset)]
    plain = {row["cell"]: row for row in known if row["variant"] == PLAIN}
    lines = []
    settings = sorted({_settings(row) for row in known})
    for half in (0, 1):
        seen = set(settings[half::2])
        profile = calibrate([row for row in known if _settings(row) in seen], preset)
        for row in known:
            if _settings(row) not in seen and row["cell"] in plain:
                lines.append(_line(profile, row, plain[row["cell"]]))
    return sorted(lines, key=lambda line: (line.cell, list(_VARIANTS).index(line.variant)))


def _line(profile: Hardware, row: Row, plain: Row) -> Line:
    before, after = predict_before(row), predict(profile, row)
    return Line(
        cell=row["cell"],
        variant=row["variant"],
        scored=bool(row["scored"]),
        measured=row["seconds"],
        before=before,
        after=after,
        measured_ratio=row["ratio"],
        before_ratio=before / predict_before(plain),
        after_ratio=after / predict(profile, plain),
    )


def _settings(row: Row) -> tuple[Any, ...]:
    """Return what twins have in common: cells that differ in their dilation only."""
    return (row["model"] or "", row["workers"], row["bucket_mb"] or 0.0, row["size"] or 0, row["samples"] or 0)
