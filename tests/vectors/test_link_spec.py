"""The package matches spec/link.md: codes, labels, limits, and the messages of every schedule, implemented from the text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence import keys
from ringfence.collectives import Action, Collective, Schedule, ScheduleId, Thresholds, build, choose
from ringfence.collectives.passes import OF_ONE_TENSOR, PASS_BYTES, SEGMENTS_PER_PASS, passes
from ringfence.dataplane.request import DTYPES, POINT_TO_POINT, REDUCTIONS
from ringfence.dataplane.shared import shared_bytes
from ringfence.link.frames import FRAME_BYTES, Type
from ringfence.link.segments import segment_bytes
from ringfence.machines import Machines

SPEC = (Path(__file__).parents[2] / "spec" / "link.md").read_text()
FLAT = " ".join(SPEC.split())


def listed(start: str, end: str) -> dict[int, str]:
    """Parse `0 name, 1 name, …` in a passage of the spec."""
    passage = re.sub(r"\([^)]*\)", "", FLAT.split(start, 1)[1].split(end, 1)[0])
    return {int(code): name.strip(" .") for code, name in re.findall(r"(\d+) ([^,]+)", passage)}


def plain(name: str) -> str:
    return re.sub(r"[ -]", "_", name).lower()


# -- codes, labels, limits ---------------------------------------------------------------------------------------------


def test_dtypes_and_reductions() -> None:
    assert listed("Dtypes:", " Elements travel") == dict(enumerate(DTYPES))
    short = {"and": "band", "or": "bor", "xor": "bxor", "average": "avg"}
    named = listed("Reductions:", " Dtypes:")
    assert [short.get(name, name) for name in named.values()] == list(REDUCTIONS)
    assert list(named) == list(range(len(REDUCTIONS)))


def test_schedules() -> None:
    named = {code: plain(name) for code, name in listed("Schedules:", "A number never").items()}
    assert named == {int(each): each.name.lower() for each in ScheduleId}


def test_the_defaults_of_the_schedule_table() -> None:
    passage = FLAT.split("The schedule table has twelve numbers", 1)[1].split(" With n the bytes", 1)[0]
    unit = {"": 1, " KiB": 1 << 10, " MiB": 1 << 20}
    named = re.findall(r"`(\w+)` \[(\d+)( [KM]iB)?\]", passage)
    assert {name: int(count) * unit[of] for name, count, of in named} == asdict(Thresholds())


def test_frame_types() -> None:
    assert listed("| type |", "|") == {int(each): each.name for each in Type}


def test_operations() -> None:
    rows = SPEC.split("| operation | | elements |")[1].split("\n\n")[0]
    named = {int(code): plain(name.strip()) for code, name in re.findall(r"^\| (\d+) \| ([^|]+)\|", rows, re.M)}
    assert named == {**{int(each): each.name.lower() for each in Collective}, POINT_TO_POINT: "point_to_point"}


def test_spec_lists_every_key_label() -> None:
    written = {f"ringfence/1 {purpose}".encode() + b"\0" for purpose in re.findall(r'L\("([^"]+)"\)', SPEC)}
    defined = {
        value
        for name, value in vars(keys).items()
        if name.startswith(("LINK_", "SESSION_", "ORIGIN", "GROUP", "RATCHET", "SEGMENT_KEY", "MACHINE_", "LOCAL_"))
        and isinstance(value, bytes)
    }
    assert written == defined


def test_limits() -> None:
    assert f"{keys.SEGMENT_BYTES:,}" in SPEC and f"{FRAME_BYTES:,}" in SPEC
    assert f"key_phase = counter >> {keys.KEY_PHASE_SHIFT}" in SPEC
    assert keys.COUNTER_LIMIT == 2**52 and "2^52" in SPEC
    assert PASS_BYTES == 16 << 20 and "w = 16 MiB" in SPEC and f"counts segments from {SEGMENTS_PER_PASS} p" in FLAT
    assert shared_bytes(1) == 64 * keys.SEGMENT_BYTES and "the greater of 64 and 4 N" in FLAT
    assert shared_bytes(40) == 160 * keys.SEGMENT_BYTES and keys.SHARED_LIMIT_BYTES == 64 << 20
    assert f"HOP or PAYLOAD of at least {keys.SHARED_FROM_BYTES:,} bytes" in FLAT
    assert keys.SHARED_LINK_SLOTS == 8 and "in lane 5, n is 8" in FLAT
    assert keys.LINK_HELLO_SECONDS == 10 and keys.LINK_PENDING == 256 and keys.LINK_PENDING_PER_ADDRESS == 128


def test_segments() -> None:
    assert "s = min(262,144, max(131,072, 4,096 · ⌈n / 16,384⌉))" in SPEC
    for n in (0, 1, 131_072, 131_073, 262_144, 524_289, 600_001, 2_097_151, 2_097_152, 2_097_153, 99_999_999):
        assert segment_bytes(n) == min(262_144, max(131_072, 4_096 * -(-n // 16_384)))


def up_to(value: int, step: int) -> int:
    return -(-value // step)


@given(st.sampled_from(list(Collective)[:7]), st.integers(0, 1 << 34), st.integers(1, 20_000), st.integers(1, 8))
def test_passes(kind: Collective, N: int, P: int, channels: int) -> None:
    C = channels if N > 2 << 20 else 1
    w = 16 << 20 if kind in OF_ONE_TENSOR else max(64, 64 * ((16 << 20) // (P + 1) // 64))
    m = max(C, C * up_to(N, w * C))
    e = max(64, 64 * up_to(N, 64 * m))
    assert passes(kind, P, N, channels, 2 << 20) == (max(C, C * up_to(N, e * C)), e, C)


# -- the messages of section 11 ----------------------------------------------------------------------------------------


class Message(NamedTuple):
    sends: bool
    peer: int
    label: int
    origin: int = -1


Messages = Iterator[Message]


def forth(peer: int, label: int, origin: int = -1) -> Message:
    return Message(True, peer, label, origin)


def back(peer: int, label: int, origin: int = -1) -> Message:
    return Message(False, peer, label, origin)


def bits(size: int) -> int:
    return (size - 1).bit_length()


def ring_twice(r: int, size: int, root: int) -> Messages:
    for t in range(size - 1):
        yield forth((r + 1) % size, (r - 1 - t) % size)
        yield back((r - 1) % size, (r - 2 - t) % size)
    for t in range(size - 1):
        leaving, arriving = (r - t) % size, (r - 1 - t) % size
        yield forth((r + 1) % size, size + leaving, leaving)
        yield back((r - 1) % size, size + arriving, arriving)


def doubling(r: int, size: int, root: int) -> Messages:
    power = 1
    while 2 * power <= size:
        power *= 2
    fold = size - power
    if r < 2 * fold and r % 2:
        yield forth(r - 1, 0)
        yield back(r - 1, 1)
        return
    if r < 2 * fold:
        yield back(r + 1, 0)
    block = r // 2 if r < 2 * fold else r - fold
    step = 1
    while step < power:
        other = block ^ step
        peer = 2 * other if other < fold else other + fold
        yield forth(peer, 0)
        yield back(peer, 0)
        step *= 2
    if r < 2 * fold:
        yield forth(r + 1, 1)


def binary(relative: int, size: int) -> tuple[int, list[int]]:
    return (relative - 1) // 2, [child for child in (2 * relative + 1, 2 * relative + 2) if child < size]


def chain(relative: int, size: int) -> tuple[int, list[int]]:
    return relative - 1, [relative + 1] if relative + 1 < size else []


def binomial(relative: int, size: int) -> tuple[int, list[int]]:
    below = bits(size) if relative == 0 else (relative & -relative).bit_length() - 1
    return relative & (relative - 1), [relative + 2**k for k in range(below) if relative + 2**k < size]


Tree = Callable[[int, int], tuple[int, list[int]]]


def down(tree: Tree, label: int, forwarded: bool, farthest_first: bool = False) -> Callable[[int, int, int], Messages]:
    def messages(r: int, size: int, root: int) -> Messages:
        relative, origin = (r - root) % size, root if forwarded else -1
        parent, children = tree(relative, size)
        if relative:
            yield back((root + parent) % size, label, origin)
        for child in reversed(children) if farthest_first else children:
            yield forth((root + child) % size, label, origin)

    return messages


def up(tree: Tree) -> Callable[[int, int, int], Messages]:
    def messages(r: int, size: int, root: int) -> Messages:
        relative = (r - root) % size
        parent, children = tree(relative, size)
        for child in children:
            yield back((root + child) % size, 0)
        if relative:
            yield forth((root + parent) % size, 0)

    return messages


def opening(r: int, size: int, root: int) -> Messages:
    yield from up(binomial)(r, size, 0)
    yield from down(binomial, 1, forwarded=False, farthest_first=True)(r, size, 0)


def ring_of_sums(r: int, size: int, root: int) -> Messages:
    yield forth((r + 1) % size, (r - 1) % size)
    for t in range(size - 2):
        yield back((r - 1) % size, (r - 2 - t) % size)
        yield forth((r + 1) % size, (r - 2 - t) % size)
    yield back((r - 1) % size, r)


def ring_once(r: int, size: int, root: int) -> Messages:
    for t in range(size - 1):
        yield forth((r + 1) % size, (r - t) % size, (r - t) % size)
        yield back((r - 1) % size, (r - 1 - t) % size, (r - 1 - t) % size)


def distances(sign: int, falling: bool) -> Callable[[int, int, int], Messages]:
    def messages(r: int, size: int, root: int) -> Messages:
        turns = range(bits(size))
        for k in reversed(turns) if falling else turns:
            yield forth((r + sign * 2**k) % size, k)
            yield back((r - sign * 2**k) % size, k)

    return messages


def to_root(r: int, size: int, root: int) -> Messages:
    if r != root:
        yield forth(root, 0)
    else:
        yield from (back((root + relative) % size, 0) for relative in range(1, size))


def from_root(r: int, size: int, root: int) -> Messages:
    if r != root:
        yield back(root, 0)
    else:
        yield from (forth((root + relative) % size, 0) for relative in range(1, size))


def straight(r: int, size: int, root: int) -> Messages:
    for t in range(1, size):
        yield forth((r + t) % size, 0)
        yield back((r - t) % size, 0)


def halved(r: int, size: int, apart: bool) -> Messages:
    for k in range((size - 1).bit_length() - 1, -1, -1):
        d = 2**k
        c = min(d, size - d)
        for label in labels(r + d, c, size, k, 0, apart):
            yield forth((r + d) % size, label)
        for label in labels(r, c, size, k, 0, apart):
            yield back((r - d) % size, label)


def doubled(r: int, size: int, apart: bool) -> Messages:
    rounds = (size - 1).bit_length()
    b = size if apart else 2 * rounds
    for k in range(rounds):
        d = 2**k
        c = min(d, size - d)
        for label in labels(r - c + 1, c, size, k, b, apart):
            yield forth((r + d) % size, label, label - b if apart else -1)
        for label in labels(r - d - c + 1, c, size, k, b, apart):
            yield back((r - d) % size, label, label - b if apart else -1)


def labels(q: int, c: int, size: int, k: int, b: int, apart: bool) -> list[int]:
    """Of the messages that carry c parts from position q on."""
    q %= size
    if apart:
        return [b + (q + i) % size for i in range(c)]
    return [b + 2 * k + number for number in range(1 if q + c <= size else 2)]


def both(r: int, size: int, apart: bool) -> Messages:
    yield from halved(r, size, apart)
    yield from doubled(r, size, apart)


def circle(messages: Callable[[int, int, bool], Messages], apart: bool) -> Callable[[int, int, int], Messages]:
    return lambda r, size, root: messages(r, size, apart)


def rows(
    between: Callable[[int, int, bool], Messages], reduces: bool, gathers: bool
) -> Callable[[Machines, int, int], Messages]:
    def messages(machines: Machines, r: int, root: int) -> Messages:
        s, size = Spread(machines, r), sum(map(len, machines))
        for t in range(1, s.L) if reduces else ():
            yield forth(s.w(s.m, s.l + 1), (s.l - t) % s.L * s.M)
            yield back(s.w(s.m, s.l - 1), (s.l - t - 1) % s.L * s.M)
        for sends, peer, label, _ in between(s.m, s.M, False):
            yield Message(sends, s.w(peer, s.l), label, -1)
        for u in range(1, s.L) if gathers else ():
            yield forth(s.w(s.m, s.l + u), size + s.l * s.M)
            yield back(s.w(s.m, s.l - u), size + (s.l - u) % s.L * s.M)

    return messages


class Spread:
    """Members on machines: w(m, l), and the place of one of them."""

    def __init__(self, machines: Machines, r: int) -> None:
        self.machines = machines
        self.m = next(m for m, members in enumerate(machines) if r in members)
        self.l = machines[self.m].index(r)
        self.M, self.L = len(machines), len(machines[self.m])

    def w(self, m: int, l: int) -> int:  # noqa: E741 (as in the text)
        members = self.machines[m % self.M]
        return members[l % len(members)]


def two_levels_of_sums(machines: Machines, r: int, root: int) -> Messages:
    s, size = Spread(machines, r), sum(map(len, machines))
    m, l, M, L = s.m, s.l, s.M, s.L  # noqa: E741

    def number(member: int, machine: int) -> int:
        return member % L * M + machine % M

    for t in range(1, L):
        for u in range(1, M + 1):
            yield forth(s.w(m, l + 1), number(l - t, m - u))
            yield back(s.w(m, l - 1), number(l - t - 1, m - u))
    for t in range(1, M):
        yield forth(s.w(m + 1, l), number(l, m - t))
        yield back(s.w(m - 1, l), number(l, m - t - 1))
    for t in range(M - 1):
        leaving, arriving = s.w(m - t, l), s.w(m - t - 1, l)
        yield forth(s.w(m + 1, l), size + leaving, leaving)
        yield back(s.w(m - 1, l), size + arriving, arriving)
    for t in range(M):
        for u in range(1, L):
            yield forth(s.w(m, l + u), size + number(l, m - t))
            yield back(s.w(m, l - u), size + number(l - u, m - t))


def two_levels_scattered(machines: Machines, r: int, root: int) -> Messages:
    s = Spread(machines, r)
    for t in range(1, s.L):
        for u in range(1, s.M + 1):
            yield forth(s.w(s.m, s.l + 1), s.w(s.m - u, s.l - t))
            yield back(s.w(s.m, s.l - 1), s.w(s.m - u, s.l - t - 1))
    for t in range(1, s.M):
        yield forth(s.w(s.m + 1, s.l), s.w(s.m - t, s.l))
        yield back(s.w(s.m - 1, s.l), s.w(s.m - t - 1, s.l))


def two_levels_gathered(machines: Machines, r: int, root: int) -> Messages:
    s = Spread(machines, r)
    for t in range(s.M - 1):
        leaving, arriving = s.w(s.m - t, s.l), s.w(s.m - t - 1, s.l)
        yield forth(s.w(s.m + 1, s.l), leaving, leaving)
        yield back(s.w(s.m - 1, s.l), arriving, arriving)
    for t in range(s.M):
        for u in range(1, s.L):
            yield forth(s.w(s.m, s.l + u), s.w(s.m - t, s.l))
            yield back(s.w(s.m, s.l - u), s.w(s.m - t, s.l - u))


def two_levels_exchanged(machines: Machines, r: int, root: int) -> Messages:
    s = Spread(machines, r)
    for u in range(1, s.L):
        yield forth(s.w(s.m, s.l + u), 0)
        yield back(s.w(s.m, s.l - u), 0)
    for t in range(1, s.M):
        yield forth(s.w(s.m + t, s.l), 1)
        yield back(s.w(s.m - t, s.l), 1)


def leaders_and_members(machines: Machines, r: int, root: int) -> tuple[list[int], list[int]]:
    home, mine = Spread(machines, root), Spread(machines, r)
    leaders = [home.w(home.m + k, home.l) for k in range(home.M)]
    first = machines[mine.m].index(home.w(mine.m, home.l))
    return leaders, [mine.w(mine.m, first + k) for k in range(mine.L)]


def two_levels_down(machines: Machines, r: int, root: int) -> Messages:
    leaders, members = leaders_and_members(machines, r, root)
    if r != members[0]:
        yield back(members[0], 0)
        return
    place = leaders.index(r)
    if place:
        yield back(leaders[place - 1], 0, root)
    if place + 1 < len(leaders):
        yield forth(leaders[place + 1], 0, root)
    yield from (forth(member, 0) for member in members[1:])


def two_levels_up(machines: Machines, r: int, root: int) -> Messages:
    leaders, members = leaders_and_members(machines, r, root)
    place = members.index(r)
    if place + 1 < len(members):
        yield back(members[place + 1], 0)
    if place:
        yield forth(members[place - 1], 0)
        return
    machine = leaders.index(r)
    if machine + 1 < len(leaders):
        yield back(leaders[machine + 1], 0)
    if machine:
        yield forth(leaders[machine - 1], 0)


SCHEDULES: dict[int, Callable[[int, int, int], Messages]] = {
    1: ring_twice,
    2: doubling,
    4: ring_of_sums,
    6: ring_once,
    8: down(binomial, 1, forwarded=False, farthest_first=True),
    9: down(chain, 1, forwarded=True),
    10: down(binary, 1, forwarded=True),
    11: up(binomial),
    12: up(chain),
    13: up(binary),
    14: up(binomial),
    15: to_root,
    16: down(binomial, 0, forwarded=False, farthest_first=True),
    17: from_root,
    18: distances(1, falling=True),
    19: straight,
    20: distances(1, falling=False),
    21: opening,
    27: circle(both, apart=False),
    28: circle(both, apart=True),
    29: circle(halved, apart=False),
    30: circle(halved, apart=True),
    31: circle(doubled, apart=False),
    32: circle(doubled, apart=True),
}
ON_MACHINES: dict[int, Callable[[Machines, int, int], Messages]] = {
    22: two_levels_of_sums,
    23: two_levels_scattered,
    24: two_levels_gathered,
    25: two_levels_down,
    26: two_levels_up,
    33: rows(both, reduces=True, gathers=True),
    34: rows(halved, reduces=True, gathers=False),
    35: rows(doubled, reduces=False, gathers=True),
    36: two_levels_exchanged,
}
SPREADS: list[Machines] = [
    ((0, 1),),
    ((0, 1, 2, 3),),
    ((0, 1), (2, 3)),
    ((0, 2), (1, 3)),
    ((0, 1, 2, 3), (4, 5, 6, 7)),
    ((0, 3), (1, 5), (2, 4)),
    ((0, 4, 8), (1, 5, 9), (2, 6, 10), (3, 7, 11)),
    tuple((machine, machine + 9) for machine in range(9)),
]
UNEVEN: list[Machines] = [((0, 1), (2,)), ((0, 3, 4), (1,), (2, 5))]
ROOTED = {8, 9, 10, 11, 12, 13, 14, 15, 16, 17}


@pytest.mark.parametrize("identifier", sorted(SCHEDULES), ids=lambda code: ScheduleId(code).name.lower())
def test_schedules_send_what_the_spec_says(identifier: int) -> None:
    assert len(SCHEDULES) + len(ON_MACHINES) == len(ScheduleId)
    for size in range(2, 14):
        for root in {0, size // 2, size - 1} if identifier in ROOTED else {0}:
            for rank in range(size):
                schedule = build(ScheduleId(identifier), size, rank, root)
                compare(schedule, list(SCHEDULES[identifier](rank, size, root)), has_origins=size > 2)


@pytest.mark.parametrize("identifier", sorted(ON_MACHINES), ids=lambda code: ScheduleId(code).name.lower())
def test_schedules_on_machines_send_what_the_spec_says(identifier: int) -> None:
    for machines in SPREADS + UNEVEN if identifier in (25, 26) else SPREADS:
        size = sum(map(len, machines))
        for root in range(size) if identifier in (25, 26) else (0,):
            for rank in range(size):
                schedule = build(ScheduleId(identifier), size, rank, root, machines=machines)
                expected = list(ON_MACHINES[identifier](machines, rank, root))
                compare(schedule, expected, has_origins=len(machines) > 2)


@pytest.mark.parametrize("identifier", [1, 4, 6], ids=lambda code: ScheduleId(code).name.lower())
def test_rings_are_ordered_by_machine(identifier: int) -> None:
    for machines in SPREADS + UNEVEN:
        order = [member for members in machines for member in members]
        for rank in order if len(machines) > 1 else ():
            size, place = len(order), order.index(rank)
            first = size if identifier == 1 else 0  # labels from here on are of the second round
            expected = [
                Message(
                    each.sends,
                    order[each.peer],
                    first + order[each.label - first] if first and each.label >= first else order[each.label],
                    -1 if each.origin < 0 else order[each.origin],
                )
                for each in SCHEDULES[identifier](place, size, 0)
            ]
            compare(build(ScheduleId(identifier), size, rank, machines=machines), expected, has_origins=size > 2)


@pytest.mark.parametrize("machines", SPREADS + UNEVEN, ids=str)
def test_machines_choose_schedules(machines: Machines) -> None:
    even, size = len({len(members) for members in machines}) == 1, sum(map(len, machines))
    two_levels = (22, 23, 24) if len(machines) <= 7 else (33, 34, 35)
    large = dict(zip((0, 2, 3), two_levels, strict=True)) if even else {}
    bundled = even and size >= 16 and len(machines) > 1
    for kind in Collective:
        for bytes_ in (4096, 1 << 20, 1 << 26):
            flat = choose(kind, size, 0, 0, bytes_, Thresholds()).identifier
            found = choose(kind, size, 0, 0, bytes_, Thresholds(), machines=machines)
            expected = {9: 25, 12: 26}.get(flat, flat)
            if kind is Collective.ALL_TO_ALL and bundled and bytes_ <= 128 * 1024 * size:
                expected = 36 if len(machines) < 16 or bytes_ > 4096 * size else 18
            assert found.identifier == (large.get(kind, expected) if bytes_ > 1 << 19 else expected)
            if len(machines) == 1:
                assert all(step.origin < 0 for step in found.steps)


def compare(schedule: Schedule, expected: list[Message], has_origins: bool) -> None:
    if not has_origins:
        expected = [message._replace(origin=-1) for message in expected]
    found = [
        Message(step.action is Action.SEND, step.peer, step.label, step.origin)
        for step in schedule.steps
        if step.peer >= 0
    ]
    assert in_order(found, True) == in_order(expected, True), schedule
    assert in_order(found, False) == in_order(expected, False), schedule


def in_order(messages: list[Message], sends: bool) -> list[Message]:
    """The messages of one direction: the spec orders sends and receives only by their dependencies."""
    return [message for message in messages if message.sends is sends]
