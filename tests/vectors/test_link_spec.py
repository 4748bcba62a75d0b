"""The package matches spec/link.md: codes, labels, limits, and the messages of every schedule, implemented from the text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import pytest

from ringfence import keys
from ringfence.collectives import Action, Collective, ScheduleId, Table, build
from ringfence.dataplane.request import _SEGMENTS_PER_PASS, DTYPES, PASS_BYTES, POINT_TO_POINT, REDUCTIONS
from ringfence.link.frames import FRAME_BYTES, Type
from ringfence.link.segments import segment_bytes

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
    passage = FLAT.split("The schedule table has eight thresholds", 1)[1].split(" With n the bytes", 1)[0]
    unit = {"": 1, " KiB": 1 << 10, " MiB": 1 << 20}
    named = re.findall(r"`(\w+)` \[(\d+)( [KM]iB)?\]", passage)
    assert {name: int(count) * unit[of] for name, count, of in named} == asdict(Table())


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
        if name.startswith(("LINK_", "SESSION_", "ORIGIN", "GROUP", "RATCHET", "SEGMENT_KEY", "MACHINE_"))
        and isinstance(value, bytes)
    }
    assert written == defined


def test_limits() -> None:
    assert f"{keys.SEGMENT_BYTES:,}" in SPEC and f"{FRAME_BYTES:,}" in SPEC
    assert f"key_phase = counter >> {keys.KEY_PHASE_SHIFT}" in SPEC
    assert keys.COUNTER_LIMIT == 2**52 and "2^52" in SPEC
    assert PASS_BYTES == 2 << 20 and f"counts segments from {_SEGMENTS_PER_PASS} p" in FLAT
    assert keys.LINK_HELLO_SECONDS == 10 and keys.LINK_PENDING == 256 and keys.LINK_PENDING_PER_ADDRESS == 128


def test_segments() -> None:
    assert "s = min(262,144, max(131,072, 4,096 · ⌈n / 16,384⌉))" in SPEC
    for n in (0, 1, 131_072, 131_073, 262_144, 524_289, 600_001, 2_097_151, 2_097_152, 2_097_153, 99_999_999):
        assert segment_bytes(n) == min(262_144, max(131_072, 4_096 * -(-n // 16_384)))


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


def up_and_down(r: int, size: int, root: int) -> Messages:
    yield from up(binary)(r, size, 0)
    yield from down(binary, 1, forwarded=True)(r, size, 0)


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


SCHEDULES: dict[int, Callable[[int, int, int], Messages]] = {
    1: ring_twice,
    2: doubling,
    3: up_and_down,
    4: ring_of_sums,
    5: distances(1, falling=True),
    6: ring_once,
    7: distances(-1, falling=False),
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
}
ROOTED = {8, 9, 10, 11, 12, 13, 14, 15, 16, 17}


@pytest.mark.parametrize("identifier", sorted(SCHEDULES), ids=lambda code: ScheduleId(code).name.lower())
def test_schedules_send_what_the_spec_says(identifier: int) -> None:
    assert len(SCHEDULES) == len(ScheduleId)
    for size in range(2, 14):
        for root in {0, size // 2, size - 1} if identifier in ROOTED else {0}:
            for rank in range(size):
                steps = build(ScheduleId(identifier), size, rank, root).steps
                found = [
                    Message(step.action is Action.SEND, step.peer, step.label, step.origin)
                    for step in steps
                    if step.peer >= 0
                ]
                expected = list(SCHEDULES[identifier](rank, size, root))
                if size == 2:
                    expected = [message._replace(origin=-1) for message in expected]
                assert in_order(found, True) == in_order(expected, True), (size, root, rank)
                assert in_order(found, False) == in_order(expected, False), (size, root, rank)


def in_order(messages: list[Message], sends: bool) -> list[Message]:
    """The messages of one direction: the spec orders sends and receives only by their dependencies."""
    return [message for message in messages if message.sends is sends]
