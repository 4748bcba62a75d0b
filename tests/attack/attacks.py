"""What an attacker on the wire can do to a link: each action attacks one message and returns what travels on instead.

An action returns None if it cannot be applied to this message; the attacker then tries it on the next one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ringfence.keys import SEGMENT_BYTES
from ringfence.link.frames import HEADER_BYTES, Type, pack_header
from tests.attack.attacker import Attack, Attacker, Recording
from tests.attack.wire_messages import Kind, Wire, WireMessage

# -- changing what is there -----------------------------------------------------------------------------------------


def flip_a_bit(attacker: Attacker, wire: Wire, message: WireMessage) -> bytes | None:
    changed = bytearray(message.data)
    changed[_random_position(attacker, message)] ^= 1 << attacker.random.randrange(8)
    return bytes(changed)


def change_the_header(attacker: Attacker, wire: Wire, message: WireMessage) -> bytes | None:
    """A field gets another plausible value; the layout stays valid."""
    if message.kind is not Kind.FRAME:
        return None
    header = message.header
    name = attacker.random.choice([name for name in header._fields if name != "unused"])
    old = getattr(header, name)
    if isinstance(old, bytes):
        new: Any = bytes([old[0] ^ 1]) + old[1:]
    elif name == "type":
        new = attacker.random.choice([kind for kind in Type if kind != old])
    elif name == "length":
        new = min(max(0, old + attacker.random.choice([-16, -1, 1, 16, 4096])), SEGMENT_BYTES) if old else 16
    else:
        new = old + 1 if old < 1000 else old - 1
    return pack_header(*header._replace(**{name: new})) + message.data[HEADER_BYTES:]


def truncate(attacker: Attacker, wire: Wire, message: WireMessage) -> bytes | None:
    attacker.inject(wire, message.data[: attacker.random.randrange(len(message.data))])
    attacker.cut(wire)
    return b""


def _random_position(attacker: Attacker, message: WireMessage) -> int:
    """A position in the header, in the payload or in the last tag, each as likely as the others."""
    end = len(message.data)
    first = HEADER_BYTES if message.kind is Kind.FRAME else 0
    regions = [range(first), range(first, end - 16), range(end - 16, end)]
    return attacker.random.choice(attacker.random.choice([region for region in regions if region]))


# -- leaving out, repeating, reordering -----------------------------------------------------------------------------


def drop(attacker: Attacker, wire: Wire, message: WireMessage) -> bytes | None:
    return b""


def drop_bytes(attacker: Attacker, wire: Wire, message: WireMessage) -> bytes | None:
    start = attacker.random.randrange(len(message.data))
    return message.data[:start] + message.data[start + attacker.random.choice([1, 16, 88, 104]) :]


def replay(attacker: Attacker, wire: Wire, message: WireMessage) -> bytes | None:
    return message.data + message.data


def replay_an_older_one(attacker: Attacker, wire: Wire, message: WireMessage) -> bytes | None:
    return message.data + attacker.random.choice(wire.passed).data if wire.passed else None


def reorder(attacker: Attacker, wire: Wire, message: WireMessage) -> bytes | None:
    wire.delayed = message.data  # sent after the next message
    return b""


# -- adds_bytes ---------------------------------------------------------------------------------------------------------


def inject_garbage(attacker: Attacker, wire: Wire, message: WireMessage) -> bytes | None:
    return attacker.random.randbytes(attacker.random.choice([1, 16, 32, 104, 600])) + message.data


def inject_a_forged_frame(attacker: Attacker, wire: Wire, message: WireMessage) -> bytes | None:
    """A plausible header, and random bytes in place of ciphertext and tags."""
    if message.kind is not Kind.FRAME:
        return None
    forged = message.data[:HEADER_BYTES] + attacker.random.randbytes(len(message.data) - HEADER_BYTES)
    return forged + message.data if attacker.random.random() < 0.5 else forged


# -- from elsewhere ----------------------------------------------------------------------------------------------------


def from_another_run(attacker: Attacker, wire: Wire, message: WireMessage) -> bytes | None:
    return _recorded_message(attacker, attacker.plan.other_run, wire, message)


def from_another_generation(attacker: Attacker, wire: Wire, message: WireMessage) -> bytes | None:
    return _recorded_message(attacker, attacker.plan.other_generation, wire, message)


def from_another_group(attacker: Attacker, wire: Wire, message: WireMessage) -> bytes | None:
    return _message_from(attacker, message, (w for w in _same_direction(attacker, wire) if _differs(w, wire, "group")))


def from_another_peer(attacker: Attacker, wire: Wire, message: WireMessage) -> bytes | None:
    others = (
        w for w in _same_direction(attacker, wire) if _differs(w, wire, "sender") or _differs(w, wire, "receiver")
    )
    return _message_from(attacker, message, others)


def from_the_other_direction(attacker: Attacker, wire: Wire, message: WireMessage) -> bytes | None:
    """From the connection that the peer dialled, or from the other half of this one."""
    connection = wire.connection
    if connection is None:
        return None
    back = (connection.receiver, connection.sender)
    opposite = (
        w
        for w in attacker.wires
        if w.connection and w is not wire and (w.connection.sender, w.connection.receiver) == back
    )
    return _message_from(
        attacker, message, (*opposite, *(w for w in attacker.wires if w.number == wire.number and w is not wire))
    )


def from_an_earlier_collective(attacker: Attacker, wire: Wire, message: WireMessage) -> bytes | None:
    if message.kind is not Kind.FRAME:
        return None
    now = message.header.sequence
    return _substitute(attacker, message, [m for m in wire.passed if m.kind is Kind.FRAME and m.header.sequence < now])


def from_an_earlier_segment(attacker: Attacker, wire: Wire, message: WireMessage) -> bytes | None:
    if message.kind is not Kind.FRAME:
        return None
    now = message.header.sequence
    return _substitute(attacker, message, [m for m in wire.passed if m.kind is Kind.FRAME and m.header.sequence == now])


def reflect(attacker: Attacker, wire: Wire, message: WireMessage) -> bytes | None:
    """Send a worker its own bytes, on the connection they came from."""
    opposite = next((w for w in attacker.wires if w.number == wire.number and w is not wire), None)
    if opposite is None:
        return None
    attacker.inject(opposite, message.data)
    return message.data


def reflect_the_connection(attacker: Attacker, wire: Wire, message: WireMessage) -> bytes | None:
    """Dial a worker with its own hello and what it sent next."""
    if wire.connection is None or not wire.from_dialler:
        return None
    attacker.dial(wire.connection.sender, b"".join(m.data for m in wire.passed) + message.data)
    return message.data


def splice_a_connection(attacker: Attacker, wire: Wire, message: WireMessage) -> bytes | None:
    """Replace all that follows by the bytes of a recorded connection."""
    if wire.connection is None:
        return None
    recording = attacker.random.choice([attacker.plan.other_run, attacker.plan.other_generation]).get(
        (wire.connection, wire.from_dialler), []
    )
    rest = [m.data for m in recording[len(wire.passed) :]]
    if not rest:
        return None
    wire.replacement = rest[1:]
    return rest[0]


def misdirect(attacker: Attacker, wire: Wire, message: WireMessage) -> bytes | None:
    """Send a hello to another worker than the one it names."""
    others = {w.connection.receiver for w in attacker.wires if w.connection} - {
        wire.connection.receiver if wire.connection else -1
    }
    if message.kind is not Kind.HELLO or not others:
        return None
    attacker.dial(attacker.random.choice(sorted(others)), message.data)
    return b""


def _same_direction(attacker: Attacker, wire: Wire) -> Iterable[Wire]:
    return (w for w in attacker.wires if w.from_dialler == wire.from_dialler and w is not wire)


def _differs(one: Wire, two: Wire, field: str) -> bool:
    return (
        one.connection is not None
        and two.connection is not None
        and getattr(one.connection, field) != getattr(two.connection, field)
    )


def _message_from(attacker: Attacker, message: WireMessage, wires: Iterable[Wire]) -> bytes | None:
    return _substitute(attacker, message, [m for w in wires for m in w.passed])


def _recorded_message(attacker: Attacker, recording: Recording, wire: Wire, message: WireMessage) -> bytes | None:
    """The recorded message at the same position, or else any of its kind."""
    messages = recording.get((wire.connection, wire.from_dialler), []) if wire.connection else []
    here = messages[len(wire.passed) : len(wire.passed) + 1]
    return _substitute(attacker, message, here or [m for recorded in recording.values() for m in recorded])


def _substitute(attacker: Attacker, message: WireMessage, candidates: list[WireMessage]) -> bytes | None:
    """A candidate of the same kind, preferably of the same length; in half of the cases after this message's own header."""
    same = [m for m in candidates if m.kind is message.kind and m.data != message.data]
    if not same:
        return None
    fitting = [m for m in same if len(m.data) == len(message.data)]
    other = attacker.random.choice(fitting or same)
    if fitting and message.kind is Kind.FRAME and attacker.random.random() < 0.5:
        return message.data[:HEADER_BYTES] + other.data[HEADER_BYTES:]
    return other.data


# -- attacks that a run must survive --------------------------------------------------------------------------------


def replay_a_hello(attacker: Attacker, wire: Wire, message: WireMessage) -> bytes | None:
    """Dial a worker with the first messages of another connection to it."""
    dialled = [w for w in attacker.wires if w.connection and w.from_dialler and w.passed]
    if not dialled:
        return None
    old = attacker.random.choice(dialled)
    assert old.connection is not None
    attacker.dial(old.connection.receiver, b"".join(m.data for m in old.passed[: attacker.random.choice([1, 2, None])]))
    return message.data


def replay_a_recorded_connection(attacker: Attacker, wire: Wire, message: WireMessage) -> bytes | None:
    """Dial a worker with a connection of another run or generation."""
    recording = attacker.random.choice([attacker.plan.other_run, attacker.plan.other_generation])
    choices = [(connection, messages) for (connection, from_dialler), messages in recording.items() if from_dialler]
    if not choices:
        return None
    connection, messages = attacker.random.choice(choices)
    attacker.dial(connection.receiver, b"".join(m.data for m in messages))
    return message.data


def unauthenticated_peers(attacker: Attacker, wire: Wire, message: WireMessage) -> bytes | None:
    """Silence, garbage and half a hello on a worker's port."""
    if wire.connection is None:
        return None
    for length in (0, 1, 111, 112, 400):
        attacker.dial(wire.connection.receiver, attacker.random.randbytes(length))
    return message.data


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
ADDS_BYTES = (replay, replay_an_older_one, reflect)
ATTACKS = tuple(
    [Attack(action, adds_bytes=action in ADDS_BYTES) for action in HARMFUL]
    + [Attack(action, harmless=True) for action in HARMLESS]
)
