"""DiLoCo when a worker is lost within an outer step: nothing is averaged twice or by halves, and all go on with equal bits."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ringfence
from ringfence.diloco import outer_state
from ringfence.diloco.averager import DiLoCo
from tests.limits import no_early_blame
from tests.pool import Pool, values

EVERY = 4

_kept: list[DiLoCo] = []  # what a worker that is left holds, from one call of the pool to the next


class Interrupted(RuntimeError):
    """Stands for the error of a session that ends within a collective."""


def begin(int8: bool = False, **groups: Any) -> DiLoCo:
    torch.manual_seed(0)
    model = nn.Linear(9, 5)
    inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    return DiLoCo(model, inner, outer, EVERY, int8=int8, **groups)


def train(averaged: DiLoCo, steps: int, seed: int | None = None) -> None:
    """Take inner steps on gradients that depend on the worker, or on a seed, and on the step."""
    for _ in range(steps):
        place = dist.get_rank() if seed is None else seed
        draw = torch.Generator().manual_seed(10_000 * averaged.outer_steps + 100 * averaged.steps + place)
        for parameter in averaged.outer.param_groups[0]["params"]:
            parameter.grad = torch.randn(parameter.shape, generator=draw)
        averaged.inner.step()


def state_of(averaged: DiLoCo) -> list[list[float]]:
    """Agreed parameters and momentum."""
    state = averaged.state_dict()
    leaves = torch.utils._pytree.tree_leaves([state["agreed"], state["outer"]])
    return [each.flatten().tolist() for each in leaves if isinstance(each, torch.Tensor)]


def tensors_of(outer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [tensor for _, tensor in outer_state.tensors(outer_state.of(outer))]


def parameters_of(averaged: DiLoCo) -> list[list[float]]:
    return [each.detach().flatten().tolist() for each in averaged.outer.param_groups[0]["params"]]


def lost_of(averaged: DiLoCo) -> list[float]:
    """What int8 has lost on this worker."""
    return averaged.state_dict()["residuals"][f"{dist.get_rank()}.replicas"].tolist()  # type: ignore[no-any-return]


def undisturbed(rounds: int) -> tuple[list[list[float]], list[float], int, int]:
    averaged = begin(int8=True)
    train(averaged, rounds * EVERY)
    return state_of(averaged), lost_of(averaged), 1, 0


# -- a worker is killed ----------------------------------------------------------------------------------------------


@no_early_blame
def lose_the_last_worker() -> tuple[str, bool]:
    """The last worker dies when all have begun to average. Return the error, and whether nothing has changed."""
    averaged = begin()
    _kept[:] = [averaged]
    train(averaged, 2 * EVERY - 1)
    before, reduce = state_of(averaged), averaged._reduce

    def die(*arguments: Any) -> None:
        if dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        reduce(*arguments)

    averaged._reduce = die  # type: ignore[method-assign, assignment]
    try:
        train(averaged, 1)
    except (ringfence.PeerLostError, ringfence.AbortedError) as error:
        averaged._reduce = reduce  # type: ignore[method-assign]
        unchanged = state_of(averaged) == before and (averaged.outer_steps, averaged.steps) == (1, EVERY)
        return str(error), unchanged and parameters_of(averaged) != before[:2]
    return "", False


def go_on() -> tuple[list[list[float]], int, int]:
    """Go on with those that are left, or begin; then train another round."""
    averaged = begin() if not _kept else _kept[0]
    if _kept:
        averaged.catch_up()
    else:
        assert parameters_of(averaged) == state_of(averaged)[:2]
    _kept[:] = [averaged]
    outer_steps = averaged.outer_steps
    train(averaged, EVERY - averaged.steps)
    return state_of(averaged), outer_steps, averaged.outer_steps


def with_the_average_of_two(third: bool) -> list[list[float]]:
    """Three workers for a round, two of them for one more, and all three for the last, or two."""
    outer_state = begin()
    model, outer = outer_state.outer.param_groups[0]["params"], outer_state.outer
    outer_state.close()
    momenta: list[list[torch.Tensor]] = [[torch.zeros_like(each) for each in model] for _ in range(3)]
    for round_, members in enumerate([3, 2, 3 if third else 2]):
        agreed, changes = [each.detach().clone() for each in model], []
        for place in range(members):
            if place == 2 and round_ == 2:  # a new worker: its inner optimizer is empty
                momenta[2] = [torch.zeros_like(each) for each in model]
            current = [each.clone() for each in agreed]
            for step in range(EVERY):
                draw = torch.Generator().manual_seed(10_000 * round_ + 100 * step + place)
                for value, momentum in zip(current, momenta[place], strict=True):
                    momentum.mul_(0.9).add_(torch.randn(value.shape, generator=draw))
                    value.sub_(momentum, alpha=0.01)
            changes.append(current)
        for parameter, *found in zip(model, agreed, *changes, strict=True):
            parameter.grad = found[0] - torch.stack(found[1:]).mean(0)
        outer.step()
    return [each.detach().flatten().tolist() for each in model]


@pytest.mark.parametrize("back", [True, False])
def test_a_loss_within_an_outer_step_drops_it_and_the_others_take_it(pool: Pool, back: bool) -> None:
    """The worker that is back takes their parameters and momentum, and counts from the next round on."""
    with pool.fresh() as workers:
        *left, killed = workers.run(lose_the_last_worker, 3)
        assert killed.message == "killed by SIGKILL"
        for message, unchanged in values(left):
            assert "worker 2" in message
            assert unchanged
        world = 3 if back else 2
        results = workers.check(go_on, world, renew=True)
        assert results == [results[0]] * world
        assert results[0][1:] == (2, 3)
        (expected,) = workers.check(with_the_average_of_two, 1, args=(back,), renew=True)
    for found, wanted in zip(results[0][0][:2], expected, strict=True):
        assert found == pytest.approx(wanted, abs=1e-6)


# -- the outer step is interrupted on some workers -------------------------------------------------------------------


def interrupted_after(exchanges: int, ranks: list[int]) -> tuple[int, int]:
    """End the outer step of some workers after so many exchanges of it."""
    averaged = begin(int8=True)
    _kept[:] = [averaged]
    train(averaged, EVERY - 1)
    exchange, left = averaged._exchange, [exchanges]

    def interrupted(*arguments: Any) -> Any:
        found = exchange(*arguments)
        left[0] -= 1
        if not left[0] and dist.get_rank() in ranks:
            raise Interrupted
        return found

    averaged._exchange = interrupted  # type: ignore[method-assign, assignment]
    with contextlib.suppress(Interrupted):
        train(averaged, 1)
    averaged._exchange = exchange  # type: ignore[method-assign]
    return averaged.outer_steps, averaged.steps


def caught_up() -> tuple[list[list[float]], list[float], int, int]:
    averaged = _kept[0]
    averaged.catch_up()
    found = averaged.outer_steps, averaged.steps
    train(averaged, EVERY)
    return state_of(averaged), lost_of(averaged), *found


@pytest.mark.parametrize("ranks", [[1], [0], [0, 1]], ids=str)
def test_an_average_that_all_had_is_used_once(pool: Pool, ranks: list[int]) -> None:
    """Whether some workers have taken the step, or none: all then have the state of a training that was not disturbed."""
    results = pool.check(interrupted_after, 2, args=(2, ranks), renew=True)
    assert results == [(0, EVERY) if rank in ranks else (1, 0) for rank in range(2)]
    expected = pool.check(undisturbed, 2, args=(2,), renew=True)
    assert any(expected[0][1])
    assert pool.check(caught_up, 2, renew=True) == expected


def go_on_alone() -> int:
    averaged = _kept[0]
    if dist.get_rank() == 0:
        averaged.catch_up(dist.new_group([0], use_local_synchronization=True))
    return averaged.outer_steps


def catches_up() -> tuple[int, list[int]]:
    """Return the number of outer steps then, and those that this worker takes meanwhile."""
    averaged, taken = _kept[0], list[int]()
    step = averaged._step_outer

    def noted() -> None:
        step()
        taken.append(averaged.outer_steps)

    averaged._step_outer = noted  # type: ignore[method-assign]
    averaged.catch_up()
    averaged._step_outer = step  # type: ignore[method-assign]
    return averaged.outer_steps, taken


def test_an_average_that_the_others_dropped_is_not_used(pool: Pool) -> None:
    """Worker 0 retries alone: another average. Worker 1, which was silent meanwhile, takes its state."""
    assert pool.check(interrupted_after, 2, args=(2, [0, 1]), renew=True) == [(0, EVERY)] * 2
    assert pool.check(go_on_alone, 2, renew=True) == [1, 0]
    assert pool.check(catches_up, 2, renew=True) == [(1, []), (1, [])]
    results = pool.check(caught_up, 2, renew=True)
    assert [result[0] for result in results] == [results[0][0]] * 2
    assert [result[2:] for result in results] == [(1, 0)] * 2


def test_sites_that_took_different_outer_steps_go_on_with_one(pool: Pool) -> None:
    """Worker 1 takes the step and is cut off; worker 0 has dropped that average, and takes another step of this number."""
    assert pool.check(interrupted_after, 2, args=(2, [0]), renew=True) == [(0, EVERY), (1, 0)]
    assert pool.check(go_on_alone, 2, renew=True) == [1, 1]
    results = pool.check(caught_up, 2, renew=True)
    assert [result[0] for result in results] == [results[0][0]] * 2
    assert [result[2:] for result in results] == [(1, 0)] * 2


# -- what a site takes over ends early -------------------------------------------------------------------------------


def cut_off_while_it_catches_up(tensors: int) -> tuple[bool, bool, int]:
    """Worker 0 is three rounds ahead, and the state that it sends breaks off. Return whether all is as it was before."""
    alone = {"group": dist.new_group([dist.get_rank()], use_local_synchronization=True)}
    averaged, broadcast, left = begin(int8=True, **alone), dist.broadcast, [tensors]
    _kept[:] = [averaged]
    train(averaged, 1 if dist.get_rank() else 3 * EVERY)
    before, parameters, new = state_of(averaged)[:2], parameters_of(averaged), not averaged.outer.state

    def breaks_off(*arguments: Any) -> None:
        if not left[0]:
            raise Interrupted
        left[0] -= 1
        broadcast(*arguments)

    dist.broadcast = breaks_off
    try:
        with contextlib.suppress(Interrupted):
            averaged.catch_up()
    finally:
        dist.broadcast = broadcast
    unchanged = state_of(averaged)[:2] == before and parameters_of(averaged) == parameters
    return unchanged, new == (not averaged.outer.state), averaged.outer_steps


@pytest.mark.parametrize("tensors", [1, 3])
def test_state_that_arrives_in_part_is_not_used(pool: Pool, tensors: int) -> None:
    """Parameters, the outer optimizer and the number of steps stay, until all has arrived."""
    results = pool.check(cut_off_while_it_catches_up, 2, args=(tensors,), renew=True)
    assert results == [(True, True, 3), (True, True, 0)]
    results = pool.check(caught_up, 2, renew=True)
    assert [result[0] for result in results] == [results[0][0]] * 2
    assert [result[2:] for result in results] == [(3, 0)] * 2


# -- sites of several workers ----------------------------------------------------------------------------------------


def stopped_at(steps: list[int]) -> tuple[int, bool, bool, list[list[float]]]:
    """Workers of two sites that have taken so many inner steps go on."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("site", "worker"))
    mine = {"group": mesh.get_group("site"), "site": mesh.get_group("worker")}
    averaged, site = begin(**mine), dist.get_rank() // 2
    train(averaged, steps[dist.get_rank()], site)
    averaged.catch_up(**mine)
    begins = parameters_of(averaged) == state_of(averaged)[:2]
    found = averaged.steps, begins, not averaged.inner.state
    train(averaged, EVERY - averaged.steps, site)
    return *found, state_of(averaged)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([2, 2, 3, 3], [(2, False, False)] * 2 + [(3, False, False)] * 2),
        ([2, 3, 1, 1], [(1, True, True)] * 2 + [(1, False, False)] * 2),
        ([2, 3, 1, 2], [(0, True, True)] * 4),
    ],
    ids=str,
)
def test_a_site_whose_workers_stopped_at_different_steps_begins_anew(
    pool: Pool, steps: list[int], expected: list[tuple[int, bool, bool]]
) -> None:
    results = pool.check(stopped_at, 4, args=(steps,))
    assert [result[:3] for result in results] == expected
    assert [result[3] for result in results] == [results[0][3]] * 4


def behind(sharded: bool) -> tuple[list[list[float]], int, int, int]:
    """The second of two sites has not trained. Return the state, where it goes on, and the bytes that crossed meanwhile."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("site", "worker"))
    mine = {"group": mesh.get_group("site"), "site": mesh.get_group("worker")}
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(64, 64)
    if sharded:
        fully_shard(model, mesh=mesh["worker"])
    inner, outer = (torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for _ in range(2))
    averaged = DiLoCo(model, inner, outer, EVERY, **mine)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    outer.step()
    if dist.get_rank() < 2:  # as if the other site had been lost for two rounds
        for tensor in (*averaged._agreed, *tensors_of(outer)):
            tensor += 1.0
        averaged.outer_steps, averaged.steps, averaged._checksums = 2, 3, None
    before = sent_to_the_other_site()
    averaged.catch_up(**mine)
    found = averaged.outer_steps, averaged.steps, sent_to_the_other_site() - before
    leaves = [each.to_local() if sharded else each for each in (*averaged._agreed, *tensors_of(outer))]
    return [each.flatten().tolist() for each in leaves], *found


def sent_to_the_other_site() -> int:
    site = dist.get_rank() // 2
    return sum(peer.payload_sent for peer in ringfence.counters().peers if peer.worker // 2 != site)


@pytest.mark.parametrize("sharded", [False, True], ids=["replicas", "shards"])
def test_a_site_that_is_behind_takes_the_state_which_crosses_once(pool: Pool, sharded: bool) -> None:
    results = pool.check(behind, 4, args=(sharded,), renew=True)
    assert [result[0] for result in results[:2]] == [result[0] for result in results[2:]]
    assert [result[1:3] for result in results] == [(2, 3)] * 4
    state = 2 * 4 * (64 * 64 + 64)  # bytes: parameters and momentum
    assert state <= sum(result[3] for result in results[:2]) < 1.5 * state


def refuse(*_: Any) -> NoReturn:
    raise AssertionError("nothing may be taken over")


def without_a_complete_site() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("site", "worker"))
    mine = {"group": mesh.get_group("site"), "site": mesh.get_group("worker")}
    averaged = begin(**mine)
    averaged.outer_steps += dist.get_rank() % 2
    averaged._broadcast_state = refuse  # type: ignore[method-assign, assignment]
    averaged.catch_up(**mine)


def test_without_a_complete_site_all_are_refused(pool: Pool) -> None:
    results = pool.run(without_a_complete_site, 4)
    assert [result.type for result in results] == ["MismatchError"] * 4
    assert all("load a checkpoint" in result.message for result in results)
