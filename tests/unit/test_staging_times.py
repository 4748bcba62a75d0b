"""The times of staged calls: the stages of a call add up to it, whatever its passes overlap."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ringfence.runtime import staging_times
from ringfence.runtime.staging_times import CALL_STAGES, PASS_STAGES


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    made = Clock()
    monkeypatch.setattr(staging_times, "monotonic_ns", made)
    staging_times.start()
    yield made
    staging_times.start()  # from zero
    staging_times.stop()


def test_nothing_is_recorded_unless_started() -> None:
    staging_times.stop()
    assert staging_times.begin() is None


def test_the_stages_of_a_call_add_up_to_its_time(clock: Clock) -> None:
    """Two passes: the second is on the host only 5 after the first was executed."""
    clock.now = 100
    call = staging_times.begin()
    assert call is not None and not staging_times.is_complete()
    clock.now = 110
    call.reached()
    moments = {0: (110, 112, 120, 121, 141, 142, 150), 1: (112, 130, 140, 146, 160, 165, 180)}
    for index, (wanted, *ends) in moments.items():
        clock.now = wanted
        call.wanted(index)
        call.wanted(index)
        for clock.now in ends:
            call.ended(index)
    clock.now = 185
    call.finish()
    found = staging_times.totals()
    assert {stage: found[stage] for stage in CALL_STAGES} == {
        "caller": 10, "fill": 11, "network": 34, "stall": 5, "drain": 25
    }  # fmt: skip
    assert sum(found[stage] for stage in CALL_STAGES) == 185 - 100
    assert {stage: found[stage] for stage in PASS_STAGES} == {
        "slot": 20, "down": 18, "queue": 7, "execute": 34, "back": 6, "up": 23
    }  # fmt: skip
    assert (found["calls"], found["passes"], staging_times.is_complete()) == (1, 2, True)


def test_the_stages_add_up_without_passes_and_if_the_caller_is_late(clock: Clock) -> None:
    """A call that only writes is executed before the caller's stream has reached it."""
    call = staging_times.begin()
    assert call is not None
    call.wanted(0)
    for clock.now in (1, 1, 2, 8):
        call.ended(0)
    clock.now = 20
    call.reached()
    for clock.now in (21, 25):
        call.ended(0)
    call.finish()
    found = staging_times.totals()
    assert {stage: found[stage] for stage in CALL_STAGES} == {
        "caller": 2, "fill": 0, "network": 6, "stall": 0, "drain": 17
    }  # fmt: skip
    empty = staging_times.begin()
    assert empty is not None
    clock.now = 30
    empty.finish()
    assert sum(staging_times.totals()[stage] for stage in CALL_STAGES) == 25 + 5
