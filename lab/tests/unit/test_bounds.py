"""Lower bounds of collectives: the arithmetic over the schedules, and a measurement of the stages."""

from __future__ import annotations

import os

import pytest

from ringfence_lab.bench.bounds import OPERATIONS, STAGES, Layout, bound, measure

SIZE = 24 << 20
ONE = dict.fromkeys(STAGES, 1.0)
ONLY = {stage: {**dict.fromkeys(STAGES, 0.0), stage: 1.0} for stage in STAGES}


@pytest.mark.parametrize(
    ("operation", "layout", "stage", "bytes_"),
    [
        ("all_reduce", Layout(2, 1), "seal", 2 * SIZE),  # each half is sealed to be added, and sealed as a sum
        ("all_reduce", Layout(2, 1), "add", SIZE),
        ("all_reduce", Layout(4, 1), "seal", 4 * SIZE),  # three hops to the sum, which is sealed once and forwarded
        ("all_reduce", Layout(4, 1), "open", 6 * SIZE),
        ("broadcast", Layout(4, 1), "seal", SIZE),
        ("broadcast", Layout(4, 1), "receive", 3 * SIZE),
        ("all_to_all", Layout(4, 1), "seal", 3 * SIZE),
        ("all_to_all", Layout(2, 2), "seal", 2 * SIZE),
        ("all_reduce", Layout(2, 4), "seal", 2 * SIZE),  # as between two workers
        ("all_reduce", Layout(1, 4), "seal", 0),
        ("all_reduce", Layout(1, 4), "add", 3 * SIZE),
    ],
)
def test_a_bound_is_what_the_schedules_do(operation: str, layout: Layout, stage: str, bytes_: int) -> None:
    found = bound(operation, layout, SIZE, ONLY[stage], cores=1) if bytes_ else bound(operation, layout, SIZE, ONE, 1)
    if bytes_:
        assert found.seconds * 1e9 == pytest.approx(bytes_)
    assert found.shares[stage] == (1.0 if bytes_ else 0.0)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_workers_use_no_more_cores_than_there_are_of_either(operation: str) -> None:
    one, two, eight = (bound(operation, Layout(2, 1), SIZE, ONE, cores).seconds for cores in (1, 2, 8))
    assert one == pytest.approx(2 * two)
    assert two == eight


@pytest.mark.nightly  # test_bench.py has the command in the gate
@pytest.mark.processes
def test_every_stage_is_measured_alone_and_on_all_cores() -> None:
    before = dict(os.environ)
    for vaes in (True, False):
        found = measure(vaes, seconds=0.05)
        assert all(found[state][stage] > 0 for state in ("alone", "busy") for stage in STAGES)
    assert dict(os.environ) == before
