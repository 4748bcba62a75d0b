"""Compares what both endpoints of each connection recorded of the frames that passed (spec/record.md, 11)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ringfence.errors import RecordError


class Point(NamedTuple):
    """A point in an entry of kind `passed`: what one worker says of one direction of a connection."""

    worker: int  #      at the other end
    connection: str  #  its name
    channel: int
    direction: int  #   0: sent; 1: received
    frames: int  #      that have passed
    digest: str  #      over their tags


class Disagreement(NamedTuple):
    """The first point at which the endpoints of a connection differ. So do all that follow."""

    sender: int
    receiver: int
    connection: str
    channel: int
    frames: int
    sent: str  #      the digest in the sender's log
    received: str  #  that in the receiver's


class Agreement(NamedTuple):
    """The result of a comparison. A connection counts once for each direction in which a worker recorded frames."""

    disagreements: list[Disagreement]
    compared: int  #    directions for which both endpoints recorded the same number of frames at some point
    partial: int  #     of these, those with later points that only one endpoint has: a failure, or a log that was cut
    uncompared: int  #  all others


def compare(points: Mapping[int, Iterable[Point]]) -> Agreement:
    """Compare the points of all workers of one session.

    `points` has every rank of the roster, with no points for a worker whose log is missing; `log.parse` has checked their
    form. Raises RecordError if a point names a worker outside the roster, or contradicts another one in the same log.
    """
    directions: defaultdict[tuple[int, int, str, int], tuple[dict[int, str], dict[int, str]]]
    directions = defaultdict(lambda: ({}, {}))  # the digests of the sender and of the receiver, by number of frames
    for rank, found in points.items():
        for each in found:
            point = Point(*each)
            if point.worker not in points or point.worker == rank:
                what = f"a point that worker {rank} recorded"
                raise RecordError(f"{what} is of worker {point.worker}, which is no other worker of the session")
            ends = (point.worker, rank) if point.direction else (rank, point.worker)
            said = directions[*ends, point.connection, point.channel][point.direction]
            if said.setdefault(point.frames, point.digest) != point.digest:
                raise RecordError(f"worker {rank} recorded two digests of the same {point.frames:,} frames")
    disagreements: list[Disagreement] = []
    compared = partial = 0
    for place, (sent, received) in sorted(directions.items()):
        common = sorted(sent.keys() & received.keys())
        compared += bool(common)
        partial += bool(common) and max(*sent, *received) > common[-1]
        differing = [frames for frames in common if sent[frames] != received[frames]]
        if differing:
            disagreements.append(Disagreement(*place, differing[0], sent[differing[0]], received[differing[0]]))
    return Agreement(disagreements, compared, partial, len(directions) - compared)
