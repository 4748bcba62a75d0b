"""Calibration with simulated GPU TEEs: host-device copies in confidential mode, fitted to the gpu-tee cells of a study.

Two figures are fitted, the rate and the overhead of a copy, to the variant `confidential`. Whether computing goes on during
copies is taken from the same cells. The variants `plain` and `ringfence` are predicted and not fitted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from ringfence.errors import ConfigurationError
from ringfence_lab.accelerator import tee
from ringfence_lab.plan import models
from ringfence_lab.plan.fit import Vector, nearest
from ringfence_lab.plan.hardware import FIGURES, FROM_STUDY, Figure, Hardware, load
from ringfence_lab.plan.steps import Question, collective, replayed
from ringfence_lab.plan.traces import as_replayed
from ringfence_lab.plan.work import VARIANTS

Row = Mapping[str, Any]

KIND: Final = "gpu-tee"
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


def _seconds(hardware: Hardware, row: Row) -> float:
    variant, workers = VARIANTS[_VARIANTS[row["variant"]]], int(row["workers"])
    if row["operation"]:
        return collective(hardware, variant, "all_reduce", workers, float(row["size"]), ring=True).seconds
    model, bucket = models.load(row["model"]), row["bucket_mb"]
    speed = hardware["compute", "flops"] * hardware["compute", "utilisation"]
    compute = model.step_flops(row["samples"]) / speed / row["scaled"]
    made = as_replayed(model, bucket, 4, compute, False, row["scaled"])
    if made.bytes > _REPLAYED:
        variant = replace(variant, at_once=1)
    return replayed(hardware, variant, made, Question(model, workers, bucket, channels=1, ring=True)).seconds


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
    return min(fits, key=lambda profile: sum(map(abs, _residuals(profile, found))))


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


def _fitted(base: Hardware, rows: Sequence[Row], computing: float) -> Hardware:
    def profile(point: Vector) -> Hardware:
        values = zip(CALIBRATED, (*map(math.exp, point), computing), strict=True)
        figures = {**base.figures, **{("device", key): Figure(value, FROM_STUDY, False) for key, value in values}}
        return Hardware(base.name, base.title, figures, base.variants, base.notes)

    weights = [1.0 if row["scored"] else _UNSCORED for row in rows]
    start = [math.log(value) for value in _START]
    bounds = [(math.log(low), math.log(high)) for low, high in _BOUNDS]
    return profile(nearest(lambda point: _residuals(profile(point), rows), weights, start, bounds))


def _residuals(hardware: Hardware, rows: Sequence[Row]) -> Vector:
    return tuple(math.log(predict(hardware, row) / row["seconds"]) for row in rows)
