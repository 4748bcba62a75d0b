"""What the study measures beyond the benchmark: replayed steps, bfloat16 on the wire, a step with nobody to talk to."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from ringfence_lab.bench import names
from ringfence_lab.bench.measure import rounds_of
from ringfence_lab.bench.names import ALONE, necessary_bytes
from ringfence_lab.bench.netns import Hosts
from ringfence_lab.bench.worker_pool import Placement, WorkerPool

VARIANTS = ["gloo-a", "gloo-b", "ringfence", "ringfence-unsealed", "hop-by-hop", "tls", names.PROFILED, ALONE]
TRACE = [(1 << 20, 0.02), (3 << 20, 0.01), (2 << 20, 0.01)]


@pytest.fixture(scope="module")
def worker_pool() -> Iterator[WorkerPool]:
    with WorkerPool([Placement()] * 2, VARIANTS) as workers:
        yield workers


@pytest.mark.parametrize("wire", names.WIRES)
@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_a_replayed_step_moves_its_buckets_and_takes_its_computing(
    worker_pool: WorkerPool, device: str, wire: str
) -> None:
    """Preparing raises unless every variant sums the largest bucket rightly."""
    case = {"kind": "trace", "device": device, "wire": wire, "variants": VARIANTS}
    measured = rounds_of(worker_pool, case, TRACE)(0)
    assert set(measured) == set(VARIANTS)
    moved = sum(necessary_bytes("all_reduce", size, worker_pool.size) for size, _ in TRACE)
    for name in VARIANTS:
        assert measured[name]["seconds"] >= 0.039, name
        assert measured[name]["sent"] == pytest.approx(0 if name == ALONE else moved, rel=0.03, abs=4096), name
    if device == "cpu":  # computing takes processor time, as long as it lasts
        assert all(measured[name]["cpu"] >= 0.039 * worker_pool.size for name in VARIANTS)
    assert measured[names.PROFILED]["stages"]["seal"] > 0


@pytest.mark.nightly
def test_a_replayed_step_of_a_gpu_leaves_the_cores_to_others(worker_pool: WorkerPool) -> None:
    """Only processor time shows it, and what a worker does besides has no exact limit."""
    case = {"kind": "trace", "device": "gpu", "wire": names.WIRES[0], "variants": VARIANTS}
    measured = rounds_of(worker_pool, case, TRACE)(0)[ALONE]
    assert measured["cpu"] < 0.039 * worker_pool.size


def test_only_the_variants_of_a_case_take_part(worker_pool: WorkerPool) -> None:
    case = {"kind": "collective", "operation": "all_reduce", "size": 4096, "busy": False}
    measured = rounds_of(worker_pool, {**case, "variants": ["gloo-a", "gloo-b", "tls"]})(0)
    assert set(measured) == {"gloo-a", "gloo-b", "tls"}


@pytest.mark.nightly
def test_bfloat16_halves_what_training_sends(worker_pool: WorkerPool) -> None:
    taking_part = ["gloo-a", "gloo-b", "ringfence", "hop-by-hop", ALONE]
    case = {"kind": "training", "model": "gpt2-tiny", "strategy": "ddp", "bucket_mb": 1.0, "variants": taking_part}
    sent = {}
    for wire in names.WIRES:
        measured = rounds_of(worker_pool, {**case, "wire": wire})(0)
        sent[wire] = {name: measured[name]["sent"] for name in taking_part}
        assert sent[wire].pop(ALONE) < 4096
    for name, sent_bytes in sent["bfloat16"].items():
        assert sent_bytes == pytest.approx(sent["float32"][name] / 2, rel=0.05), name


def test_a_collective_of_bfloat16_is_summed_rightly_by_all(worker_pool: WorkerPool) -> None:
    case = {"kind": "collective", "operation": "all_reduce", "size": 1 << 20, "busy": False, "wire": "bfloat16"}
    everyone = [name for name in VARIANTS if name != ALONE]
    assert set(rounds_of(worker_pool, {**case, "variants": everyone})(0)) == set(everyone)


def test_hosts_of_a_killed_study_are_removed_by_the_next() -> None:
    """Their names say which process made them; those of a living one stay."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    orphan, living = f"rfb{ended.pid}-0", f"rfb{os.getpid()}-kept"
    try:
        for name in (orphan, living):
            subprocess.run(["ip", "netns", "add", name], check=True)
        with Hosts(2, None):
            listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    finally:
        for name in (orphan, living):
            subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL)
    assert orphan not in listed
    assert living in listed
    assert f"rfb{os.getpid()}-1" in listed
