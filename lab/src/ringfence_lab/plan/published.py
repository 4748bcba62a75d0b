"""The model beside published figures: other hardware, other software, inputs that had to be assumed. Nothing is fitted to them.

The GPUs of one machine, in plaintext over their own link, with host-device copies calibrated on simulated GPU TEEs.
Lee et al. (arXiv 2501.11771 v3): four GPU TEEs, GPT-2 XL: 41.6 times slower with DDP's default buckets, 3.03 times with
enlarged ones. The abstract and the opening were read, not the body.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from ringfence_lab.plan import models
from ringfence_lab.plan.buckets import MIB
from ringfence_lab.plan.hardware import Hardware, load
from ringfence_lab.plan.steps import Question, step
from ringfence_lab.plan.work import VARIANTS

GPUS: Final = 4
NODE: Final = "h100-cc-node"
PUBLISHED: Final = {"default": 41.6, "enlarged": 3.03, "average": 8.68}  # the last over the models of Lee et al.
GRID_SAMPLES: Final = {"bert-large": 4, "gpt2": 4, "gpt2-xl": 4, "resnet50": 32}  # of the grid gpu-tee
ENLARGED: Final = 200.0  # MiB: the largest buckets of that grid
# `ringfence study --grid gpu-tee`, preset h100, four devices, 2026-11-16: confidential over plain, of steps that are cut.
SIMULATED: Final = {"default": 47.2, "200 MiB": 39.5, "average": 57.4}
_INPUTS: Final = {
    "rate of a host-device copy": "device_copy_rate",
    "overhead of a host-device copy": "device_copy_overhead",
    "link between the GPUs": "device_peer_rate",
    "speed of computing, over the batch": "compute_utilisation",
}


@dataclass(frozen=True)
class Slowdown:
    """A published slowdown, sealed hop by hop over plaintext, beside the planner's and that of simulated GPU TEEs."""

    what: str
    published: float
    predicted: float
    simulated: float | None
    inputs: Mapping[str, tuple[float, float]]  # the prediction with each input halved, and doubled

    @property
    def decisive(self) -> str:
        """The input that moves the prediction most."""
        return max(self.inputs, key=lambda name: max(self.inputs[name]) / min(self.inputs[name]))


def slowdowns() -> list[Slowdown]:
    """Return the published slowdowns of four GPUs beside those of the planner, with the batches of the grid gpu-tee."""
    gpt2 = models.load("gpt2-xl")
    default = Question(gpt2, GPUS, samples=GRID_SAMPLES["gpt2-xl"])
    one = replace(default, cap_mib=gpt2.elements * default.bytes_each / MIB)
    all_models = [Question(models.load(name), GPUS, samples=count) for name, count in GRID_SAMPLES.items()]
    asked = [
        ("GPT-2 XL, default buckets", "default", [default], SIMULATED["default"]),
        ("GPT-2 XL, buckets of 200 MiB", "enlarged", [replace(default, cap_mib=ENLARGED)], SIMULATED["200 MiB"]),
        ("GPT-2 XL, one bucket", "enlarged", [one], None),
        (f"mean of {len(all_models)} models", "average", all_models, SIMULATED["average"]),
    ]
    profile, result = load(NODE), []
    for what, published, questions, simulated_as in asked:
        inputs = {}
        for name, figure in _INPUTS.items():
            section, _, key = figure.partition("_")
            value = profile.figures[section, key].value
            changed = [profile.with_values(**{figure: value * factor}) for factor in (0.5, 2.0)]
            inputs[name] = (_slowdown(changed[0], questions), _slowdown(changed[1], questions))
        predicted = _slowdown(profile, questions)
        result.append(Slowdown(what, PUBLISHED[published], predicted, simulated_as, inputs))
    return result


def _slowdown(profile: Hardware, asked: list[Question]) -> float:
    """Return sealed hop by hop over plaintext, the mean of several settings."""
    return statistics.fmean(
        step(profile, VARIANTS["hop-by-hop"], each).seconds / step(profile, VARIANTS["plaintext"], each).seconds
        for each in asked
    )
