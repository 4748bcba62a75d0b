"""The benchmark's workers: every contender computes the right numbers, moves them over TCP, and is measured as one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from ringfence.lab.bench import names
from ringfence.lab.bench.names import necessary_bytes
from ringfence.lab.bench.worker_pool import BenchError, Crew, Seat

SIZE = 120_000  # bytes; a whole number of parts for 2, 3 and 4 workers
DOUBLING = "ringfence-doubling"  # sends more than is necessary, in fewer steps
TRANSPORTS = [name for name in names.CONTENDERS if name not in (*names.BASELINE, DOUBLING)]


@pytest.fixture(scope="module", params=[2, 4])
def crew(request: pytest.FixtureRequest) -> Iterator[Crew]:
    with Crew([Seat()] * request.param, list(names.CONTENDERS)) as workers:
        yield workers


@pytest.mark.parametrize("operation", names.OPERATIONS)
def test_every_contender_computes_every_collective_and_is_measured(crew: Crew, operation: str) -> None:
    """`prepare` raises unless every contender's result is right."""
    taking_part = crew.tell("prepare", operation=operation, size=SIZE)[0]["contenders"]
    rings = {"plain-ring", "hop-by-hop", "tls"}
    assert set(taking_part) == set(names.CONTENDERS) - (rings if operation == "all_to_all" else set())
    measured = crew.measure("round", turns=[(name, 4) for name in taking_part], busy=False)
    for name in taking_part:
        assert measured[name]["seconds"] > 0
        assert measured[name]["cpu"] > 0
        assert measured[name]["sent"] >= necessary_bytes(operation, SIZE, crew.size) * 0.999, name


def test_sealed_bytes_on_the_wire_are_the_payload_and_little_more(crew: Crew) -> None:
    size = 4 << 20
    crew.tell("prepare", operation="all_reduce", size=size)
    rounds = [crew.measure("round", turns=[(name, 2) for name in TRANSPORTS], busy=False) for _ in range(3)]
    for name in TRANSPORTS:
        sent = min(measured[name]["sent"] for measured in rounds)  # the kernel counts what it sends again, too
        assert sent == pytest.approx(necessary_bytes("all_reduce", size, crew.size), rel=0.01), name


def test_a_busy_caller_is_measured_too(crew: Crew) -> None:
    crew.tell("prepare", operation="all_reduce", size=SIZE)
    measured = crew.measure("round", turns=[(name, 1) for name in names.CONTENDERS], busy=True)
    assert set(measured) == set(names.CONTENDERS)


def test_the_stages_of_a_profile_add_up_to_the_whole(crew: Crew) -> None:
    crew.tell("prepare", operation="all_reduce", size=8 << 20)
    measured = crew.measure("round", turns=[(names.PROFILED, 3), ("ringfence", 3)], busy=False)
    stages = measured[names.PROFILED]["stages"]
    assert set(stages) == {"seal", "open", "lock", "reduce", "send", "receive", "wait", "rest"}
    assert all(share > 0 for share in stages.values())
    assert sum(stages.values()) == pytest.approx(1)
    assert "stages" not in measured["ringfence"]


def test_the_same_model_is_trained_by_every_contender(crew: Crew) -> None:
    facts = crew.tell("prepare_training", model="gpt2-tiny", strategy="ddp", bucket_mb=1.0)[0]
    gradients = 4 * facts["parameters"] * 2 * (crew.size - 1)
    measured = crew.measure("train", turns=[(name, 2) for name in names.CONTENDERS])
    for name in (*names.BASELINE, *TRANSPORTS):
        assert measured[name]["sent"] == pytest.approx(gradients, rel=0.05), name
    assert measured[DOUBLING]["sent"] >= gradients


def test_fsdp2_is_trained_over_every_process_group() -> None:
    with Crew([Seat()] * 2, list(names.GROUPS)) as crew:
        crew.tell("prepare_training", model="gpt2-tiny", strategy="fsdp2", bucket_mb=0.0)
        measured = crew.measure("train", turns=[(name, 1) for name in names.GROUPS])
    assert all(measured[name]["sent"] > 1 << 20 for name in names.GROUPS)


def test_what_a_copy_of_the_tensor_takes_shows_as_memory_beyond_it() -> None:
    """The rings keep a chunk beside the tensor, half of it with two workers; hop by hop two sealed chunks more."""
    size = 64 << 20
    with Crew([Seat()] * 2, ["gloo-a", "ringfence", "plain-ring", "hop-by-hop"]) as crew:
        beyond = {}
        for name in ("ringfence", "plain-ring", "hop-by-hop"):
            warm = crew.tell("warm", name=name)
            swollen = crew.tell("swell", name=name, size=size)
            beyond[name] = [now["peak"] - then["warm"] - size for then, now in zip(warm, swollen, strict=True)]
            assert all(each["links"] >= 1 and each["socket_buffers"] > 0 for each in swollen)
    assert max(beyond["ringfence"]) < size // 4
    assert min(beyond["plain-ring"]) > size // 2 * 0.95  # received beside
    assert min(beyond["hop-by-hop"]) > size * 1.45  # and two sealed chunks


def test_a_worker_that_cannot_go_on_is_named_with_its_reason() -> None:
    with Crew([Seat()] * 2, ["gloo-a", "gloo-b"]) as crew, pytest.raises(BenchError, match=r"worker \d .*KeyError"):
        crew.tell("round", turns=[("nobody", 1)], busy=False)


def test_the_choice_of_the_data_plane_reaches_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGFENCE_CORE", "python")
    with pytest.raises(BenchError, match=r"a profile needs the compiled data plane; RINGFENCE_CORE .*; unset it"):
        Crew([Seat()] * 2, [*names.BASELINE, names.PROFILED])


def test_a_worker_that_dies_is_noticed_while_the_others_wait_for_it() -> None:
    with Crew([Seat()] * 2, ["gloo-a", "gloo-b"]) as crew:
        crew.tell("prepare", operation="all_reduce", size=4096)
        os.kill(crew.processes[1], signal.SIGKILL)
        with pytest.raises(BenchError, match=r"worker 1 .* ended early|worker 0 .*onnection"):
            crew.tell("round", turns=[("gloo-a", 1)], busy=False)
