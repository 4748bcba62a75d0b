"""The names of everything that can be measured. Needs no torch, because the command line imports it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

BASELINE: Final = ("gloo-a", "gloo-b")  # plaintext Gloo, twice: their difference is the instrument's resolution

VARIANTS: Final = {
    "gloo-a": "plaintext Gloo",
    "gloo-b": "plaintext Gloo once more, in a group of its own",
    "ringfence": "sealed, as a training script gets it",
    "ringfence-unsealed": "the same transport without sealing; exists only in this benchmark",
    "hop-by-hop": "a ring that seals each whole chunk for each hop: the published scheme",
    "tls": "a ring through TLS 1.3 (Python's ssl)",
    "plain-ring": "the ring of the two above, in the clear",
    "ringfence-profiled": "ringfence with a clock around each stage (--profile)",
    "ringfence-ring": "ringfence that sums everything in a ring",
    "ringfence-halving": "ringfence that halves and doubles",
    "ringfence-doubling": "ringfence that sums everything by recursive doubling",
}
TUNNELS: Final = {  # with two hosts
    "gloo-wireguard": "plaintext Gloo through wireguard-go, a tunnel in user space (--hosts 2)",
    "gloo-openvpn": "plaintext Gloo through OpenVPN with AES-256-GCM (--hosts 2)",
}
QUANTISED: Final = {  # of all-reduces
    "int8": "ringfence.hooks.int8.all_reduce: sealed, with int8 on the wire",
    "gloo-int8": "the same over plaintext Gloo",
}
HOST: Final = ("host-a", "host-b")  # the baseline of device tensors, twice for the same reason
DEVICE_VARIANTS: Final = {
    "host-a": "ringfence on host tensors, with the same copies to and from the device beside it",
    "host-b": "the same once more, in a group of its own",
    "ringfence": "sealed, on device tensors",
    "ringfence-unsealed": "the same transport without sealing; exists only in this benchmark",
    "ringfence-profiled": "ringfence with a clock around each stage (--profile)",
    "gloo": "plaintext Gloo on device tensors; CUDA only",
    "nccl": "plaintext NCCL on device tensors; CUDA only, and a device for each worker",
}
TEE_BASELINE: Final = ("plain", "plain-again")  # of simulated GPU TEEs, twice for the same reason
TEE_RING: Final = {  # variants of the ring between the devices of a machine, and what each switches on
    "plain": "copies from device to device in the clear, outside confidential mode",
    "plain-again": "the same once more",
    "confidential": "every copy encrypted through the host's memory, by its CPU, at both ends",
    "direct": "confidential, and devices encrypt for each other: the CPU does not encrypt again",
    "parallel-authentication": "confidential, and a device authenticates several pieces at once",
    "overlap": "confidential, and the stages of a copy run at the same time",
    "all": "confidential, with all three",
}
TEE_SEALED: Final = "ringfence"  # on the same devices in confidential mode
TEE_VARIANTS: Final = (*TEE_RING, TEE_SEALED)
CUDA_VARIANTS: Final = ("gloo", "nccl")
DEFAULT_ON_DEVICE: Final = (*HOST, "ringfence", "ringfence-unsealed")
SIMULATED: Final = "sim"  # the device of ringfence_lab.accelerator
DEVICES: Final = (SIMULATED, "cuda", "xpu")
PROFILED: Final = "ringfence-profiled"
STAGES: Final = ("seal", "open", "lock", "reduce", "send", "receive", "wait")  # profile.py says what each is
ALONE: Final = "alone"  # a step with no communication at all; the study measures it, `bench` does not
RINGS: Final = ("hop-by-hop", "tls", "plain-ring")
DEFAULT_VARIANTS: Final = ("gloo-a", "gloo-b", "ringfence", "ringfence-unsealed", "hop-by-hop", "tls")
DEFAULT_MEMORY: Final = ("gloo-b", "ringfence")
GROUPS: Final = ("gloo-a", "gloo-b", "ringfence", "ringfence-unsealed")  # process groups, which FSDP2 needs

_TIMES_MOVED: Final = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "broadcast": 1, "all_to_all": 1}
OPERATIONS: Final = tuple(_TIMES_MOVED)

MODELS: Final = ("resnet50", "bert-base", "gpt2", "gpt2-tiny")
STRATEGIES: Final = ("ddp", "fsdp2")
WIRES: Final = ("float32", "bfloat16")  # what gradients travel as


def study_baseline(kind: str) -> tuple[str, str]:
    """Return the two runs that the ratios of a cell of a study are taken to."""
    return TEE_BASELINE if kind == "gpu-tee" else BASELINE


def baseline(case: Mapping[str, Any]) -> tuple[str, str]:
    """Return the two runs that a case's ratios are taken to."""
    return HOST if case["kind"] == "collective" and case.get("device") else BASELINE


def necessary_bytes(operation: str, size: int, ranks: int) -> int:
    """Return the least bytes that all ranks together must send: the divisor of CPU time per byte."""
    return _TIMES_MOVED[operation] * (ranks - 1) * size
