"""The counters of a worker for each peer, as numbers and as a file for Prometheus."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from prometheus_client import parser
from prometheus_client.openmetrics import parser as openmetrics_parser

import ringfence
from ringfence.admission.roster import Worker
from ringfence.config.settings import Settings
from ringfence.errors import ConfigurationError
from ringfence.link.hello import CONFIRM_BYTES
from ringfence.runtime.counters import Counters, PeerCounters
from ringfence.runtime.staging_times import CALL_STAGES, PASS_STAGES
from ringfence.session.metrics import openmetrics
from tests import device
from tests.limits import FAR, HANG
from tests.pool import IN_SHARED_MEMORY, Failure, Pool
from tests.progress_thread import between_steps

UNEQUAL = 66 * (CONFIRM_BYTES + 200)  # of all links: handshakes and goodbyes that one end counts and the other does not
SPECIAL = 'a "run" \\ of many'


@pytest.fixture(scope="module", params=["compiled", "python"])
def workers(request: pytest.FixtureRequest, pool: Pool) -> Any:
    with pool.fresh([["env", f"RINGFENCE_DATAPLANE={request.param}"]] * 3) as fresh:
        yield fresh


def counted() -> dict[str, Any]:
    return dataclasses.asdict(between_steps(ringfence.counters))


def move() -> dict[str, Any]:
    """Three workers gather 12,000 bytes from each; worker 0 sends 4,000 to worker 1; ten groups are created and destroyed."""
    rank = dist.get_rank()
    dist.all_gather_single(torch.empty(9000), torch.ones(3000))
    if rank < 2:
        dist.send(torch.ones(1000), 1) if rank == 0 else dist.recv(torch.empty(1000), 0)
    seen = [counted()]
    for _ in range(10):
        group = dist.new_group()
        dist.all_gather_single(torch.empty(300_000), torch.ones(100_000), group=group)
        dist.destroy_process_group(group)
        seen.append(counted())
    for before, after in itertools.pairwise(seen):
        assert total(after, "payload_sent") >= total(before, "payload_sent")
    dist.barrier()
    return counted()


def total(counters: dict[str, Any], name: str) -> int:
    return sum(peer[name] for peer in counters["peers"])


def test_bytes_are_counted_at_both_endpoints(workers: Pool) -> None:
    results = workers.check(move, 3, renew=True)
    for result in results:
        assert result["operations"]["all_gather"] == 11 and result["operations"]["barrier"] == 1
    assert [result["operations"].get("send/recv") for result in results] == [1, 1, None]
    for name in ("payload", "wire"):
        sent, received = (sum(total(each, f"{name}_{way}") for each in results) for way in ("sent", "received"))
        assert 0 <= sent - received < (1 if name == "payload" else UNEQUAL)
    # Every worker gets two others' parts, and every byte is sent once for each that gets it.
    expected = 3 * 2 * (12_000 + 10 * 400_000) + 4000
    payload = sum(total(each, "payload_sent") for each in results)
    assert expected <= payload < expected + 10_000  # the rest opens groups and ends the barrier
    assert payload < sum(total(each, "wire_sent") for each in results) < 1.02 * payload


@pytest.mark.parametrize("way", ["ringfence", IN_SHARED_MEMORY])
def test_bytes_inside_a_machine_are_counted_apart(workers: Pool, way: str) -> None:
    for result in workers.check(move, 3, way, renew=True):
        for direction in ("sent", "received"):
            payload = total(result, f"payload_{direction}")
            assert payload and total(result, f"local_{direction}") == (payload if way == IN_SHARED_MEMORY else 0)


def wait_for_the_late(seconds: float) -> list[tuple[int, float]]:
    """Worker 1 calls once worker 0 has waited so long. Return how often and how long this worker has waited for the other."""
    dist.barrier()
    before = ringfence.counters()
    store, idle = dist.distributed_c10d._get_default_store(), threading.Event()
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.ones(10), async_op=True)
        while ringfence.counters().oldest_wait_seconds < seconds:
            idle.wait(0.01)
        store.set("late enough", "")
        work.wait()
    else:
        store.wait(["late enough"], timedelta(seconds=HANG))
        dist.all_reduce(torch.ones(10))
    after = ringfence.counters()
    assert after.oldest_wait_seconds == 0
    pairs = zip(before.peers, after.peers, strict=True)
    return [(new.waits - old.waits, new.waited_seconds - old.waited_seconds) for old, new in pairs]


def test_a_wait_is_attributed_to_the_late_worker(workers: Pool) -> None:
    """The late worker waits for as long as the machine is busy with other things, the other one longer than that."""
    for late in (0.4, 4.0, 40.0):
        args = (late,)
        ((often, long),), ((_, short),) = workers.check(
            wait_for_the_late, 2, args=args, seconds=FAR, timeout=HANG, renew=True
        )
        assert often >= 1 and long > 0.9 * late
        if short < late / 2:
            break
    assert short < late / 2


def stage_times() -> list[dict[str, float]]:
    """Return the times once every worker has spent some in each stage: a lock that is free takes none."""
    found, complete = [], torch.zeros(1)
    while not complete.item():
        dist.all_reduce(torch.ones(1_000_000))
        found = [peer.stage_seconds for peer in ringfence.counters().peers]
        complete.fill_(all(all(stages.values()) for stages in found))
        dist.all_reduce(complete, dist.ReduceOp.MIN)
    return found


def test_stages_are_timed_if_enabled(pool: Pool) -> None:
    with pool.fresh() as fresh:
        assert fresh.check(stage_times, 2) == [[{}], [{}]]
        for (stages,) in fresh.check(stage_times, 2, env={"RINGFENCE_STAGE_TIMES": "1"}, timeout=HANG):
            assert set(stages) == {"seal", "open", "reduce", "send", "receive", "lock"} and min(stages.values()) > 0


def staged_times() -> dict[str, float]:
    where = device.load()
    dist.all_reduce(torch.ones(1_000_000, device=where))
    torch.accelerator.synchronize()
    dist.all_reduce(torch.ones(1, device=where))  # the device thread has noted the end of the first call
    return ringfence.counters().staging_seconds


def test_staging_is_timed_if_enabled(pool: Pool) -> None:
    with pool.fresh() as fresh:
        assert fresh.check(staged_times, 2) == [{}, {}]
        for found in fresh.check(staged_times, 2, env={"RINGFENCE_STAGE_TIMES": "1"}):
            assert set(found) == {*CALL_STAGES, *PASS_STAGES}
            assert min(found[stage] for stage in ("fill", "network", "drain", "down", "execute", "up")) > 0


# -- the file ---------------------------------------------------------------------------------------------------------


def write_often() -> None:
    from ringfence.session import metrics

    metrics.EVERY_SECONDS = 0.05  # type: ignore[misc]


def written(directory: str) -> str:
    """Wait until the file contains what was done since it was created."""
    for _ in range(3):
        dist.all_reduce(torch.ones(1000))
    path, idle = Path(directory, f"run-{dist.get_rank()}.prom"), threading.Event()
    while 'operation="all_reduce"} 3' not in path.read_text():
        idle.wait(0.05)
    dist.barrier()
    return path.read_text()


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return the samples by name and labels, as both parsers read them."""
    families = list(openmetrics_parser.text_string_to_metric_families(text))
    found = {
        (each.name, tuple(sorted(each.labels.items()))): each.value for family in families for each in family.samples
    }
    older = [each for family in parser.text_string_to_metric_families(text) for each in family.samples]
    assert found == {(each.name, tuple(sorted(each.labels.items()))): each.value for each in older}
    return found


def test_the_file_is_written_at_intervals_and_at_the_end(pool: Pool, tmp_path: Path) -> None:
    with pool.fresh() as fresh:
        fresh.check(write_often, 2, None)
        env = {"RINGFENCE_METRICS_FILE": str(tmp_path / "run-{rank}.prom")}
        for rank, text in enumerate(fresh.check(written, 2, args=(str(tmp_path),), env=env, timeout=HANG)):
            found = {name: value for (name, _), value in samples(text).items()}
            assert found["ringfence_operations_total"] >= 1 and found["ringfence_payload_sent_bytes_total"] > 0
            labels = [dict(labels) for name, labels in samples(text) if name == "ringfence_admitted"]
            assert [each["worker"] for each in labels] == ["0", "1"] and {each["rank"] for each in labels} == {
                str(rank)
            }
        fresh.leave()
        for rank in range(2):
            last = samples((tmp_path / f"run-{rank}.prom").read_text())
            operations = {
                dict(labels)["operation"]: value for (name, labels), value in last.items() if "operations" in name
            }
            assert operations == {"all_reduce": 3, "barrier": 1}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run-0.prom", "run-1.prom"]


def test_the_text_contains_all_counters() -> None:
    peer = PeerCounters(1, 10, 20, 6, 7, 30, 40, 5, 1.5, {"seal": 0.25})
    worker = Worker(1, "spiffe://example.org/b", "[fd00::1]:4000", "certificate", "00", "11")
    found = samples(openmetrics(Counters(0, {"all_reduce": 7}, 2.5, (peer,)), SPECIAL, [worker]))
    mine = {"run": SPECIAL, "rank": "0"}
    expected = {
        ("ringfence_operations_total", ("operation", "all_reduce")): 7,
        ("ringfence_oldest_wait_seconds",): 2.5,
        ("ringfence_payload_sent_bytes_total", ("worker", "1")): 10,
        ("ringfence_payload_received_bytes_total", ("worker", "1")): 20,
        ("ringfence_local_sent_bytes_total", ("worker", "1")): 6,
        ("ringfence_local_received_bytes_total", ("worker", "1")): 7,
        ("ringfence_wire_sent_bytes_total", ("worker", "1")): 30,
        ("ringfence_wire_received_bytes_total", ("worker", "1")): 40,
        ("ringfence_waits_total", ("worker", "1")): 5,
        ("ringfence_wait_seconds_total", ("worker", "1")): 1.5,
        ("ringfence_stage_seconds_total", ("worker", "1"), ("stage", "seal")): 0.25,
        (
            "ringfence_admitted",
            ("worker", "1"),
            ("address", "[fd00::1]:4000"),
            ("admitted_by", "certificate"),
            ("identity", "spiffe://example.org/b"),
        ): 1,
    }
    assert found == {
        (name, tuple(sorted({**mine, **dict(cast(Any, labels))}.items()))): value
        for (name, *labels), value in expected.items()
    }


def test_a_metrics_file_shared_by_workers_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"needs \{rank\} in it"):
        Settings.without_credentials({"RINGFENCE_METRICS_FILE": "/run/metrics.prom"})
    with pytest.raises(ConfigurationError, match="may be 0 or 1"):
        Settings.without_credentials({"RINGFENCE_STAGE_TIMES": "yes"})


def test_an_unwritable_metrics_file_fails_the_start(pool: Pool, tmp_path: Path) -> None:
    env = {"RINGFENCE_METRICS_FILE": str(tmp_path / "nowhere" / "{rank}.prom")}
    with pool.fresh() as fresh:
        for result in fresh.run(counted, 2, env=env):
            assert isinstance(result, Failure) and result.type == "ConfigurationError"
            assert "cannot write RINGFENCE_METRICS_FILE" in result.message and "nowhere" in result.message
