"""DiLoCo with an outer optimizer that fails, that counts its steps in numbers, or whose saved state does not fit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ringfence.diloco.averager import DiLoCo
from ringfence.errors import MismatchError
from tests.integration.test_diloco import EVERY, train
from tests.pool import Pool


class Momentum(torch.optim.Optimizer):
    """Corrects its momentum by a number of steps, as torch.optim.SparseAdam does. Fails at a parameter if it is told to."""

    def __init__(self, parameters: Any, fails_at: int = -1) -> None:
        super().__init__(parameters, {})
        self.fails_at = fails_at

    @torch.no_grad()  # type: ignore[untyped-decorator]  # torch is untyped here
    def step(self, closure: Any = None) -> None:
        for place, parameter in enumerate(self.param_groups[0]["params"]):
            if place == self.fails_at:
                raise RuntimeError("as asked")
            state = self.state[parameter]
            state["step"] = state.get("step", 0) + 1
            momentum = state.setdefault("momentum", torch.zeros_like(parameter))
            momentum.lerp_(parameter.grad, 0.1)
            parameter.add_(momentum, alpha=-0.5 / (1 - 0.9 ** state["step"]))


class Lists(Momentum):
    def step(self, closure: Any = None) -> None:
        super().step()
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["history"] = [torch.zeros(1)]


class Global(Momentum):
    def step(self, closure: Any = None) -> None:
        super().step()
        self.state["all"] = {"loss": 1.0}


def begin(kind: Callable[..., torch.optim.Optimizer] = Momentum) -> DiLoCo:
    torch.manual_seed(0)
    model = nn.Linear(9, 5)
    return DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.01), kind(model.parameters()), EVERY)


def state_of(averaged: DiLoCo) -> list[Any]:
    """Agreed parameters and all that the outer optimizer keeps."""
    leaves = torch.utils._pytree.tree_leaves([averaged._agreed, averaged.outer.state_dict()["state"]])
    return [each.flatten().tolist() if isinstance(each, torch.Tensor) else each for each in leaves]


def lost_and_back() -> tuple[list[Any], list[Any]]:
    """Site 1 is started again after two rounds. Return the state then, and after another round."""
    averaged = begin()
    train(averaged, 2 * EVERY)
    if dist.get_rank() == 1:
        averaged.close()
        averaged = begin()
    else:
        averaged.catch_up()
    returned = state_of(averaged)
    train(averaged, EVERY)
    return returned, state_of(averaged)


def test_a_site_that_returns_takes_numbers_of_the_outer_optimizer_too(pool: Pool) -> None:
    one, two = pool.check(lost_and_back, 2)
    assert one == two
    assert 2 in one[0]  # steps


def with_another_number_of_steps() -> None:
    averaged = begin()
    train(averaged, EVERY)
    if dist.get_rank() == 1:
        state = copy.deepcopy(averaged.state_dict())
        state["outer"]["state"][0]["step"] += 1
        averaged.load_state_dict(state)
    else:
        averaged.load_state_dict(averaged.state_dict())
    train(averaged, EVERY)


def test_outer_optimizers_that_differ_in_a_number_are_refused(pool: Pool) -> None:
    results = pool.run(with_another_number_of_steps, 2)
    assert [each.type for each in results] == ["MismatchError"] * 2
    assert all("or the outer optimizers differ" in each.message for each in results)


@pytest.mark.parametrize(
    ("kind", "says"), [(Lists, "keeps 'history' of type list"), (Global, "keeps state that belongs to no parameter")]
)
def test_state_that_could_differ_unnoticed_is_refused(pool: Pool, kind: type[Momentum], says: str) -> None:
    results = pool.run(two_rounds, 2, args=(kind,))
    assert [each.type for each in results] == ["TypeError"] * 2
    assert all(says in each.message for each in results)


def two_rounds(kind: type[Momentum]) -> None:
    train(begin(kind), 2 * EVERY)


def fails_in_the_second_round(ranks: list[int]) -> tuple[str, bool, list[Any]]:
    """The outer optimizer fails at its second parameter. What `catch_up` says, if it refuses, and the state afterwards."""
    averaged = begin()
    train(averaged, 2 * EVERY - 1)
    assert isinstance(averaged.outer, Momentum)
    averaged.outer.fails_at = 1 if dist.get_rank() in ranks else -1
    if dist.get_rank() in ranks:
        with pytest.raises(RuntimeError, match="as asked"):
            train(averaged, 1)
        with pytest.raises(RuntimeError, match="the outer optimizer has failed"):
            averaged.state_dict()
    else:
        train(averaged, 1)
    averaged.outer.fails_at = -1
    try:
        averaged.catch_up()
    except MismatchError as error:
        return str(error), True, []
    train(averaged, EVERY)
    return "", False, state_of(averaged)


def test_a_site_whose_outer_optimizer_failed_takes_the_state_of_another(pool: Pool) -> None:
    one, two = pool.check(fails_in_the_second_round, 2, args=([1],))
    assert one == two
    assert one[2][-1] != [] and 3 in one[2]  # steps


def test_after_a_failure_of_all_outer_optimizers_nothing_is_averaged(pool: Pool) -> None:
    for said, _, _ in pool.check(fails_in_the_second_round, 2, args=([0, 1],)):
        assert said == "DiLoCo: the outer optimizer has failed in every site: load a checkpoint"


SAYS = {
    "optimizer": "parameter group",
    "shape": "names, shapes or dtypes differ",
    "dtype": "names, shapes or dtypes differ",
    "residuals": "residuals of another number of workers",
}


def changed(averaged: DiLoCo, how: str) -> dict[str, Any]:
    state = copy.deepcopy(averaged.state_dict())
    state["agreed"]["weight"] += 100.0
    if how == "optimizer":
        state["outer"]["param_groups"][0]["params"] = [0, 1, 2]
    elif how == "shape":
        state["agreed"]["weight"] = state["agreed"]["weight"][:, :1]
    elif how == "dtype":
        state["agreed"]["weight"] = state["agreed"]["weight"].double()
    else:
        state["residuals"] = {f"{dist.get_rank()}.replicas": torch.ones(3)}
    return state


def refused(how: str) -> bool:
    """Whether a worker that cannot load a state goes on as if it had not tried."""
    averaged = begin()
    train(averaged, EVERY + 1)
    before = state_of(averaged)
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match=SAYS[how]):
            averaged.load_state_dict(changed(averaged, how))
    same = state_of(averaged) == before and averaged.steps == 1
    train(averaged, EVERY - 1)
    return same and averaged.outer_steps == 2


@pytest.mark.parametrize("how", SAYS)
def test_a_state_that_does_not_fit_changes_nothing(pool: Pool, how: str) -> None:
    assert pool.check(refused, 2, args=(how,)) == [True] * 2
