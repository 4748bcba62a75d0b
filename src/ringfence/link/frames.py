"""The wire format of frames: the header, the description of a call, and sizes (spec/link.md).

    frame with a payload sealed for this hop    header · ciphertext · tag
    frame sealed once by its origin             header · ciphertext · origin tag · link tag

The first 16 bytes of the header belong to the hop. The other 72 are equal at every hop; an origin authenticates them
together with the payload.
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
    OFFER = 3  #    point-to-point: the sender has a payload
    WANT = 4  #     point-to-point: the receiver requests it
    PAYLOAD = 5  #  point-to-point: a segment of it
    BYE = 6  #      the sender closes the link; nothing follows
    NOP = 7  #      no content: after an outage, tells the sender on a collective link that it may continue
    SHARED = 8  #   a segment in the sender's shared memory: the frame is a header, its counter the slot
    RETURN = 9  #   the receiver has read so many shared segments of this link


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
    """The parameters on which all ranks of a collective, or both ends of a transfer, must agree."""

    operation: int
    reduction: int = 0
    dtype: int = 0
    schedule: int = 0
    root: int = 0
    elements: int = 0  # if equal on all ranks
    tag: int = 0  #  point-to-point

    def pack(self) -> bytes:
        return _CALL.pack(*self)

    @classmethod
    def unpack(cls, data: bytes) -> Call:
        return cls(*_CALL.unpack(data))


class Header(NamedTuple):
    """The fields of a header, in wire order. Construct it with keyword arguments."""

    type: int
    key_phase: int = 0
    step: int = 0
    unused: int = 0
    length: int = 0
    label: int = 0
    segment: int = 0
    origin: int = NO_ORIGIN
    sequence: int = 0
    counter: int = 0
    instance: bytes = bytes(INSTANCE_BYTES)
    call: bytes = bytes(_CALL.size)

    def pack(self) -> bytes:
        return _HEADER.pack(*self)


pack_header = _HEADER.pack  # for the data plane: positional, without a Header object for each segment
pack_header_into = _HEADER.pack_into


def read_header(data: bytes | memoryview) -> Header:
    """Parse a header. Its values are untrusted until the frame authenticates. Raises ProtocolError if it is malformed."""
    header = Header(*_HEADER.unpack(data))
    known = Type.HOP <= header.type <= Type.RETURN
    if not known or header.unused or header.length > SEGMENT_BYTES or header.pack() != bytes(data):
        raise ProtocolError("a frame header is malformed")
    return header


def frame_bytes(header: Header) -> int:
    """The length of the whole frame."""
    if header.type == Type.SHARED:
        return HEADER_BYTES
    return header.length + (FORWARD_OVERHEAD if header.type == Type.FORWARD else HOP_OVERHEAD)
