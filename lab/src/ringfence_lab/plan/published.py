"""The model beside published figures: other hardware, other software, inputs that had to be assumed. Nothing is fitted to them.

Three answers. `calibrated` is the planner's: the GPUs of one machine, in plaintext over their own link, with host-device copies
calibrated on simulated GPU TEEs. `gpt2_xl` is what it predicted before: each GPU in a machine of its own, both variants over
the network. `copies_only` adds up host-device copies and nothing else. They differ most in the baseline.

Lee et al. (arXiv 2501.11771 v3): four GPU TEEs, GPT-2 XL: 41.6 times slower with DDP's default buckets, 3.03 times with
enlarged ones. Fastrack (arXiv 2410.15240): CPU-GPU communication 12.69 to 33.53 times slower; up to 84.6 % less run time with
all three fixes.
Of both, abstracts and openings were read, not the bodies.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from ringfence_lab.plan import models
from ringfence_lab.plan.buckets import MIB, buckets
from ringfence_lab.plan.hardware import Hardware, load
from ringfence_lab.plan.schedules import busiest
from ringfence_lab.plan.steps import FLAT, Question, step
from ringfence_lab.plan.work import VARIANTS
from ringfence_lab.plan.work import load as load_of

GPUS: Final = 4
PUBLISHED: Final = {"default": 41.6, "enlarged": 3.03}
PLAIN_LINKS: Final = {"NVLink": 476e9, "PCIe": 12e9}  # nccl-tests issue 290; NCCL's topo.h for PCIe 3.0 x16
_SAMPLES: Final = (1, 4, 16)
_ELEMENT: Final = 4
NODE: Final = "h100-cc-node"
AVERAGE: Final = 8.68  # over the models of Lee et al. on four GPUs
_GRID_SAMPLES: Final = {"bert-large": 4, "gpt2": 4, "gpt2-xl": 4, "resnet50": 32}  # of the grid gpu-tee
_ENLARGED: Final = 200.0  # MiB: the largest buckets of that grid
# `ringfence study --grid gpu-tee`, preset h100, four devices, 2026-11-16: confidential over plain, of steps that are cut.
SIMULATED: Final = {"default": 47.2, "200 MiB": 39.5, "average": 57.4}
_INPUTS: Final = {
    "rate of a host-device copy": "device_copy_rate",
    "overhead of a host-device copy": "device_copy_overhead",
    "link between the GPUs": "device_peer_rate",
    "speed of computing, over the batch": "compute_utilisation",
}


@dataclass(frozen=True)
class Predicted:
    """GPT-2 XL on four GPUs by the whole model: sealed hop by hop over plaintext, both over the profile's own network."""

    samples: int
    plain: float  # seconds a step
    slowdown: dict[str, float]  # by buckets


@dataclass(frozen=True)
class Copies:
    """The same by host-device copies alone, against a baseline whose GPUs talk to each other over a link of their own."""

    samples: int
    link: str  # what the plaintext baseline's GPUs talk over
    compute: float
    plain: float  # seconds a step
    slowdown: dict[str, float]  # by buckets
    implied: tuple[float, float]  # overhead and rate of a host-device copy that would make both published figures true


def gpt2_xl(hardware: Hardware | None = None) -> list[Predicted]:
    """What `ringfence plan` says of the published setting, for each assumption about the batch."""
    profile, model = hardware or load("h100-cc"), models.load("gpt2-xl")
    whole = model.elements * _ELEMENT / MIB
    result = []
    for samples in _SAMPLES:
        plain = step(profile, VARIANTS["plaintext"], Question(model, GPUS, samples=samples)).seconds
        slowdown = {}
        for name, cap in (("default", None), ("enlarged", whole)):
            asked = Question(model, GPUS, cap, samples=samples)
            slowdown[name] = step(profile, VARIANTS["hop-by-hop"], asked).seconds / plain
        result.append(Predicted(samples, plain, slowdown))
    return result


def copies_only(hardware: Hardware | None = None) -> list[Copies]:
    """Computing and host-device copies, nothing else, for each assumption about the batch and the baseline's link."""
    profile = hardware or load("h100-cc")
    model = models.load("gpt2-xl")
    result = []
    for samples in _SAMPLES:
        compute = model.step_flops(samples) / (profile["compute", "flops"] * profile["compute", "utilisation"])
        for link, rate in PLAIN_LINKS.items():
            moved = 2 * (GPUS - 1) / GPUS * model.elements * _ELEMENT
            plain = max(compute, compute / 3 + moved / rate)  # hidden behind the backward pass as far as it goes
            protected = {name: compute + _hops(profile, sizes) for name, sizes in _bucketed(model.parameters).items()}
            slowdown = {name: seconds / plain for name, seconds in protected.items()}
            result.append(Copies(samples, link, compute, plain, slowdown, implied(compute, plain)))
    return result


@dataclass(frozen=True)
class Calibrated:
    """A published slowdown beside the planner's, before and after calibration, and the one of simulated GPU TEEs."""

    what: str
    published: float
    before: float
    after: float
    simulated: float | None
    inputs: Mapping[str, tuple[float, float]]  # the prediction with each input halved, and doubled

    @property
    def decisive(self) -> str:
        """The input that moves the prediction most."""
        return max(self.inputs, key=lambda name: max(self.inputs[name]) / min(self.inputs[name]))


def calibrated(hardware: Hardware | None = None) -> list[Calibrated]:
    """Return the published slowdowns of four GPUs beside those of the planner, with the batches of the grid gpu-tee."""
    profile, gpt2 = hardware or load(NODE), models.load("gpt2-xl")
    default = Question(gpt2, GPUS, samples=_GRID_SAMPLES["gpt2-xl"])
    larger = replace(default, cap_mib=_ENLARGED)
    one = replace(default, cap_mib=gpt2.elements * _ELEMENT / MIB)
    all_models = [Question(models.load(name), GPUS, samples=count) for name, count in _GRID_SAMPLES.items()]
    return [
        _calibrated(profile, "GPT-2 XL, default buckets", PUBLISHED["default"], [default], SIMULATED["default"]),
        _calibrated(profile, "GPT-2 XL, buckets of 200 MiB", PUBLISHED["enlarged"], [larger], SIMULATED["200 MiB"]),
        _calibrated(profile, "GPT-2 XL, one bucket", PUBLISHED["enlarged"], [one], None),
        _calibrated(profile, f"mean of {len(all_models)} models", AVERAGE, all_models, SIMULATED["average"]),
    ]


def _calibrated(
    profile: Hardware, what: str, published: float, asked: list[Question], simulated: float | None
) -> Calibrated:
    inputs = {}
    for name, figure in _INPUTS.items():
        section, _, key = figure.partition("_")
        value = profile.figures[section, key].value
        half, twice = (_slowdown(profile.with_values(**{figure: value * factor}), asked) for factor in (0.5, 2.0))
        inputs[name] = half, twice
    return Calibrated(what, published, _slowdown(load("h100-cc"), asked), _slowdown(profile, asked), simulated, inputs)


def simulated(rows: Iterable[Mapping[str, Any]], preset: str) -> dict[str, float]:
    """Return the slowdowns that SIMULATED has, from summary rows of a study."""
    cells = {
        (row["model"], row["bucket_mb"]): float(row["ratio"])
        for row in sorted(rows, key=lambda row: row["load"] or 0.0)  # of two dilations the smaller one
        if row["preset"] == preset and row["variant"] == "confidential" and row["model"] and not row["changed"]
        if row["workers"] == GPUS and row["samples"] == _GRID_SAMPLES[row["model"]]
    }
    average = statistics.fmean(cells[name, None] for name in _GRID_SAMPLES)
    return {"default": cells["gpt2-xl", None], "200 MiB": cells["gpt2-xl", _ENLARGED], "average": average}


def _slowdown(profile: Hardware, asked: list[Question]) -> float:
    """Return sealed hop by hop over plaintext, the mean of several settings."""
    return statistics.fmean(
        step(profile, VARIANTS["hop-by-hop"], each).seconds / step(profile, VARIANTS["plaintext"], each).seconds
        for each in asked
    )


def distance(predicted: float, buckets_are: str) -> str:
    """Return how far a prediction is from the published figure, such as "2.0 times above"."""
    return times_text(predicted / PUBLISHED[buckets_are])


def times_text(times: float) -> str:
    """Return a factor such as "2.0 times above"."""
    return f"{times:.1f} times above" if times >= 1 else f"{1 / times:.1f} times below"


def _bucketed(parameters: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    return {"default": buckets(parameters, None, _ELEMENT), "enlarged": (sum(parameters) * _ELEMENT,)}


def _hops(hardware: Hardware, sizes: tuple[int, ...]) -> float:
    """Every sub-step of the ring is copied to the host and back, sealed at both ends; nothing is hidden."""
    variant = VARIANTS["hop-by-hop"]
    counted, _ = busiest(FLAT["ring"], GPUS)
    rate, overhead = hardware["device", "copy_rate"], hardware["device", "copy_overhead"]
    seconds = 0.0
    for size in sizes:
        done = load_of(variant, counted[0], size)
        seconds += done.messages * overhead + (done.sent + done.received) / rate
    return seconds


def implied(compute: float, plain: float) -> tuple[float, float]:
    """Return the overhead (seconds) and rate (bytes per second) of a host-device copy for which both published figures hold."""
    found = _bucketed(models.load("gpt2-xl").parameters)
    copies = {name: len(sizes) * 2 * 2 * (GPUS - 1) for name, sizes in found.items()}
    overhead = (PUBLISHED["default"] - PUBLISHED["enlarged"]) * plain / (copies["default"] - copies["enlarged"])
    moving = PUBLISHED["enlarged"] * plain - compute - copies["enlarged"] * overhead
    moved = 2 * 2 * (GPUS - 1) / GPUS * sum(found["enlarged"])
    return overhead, moved / moving if moving > 0 else float("inf")


@dataclass(frozen=True)
class Stage:
    """One more of Fastrack's fixes switched on."""

    name: str
    seconds_per_gb: float
    slowdown: float  # over the plain copy
    reduction: float  # of the time without any fix


FASTRACK_INPUTS: Final = {
    "re-encryption by the CPU": "seal and open of the profile's core, once more",
    "authentication by one sequential kernel": "2 GB/s, assumed: no figure in what was read",
    "parallel authentication": "32 times that, assumed: one for each of 32 independent pieces",
    "decryption on the device": "50 GB/s, assumed: near the plain copy",
}
_SEQUENTIAL, _PARALLEL, _DECRYPT = 2e9, 64e9, 50e9


def fastrack(hardware: Hardware | None = None) -> list[Stage]:
    """A gigabyte to the device, with the three fixes switched on one by one."""
    profile = hardware or load("h100-cc")
    plain = 1e9 / profile["device", "plain_copy_rate"]
    again = 1e9 * (profile["core", "seal"] + profile["core", "open"])
    variants = {
        "none": [again, plain, 1e9 / _DECRYPT, 1e9 / _SEQUENTIAL],
        "direct channel: nothing is encrypted twice": [plain, 1e9 / _DECRYPT, 1e9 / _SEQUENTIAL],
        "and authentication in parallel": [plain, 1e9 / _DECRYPT, 1e9 / _PARALLEL],
    }
    spent = {name: sum(parts) for name, parts in variants.items()}
    spent["and decryption while bytes arrive"] = max(variants["and authentication in parallel"])
    first = spent["none"]
    return [Stage(name, seconds, seconds / plain, 1 - seconds / first) for name, seconds in spent.items()]
