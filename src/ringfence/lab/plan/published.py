"""The model beside published figures: other hardware, other software, inputs that had to be assumed. Nothing is fitted to them.

Two answers. `gpt2_xl` is the planner's own: both variants over the profile's network, so the baseline pays for it too.
`copies_only` leaves all of that out and takes a baseline whose GPUs talk over NVLink or PCIe. They differ in the baseline.

Lee et al. (arXiv 2501.11771 v3): four GPU TEEs, GPT-2 XL: 41.6 times slower with DDP's default buckets, 3.03 times with
enlarged ones. Fastrack (arXiv 2410.15240): CPU-GPU communication 12.69 to 33.53 times slower; up to 84.6 % less run time with
all three fixes.
Of both, abstracts and openings were read, not the bodies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ringfence.lab.plan import models
from ringfence.lab.plan.buckets import MIB, buckets
from ringfence.lab.plan.cost import load as load_of
from ringfence.lab.plan.hardware import Hardware, load
from ringfence.lab.plan.steps import FLAT, Question, step
from ringfence.lab.plan.work import VARIANTS, busiest

GPUS: Final = 4
PUBLISHED: Final = {"default": 41.6, "enlarged": 3.03}
PLAIN_LINKS: Final = {"NVLink": 476e9, "PCIe": 12e9}  # nccl-tests issue 290; NCCL's topo.h for PCIe 3.0 x16
_SAMPLES: Final = (1, 4, 16)
_ELEMENT: Final = 4


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


def distance(predicted: float, buckets_are: str) -> str:
    """Return how far a prediction is from the published figure, such as "2.0 times above"."""
    times = predicted / PUBLISHED[buckets_are]
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
