"""The comparison of what both endpoints of each connection recorded."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.errors import RecordError
from ringfence.record import agreement, log
from ringfence.record.agreement import Agreement, Disagreement, Point

FIRST, SECOND = "01" * 32, "02" * 32  # connections


def digest(number: int) -> str:
    return f"{number:064x}"


def chain(rank: int, counts: Iterable[int], connection: str = FIRST, channel: int = 0, sender: int = 0) -> list[Point]:
    """What a worker says of the frames between workers 0 and 1."""
    place = 1 - rank, connection, channel, int(rank != sender)
    return [Point(*place, count, digest(count)) for count in counts]


def changed(points: list[Point], at: int) -> list[Point]:
    return [each._replace(digest=digest(1 << 200)) if each.frames == at else each for each in points]


def compare(*points: Iterable[Any]) -> Agreement:
    return agreement.compare(dict(enumerate(points)))


def test_equal_points_agree() -> None:
    both = [chain(rank, (1, 2, 3)) + chain(rank, (1, 2), SECOND, 1, sender=1) for rank in range(2)]
    assert compare(*both) == Agreement([], compared=2, partial=0, uncompared=0)
    assert compare(*(reversed(each * 2) for each in both)) == Agreement([], 2, 0, 0)
    assert compare([], []) == Agreement([], 0, 0, 0)


def test_the_first_difference_of_a_direction_is_named() -> None:
    ours = chain(0, (1, 2, 4, 5)) + chain(0, (1, 2, 4), SECOND, 1, sender=1)
    theirs = chain(1, (1, 2, 4, 5)) + chain(1, (1, 2, 4), SECOND, 1, sender=1)
    wrong, right = digest(1 << 200), digest(2)
    assert compare(ours, changed(changed(chain(1, (1, 2, 4, 5)), 2), 4)).disagreements == [
        Disagreement(sender=0, receiver=1, connection=FIRST, channel=0, frames=2, sent=right, received=wrong)
    ]
    assert compare(changed(ours, 2), theirs).disagreements == [
        Disagreement(0, 1, FIRST, 0, 2, wrong, right),
        Disagreement(1, 0, SECOND, 1, 2, right, wrong),
    ]


@pytest.mark.parametrize(("sent", "received"), [((1, 2, 4, 7), (1, 2, 4, 6)), ((1, 2), (1, 2, 4)), ((1, 2, 3), (1, 2))])
def test_an_end_that_has_more_is_compared_as_far_as_both_go(sent: tuple[int, ...], received: tuple[int, ...]) -> None:
    assert compare(chain(0, sent), chain(1, received)) == Agreement([], compared=1, partial=1, uncompared=0)


def test_what_only_one_end_recorded_is_counted() -> None:
    ours = chain(0, (1, 2))
    assert compare(ours, []) == compare([], chain(1, (1, 2))) == Agreement([], 0, 0, uncompared=1)
    assert compare(ours, chain(1, (3, 4))) == Agreement([], 0, 0, uncompared=1)
    for other in (chain(1, (1, 2), SECOND), chain(1, (1, 2), channel=1), chain(1, (1, 2), sender=1)):
        assert compare(ours, other) == Agreement([], 0, 0, uncompared=2)


def test_a_pair_of_workers_is_not_taken_for_another() -> None:
    points = {rank: [Point(2 - rank, FIRST, 0, rank // 2, 1, digest(1))] if rank != 1 else [] for rank in range(3)}
    assert agreement.compare(points) == Agreement([], 1, 0, 0)
    points[1] = [Point(0, FIRST, 0, 1, 1, digest(2))]
    assert agreement.compare(points) == Agreement([], 1, 0, 1)


GOOD = Point(1, FIRST, 0, 0, 1, digest(1))


@pytest.mark.parametrize(
    "wrong",
    [
        GOOD[:5],
        (*GOOD, 1),
        GOOD._replace(worker="1"),  # type: ignore[arg-type]
        GOOD._replace(worker=-1),
        GOOD._replace(connection=1),  # type: ignore[arg-type]
        GOOD._replace(connection="0" * 63),
        GOOD._replace(channel=-1),
        GOOD._replace(channel=8),
        GOOD._replace(direction=2),
        GOOD._replace(direction=-1),
        GOOD._replace(frames=1 << 63),
        GOOD._replace(frames=0),
        GOOD._replace(frames=-5),
        GOOD._replace(digest="A" * 64),
        GOOD._replace(digest="0" * 64 + "\n"),
    ],
)
def test_a_log_with_a_malformed_point_is_refused(wrong: Any) -> None:
    def line(point: Any) -> bytes:
        return log.LogEntry("passed", 1, digest(0), 1, {"points": [list(GOOD), list(point)]}).encode()

    assert log.parse(line(GOOD)).fields["points"] == [list(GOOD)] * 2
    with pytest.raises(RecordError, match=r"a point does not have the form of one|a value is too large"):
        log.parse(line(wrong))


@pytest.mark.parametrize("worker", [0, 2, -1])
def test_a_point_of_no_other_worker_is_refused(worker: int) -> None:
    with pytest.raises(RecordError, match=f"worker {worker}, which is no other worker"):
        compare([GOOD, GOOD._replace(worker=worker)], [])


def test_a_log_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(RecordError, match="worker 1 recorded two digests of the same 2 frames"):
        compare([], chain(1, (1, 2)) + changed(chain(1, (2,)), 2))


@given(st.lists(st.integers(1, 40)), st.lists(st.integers(1, 40)), st.sets(st.integers(1, 40)))
def test_any_point_that_both_have_is_compared(sent: list[int], received: list[int], lies: set[int]) -> None:
    theirs = list(
        itertools.chain.from_iterable(
            changed([each], each.frames) if each.frames in lies else [each] for each in chain(1, received)
        )
    )
    found = compare(chain(0, sent), theirs)
    common = set(sent) & set(received)
    assert [each.frames for each in found.disagreements] == sorted(common & lies)[:1]
    assert (found.compared, found.uncompared) == (int(bool(common)), int(bool(sent or received) and not common))
