"""Traces of torch.profiler: each collective with its name, shapes, bytes and group, and optionally its stages."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile, record_function

import ringfence
from tests.pool import Pool

STAGES = {"seal", "open", "lock", "reduce", "send", "receive", "wait"}


def release(event: str) -> None:
    """Let workers that wait for `event` go on."""
    dist.distributed_c10d._get_default_store().set(event, "")


def wait_for(event: str) -> None:
    """Wait until another worker releases this one; the thread makes no progress with collectives meanwhile."""
    dist.distributed_c10d._get_default_store().get(event)


def trace_of(done: profile, path: Path) -> list[dict[str, Any]]:
    done.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if event.get("ph") == "X" and event["name"].startswith("ringfence")]


def one_of_each(directory: str) -> list[tuple[str, Any, Any, Any, Any, Any]]:
    """The events of a plain profile in order: (name, shapes, collective, bytes in and out, group)."""
    rank = dist.get_rank()
    tensor = torch.ones(30, 4)
    pair = dist.new_group([0, 1], group_desc="the pair")
    with profile(record_shapes=True) as done:
        dist.all_reduce(tensor)
        dist.all_gather_single(torch.empty(60, 4), tensor, group=pair)
        dist.broadcast(tensor.t(), 0)
        dist.reduce_scatter_single(torch.empty(15, 4), tensor)
        dist.barrier()
        dist.send(tensor, 1) if rank == 0 else dist.recv(tensor, 0)
    events = trace_of(done, Path(directory, f"plain{rank}.json"))
    ranges = [event for event in events if event["name"].startswith("ringfence:")]
    calls = [event for event in events if event["name"] == "ringfence.call"]
    assert len(ranges) == len(calls) == 6
    for each, call in zip(ranges, calls, strict=True):
        assert each["cat"] == "user_annotation" and each["args"].get("finished") is not False
        assert each["ts"] <= call["ts"] <= each["ts"] + each["dur"]
    assert {row.key for row in done.key_averages()} >= {"ringfence:all_reduce", "ringfence:barrier"}
    return [
        (
            each["name"].removeprefix("ringfence:"),
            each["args"].get("Input Dims"),
            call["args"]["Collective name"],
            call["args"]["In msg bytes"],
            call["args"]["Out msg bytes"],
            call["args"]["Process Group Description"],
        )
        for each, call in zip(ranges, calls, strict=True)
    ]


@pytest.mark.parametrize("plane", ["compiled", "python"])
def test_a_plain_profile_shows_every_collective(pool: Pool, tmp_path: Path, plane: str) -> None:
    with pool.fresh([["env", f"RINGFENCE_DATAPLANE={plane}"]] * 2) as workers:
        results = workers.check(one_of_each, 2, args=(str(tmp_path),))
    for result, transfer, received in zip(results, ("send", "recv"), (0, 480), strict=True):
        assert result == [
            ("all_reduce", [[30, 4]], "all_reduce", 480, 480, "default_pg"),
            ("all_gather", [[30, 4]], "all_gather", 480, 960, "the pair"),
            ("broadcast", [[4, 30]], "broadcast", 480, 480, "default_pg"),
            ("reduce_scatter", [[30, 4]], "reduce_scatter", 480, 240, "default_pg"),
            ("barrier", None, "barrier", 0, 0, "default_pg"),
            (transfer, [[30, 4]], transfer, 480, received, "default_pg"),
        ]


def not_waited_for_yet() -> list[str]:
    """The order in which things happen if the other worker starts after the call has returned."""
    if dist.get_rank() == 1:
        wait_for("called")
        dist.all_reduce(torch.ones(10))
        release("reduced")
        return []
    with profile() as done:
        work = dist.all_reduce(torch.ones(10), async_op=True)
        with record_function("release"):
            release("called")  # a call that waits for the result does not get here
        wait_for("reduced")
        work.wait()
        with record_function("waited"):
            pass
    times = {event.name: event.time_range for event in done.events()}
    moments = {
        "call": times["ringfence:all_reduce"].start,
        "release": times["release"].start,
        "result": times["ringfence:all_reduce"].end,
        "waited": times["waited"].end,
    }
    return sorted(moments, key=lambda name: moments[name])


def test_range_lasts_until_the_result_is_available(pool: Pool) -> None:
    assert pool.check(not_waited_for_yet, 2, renew=True)[0] == ["call", "release", "result", "waited"]


def finished(directory: str) -> int:
    """Profiles that end with their only collective: the number of twenty traces with an unfinished range."""
    path = Path(directory, f"short{dist.get_rank()}.json")
    unfinished = 0
    for _ in range(20):
        with profile() as done:
            dist.all_reduce(torch.ones(10), async_op=True).wait()
        unfinished += any(event["args"].get("finished") is False for event in trace_of(done, path))
    return unfinished


def test_a_range_ends_before_the_wait_does(pool: Pool, tmp_path: Path) -> None:
    assert pool.check(finished, 2, args=(str(tmp_path),)) == [0, 0]


def delayed_call() -> tuple[int, float]:
    """Asynchronous calls with overlapping ranges: their number, and torch's sum of their time."""
    with profile(record_shapes=True) as done:
        for _ in range(5):
            works = [dist.all_reduce(torch.ones(300_000), async_op=True) for _ in range(3)]
            dist.all_reduce(torch.ones(10))
            for work in works:
                work.wait()
    (row,) = [row for row in done.key_averages() if row.key == "ringfence:all_reduce"]
    done.key_averages(group_by_input_shape=True).table()
    return row.count, row.cpu_time_total


def test_overlapping_ranges_are_summed(pool: Pool) -> None:
    for count, total in pool.check(delayed_call, 2):
        assert count == 20 and total > 0


def outlived() -> float:
    """Collectives that end after their profile has ended and was deleted. There are many: torch frees what it had on them."""
    tensors = [torch.ones(10) for _ in range(50)]
    dist.barrier()
    if dist.get_rank() == 1:
        wait_for("profile is deleted")
        for tensor in tensors:
            dist.all_reduce(tensor)
    else:
        with profile() as done:
            works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        del done
        gc.collect()
        release("profile is deleted")
        for work in works:
            work.wait()
    return float(sum(tensor.sum() for tensor in tensors))


def test_a_collective_may_end_after_its_profile(pool: Pool) -> None:
    assert pool.check(outlived, 2) == [1000.0, 1000.0]


def release_when_waiting(event: str) -> pytest.MonkeyPatch:
    """Release the other worker when the loop of this one begins to wait, in a profile that starts after this."""
    from ringfence.runtime import stages

    timed, patch = stages._timed, pytest.MonkeyPatch()
    released: list[str] = []

    def telling(poll: Callable[[float], None]) -> Callable[[float], None]:
        def tell_and_poll(seconds: float) -> None:
            if seconds > 0 and not released:
                released.append(event)
                release(event)
            poll(seconds)

        return timed(tell_and_poll)

    patch.setattr(stages, "_timed", telling)
    return patch


def train(directory: str, suffix: str) -> tuple[int, list[str], int]:
    """DDP: the number of buckets in the trace, its stages, and the number of overlapping ranges in our rows."""
    model = DistributedDataParallel(
        torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)]), bucket_cap_mb=1
    )
    first, event = dist.get_rank() == 0, f"waiting {suffix}"
    patch = release_when_waiting(event) if first else pytest.MonkeyPatch()
    with profile() as done:
        if not first:
            wait_for(event)
        for _ in range(3):
            model(torch.ones(8, 256)).sum().backward()
    patch.undo()
    path = Path(directory, f"ddp{dist.get_rank()}{suffix}")
    ringfence.export_chrome_trace(done, path)
    text = path.read_bytes()
    if suffix.endswith(".gz"):
        import gzip

        text = gzip.decompress(text)
    events = json.loads(text)["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    ours = [event for event in events if event.get("ph") == "X" and "ringfence" in names.get(event["tid"], "")]
    assert not [event for event in events if event["name"] == "ringfence:all_reduce" and event not in ours]
    crossed = 0
    for row in {event["tid"] for event in ours}:
        ends = 0.0
        for event in sorted((event for event in ours if event["tid"] == row), key=lambda event: event["ts"]):
            crossed += event["ts"] < ends - 0.01  # floats of microseconds
            ends = event["ts"] + event["dur"]
    buckets = sum(event["name"] == "ringfence:all_reduce" for event in ours)
    return buckets, sorted({event["name"] for event in ours if event["cat"] == "ringfence"}), crossed


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_the_exported_trace_has_rows_of_stages(pool: Pool, tmp_path: Path, suffix: str) -> None:
    results = pool.check(train, 2, args=(str(tmp_path), suffix))
    for buckets, stages, crossed in results:
        assert buckets >= 3 and crossed == 0
        assert STAGES - {"wait"} <= set(stages) <= STAGES
    assert "wait" in results[0][1]  # for the other worker, which was late


def clocks() -> list[bool]:
    """Whether the data plane is timed: before a profile, in it, and after the first collectives that follow it."""
    from ringfence.runtime import stages

    seen = [stages.running]
    with profile():
        dist.all_reduce(torch.ones(1))
        seen.append(stages.running)
    timed = torch.ones(1)
    while timed.item():  # the loop checks when it waits, which it does not for each collective
        timed.fill_(stages.running)
        dist.all_reduce(timed)
    seen.append(stages.running)
    kept = len(stages.recorded())
    dist.all_reduce(torch.ones(1))
    assert kept and len(stages.recorded()) == kept
    return seen


def test_timing_stops_with_the_profile(pool: Pool) -> None:
    assert pool.check(clocks, 2, renew=True) == [[False, True, False]] * 2


def test_trace_has_no_other_names() -> None:
    with pytest.raises(AttributeError, match="no attribute 'exports'"):
        _ = ringfence.exports
