"""Steps with FSDP: units as torch forms them, and a timeline that neither loses nor hides too much."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.testing._internal.distributed.fake_pg import FakeStore

from ringfence_lab.plan import fsdp, hardware, models
from ringfence_lab.plan.recommend import plan
from ringfence_lab.plan.steps import Question, step
from ringfence_lab.plan.work import VARIANTS, Cost

GPT2 = models.load("gpt2")
LLAMA = models.load("llama-7b")
names = st.sampled_from(hardware.names())


def cost(seconds: float) -> Cost:
    return Cost(seconds, {"wire": seconds}, "network")


def test_units_hold_every_parameter_once() -> None:
    for name in models.names():
        model = models.load(name)
        for together in (1, 2, 5):
            assert sum(unit.elements for unit in fsdp.units(model, together)) == model.elements
    assert [unit.elements for unit in fsdp.units(models.of_tensors([3, 5, 7], "list"))] == [15]


@pytest.mark.parametrize(("name", "layers"), [("gpt2", 12), ("gpt2-xl", 48), ("bert-large", 24), ("llama-7b", 32)])
def test_units_are_the_layers_of_the_model(name: str, layers: int) -> None:
    root, *others = fsdp.units(models.load(name))
    assert root.is_root
    assert len(others) == layers
    assert len({unit.elements for unit in others}) == 1
    assert len(fsdp.units(models.load(name), 4)) == 1 + layers // 4


def test_units_and_collectives_are_those_of_torch() -> None:
    """A real model, sharded layer by layer among two workers, one of them fake: what torch gathers and scatters in a step."""
    config = transformers.GPT2Config(n_layer=3, n_embd=32, n_head=2, vocab_size=50, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    described = models.of_tensors([parameter.numel() for parameter in model.parameters()], "a small GPT-2")
    seen: list[tuple[str, int]] = []

    class Gather(DefaultAllGather):
        def __call__(self, output_tensor: torch.Tensor, *others: Any, **more: Any) -> Any:
            seen.append(("all_gather", output_tensor.numel()))
            return super().__call__(output_tensor, *others, **more)

    class Scatter(DefaultReduceScatter):
        def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *others: Any, **more: Any) -> Any:
            seen.append(("reduce_scatter", input_tensor.numel()))
            return super().__call__(output_tensor, input_tensor, *others, **more)

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        for layer in model.transformer.h:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for unit in (model, *model.transformer.h):
            unit.set_custom_all_gather(Gather())
            unit.set_custom_reduce_scatter(Scatter())
        model(input_ids=torch.zeros(1, 4, dtype=torch.long)).logits.sum().backward()
    finally:
        dist.destroy_process_group()
    root, *layers = fsdp.units(described)
    gathers, scatters = ([cost(first + number) for number in range(4)] for first in (1, 101))
    made = fsdp.timeline((root, *layers), gathers, scatters, 1.0, True)
    sizes = [unit.elements for unit in (root, *layers)]
    ours = [
        ("all_gather", sizes[gathers.index(each)])
        if each in gathers
        else ("reduce_scatter", sizes[scatters.index(each)])
        for each in made.collectives
    ]
    assert ours == seen


# -- the timeline -----------------------------------------------------------------------------------------------------


def test_without_communication_a_step_is_its_computing() -> None:
    found = fsdp.units(GPT2)
    free = [cost(0.0)] * len(found)
    assert fsdp.timeline(found, free, free, 3.0, True).finished == pytest.approx(3.0)


def test_each_unit_is_gathered_twice_and_scattered_once() -> None:
    found = fsdp.units(GPT2)
    gathers, scatters = [cost(1.0)] * 13, [cost(2.0)] * 13
    twice = fsdp.timeline(found, gathers, scatters, 1.0, True)
    assert len(twice.collectives) == 13 + 12 + 13  # the root is gathered once
    assert len(fsdp.timeline(found, gathers, scatters, 1.0, False).collectives) == 13 + 13


def test_computing_hides_all_but_the_ends_of_both_passes() -> None:
    found = fsdp.units(LLAMA)
    gathers, scatters = [cost(0.001)] * len(found), [cost(0.002)] * len(found)
    # Not hidden: the root's gather, that of the last layer after the forward pass, and the root's scatter.
    assert fsdp.timeline(found, gathers, scatters, 100.0, True).finished == pytest.approx(100.004)


@given(
    seconds=st.lists(st.floats(0, 10), min_size=13, max_size=13),
    compute=st.floats(0.001, 100),
    reshard=st.booleans(),
)
def test_a_step_is_at_least_its_parts_and_at_most_their_sum(
    seconds: list[float], compute: float, reshard: bool
) -> None:
    costs = [cost(each) for each in seconds]
    made = fsdp.timeline(fsdp.units(GPT2), costs, costs, compute, reshard)
    total = sum(each.seconds for each in made.collectives)
    assert made.finished >= max(compute, total) * 0.999999
    assert made.finished <= (compute + total) * 1.000001


@settings(max_examples=30, deadline=None)
@given(name=names, workers=st.sampled_from([2, 8, 64, 1024]), blocks=st.sampled_from([1, 4]))
def test_a_sharded_step_adds_up_and_sealing_costs_something(name: str, workers: int, blocks: int) -> None:
    profile = hardware.load(name)
    question = Question(GPT2, workers, strategy="fsdp", blocks=blocks)
    found = {
        variant: step(profile, VARIANTS[variant], question) for variant in ("plaintext", "ringfence", "hop-by-hop")
    }
    for each in found.values():
        assert each.compute * 0.999999 <= each.seconds <= (each.compute + each.communication.seconds) * 1.000001
        assert math.isclose(sum(each.terms.values()), each.seconds, rel_tol=1e-9)
    assert found["plaintext"].seconds <= found["ringfence"].seconds * 1.000001


def test_one_worker_communicates_nothing() -> None:
    found = step(
        hardware.load("tdx-100g"), VARIANTS["ringfence"], Question(GPT2, 1, strategy="fsdp", compute_seconds=2.0)
    )
    assert found.seconds == pytest.approx(2.0)


def test_sharding_moves_half_as_much_again_as_ddp() -> None:
    """Two gathers and a scatter of (n-1)/n each, where an all-reduce has two such halves."""
    profile = hardware.load("tdx-10g")  # bound by the network
    ddp, sharded = (
        step(profile, VARIANTS["plaintext"], Question(LLAMA, 64, strategy=strategy)) for strategy in ("ddp", "fsdp")
    )
    assert sharded.communication.seconds == pytest.approx(1.5 * ddp.communication.seconds, rel=0.1)


def test_fsdp_has_levers_of_its_own() -> None:
    found = plan(hardware.load("tdx-100g"), Question(LLAMA, 64, strategy="fsdp"))
    assert found.advice and {each.lever for each in found.advice} <= {"unit", "reshard_after_forward", "channels"}
    assert found.tuned["ringfence"].seconds < found.variants["ringfence"].seconds
