"""What an attacker on the wire can do to a link: each blow is dealt to one unit, and says what goes on in its place.

A blow returns the bytes that travel on, or None when there is nothing here to deal it with; it is then dealt to the
next unit.
"""

from __future__ import annotations

from collections.abc import Iterable

from ringfence.keys import SEGMENT_BYTES
from ringfence.link.frames import HEADER_BYTES, Type, pack_header
from tests.attack.attacker import Attack, Recording, Seat
from tests.attack.wire_messages import Kind, Unit, Wire

# -- changing what is there -----------------------------------------------------------------------------------------


def flip_a_bit(seat: Seat, wire: Wire, unit: Unit) -> bytes | None:
    changed = bytearray(unit.data)
    changed[_somewhere(seat, unit)] ^= 1 << seat.draw.randrange(8)
    return bytes(changed)


def change_the_header(seat: Seat, wire: Wire, unit: Unit) -> bytes | None:
    """A field gets another plausible value; the layout stays valid."""
    if unit.kind is not Kind.FRAME:
        return None
    header = unit.header
    name = seat.draw.choice([name for name in header._fields if name != "unused"])
    old = getattr(header, name)
    if isinstance(old, bytes):
        new: object = bytes([old[0] ^ 1]) + old[1:]
    elif name == "type":
        new = seat.draw.choice([kind for kind in Type if kind != old])
    elif name == "length":
        new = min(max(0, old + seat.draw.choice([-16, -1, 1, 16, 4096])), SEGMENT_BYTES) if old else 16
    else:
        new = old + 1 if old < 1000 else old - 1
    return pack_header(*header._replace(**{name: new})) + unit.data[HEADER_BYTES:]


def truncate(seat: Seat, wire: Wire, unit: Unit) -> bytes | None:
    seat.put(wire, unit.data[: seat.draw.randrange(len(unit.data))])
    seat.cut(wire)
    return b""


def _somewhere(seat: Seat, unit: Unit) -> int:
    """A position in the header, in the payload or in the last tag, each as likely as the others."""
    end = len(unit.data)
    first = HEADER_BYTES if unit.kind is Kind.FRAME else 0
    regions = [range(first), range(first, end - 16), range(end - 16, end)]
    return seat.draw.choice(seat.draw.choice([region for region in regions if region]))


# -- leaving out, repeating, reordering -----------------------------------------------------------------------------


def drop(seat: Seat, wire: Wire, unit: Unit) -> bytes | None:
    return b""


def drop_bytes(seat: Seat, wire: Wire, unit: Unit) -> bytes | None:
    start = seat.draw.randrange(len(unit.data))
    return unit.data[:start] + unit.data[start + seat.draw.choice([1, 16, 88, 104]) :]


def replay(seat: Seat, wire: Wire, unit: Unit) -> bytes | None:
    return unit.data + unit.data


def replay_an_older_one(seat: Seat, wire: Wire, unit: Unit) -> bytes | None:
    return unit.data + seat.draw.choice(wire.passed).data if wire.passed else None


def reorder(seat: Seat, wire: Wire, unit: Unit) -> bytes | None:
    wire.held = unit.data  # goes behind the next one
    return b""


# -- adding ---------------------------------------------------------------------------------------------------------


def inject_garbage(seat: Seat, wire: Wire, unit: Unit) -> bytes | None:
    return seat.draw.randbytes(seat.draw.choice([1, 16, 32, 104, 600])) + unit.data


def inject_a_forged_frame(seat: Seat, wire: Wire, unit: Unit) -> bytes | None:
    """A header that would be believed, and random bytes where ciphertext and tags belong."""
    if unit.kind is not Kind.FRAME:
        return None
    forged = unit.data[:HEADER_BYTES] + seat.draw.randbytes(len(unit.data) - HEADER_BYTES)
    return forged + unit.data if seat.draw.random() < 0.5 else forged


# -- from another place ---------------------------------------------------------------------------------------------


def from_another_run(seat: Seat, wire: Wire, unit: Unit) -> bytes | None:
    return _recorded(seat, seat.strike.other_run, wire, unit)


def from_another_generation(seat: Seat, wire: Wire, unit: Unit) -> bytes | None:
    return _recorded(seat, seat.strike.other_generation, wire, unit)


def from_another_group(seat: Seat, wire: Wire, unit: Unit) -> bytes | None:
    return _from(seat, unit, (w for w in _alike(seat, wire) if _differs(w, wire, "group")))


def from_another_peer(seat: Seat, wire: Wire, unit: Unit) -> bytes | None:
    others = (w for w in _alike(seat, wire) if _differs(w, wire, "sender") or _differs(w, wire, "receiver"))
    return _from(seat, unit, others)


def from_the_other_direction(seat: Seat, wire: Wire, unit: Unit) -> bytes | None:
    """From the connection that the peer dialled, or from the other half of this one."""
    place = wire.place
    if place is None:
        return None
    back = (place.receiver, place.sender)
    opposite = (w for w in seat.wires if w.place and w is not wire and (w.place.sender, w.place.receiver) == back)
    return _from(seat, unit, (*opposite, *(w for w in seat.wires if w.number == wire.number and w is not wire)))


def from_an_earlier_collective(seat: Seat, wire: Wire, unit: Unit) -> bytes | None:
    if unit.kind is not Kind.FRAME:
        return None
    now = unit.header.sequence
    return _one_of(seat, unit, [u for u in wire.passed if u.kind is Kind.FRAME and u.header.sequence < now])


def from_an_earlier_segment(seat: Seat, wire: Wire, unit: Unit) -> bytes | None:
    if unit.kind is not Kind.FRAME:
        return None
    now = unit.header.sequence
    return _one_of(seat, unit, [u for u in wire.passed if u.kind is Kind.FRAME and u.header.sequence == now])


def reflect(seat: Seat, wire: Wire, unit: Unit) -> bytes | None:
    """Send a worker its own bytes, on the connection they came from."""
    opposite = next((w for w in seat.wires if w.number == wire.number and w is not wire), None)
    if opposite is None:
        return None
    seat.put(opposite, unit.data)
    return unit.data


def reflect_the_connection(seat: Seat, wire: Wire, unit: Unit) -> bytes | None:
    """Dial a worker with its own hello and whatever it sent next."""
    if wire.place is None or not wire.from_dialler:
        return None
    seat.dial(wire.place.sender, b"".join(u.data for u in wire.passed) + unit.data)
    return unit.data


def splice_a_connection(seat: Seat, wire: Wire, unit: Unit) -> bytes | None:
    """From here on, a recorded connection's bytes in place of this one's."""
    if wire.place is None:
        return None
    recording = seat.draw.choice([seat.strike.other_run, seat.strike.other_generation]).get(
        (wire.place, wire.from_dialler), []
    )
    rest = [u.data for u in recording[len(wire.passed) :]]
    if not rest:
        return None
    wire.script = rest[1:]
    return rest[0]


def misdirect(seat: Seat, wire: Wire, unit: Unit) -> bytes | None:
    """Give a hello to a worker that it is not for."""
    others = {w.place.receiver for w in seat.wires if w.place} - {wire.place.receiver if wire.place else -1}
    if unit.kind is not Kind.HELLO or not others:
        return None
    seat.dial(seat.draw.choice(sorted(others)), unit.data)
    return b""


def _alike(seat: Seat, wire: Wire) -> Iterable[Wire]:
    return (w for w in seat.wires if w.from_dialler == wire.from_dialler and w is not wire)


def _differs(one: Wire, two: Wire, field: str) -> bool:
    return one.place is not None and two.place is not None and getattr(one.place, field) != getattr(two.place, field)


def _from(seat: Seat, unit: Unit, wires: Iterable[Wire]) -> bytes | None:
    return _one_of(seat, unit, [u for w in wires for u in w.passed])


def _recorded(seat: Seat, recording: Recording, wire: Wire, unit: Unit) -> bytes | None:
    """What stood at this very place there, or else anything of its kind."""
    units = recording.get((wire.place, wire.from_dialler), []) if wire.place else []
    here = units[len(wire.passed) : len(wire.passed) + 1]
    return _one_of(seat, unit, here or [u for us in recording.values() for u in us])


def _one_of(seat: Seat, unit: Unit, candidates: list[Unit]) -> bytes | None:
    """One of the candidates of the same kind, preferably of the same length; sometimes behind this unit's own header."""
    same = [u for u in candidates if u.kind is unit.kind and u.data != unit.data]
    if not same:
        return None
    fitting = [u for u in same if len(u.data) == len(unit.data)]
    other = seat.draw.choice(fitting or same)
    if fitting and unit.kind is Kind.FRAME and seat.draw.random() < 0.5:
        return unit.data[:HEADER_BYTES] + other.data[HEADER_BYTES:]
    return other.data


# -- what must not disturb anybody ----------------------------------------------------------------------------------


def replay_a_hello(seat: Seat, wire: Wire, unit: Unit) -> bytes | None:
    """Dial a worker with what another connection to it began with, and went on with."""
    places = [w for w in seat.wires if w.place and w.from_dialler and w.passed]
    if not places:
        return None
    old = seat.draw.choice(places)
    assert old.place is not None
    seat.dial(old.place.receiver, b"".join(u.data for u in old.passed[: seat.draw.choice([1, 2, None])]))
    return unit.data


def replay_a_recorded_connection(seat: Seat, wire: Wire, unit: Unit) -> bytes | None:
    """The same with a connection of another run or generation."""
    recording = seat.draw.choice([seat.strike.other_run, seat.strike.other_generation])
    choices = [(place, units) for (place, from_dialler), units in recording.items() if from_dialler]
    if not choices:
        return None
    place, units = seat.draw.choice(choices)
    seat.dial(place.receiver, b"".join(u.data for u in units))
    return unit.data


def unauthenticated_peers(seat: Seat, wire: Wire, unit: Unit) -> bytes | None:
    """Silence, garbage and half a hello on a worker's port."""
    if wire.place is None:
        return None
    for length in (0, 1, 111, 112, 400):
        seat.dial(wire.place.receiver, seat.draw.randbytes(length))
    return unit.data


HARMFUL = (
    flip_a_bit,
    change_the_header,
    truncate,
    drop,
    drop_bytes,
    replay,
    replay_an_older_one,
    reorder,
    inject_garbage,
    inject_a_forged_frame,
    from_another_run,
    from_another_generation,
    from_another_group,
    from_another_peer,
    from_the_other_direction,
    from_an_earlier_collective,
    from_an_earlier_segment,
    reflect,
    splice_a_connection,
    misdirect,
)
HARMLESS = (reflect_the_connection, replay_a_hello, replay_a_recorded_connection, unauthenticated_peers)
ADDING = (replay, replay_an_older_one, reflect)
ATTACKS = tuple(
    [Attack(blow, adding=blow in ADDING) for blow in HARMFUL] + [Attack(blow, harmless=True) for blow in HARMLESS]
)
