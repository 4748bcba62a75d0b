"""The byte layouts of a link: one header for every frame, the call it names, and the sizes around it (spec/link.md).

    frame with a payload sealed for this hop    header · ciphertext · tag
    frame sealed once by its origin             header · ciphertext · origin tag · link tag

The first 16 bytes of the header belong to the hop. The other 72 are the same at every hop, and what an origin vouches
for together with the payload.
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct
from typing import Final, NamedTuple

from ringfence.errors import ProtocolError
from ringfence.keys import SEGMENT_BYTES, TAG_BYTES


class Type(IntEnum):
    HOP = 1  #      a segment of a collective, sealed for this hop
    FORWARD = 2  #  a segment of a collective, sealed once by its origin
    OFFER = 3  #    point-to-point: a payload is waiting
    WANT = 4  #     point-to-point: its receiver asks for it
    PAYLOAD = 5  #  point-to-point: a segment of it
    BYE = 6  #      the sender leaves; nothing follows
    NOP = 7  #      nothing: to a sender on a collective link that an outage has kept from hearing that it may send on


NO_ORIGIN: Final = 0xFFFF_FFFF

_HEADER: Final = Struct(">B3xIII IIIIQQ16s24s")
_CALL: Final = Struct(">BBBBIQq")

HEADER_BYTES: Final = _HEADER.size
HOP_BYTES: Final = 16  # the part of the header that changes from hop to hop
INSTANCE_BYTES: Final = 16
HOP_OVERHEAD: Final = HEADER_BYTES + TAG_BYTES
FORWARD_OVERHEAD: Final = HEADER_BYTES + 2 * TAG_BYTES
FRAME_BYTES: Final = SEGMENT_BYTES + FORWARD_OVERHEAD  # the largest frame

assert HEADER_BYTES == 88
assert _CALL.size == 24


class Call(NamedTuple):
    """What all ranks of a collective must agree on, or what both ends of a transfer must."""

    operation: int
    reduction: int = 0
    dtype: int = 0
    schedule: int = 0
    root: int = 0
    elements: int = 0  # where all ranks share the number
    tag: int = 0  #  point-to-point

    def pack(self) -> bytes:
        return _CALL.pack(*self)

    @classmethod
    def unpack(cls, data: bytes) -> Call:
        return cls(*_CALL.unpack(data))


class Header(NamedTuple):
    type: int
    key_phase: int
    step: int
    unused: int
    length: int
    label: int
    segment: int
    origin: int
    sequence: int
    counter: int
    instance: bytes
    call: bytes


pack_header = _HEADER.pack
pack_header_into = _HEADER.pack_into


def read_header(data: bytes | memoryview) -> Header:
    """The fields of a header; refuses what no sender writes. Believe nothing in it before it authenticates."""
    header = Header(*_HEADER.unpack(data))
    known = Type.HOP <= header.type <= Type.NOP
    if not known or header.unused or header.length > SEGMENT_BYTES or pack_header(*header) != bytes(data):
        raise ProtocolError("a frame header is malformed")
    return header


def frame_bytes(header: Header) -> int:
    """How long the whole frame is."""
    return header.length + (FORWARD_OVERHEAD if header.type == Type.FORWARD else HOP_OVERHEAD)
