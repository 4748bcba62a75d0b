"""Show captured bytes to a person: a hex dump, and whether a known sentence can be read in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WIDTH = 16


@dataclass(frozen=True)
class Sighting:
    """What was seen of a sentence in captured streams, and the lines that show it."""

    captured: int  # bytes in all streams
    times: int  #     how often the sentence was found
    dump: str


def look(streams: Sequence[bytes], sentence: bytes, lines: int = 5) -> Sighting:
    """Search all streams. The dump shows the first find, or the middle of the longest stream if there is none."""
    times = sum(stream.count(sentence) for stream in streams)
    longest = max(streams, key=len, default=b"")
    shown = next((stream for stream in streams if sentence in stream), longest)
    start = shown.find(sentence) if times else max(0, len(shown) // 2 - lines * WIDTH // 2)
    return Sighting(sum(map(len, streams)), times, hex_dump(shown, start - start % WIDTH, lines))


def hex_dump(data: bytes, start: int, lines: int) -> str:
    """Lines of offset, sixteen bytes in hexadecimal, and what of them can be read."""
    return "\n".join(_line(data, at) for at in range(start, min(len(data), start + lines * WIDTH), WIDTH))


def _line(data: bytes, at: int) -> str:
    row = data[at : at + WIDTH]
    readable = "".join(chr(byte) if 0x20 <= byte < 0x7F else "." for byte in row)
    return f"{at:08x}  {row.hex(' '):{3 * WIDTH - 1}}  |{readable}|"
