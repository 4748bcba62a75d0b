"""The names of everything that can be measured. Needs no torch, because the command line imports it."""

from __future__ import annotations

from typing import Final

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
    "ringfence-tree": "ringfence that sums everything up and down a tree",
    "ringfence-doubling": "ringfence that sums everything by recursive doubling",
}
PROFILED: Final = "ringfence-profiled"
STAGES: Final = ("seal", "open", "lock", "reduce", "send", "receive", "wait")  # profile.py says what each is
ALONE: Final = "alone"  # a step with no communication at all; the study measures it, `bench` does not
RINGS: Final = ("hop-by-hop", "tls", "plain-ring")
DEFAULT_VARIANTS: Final = ("gloo-a", "gloo-b", "ringfence", "ringfence-unsealed", "hop-by-hop", "tls")
DEFAULT_TRAINING: Final = ("gloo-a", "gloo-b", "ringfence", "ringfence-unsealed")
DEFAULT_MEMORY: Final = ("gloo-b", "ringfence")
GROUPS: Final = ("gloo-a", "gloo-b", "ringfence", "ringfence-unsealed")  # process groups, which FSDP2 needs

_TIMES_MOVED: Final = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "broadcast": 1, "all_to_all": 1}
OPERATIONS: Final = tuple(_TIMES_MOVED)

MODELS: Final = ("resnet50", "bert-base", "gpt2", "gpt2-tiny")
STRATEGIES: Final = ("ddp", "fsdp2")
WIRES: Final = ("float32", "bfloat16")  # what gradients travel as


def necessary_bytes(operation: str, size: int, ranks: int) -> int:
    """Return the least bytes that all ranks together must send: the divisor of CPU time per byte."""
    return _TIMES_MOVED[operation] * (ranks - 1) * size
