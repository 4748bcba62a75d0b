"""The compiled data plane: it is in use, rejects invalid arguments, computes as torch does, and leaks nothing."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringfence.collectives import Collective, ScheduleId, Thresholds, build, choose
from ringfence.collectives.schedule import Action, Buffer, Dependency, Step
from ringfence.dataplane import buffers, choice, endpoint, native
from ringfence.dataplane import execution as python_execution
from ringfence.dataplane.program import _fused_sends
from ringfence.errors import ConfigurationError
from ringfence.link.frames import FRAME_BYTES
from ringfence.link.segments import segment_count
from tests.limits import HANG
from tests.memory_cluster import World, all_reduce, broadcast

if not native.COMPILED:
    from ringfence.dataplane import _core
else:
    _core = native.CORE


def test_this_process_uses_the_compiled_data_plane() -> None:
    if os.environ.get("RINGFENCE_DATAPLANE") == "python":
        assert (choice.Endpoint, choice.Execution, choice.Pool) == (
            endpoint.Endpoint,
            python_execution.Execution,
            buffers.Pool,
        )
    else:
        assert native.COMPILED and choice.Execution is _core.Execution


@pytest.mark.processes
@pytest.mark.parametrize(
    ("wanted", "expected"),
    [("python", "False"), ("compiled", "True"), ("", "True"), ("fast", "it may be 'compiled' or 'python'")],
)
def test_the_environment_selects_the_data_plane(wanted: str, expected: str) -> None:
    code = "from ringfence.dataplane import native; print(native.COMPILED)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "RINGFENCE_DATAPLANE": wanted},
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert expected in done.stdout + done.stderr


def test_an_installation_without_the_compiled_data_plane_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RINGFENCE_DATAPLANE", raising=False)
    monkeypatch.setitem(sys.modules, "ringfence.dataplane._core", None)  # as a broken one: its import fails
    monkeypatch.delattr("ringfence.dataplane._core", raising=False)
    with pytest.raises(ConfigurationError, match=r"install a C compiler .* RINGFENCE_DATAPLANE=python does without it"):
        native._load()
    monkeypatch.setenv("RINGFENCE_DATAPLANE", "python")
    assert native._load() is None


def test_a_module_built_for_another_frame_layout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "LAYOUT", (*_core.LAYOUT[:-1], FRAME_BYTES + 1))
    monkeypatch.delenv("RINGFENCE_DATAPLANE", raising=False)
    with pytest.raises(ConfigurationError, match="install again"):
        native._load()


def program(**changes: Any) -> Any:
    step = Step(Action.SEND, 0, 1)
    parts: dict[str, Any] = {
        "steps": (step,),
        "dependencies": ((),),
        "wakes": ((),),
        "ordinals": (0,),
        "shared_by": ((),),
        "heirs": (-1,),
        "chunks": 1,
        **changes,
    }
    return _core.compile(*parts.values())


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": (Step(Action.SEND, 1, 1),)},
        {"steps": (Step(Action.REDUCE, 0, 1),)},
        {"steps": (Step(Action.COPY, 0, -1, 5),)},
        {"steps": ((9, 0, 1, -1, 0, -1, True),)},
        {"steps": ((0, 0, 1),)},
        {"steps": (7,)},
        {"dependencies": ((Dependency(1, True),),)},
        {"dependencies": ((Dependency(-1, True),),)},
        {"dependencies": ((5,),)},
        {"dependencies": ()},
        {"wakes": ((1,),)},
        {"wakes": (("x",),)},
        {"ordinals": (-1,)},
        {"shared_by": ((3,),)},
        {"heirs": (1,)},
        {"heirs": (-2,)},
        {"heirs": ()},
    ],
    ids=str,
)
def test_a_program_with_indices_out_of_range_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError, OverflowError)):
        program(**changes)


def test_an_execution_checks_its_memory_against_the_program() -> None:
    def run(views: list[memoryview], call: bytes = bytes(24), instance: bytes = bytes(16)) -> Any:
        pool = _core.Pool()
        return _core.Execution(
            None, program(), 0, call, views, None, torch.uint8, None, 0, lambda: None, 0, instance, pool, 1
        )

    view = memoryview(bytearray(8))
    run([view])
    wrong: dict[str, Any]
    for wrong in ({"views": []}, {"views": [view], "call": b""}, {"views": [view], "instance": b""}):
        with pytest.raises(ValueError, match="do not match its program"):
            run(**wrong)  # type: ignore[arg-type]
    with pytest.raises(BufferError):
        run([memoryview(b"read only")])


@pytest.mark.parametrize("what", [object(), None, _core.Pool()])
def test_only_endpoints_send_and_receive(what: Any) -> None:
    for move in (_core.send, _core.receive):
        with pytest.raises(TypeError):
            move(what)


def test_an_uninitialised_endpoint_raises() -> None:
    bare = _core.Endpoint.__new__(_core.Endpoint)
    for use in (_core.send, _core.receive, _core.Endpoint.wake, _core.Endpoint.flush):
        with pytest.raises(TypeError):
            use(bare)


def test_a_pool_keeps_a_limited_number_of_segments() -> None:
    pool = _core.Pool(2)
    taken = [pool.take() for _ in range(4)]
    assert {len(segment.view) for segment in taken} == {FRAME_BYTES}
    for segment in taken:
        pool.give(segment)
    assert pool.made == 4
    assert [pool.take(), pool.take()] == [taken[1], taken[0]]
    pool.take()
    assert pool.made == 5
    with pytest.raises(TypeError):
        pool.give(object())
    with pytest.raises(ValueError, match="at most"):
        _core.Pool(1000)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.int64, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("count", [0, 1, 7, 300_001])
def test_sums_equal_those_of_torch_bitwise(dtype: torch.dtype, count: int) -> None:
    world = World(2)
    generator = torch.Generator().manual_seed(count)
    draw = [torch.randint(-(2**31), 2**31 - 1, (count,), generator=generator) for _ in range(2)]
    tensors = [each.to(dtype) if not dtype.is_floating_point else (each / 2**20).to(dtype) for each in draw]
    if dtype == torch.float32 and count > 3:
        tensors[0][:4] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    expected = torch.add(tensors[0], tensors[1])
    requests = [
        world.submit(world.communicators[rank], all_reduce(world.communicators[rank], tensors[rank]))
        for rank in range(2)
    ]
    world.run(requests)
    for tensor in tensors:
        assert torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8))


def test_bfloat16_is_rounded_as_in_torch() -> None:
    """Bit patterns are drawn uniformly, so infinities, subnormal numbers, NaN and ties are among them."""
    world = World(2)
    generator = torch.Generator().manual_seed(16)
    draw = [torch.randint(-(2**15), 2**15, (400_000,), generator=generator).to(torch.int16) for _ in range(2)]
    draw[1][:100_000] = (draw[0][:100_000].int() + 0x80).to(torch.int16)  # neighbours: many sums lie half-way
    tensors = [each.view(torch.bfloat16) for each in draw]
    expected = torch.add(tensors[0], tensors[1])
    requests = [
        world.submit(world.communicators[rank], all_reduce(world.communicators[rank], tensors[rank]))
        for rank in range(2)
    ]
    world.run(requests)
    numbers = ~expected.isnan()
    for tensor in tensors:
        assert torch.equal(tensor.isnan(), ~numbers)
        assert torch.equal(tensor.view(torch.int16)[numbers], expected.view(torch.int16)[numbers])
    assert 0.9 < float(numbers.float().mean()) < 1


def test_misaligned_memory_is_summed_correctly() -> None:
    world = World(2)
    raw = [torch.zeros(4 * 1000 + 1, dtype=torch.uint8) for _ in range(2)]
    tensors = [torch.frombuffer(memoryview(each.numpy())[1:], dtype=torch.uint8).view(torch.uint8) for each in raw]
    for tensor in tensors:
        tensor += 3
    requests = [
        world.submit(world.communicators[rank], all_reduce(world.communicators[rank], tensors[rank]))
        for rank in range(2)
    ]
    world.run(requests)
    assert all(bool((tensor == 6).all()) for tensor in tensors)


def test_integers_overflow_as_in_torch() -> None:
    world = World(2)
    tensors = [torch.full((9,), 2**31 - 1, dtype=torch.int32) for _ in range(2)]
    requests = [
        world.submit(world.communicators[rank], all_reduce(world.communicators[rank], tensors[rank]))
        for rank in range(2)
    ]
    world.run(requests)
    assert tensors[0].tolist() == [-2] * 9


def test_a_segment_for_several_peers_is_sealed_once() -> None:
    """The root of a tree has two children; both receive the same ciphertext."""
    table = Thresholds(chain_group=0)
    world = World(7, table=table)
    root = world.communicators[0]

    def run(tensors: list[torch.Tensor]) -> None:
        world.run(
            [world.submit(world.communicators[r], broadcast(world.communicators[r], tensors[r])) for r in range(7)]
        )

    run([torch.zeros(4) for _ in range(7)])
    tensors = [torch.full((400_000,), float(rank == 0)) for rank in range(7)]
    before = root.origin.counter
    run(tensors)
    assert all(bool(tensor.eq(1).all()) for tensor in tensors)
    segments = segment_count(tensors[0].nbytes)
    schedule = choose(Collective.BROADCAST, 7, 0, 0, tensors[0].nbytes, table)
    children = sum(step.action is Action.SEND for step in schedule.steps)
    assert children > 1
    assert root.origin.counter - before == (segments if native.COMPILED else segments * children)


def test_a_sum_that_is_only_sent_is_not_stored() -> None:
    """In a ring of four, two of the three sums are only sent; the third belongs to this rank."""
    heirs = _fused_sends(build(ScheduleId.ALL_REDUCE_RING, 4, 0))
    steps = build(ScheduleId.ALL_REDUCE_RING, 4, 0).steps
    sums = [index for index, step in enumerate(steps) if step.action is Action.REDUCE]
    assert [heirs[index] >= 0 for index in sums] == [True, True, False]
    for index in sums[:2]:
        assert steps[heirs[index]].action is Action.SEND and steps[heirs[index]].chunk == steps[index].chunk
    assert all(heirs[index] < 0 for index in set(range(len(steps))) - set(sums))
    scattered = build(ScheduleId.REDUCE_SCATTER_RING, 4, 0)
    assert sum(heir >= 0 for heir in _fused_sends(scattered)) == 2


def test_a_sum_that_is_read_later_is_stored() -> None:
    for identifier in ScheduleId:
        for rank in range(5):
            schedule = build(identifier, 5, rank)
            for index, heir in enumerate(_fused_sends(schedule)):
                if heir < 0:
                    continue
                chunk = schedule.steps[index].chunk
                later = [step for step in schedule.steps[heir + 1 :] if chunk in (step.chunk, step.other)]
                overwritten = later and later[0].chunk == chunk != later[0].other and later[0].action != Action.SEND
                assert overwritten or (not later and schedule.chunks[chunk].buffer is Buffer.SCRATCH)


def test_executions_links_and_tensors_are_freed() -> None:
    """Executions, links and tensors are freed after use, also if they were part of reference cycles."""
    world = World(3)
    gone = []
    for _ in range(3):
        tensors = [torch.ones(200_000) for _ in range(3)]
        gone += [weakref.ref(tensor) for tensor in tensors]
        requests = [
            world.submit(world.communicators[rank], all_reduce(world.communicators[rank], tensors[rank]))
            for rank in range(3)
        ]
        world.run(requests)
        del tensors, requests
    gc.collect()
    assert not [each for each in gone if each() is not None]
    links = [weakref.ref(link) for communicator in world.communicators.values() for link in communicator.links()]
    assert links
    del world
    gc.collect()
    assert not [each for each in links if each() is not None]


def test_an_average_is_divided() -> None:
    world = World(2)
    tensors = [torch.full((5,), float(3 + 2 * rank)) for rank in range(2)]
    requests = [
        world.submit(
            world.communicators[rank], all_reduce(world.communicators[rank], tensors[rank], reduction=dist.ReduceOp.AVG)
        )
        for rank in range(2)
    ]
    world.run(requests)
    assert tensors[0].tolist() == tensors[1].tolist() == [4.0] * 5


def test_an_average_of_integers_is_rounded_toward_zero() -> None:
    world = World(2)
    tensors = [torch.tensor([-7, -1, 0, 1, 7]) + rank for rank in range(2)]  # sums: -13, -1, 1, 3, 15
    requests = [
        world.submit(
            world.communicators[rank], all_reduce(world.communicators[rank], tensors[rank], reduction=dist.ReduceOp.AVG)
        )
        for rank in range(2)
    ]
    world.run(requests)
    assert tensors[0].tolist() == tensors[1].tolist() == [-6, 0, 0, 1, 7]
