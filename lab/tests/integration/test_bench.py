"""The benchmark's workers: every variant computes the right numbers, moves them over TCP, and is measured as one."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from ringfence.errors import ConfigurationError
from ringfence_lab.bench import names, tunnels
from ringfence_lab.bench.names import necessary_bytes
from ringfence_lab.bench.netns import Hosts
from ringfence_lab.bench.worker_pool import BenchError, Placement, WorkerPool

SIZE = 120_000  # bytes; a whole number of parts for 2, 3 and 4 workers
DOUBLING = "ringfence-doubling"  # sends more than is necessary, in fewer steps
ON_DEVICE = [name for name in names.DEVICE_VARIANTS if name not in names.CUDA_VARIANTS]
TRANSPORTS = [name for name in names.VARIANTS if name not in (*names.BASELINE, DOUBLING)]


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.nightly)])
def worker_pool(request: pytest.FixtureRequest) -> Iterator[WorkerPool]:
    with WorkerPool([Placement()] * request.param, list(names.VARIANTS)) as workers:
        yield workers


@pytest.fixture(scope="module")
def device_pool() -> Iterator[WorkerPool]:
    with WorkerPool([Placement()] * 2, ON_DEVICE, "sim") as workers:
        yield workers


@pytest.mark.parametrize("operation", names.OPERATIONS)
def test_every_variant_computes_every_collective_and_is_measured(worker_pool: WorkerPool, operation: str) -> None:
    """`prepare` raises unless every variant's result is right."""
    taking_part = worker_pool.tell("prepare", operation=operation, size=SIZE)[0]["variants"]
    rings = {"plain-ring", "hop-by-hop", "tls"}
    assert set(taking_part) == set(names.VARIANTS) - (rings if operation == "all_to_all" else set())
    measured = worker_pool.measure("round", turns=[(name, 4) for name in taking_part], busy=False)
    for name in taking_part:
        assert measured[name]["seconds"] > 0
        assert measured[name]["cpu"] > 0
        assert measured[name]["sent"] >= necessary_bytes(operation, SIZE, worker_pool.size) * 0.999, name


def test_sealed_bytes_on_the_wire_are_the_payload_and_little_more(worker_pool: WorkerPool) -> None:
    size = 4 << 20
    worker_pool.tell("prepare", operation="all_reduce", size=size)
    rounds = [worker_pool.measure("round", turns=[(name, 2) for name in TRANSPORTS], busy=False) for _ in range(3)]
    for name in TRANSPORTS:
        sent = min(measured[name]["sent"] for measured in rounds)  # the kernel counts what it sends again, too
        assert sent == pytest.approx(necessary_bytes("all_reduce", size, worker_pool.size), rel=0.01), name


def test_a_busy_caller_is_measured_too(worker_pool: WorkerPool) -> None:
    worker_pool.tell("prepare", operation="all_reduce", size=SIZE)
    measured = worker_pool.measure("round", turns=[(name, 1) for name in names.VARIANTS], busy=True)
    assert set(measured) == set(names.VARIANTS)


def test_int8_computes_right_sums_and_sends_a_quarter() -> None:
    size = 1 << 20
    with WorkerPool([Placement()] * 2, list(names.QUANTISED)) as pool:
        for operation in names.OPERATIONS:
            taking_part = pool.tell("prepare", operation=operation, size=size)[0]["variants"]
            assert taking_part == (list(names.QUANTISED) if operation == "all_reduce" else [])
        pool.tell("prepare", operation="all_reduce", size=size)
        for busy in (False, True):
            measured = pool.measure("round", turns=[(name, 2) for name in names.QUANTISED], busy=busy)
            for name in names.QUANTISED:
                sent = necessary_bytes("all_reduce", size, 2) / 4
                assert sent < measured[name]["sent"] < sent * 1.1, name


def test_the_stages_of_a_profile_add_up_to_the_whole(worker_pool: WorkerPool) -> None:
    worker_pool.tell("prepare", operation="all_reduce", size=8 << 20)
    measured = worker_pool.measure("round", turns=[(names.PROFILED, 3), ("ringfence", 3)], busy=False)
    stages = measured[names.PROFILED]["stages"]
    assert set(stages) == {"seal", "open", "lock", "reduce", "send", "receive", "wait", "rest"}
    assert all(share > 0 for share in stages.values())
    assert sum(stages.values()) == pytest.approx(1)
    assert "stages" not in measured["ringfence"]


@pytest.mark.parametrize("operation", names.OPERATIONS)
def test_every_collective_is_measured_on_device_tensors(device_pool: WorkerPool, operation: str) -> None:
    """`prepare_device` raises unless every variant's result is right."""
    prepare(device_pool, operation, SIZE)
    measured = device_pool.measure("round", turns=[(name, 2) for name in ON_DEVICE], busy=False)
    for name in ON_DEVICE:
        assert measured[name]["sent"] >= necessary_bytes(operation, SIZE, device_pool.size) * 0.999, name


def test_the_stages_of_staging_are_parts_of_the_call(device_pool: WorkerPool) -> None:
    prepare(device_pool, "all_reduce", 32 << 20, copy_rate=1e9)
    measured = device_pool.measure("round", turns=[(names.PROFILED, 2), ("ringfence", 2)], busy=False)
    staging = measured[names.PROFILED]["staging"]
    assert staging["passes"] == 2
    assert sum(staging["call"].values()) < 1.01 * measured[names.PROFILED]["mean"]
    assert staging["call"]["network"] > 0 and staging["call"]["fill"] > 0.003 and staging["call"]["drain"] > 0.003
    assert staging["pass"]["down"] > 0.003 and staging["pass"]["up"] > 0.003  # 16 MiB at 1 GB/s
    assert "staging" not in measured["ringfence"]


def prepare(workers: WorkerPool, operation: str, size: int, copy_rate: float = 0.0) -> None:
    what = {"operation": operation, "size": size, "wire": "float32", "only": ON_DEVICE}
    workers.tell("prepare_device", **what, copy_rate=copy_rate, confidential=False)


def test_the_same_model_is_trained_by_every_variant(worker_pool: WorkerPool) -> None:
    facts = worker_pool.tell("prepare_training", model="gpt2-tiny", strategy="ddp", bucket_mb=1.0)[0]
    gradients = 4 * facts["parameters"] * 2 * (worker_pool.size - 1)
    measured = worker_pool.measure("train", turns=[(name, 2) for name in names.VARIANTS])
    for name in (*names.BASELINE, *TRANSPORTS):
        assert measured[name]["sent"] == pytest.approx(gradients, rel=0.05), name
    assert measured[DOUBLING]["sent"] >= gradients


@pytest.mark.nightly
def test_fsdp2_is_trained_over_every_process_group() -> None:
    with WorkerPool([Placement()] * 2, list(names.GROUPS)) as worker_pool:
        worker_pool.tell("prepare_training", model="gpt2-tiny", strategy="fsdp2", bucket_mb=0.0)
        measured = worker_pool.measure("train", turns=[(name, 1) for name in names.GROUPS])
    assert all(measured[name]["sent"] > 1 << 20 for name in names.GROUPS)


def test_what_a_copy_of_the_tensor_takes_shows_as_memory_beyond_it() -> None:
    """The rings keep a chunk beside the tensor, half of it with two workers; hop by hop two sealed chunks more."""
    size = 64 << 20
    with WorkerPool([Placement()] * 2, ["gloo-a", "ringfence", "plain-ring", "hop-by-hop"]) as worker_pool:
        beyond = {}
        for name in ("ringfence", "plain-ring", "hop-by-hop"):
            warm = worker_pool.tell("warm", name=name)
            swollen = worker_pool.tell("swell", name=name, size=size)
            beyond[name] = [now["peak"] - then["warm"] - size for then, now in zip(warm, swollen, strict=True)]
            assert all(each["links"] >= 1 and each["socket_buffers"] > 0 for each in swollen)
    assert max(beyond["ringfence"]) < size // 4
    assert min(beyond["plain-ring"]) > size // 2 * 0.95  # received beside
    assert min(beyond["hop-by-hop"]) > size * 1.45  # and two sealed chunks


def test_a_worker_that_cannot_go_on_is_named_with_its_reason() -> None:
    with (
        WorkerPool([Placement()] * 2, ["gloo-a", "gloo-b"]) as worker_pool,
        pytest.raises(BenchError, match=r"worker \d .*KeyError"),
    ):
        worker_pool.tell("round", turns=[("nobody", 1)], busy=False)


def test_the_choice_of_the_data_plane_reaches_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGFENCE_DATAPLANE", "python")
    with pytest.raises(BenchError, match=r"a profile needs the compiled data plane; RINGFENCE_DATAPLANE .*; unset it"):
        WorkerPool([Placement()] * 2, [*names.BASELINE, names.PROFILED])


def test_a_worker_that_dies_is_noticed_while_the_others_wait_for_it() -> None:
    with WorkerPool([Placement()] * 2, ["gloo-a", "gloo-b"]) as worker_pool:
        worker_pool.tell("prepare", operation="all_reduce", size=4096)
        os.kill(worker_pool.processes[1], signal.SIGKILL)
        with pytest.raises(BenchError, match=r"worker 1 .* ended early|worker 0 .*onnection"):
            worker_pool.tell("round", turns=[("gloo-a", 1)], busy=False)


@pytest.mark.nightly
def test_gloo_is_measured_through_both_tunnels() -> None:
    """Each tunnel's interface counts what Gloo sends through it, and nothing of what plaintext Gloo sends beside it."""
    variants = ("gloo-a", *names.TUNNELS)
    with (
        Hosts(2, None) as hosts,
        tunnels.tunnels(hosts.ends, variants),
        WorkerPool(hosts.placements(2), variants) as pool,
    ):
        pool.tell("prepare", operation="all_reduce", size=SIZE)
        for name in variants:
            before = {each: sent(hosts.ends[0][0], tunnels.interface(each)) for each in names.TUNNELS}
            pool.measure("round", turns=[(name, 4)], busy=False)
            for each, count in before.items():
                passed = sent(hosts.ends[0][0], tunnels.interface(each)) - count
                assert (passed >= 4 * SIZE) is (each == name), (each, name, passed)


def sent(namespace: str, interface: str) -> int:
    """Bytes that an interface of a network namespace has sent."""
    command = ["ip", "netns", "exec", namespace, "cat", f"/sys/class/net/{interface}/statistics/tx_bytes"]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def test_a_tunnel_needs_two_hosts() -> None:
    with pytest.raises(ConfigurationError, match="is a tunnel between two hosts: add --hosts 2"):
        tunnels.check(0, ["gloo-a", "gloo-openvpn"])
