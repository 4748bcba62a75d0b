"""Models, DDP's buckets and traces: what the planner costs and the study replays."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from ringfence.errors import ConfigurationError
from ringfence_lab.plan import models
from ringfence_lab.plan.buckets import MIB, buckets
from ringfence_lab.plan.traces import FORWARD, MOST_BYTES, trace

SIZES = {
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "llama-7b": 6_738_415_616,
    "llama-1b": 1_235_814_400,
    "llama-70b": 68_976_648_192,
}


def test_models_have_their_known_number_of_parameters() -> None:
    assert {name: models.load(name).elements for name in SIZES} == SIZES
    assert set(models.names()) > set(SIZES)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_list_is_that_of_meta_tensors() -> None:
    import transformers  # late: it takes seconds

    kept = models.load("gpt2-xl")
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=1600, n_layer=48, n_head=25))
        tokens = torch.zeros((1, 1024), dtype=torch.long)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(tokens)
    assert [parameter.numel() for parameter in model.parameters()] == list(kept.parameters)
    assert (counter.get_total_flops(), "a sequence of 1024 tokens") == (kept.forward_flops, kept.sample)


def test_an_unknown_model_is_refused_with_a_hint() -> None:
    for name in ("gpt5", "../hardware/here", ""):
        with pytest.raises(ConfigurationError, match="ringfence plan models"):
            models.load(name)


@given(st.lists(st.integers(1, 5), max_size=60))
def test_rolled_lists_unroll_to_the_same(parameters: list[int]) -> None:
    assert models._unrolled(models.rolled(parameters)) == parameters


def _torchs(parameters: list[int], cap_mib: float | None, dtype: torch.dtype) -> list[int]:
    """What torch's reducer does when it has seen gradients come in reverse order."""
    with torch.device("meta"):
        tensors = [torch.empty(elements, dtype=dtype) for elements in reversed(parameters)]
    cap = int((25 if cap_mib is None else cap_mib) * MIB)
    limits = [dist._DEFAULT_FIRST_BUCKET_BYTES if cap_mib is None else cap, cap]
    indices, _ = dist._compute_bucket_assignment_by_size(
        tensors, limits, [False] * len(tensors), list(range(len(tensors)))
    )
    return [sum(tensors[i].numel() * tensors[i].element_size() for i in bucket) for bucket in indices]


@pytest.mark.parametrize("cap", [None, 1, 25, 100.5])
@pytest.mark.parametrize("name", models.names())
def test_buckets_are_those_of_torch(name: str, cap: float | None) -> None:
    parameters = models.load(name).parameters
    assert list(buckets(parameters, cap, 4)) == _torchs(list(parameters), cap, torch.float32)
    assert list(buckets(parameters, cap, 2)) == _torchs(list(parameters), cap, torch.bfloat16)


def test_buckets_are_those_that_ddp_hands_to_its_hook() -> None:
    """A real module in a group of one: what arrives at the hook from the second step on."""
    sizes = [300_000, 100, 900_000, 7, 2_000_000]
    module = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in sizes])

    class Used(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for parameter in self.inner:
                x = x + parameter.sum()
            return x

    seen: list[int] = []

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        seen.append(bucket.buffer().numel() * 4)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        parallel = DistributedDataParallel(Used(), process_group=dist.group.WORLD)
        parallel.register_comm_hook(None, lambda state, bucket: hook(state, bucket))
        for _ in range(2):
            seen.clear()
            parallel(torch.zeros(())).backward()
    finally:
        dist.destroy_process_group()
    assert tuple(seen) == buckets(sizes, None, 4)


@given(
    parameters=st.lists(st.integers(1, 10**7), min_size=1, max_size=80),
    cap=st.none() | st.floats(0.1, 200),
    each=st.sampled_from([2, 4]),
)
def test_buckets_hold_every_parameter_once(parameters: list[int], cap: float | None, each: int) -> None:
    assert sum(buckets(parameters, cap, each)) == sum(parameters) * each


@given(
    name=st.sampled_from(models.names()),
    cap=st.sampled_from([None, 5, 25, 100, 1000]),
    seconds=st.floats(1e-3, 100),
    busy=st.booleans(),
)
def test_a_trace_times_its_scale_is_the_step(name: str, cap: float | None, seconds: float, busy: bool) -> None:
    model = models.load(name)
    made = trace(model, cap, 4, seconds, busy)
    assert made.busy is busy
    assert made.bytes <= MOST_BYTES
    assert made.scale >= 1 and (made.scale == 1) == (model.elements * 4 <= MOST_BYTES)
    assert math.isclose(made.bytes * made.scale, model.elements * 4, rel_tol=1e-9)
    assert math.isclose(made.compute_seconds * made.scale, seconds, rel_tol=1e-9)
    assert made.steps[0][1] >= seconds * FORWARD / made.scale
