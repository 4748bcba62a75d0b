"""Costs: the closed form against a simulation of every rank, and both against what must hold of any cost."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.tests.unit.schedule_simulation import Simulation
from ringfence.collectives import Collective, ScheduleId, build
from ringfence.collectives.counts import count
from ringfence.collectives.passes import PASS_BYTES
from ringfence_lab.plan import hardware, models
from ringfence_lab.plan.cost import collective_cost, staged
from ringfence_lab.plan.hardware import Hardware
from ringfence_lab.plan.schedules import SYMMETRIC, busiest, chain, copied, machines_of, schedule_of, tasks, usual
from ringfence_lab.plan.steps import Question, collective, step
from ringfence_lab.plan.work import FREE, VARIANTS, Cost, load, stage_costs

KIB, MIB = 1 << 10, 1 << 20
RINGS = (ScheduleId.ALL_REDUCE_RING, ScheduleId.ALL_GATHER_RING, ScheduleId.REDUCE_SCATTER_RING)
TREES = (ScheduleId.BROADCAST_TREE,)
CHAINS = (ScheduleId.BROADCAST_CHAIN,)
HALVING = (
    ScheduleId.ALL_REDUCE_HALVING,
    ScheduleId.REDUCE_SCATTER_HALVING,
    ScheduleId.ALL_GATHER_DOUBLING,
    ScheduleId.ALL_REDUCE_HALVING_APART,
)
PRICED = (*HALVING, *RINGS, *TREES, *CHAINS, ScheduleId.ALL_REDUCE_DOUBLING, ScheduleId.BROADCAST_BINOMIAL)
profiles = st.sampled_from(["tdx-10g", "tdx-100g", "tdx-400g", "snp-25g"]).map(hardware.load)


def simulated(
    profile: Hardware, variant: str, identifier: ScheduleId, workers: int, size: float, threads: int = 1
) -> float:
    return Simulation(profile, VARIANTS[variant], identifier, workers, size, threads).seconds()


@settings(max_examples=25, deadline=None)
@given(
    profile=profiles,
    variant=st.sampled_from(["ringfence", "ringfence-unsealed", "plaintext", "hop-by-hop"]),
    identifier=st.sampled_from(RINGS),
    workers=st.integers(2, 64),
    slices=st.sampled_from([1 * KIB, 8 * KIB, 100 * KIB, 256 * KIB, 600 * KIB]),
)
def test_ring_costs_agree_with_the_simulation(
    profile: Hardware, variant: str, identifier: ScheduleId, workers: int, slices: int
) -> None:
    size = slices * workers
    closed = collective_cost(profile, VARIANTS[variant], identifier, workers, size).seconds
    assert closed == pytest.approx(simulated(profile, variant, identifier, workers, size), rel=0.3)


@settings(max_examples=25, deadline=None)
@given(
    profile=profiles,
    identifier=st.sampled_from(PRICED),
    workers=st.sampled_from([2, 4, 7, 8, 16, 31, 32, 64]),
    size=st.sampled_from([4 * KIB, 256 * KIB, 2 * MIB, 6 * MIB]),
)
def test_costs_of_all_schedules_are_near_the_simulation(
    profile: Hardware, identifier: ScheduleId, workers: int, size: int
) -> None:
    closed = collective_cost(profile, VARIANTS["ringfence"], identifier, workers, size).seconds
    assert closed == pytest.approx(simulated(profile, "ringfence", identifier, workers, size), rel=0.45)


def test_rings_and_trees_are_near_the_simulation_on_average() -> None:
    """The tolerances above are for the worst; this is about the usual: half of all within 4 %, nine of ten within 25 %."""
    off = []
    for name in ("tdx-10g", "tdx-100g", "tdx-400g"):
        profile = hardware.load(name)
        for identifier in (ScheduleId.ALL_REDUCE_RING, ScheduleId.ALL_REDUCE_HALVING, ScheduleId.ALL_REDUCE_DOUBLING):
            for workers in (2, 4, 8, 16):
                for size in (64 * KIB, 1 * MIB, 6 * MIB):
                    closed = collective_cost(profile, VARIANTS["ringfence"], identifier, workers, size).seconds
                    off.append(abs(closed / simulated(profile, "ringfence", identifier, workers, size) - 1))
    off.sort()
    assert off[len(off) // 2] < 0.04
    assert off[len(off) * 9 // 10] < 0.25


@pytest.mark.parametrize(
    "identifier", [*RINGS, *HALVING, *TREES, *CHAINS, ScheduleId.BROADCAST_BINOMIAL], ids=lambda i: i.name
)
@pytest.mark.parametrize("workers", [2, 3, 4, 5, 8, 13, 16, 33])
def test_chains_are_as_long_as_in_the_simulation(identifier: ScheduleId, workers: int) -> None:
    """With nothing but latency, a collective takes as many seconds as messages wait for each other."""
    figures = {f"core_{name}": 0.0 for name in ("seal", "open", "send", "receive", "reduce", "copy", "message")}
    only_latency = hardware.load("tdx-100g").with_values(**figures, network_latency=1e6, network_rate=1e9)
    found = Simulation(only_latency, VARIANTS["ringfence"], identifier, workers, 1.0).seconds()
    assert round(found, 3) == sum(link.times for link in chain(identifier, workers))


@settings(deadline=None)
@given(
    identifier=st.sampled_from(
        [ScheduleId.ALL_REDUCE_RING, ScheduleId.ALL_REDUCE_HALVING, ScheduleId.ALL_REDUCE_DOUBLING]
    ),
    workers=st.integers(2, 40),
    size=st.integers(1, 10**8),
)
def test_terms_add_up_and_nothing_is_negative(identifier: ScheduleId, workers: int, size: int) -> None:
    found = collective_cost(hardware.load("tdx-25g"), VARIANTS["ringfence"], identifier, workers, size)
    assert math.isclose(sum(found.terms.values()), found.seconds)
    assert min(found.terms.values()) >= 0
    assert found.terms[found.dominant] == max(found.terms.values())


@settings(deadline=None)
@given(workers=st.integers(2, 200), size=st.integers(1 * KIB, 10**9), more=st.integers(1, 10**9))
def test_more_bytes_never_cost_less_and_sealing_is_never_free(workers: int, size: int, more: int) -> None:
    profile = hardware.load("tdx-100g")
    ring = ScheduleId.ALL_REDUCE_RING
    sealed = collective_cost(profile, VARIANTS["ringfence"], ring, workers, size).seconds
    assert collective_cost(profile, VARIANTS["ringfence"], ring, workers, size + more).seconds >= sealed * 0.999
    assert collective_cost(profile, VARIANTS["plaintext"], ring, workers, size).seconds <= sealed
    assert collective_cost(profile, VARIANTS["ringfence"], ring, workers, size, threads=4).seconds <= sealed


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_bytes_through_each_stage_are_those_of_the_schedules(workers: int) -> None:
    """Against the count that the benchmark's lower bound is made from: over all workers of a ring."""
    counted, alike = busiest(ScheduleId.ALL_REDUCE_RING, workers)
    size = 24 * MIB
    done = load(VARIANTS["ringfence"], counted[0], size)
    each = count(Collective.ALL_REDUCE, workers, size)
    assert alike
    assert (done.sealed, done.opened, done.reduced, done.sent, done.received) == pytest.approx(
        (each.encrypted, each.opened, each.reduced, each.sealed, each.opened)
    )


def test_those_called_symmetric_are() -> None:
    """Every worker of a power of two has the same tasks, so that one of them speaks for all."""
    for identifier in SYMMETRIC:
        first, *others = (tasks(build(identifier, 8, rank)) for rank in range(8))
        assert all(other == first for other in others), identifier.name


LOGARITHMIC = ("BRUCK", "DOUBLING")  # on machines, their workers differ in more than three ways


@pytest.mark.parametrize("machines", [1, 2, 3])
@pytest.mark.parametrize("per_machine", [2, 3, 4, 5])
@pytest.mark.parametrize("identifier", sorted(each for each in SYMMETRIC if not each.name.endswith(LOGARITHMIC)))
def test_the_mean_on_machines_is_that_of_all_workers(identifier: ScheduleId, per_machine: int, machines: int) -> None:
    size = machines * per_machine
    here = machines_of(size, per_machine)
    counted = [tasks(build(identifier, size, rank, machines=here), here[rank // per_machine]) for rank in range(size)]
    every = {task for each in counted for task in each}
    mean = {task: sum(each[task] for each in counted) / size for task in every}
    assert usual(identifier, size, per_machine) == pytest.approx(mean)
    most, _ = busiest(identifier, size, per_machine)
    assert {frozenset(each.items()) for each in most} == {frozenset(each.items()) for each in counted}


def test_one_worker_pays_nothing() -> None:
    profile = hardware.load("tdx-10g")
    assert collective_cost(profile, VARIANTS["ringfence"], ScheduleId.ALL_REDUCE_RING, 1, MIB) is FREE
    assert collective(profile, VARIANTS["ringfence"], "all_reduce", 1, MIB) is FREE
    alone = step(profile, VARIANTS["ringfence"], Question(models.load("gpt2"), 1, compute_seconds=1.0))
    assert alone.seconds == pytest.approx(1.0)


@pytest.mark.parametrize("identifier", PRICED, ids=lambda i: i.name)
def test_workers_that_share_cores_pay_for_it(identifier: ScheduleId) -> None:
    """The simulation and the closed form agree where all workers are on one machine with two cores, trees and rings alike."""
    profile = hardware.load("tdx-100g").with_values(node_workers=64, node_cores=2, core_switch=50, inside_sealed=1)
    for workers in (2, 4, 8):
        for size in (64 * KIB, 4 * MIB, 25 * MIB):
            closed = collective_cost(profile, VARIANTS["ringfence"], identifier, workers, size).seconds
            exact = simulated(profile, "ringfence", identifier, workers, size)
            assert closed == pytest.approx(exact, rel=0.25), (workers, size)


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"])
def test_costs_on_machines_of_several_workers_are_near_the_simulation(operation: str) -> None:
    """What the runtime's table chooses there: half of all within 5 %, all within 40 %."""
    off = []
    for machines, workers in ((1, 2), (1, 4), (2, 2), (2, 4), (3, 3), (4, 2), (8, 4)):
        for cores, switch in ((2, 20), (16, 0)):
            profile = hardware.load("tdx-100g").with_values(node_workers=workers, node_cores=cores, core_switch=switch)
            for size in (4 * KIB, 1 * MIB, 6 * MIB):
                identifier = schedule_of("ringfence", operation, machines * workers, size, workers)
                closed = collective_cost(profile, VARIANTS["ringfence"], identifier, machines * workers, size).seconds
                off.append(abs(closed / simulated(profile, "ringfence", identifier, machines * workers, size) - 1))
    assert statistics.median(off) < 0.05
    assert max(off) < 0.4


@pytest.mark.parametrize(("machines", "workers"), [(1, 4), (2, 4), (3, 2)])
def test_bytes_between_and_inside_machines_are_those_that_the_benchmark_counts(machines: int, workers: int) -> None:
    from ringfence_lab.bench import byte_counts

    size, count = 24 * MIB, machines * workers
    for operation in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"):
        identifier = schedule_of("ringfence", operation, count, size, workers)
        mean = load(VARIANTS["ringfence"], usual(identifier, count, workers), size)
        counted = byte_counts.traffic(Collective[operation.upper()], size, count, machines_of(count, workers))
        assert mean.sent * count == pytest.approx(counted.sealed)


def test_what_several_workers_read_is_copied_once_and_sums_not_at_all() -> None:
    """Of four on a machine, each copies its part in, and three out; sums are written where the next worker reads them."""
    gather, total = (
        load(VARIANTS["ringfence"], usual(identifier, 4, 4), 4.0 * MIB)
        for identifier in (ScheduleId.ALL_GATHER_TWO_LEVELS, ScheduleId.ALL_REDUCE_TWO_LEVELS)
    )
    assert gather.near_copied == pytest.approx((1 + 3) * MIB)
    assert total.near_copied == pytest.approx((1 + 1 + 3) * MIB)  # the first one leaving, the own sum, the others' sums
    assert total.reduced == pytest.approx(3 * MIB) and total.sealed == total.sent == 0


@pytest.mark.parametrize("identifier", PRICED, ids=lambda i: i.name)
def test_core_seconds_are_those_of_all_workers(identifier: ScheduleId) -> None:
    """What each takes of shared cores is the mean of all ranks, not what the busiest does."""
    profile, variant = hardware.load("tdx-100g"), VARIANTS["ringfence"]
    counted = [tasks(build(identifier, 8, rank)) for rank in range(8)]
    spent = [sum(load(variant, each, MIB).terms(stage_costs(profile, variant), variant).values()) for each in counted]
    assert collective_cost(profile, variant, identifier, 8, MIB).cpu == pytest.approx(sum(spent) / 8)


@pytest.mark.parametrize("identifier", [*TREES, *CHAINS, ScheduleId.BROADCAST_BINOMIAL], ids=lambda i: i.name)
def test_the_mean_of_64_workers_speaks_for_more(identifier: ScheduleId) -> None:
    """To within the root's share: in a broadcast, it alone seals."""
    size, variant = 200, VARIANTS["ringfence"]
    exact = [load(variant, tasks(build(identifier, size, rank)), MIB) for rank in range(size)]
    said = load(variant, usual(identifier, size), MIB)
    for stage in said._fields:
        mean = sum(getattr(each, stage) for each in exact) / size
        assert getattr(said, stage) == pytest.approx(mean, rel=0.03, abs=MIB / 32), stage


# -- device tensors -------------------------------------------------------------------------------------------------


GPU = hardware.load("h100-cc").with_values(device_copy_rate=1, device_copy_overhead=0, device_overlap=1)


def staged_seconds(profile: Hardware, whole: float, on_host: float, size: int = 2) -> float:
    found = Cost(on_host, {"wire": on_host}, "network")
    return staged(profile, VARIANTS["ringfence"], ScheduleId.ALL_REDUCE_RING, size, whole, found).seconds


def test_one_pass_adds_its_copies_and_many_hide_them() -> None:
    assert staged_seconds(GPU, 1e6, 0.5) == pytest.approx(0.5 + 2e-3)
    whole, each = 100 * PASS_BYTES, PASS_BYTES / 1e9  # a hundred passes of 17 ms
    assert staged_seconds(GPU, whole, 5.0) == pytest.approx(5.0 + 2 * each)  # the network is the slowest stage
    assert staged_seconds(GPU, whole, 0.1) == pytest.approx(101 * each + 1e-3)  # copies are


def test_copies_that_serialise_are_one_stage() -> None:
    whole, each = 100 * PASS_BYTES, PASS_BYTES / 1e9
    serial = GPU.with_values(device_overlap=0)
    assert staged_seconds(serial, whole, 0.1) == pytest.approx(200 * each + 1e-3)


@pytest.mark.parametrize("size", [2, 8, 64, 16384])
def test_a_pass_has_two_copies_whatever_the_size_of_the_group(size: int) -> None:
    slow = GPU.with_values(device_copy_overhead=1e6, device_copy_rate=1e9)  # a second each
    assert staged_seconds(slow, 4096, 0.0, size) == pytest.approx(2.0)
    assert staged_seconds(slow, 5 * PASS_BYTES, 0.0, size) == pytest.approx(6.0)  # those of the two directions overlap


@pytest.mark.parametrize(("name", "down", "up"), [
    ("ALL_REDUCE_RING", 8, 8), ("ALL_GATHER_RING", 2, 8), ("REDUCE_SCATTER_RING", 8, 2), ("BROADCAST_TREE", 8, 8)
])  # fmt: skip
def test_a_worker_copies_what_it_reads_and_writes(name: str, down: float, up: float) -> None:
    assert copied(ScheduleId[name], 4, 8) == (down, up)


def test_what_copies_add_is_never_negative_and_named() -> None:
    host = GPU.with_values(device_copy_rate=0)
    for whole in (1e3, 1e6, 1e8):
        on_host = collective_cost(host, VARIANTS["ringfence"], ScheduleId.ALL_REDUCE_RING, 4, whole)
        found = collective_cost(GPU, VARIANTS["ringfence"], ScheduleId.ALL_REDUCE_RING, 4, whole)
        assert found.terms["host-device copy"] > 0
        assert found.seconds == pytest.approx(on_host.seconds + found.terms["host-device copy"])
        assert sum(found.terms.values()) == pytest.approx(found.seconds)
