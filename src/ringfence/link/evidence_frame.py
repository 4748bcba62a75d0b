"""The frame of a peer verification: each side presents the proof that admitted it (spec/link.md, section 3).

Only the length in its header varies, so each length has exactly one valid header.
"""

from __future__ import annotations

from typing import Final

from ringfence.errors import AuthenticationError, ProtocolError
from ringfence.keys import DIGEST_BYTES, PRESENTATION_BYTES
from ringfence.link.frames import (
    HEADER_BYTES,
    HOP_OVERHEAD,
    INSTANCE_BYTES,
    Call,
    Header,
    Type,
    read_header,
)
from ringfence.link.seal import Opener, Sealer

NO_GROUP: Final = bytes(DIGEST_BYTES)  # a peer verification belongs to no group


def seal_presentation(sealer: Sealer, presentation: bytes) -> bytes:
    """Return the frame that carries this presentation."""
    header = _header(len(presentation))
    frame = bytearray(len(presentation) + HOP_OVERHEAD)
    frame[:HEADER_BYTES] = header
    sealer.seal_into(header, presentation, memoryview(frame)[HEADER_BYTES:])
    return bytes(frame)


def presentation_frame_bytes(header: bytes) -> int:
    """Return the length of the frame with this header. Raises AuthenticationError if no worker sends such a header."""
    try:
        length = read_header(header).length
    except ProtocolError:
        raise AuthenticationError("a frame does not authenticate") from None
    if length > PRESENTATION_BYTES or header != _header(length):
        raise AuthenticationError("a frame does not authenticate")
    return length + HOP_OVERHEAD


def open_presentation(opener: Opener, frame: bytes) -> bytes:
    """Return the presentation in a frame. Raises AuthenticationError if the frame does not authenticate."""
    presentation = bytearray(len(frame) - HOP_OVERHEAD)
    opener.open_into(frame[:HEADER_BYTES], frame[HEADER_BYTES:], memoryview(presentation))
    return bytes(presentation)


def _header(length: int) -> bytes:
    return Header(Type.PAYLOAD, length=length, instance=NO_GROUP[:INSTANCE_BYTES], call=Call(0).pack()).pack()
