"""DiLoCo over sealed groups, compared with the algorithm in one process; and what it refuses, on all workers alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import ringfence
from ringfence.diloco.standing import Standing
from tests.pool import Pool

EVERY = 3
ROUNDS = 3
WORDS, WIDTH = 12, 7  # an odd number of elements: two workers of a site get unequal parts
CLOSE = {
    False: 1e-6,
    True: 0.01,
}  # of weights: sums are in another order; int8 moves each by a part of 0.03, its change


class Model(nn.Module):
    """With tied parameters, a frozen one and buffers."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.frozen(self.norm(self.embedding(words))))


def batch(step: int, place: int) -> Tensor:
    return torch.randint(WORDS, (16,), generator=torch.Generator().manual_seed(1000 * step + place))


def inner_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.01)


def outer_of(model: nn.Module) -> torch.optim.Optimizer:
    trained = [each for each in model.parameters() if each.requires_grad]
    return torch.optim.SGD(trained, lr=0.7, momentum=0.9, nesterov=True)


def take(model: nn.Module, inner: torch.optim.Optimizer, words: Tensor) -> None:
    inner.zero_grad()
    nn.functional.cross_entropy(model(words), words).backward()
    inner.step()


def trained_weights(model: nn.Module) -> list[list[float]]:
    """Of shards those that this worker holds: torch looks up the whole in caches that outlive a group."""
    found = [each for each in model.parameters() if each.requires_grad]
    held = [each.to_local() if isinstance(each, DTensor) else each for each in found]
    return [each.detach().flatten().tolist() for each in held]


def assert_close(found: list[list[float]], expected: list[list[float]], int8: bool) -> None:
    farthest = 0.0
    for one, two in zip(found, expected, strict=True):
        farthest = max(farthest, *(abs(a - b) for a, b in zip(one, two, strict=True)))
    assert farthest <= CLOSE[int8]
    assert int8 == (farthest > CLOSE[False])


def in_one_process(kind: Callable[[], nn.Module], sites: int, workers: int = 1) -> list[list[float]]:
    """Train all sites here. The workers of a site train on their batches together."""
    models = [kind() for _ in range(sites)]
    inners = [inner_of(model) for model in models]
    agreed = kind()
    outer = outer_of(agreed)
    for round_ in range(ROUNDS):
        for site, (model, inner) in enumerate(zip(models, inners, strict=True)):
            for step in range(round_ * EVERY, (round_ + 1) * EVERY):
                inner.zero_grad()
                for worker in range(workers):
                    words = batch(step, site * workers + worker)
                    (nn.functional.cross_entropy(model(words), words) / workers).backward()
                inner.step()
        for place, parameter in enumerate(agreed.parameters()):
            if parameter.requires_grad:
                trained = [list(model.parameters())[place].detach() for model in models]
                parameter.grad = parameter.detach() - torch.stack(trained).mean(0)
        outer.step()
        with torch.no_grad():
            for model in models:
                for parameter, value in zip(model.parameters(), agreed.parameters(), strict=True):
                    parameter.copy_(value)
    return trained_weights(agreed)


def alone(int8: bool) -> list[list[float]]:
    """Every worker is a site."""
    model = Model()
    inner = inner_of(model)
    with ringfence.DiLoCo(model, inner, outer_of(model), EVERY, int8=int8) as averaged:
        for step in range(ROUNDS * EVERY):
            assert (averaged.outer_steps, averaged.steps) == divmod(step, EVERY)
            take(model, inner, batch(step, dist.get_rank()))
    found = trained_weights(model)
    for step in range(EVERY):  # no outer step any more
        take(model, inner, batch(step, dist.get_rank()))
    assert (averaged.outer_steps, averaged.steps) == (ROUNDS, 0)
    return found


@pytest.mark.parametrize("int8", [False, True], ids=["float32", "int8"])
@pytest.mark.parametrize("world", [2, 4])
def test_workers_end_with_the_weights_of_one_process(pool: Pool, world: int, int8: bool) -> None:
    results = pool.check(alone, world, args=(int8,))
    assert results == [results[0]] * world
    assert_close(results[0], in_one_process(Model, world), int8)


def mesh_of_sites() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("site", "worker"))


def groups(mesh: DeviceMesh) -> dict[str, Any]:
    return {"group": mesh.get_group("site"), "site": mesh.get_group("worker")}


class NoBuffers(nn.Module):
    """Of which FSDP shards every parameter."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.embedding(words))


def replicas(mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(NoBuffers(), process_group=mesh.get_group("worker"))


def shards(mesh: DeviceMesh) -> nn.Module:
    return fully_shard(NoBuffers(), mesh=mesh["worker"])


def trained_in_sites(kind: Callable[[DeviceMesh], nn.Module], int8: bool) -> tuple[list[list[float]], int]:
    """The weights, and how many bytes of outer steps this worker has sent to its counterpart."""
    mesh = mesh_of_sites()
    model = kind(mesh)
    inner = inner_of(model)
    with ringfence.DiLoCo(model, inner, outer_of(model), EVERY, int8=int8, **groups(mesh)):
        before = sent_to_the_other_site()
        for step in range(ROUNDS * EVERY):
            take(model, inner, batch(step, dist.get_rank()))
        sent = sent_to_the_other_site() - before
    return trained_weights(model), sent


def sent_to_the_other_site() -> int:
    site = dist.get_rank() // 2
    return sum(peer.payload_sent for peer in ringfence.counters().peers if peer.worker // 2 != site)


@pytest.mark.parametrize("int8", [False, True], ids=["float32", "int8"])
@pytest.mark.parametrize("kind", [replicas, shards], ids=lambda kind: kind.__name__)
def test_sites_of_two_workers_train_as_two_workers_with_their_batches(
    pool: Pool, kind: Callable[[DeviceMesh], nn.Module], int8: bool
) -> None:
    """And the workers of a site together send each element to the other site once in an outer step."""
    found, sent = zip(*pool.check(trained_in_sites, 4, args=(kind, int8)), strict=True)
    assert found[:2] == found[2:]
    whole = found[0] if kind is replicas else [first + second for first, second in zip(*found[:2], strict=True)]
    assert_close(whole, in_one_process(NoBuffers, 2, 2), int8)
    elements = sum(len(each) for each in whole)  # so few that int8 sends more in headers
    standings = 2 * 2 * len(Standing._fields) * 8  # of both workers, before and after the average
    for of_site in (sent[:2], sent[2:]):
        average = sum(of_site) / ROUNDS - standings
        assert int8 or 4 * elements <= average <= 4 * (elements + 4)


# -- what is refused -------------------------------------------------------------------------------------------------


def other_seed() -> None:
    begin(Model(seed=dist.get_rank()))


def other_frozen_parameters() -> None:
    model = Model()
    model.frozen.bias.data.fill_(dist.get_rank())
    begin(model)


def other_length_of_a_round() -> None:
    begin(Model(), EVERY + dist.get_rank())


def other_outer_step() -> None:
    model = Model()
    with begin(model) as averaged:
        if dist.get_rank() == 1:
            averaged.outer_steps += 1
        train_a_round(model, averaged)


def other_inner_step() -> None:
    model = Model()
    with begin(model) as averaged:
        if dist.get_rank() == 1:
            averaged.every -= 1
        train_a_round(model, averaged)


def other_agreed_parameters() -> None:
    model = Model()
    with begin(model) as averaged:
        train_a_round(model, averaged)
        state = averaged.state_dict()
        if dist.get_rank() == 1:
            state["agreed"]["norm.bias"][0] += 1e-7
        averaged.load_state_dict(state)
        train_a_round(model, averaged)


def groups_in_each_others_place() -> None:
    mesh = mesh_of_sites()
    model = replicas(mesh)
    inner = inner_of(model)
    with ringfence.DiLoCo(
        model, inner, outer_of(model), EVERY, group=mesh.get_group("worker"), site=mesh.get_group("site")
    ) as averaged:
        train_a_round(model, averaged)


def begin(model: nn.Module, every: int = EVERY, int8: bool = False) -> Any:
    return ringfence.DiLoCo(model, inner_of(model), outer_of(model), every, int8=int8)


def train_a_round(model: nn.Module, averaged: Any) -> None:
    for step in range(averaged.every - averaged.steps):
        take(model, averaged.inner, batch(step, dist.get_rank()))


REFUSED: dict[Callable[[], None], tuple[int, str]] = {
    other_seed: (2, "the agreed parameters or the outer optimizers differ"),
    other_frozen_parameters: (2, "the agreed parameters or the outer optimizers differ"),
    other_length_of_a_round: (2, "different numbers of inner steps in a round: 3 on worker 0, 4 on worker 1"),
    other_outer_step: (2, "different numbers of outer steps: 0 on worker 0, 1 on worker 1"),
    other_inner_step: (2, "different numbers of inner steps in this round: 3 on worker 0, 2 on worker 1"),
    other_agreed_parameters: (2, "the agreed parameters or the outer optimizers differ"),
    groups_in_each_others_place: (4, "is `site` the group of one site"),
}


@pytest.mark.parametrize("wrong", REFUSED, ids=lambda wrong: wrong.__name__)
def test_workers_that_do_not_agree_are_refused_on_all(pool: Pool, wrong: Callable[[], None]) -> None:
    world, message = REFUSED[wrong]
    results = pool.run(wrong, world)
    assert [result.type for result in results] == ["MismatchError"] * world
    assert all(message in result.message for result in results)


def with_a_wrong_value(value: float, pair: bool) -> tuple[str, bool]:
    """What the outer step raises, and whether agreed parameters and momentum are those before it."""
    model = Model()
    with begin(model) as averaged:
        train_a_round(model, averaged)
        before = copied(averaged.state_dict())
        with torch.no_grad():
            if pair or dist.get_rank() == 1:
                model.norm.bias[3] = value
        averaged.steps = EVERY - 1
        averaged.inner.zero_grad()
        try:
            averaged.inner.step()
        except FloatingPointError as error:
            return str(error), same(before, averaged.state_dict())
    return "", False


def copied(state: Any) -> Any:
    return torch.utils._pytree.tree_map_only(Tensor, Tensor.clone, state)


def same(one: Any, two: Any) -> bool:
    flat, shape = torch.utils._pytree.tree_flatten(one)
    other, other_shape = torch.utils._pytree.tree_flatten(two)
    equal = [a.equal(b) if isinstance(a, Tensor) else a == b for a, b in zip(flat, other, strict=True)]
    return shape == other_shape and all(equal)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_of_one_worker_changes_no_parameter_of_any(pool: Pool, value: float) -> None:
    for message, unchanged in pool.check(with_a_wrong_value, 2, args=(value, False)):
        assert "the pseudo-gradient has NaN or Inf on worker [1]" in message
        assert unchanged


def test_sum_that_overflows_changes_no_parameter(pool: Pool) -> None:
    for message, unchanged in pool.check(with_a_wrong_value, 2, args=(3e38, True)):
        assert "the average has NaN or Inf on worker [0, 1]" in message
        assert unchanged


class Fails(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise MemoryError


def with_an_outer_optimizer_that_fails() -> bool:
    model = Model()
    inner, outer = inner_of(model), Fails([each for each in model.parameters() if each.requires_grad])
    words = batch(0, dist.get_rank())
    with ringfence.DiLoCo(model, inner, outer, 1):
        nn.functional.cross_entropy(model(words), words).backward()
        before = [each.grad for each in model.parameters()]
        with pytest.raises(MemoryError):
            inner.step()
    return all(each.grad is found for each, found in zip(model.parameters(), before, strict=True))


def test_gradients_stay_if_the_outer_optimizer_fails(pool: Pool) -> None:
    assert pool.check(with_an_outer_optimizer_that_fails, 2) == [True] * 2


def with_other_parameters() -> list[str]:
    model = Model()
    inner, said = inner_of(model), []
    for outer, every in (
        (torch.optim.SGD(model.frozen.parameters(), 0.7), EVERY),
        (torch.optim.SGD([model.norm.bias], 0.7), EVERY),
        (outer_of(model), 0),
    ):
        try:
            ringfence.DiLoCo(model, inner, outer, every)
        except ValueError as error:
            said.append(str(error))
    return said


def test_arguments_are_checked(pool: Pool) -> None:
    for said in pool.check(with_other_parameters, 2):
        assert said == [
            "the outer optimizer must have exactly the parameters of the model that require a gradient",
            "the outer optimizer must have exactly the parameters of the model that require a gradient",
            "every= is a number of inner steps, at least 1, and not 0",
        ]


def test_a_group_of_gloo_is_refused(pool: Pool) -> None:
    results = pool.run(alone, 2, "gloo", (False,))
    assert [result.type for result in results] == ["ConfigurationError"] * 2
