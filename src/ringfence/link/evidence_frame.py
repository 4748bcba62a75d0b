"""The frame that each side of a peer verification sends: the proof that admitted its worker (spec/link.md, section 3).

Nothing in its header is chosen but the length, so there is one header for each length.
"""

from __future__ import annotations

from typing import Final

from ringfence.errors import AuthenticationError, ProtocolError
from ringfence.keys import DIGEST_BYTES, PRESENTATION_BYTES
from ringfence.link.frames import (
    HEADER_BYTES,
    HOP_OVERHEAD,
    INSTANCE_BYTES,
    NO_ORIGIN,
    Call,
    Type,
    pack_header,
    read_header,
)
from ringfence.link.seal import Opener, Sealer

NO_GROUP: Final = bytes(DIGEST_BYTES)  # an peer verification is between two workers


def seal_presentation(sealer: Sealer, presentation: bytes) -> bytes:
    header = _header(len(presentation))
    frame = bytearray(len(presentation) + HOP_OVERHEAD)
    frame[:HEADER_BYTES] = header
    sealer.seal_into(header, presentation, memoryview(frame)[HEADER_BYTES:])
    return bytes(frame)


def presentation_frame_bytes(header: bytes) -> int:
    """How long the frame is that begins so. AuthenticationError: nobody writes such a one."""
    try:
        length = read_header(header).length
    except ProtocolError:
        raise AuthenticationError("a frame does not authenticate") from None
    if length > PRESENTATION_BYTES or header != _header(length):
        raise AuthenticationError("a frame does not authenticate")
    return length + HOP_OVERHEAD


def open_presentation(opener: Opener, frame: bytes) -> bytes:
    presentation = bytearray(len(frame) - HOP_OVERHEAD)
    opener.open_into(frame[:HEADER_BYTES], frame[HEADER_BYTES:], memoryview(presentation))
    return bytes(presentation)


def _header(length: int) -> bytes:
    return pack_header(Type.PAYLOAD, 0, 0, 0, length, 0, 0, NO_ORIGIN, 0, 0, NO_GROUP[:INSTANCE_BYTES], Call(0).pack())
