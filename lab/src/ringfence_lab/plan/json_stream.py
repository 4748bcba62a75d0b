"""Reads large JSON files piece by piece, with bounded memory: the elements of a few known lists, one after the other.

A profiler's file is made by another program, perhaps on another machine, so nothing in it is trusted: the bytes read, the bytes
after decompression, and the size of each element are limited. This module opens no file.
"""

from __future__ import annotations

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, Final

from ringfence.errors import ConfigurationError

MOST_BYTES: Final = 2 << 30  # after decompression
_MOST_ELEMENT: Final = 4 << 20  # characters of one element, or of one member that is not streamed
_PIECE: Final = 1 << 20
_GZIP: Final = b"\x1f\x8b"
_SPACE: Final = " \t\r\n"
_SPACES: Final = re.compile(r"[ \t\r\n]*")
_AFTER: Final = " \t\r\n,:]}"  # what may follow a value


def inflated(file: Any, name: str, most: int = MOST_BYTES) -> Iterator[bytes]:
    """Yield the bytes of an open binary file, which may be compressed with gzip, in pieces of at most 1 MiB.

    Raises ConfigurationError if it is damaged or truncated, or longer than `most` bytes.
    """
    packed = file.peek(2).startswith(_GZIP)
    source: Any = gzip.GzipFile(fileobj=file) if packed else file
    total = 0
    try:
        while piece := source.read1(_PIECE):
            total += len(piece)
            if total > most:
                raise ConfigurationError(
                    f"{name} has more than {most >> 20:,} MiB: record fewer steps, such as torch.profiler.schedule(wait=1, "
                    "warmup=1, active=3)"
                )
            yield piece
    except EOFError:
        raise ConfigurationError(f"{name} is truncated: gzip ends early. Copy it again, or record it again") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise ConfigurationError(f"{name} is damaged: gzip cannot be decompressed ({error})") from None


class JsonStream:
    """A JSON document of which some lists are read element by element."""

    def __init__(self, pieces: Iterable[bytes], name: str) -> None:
        self._pieces = iter(pieces)
        self._name = name
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        self._decoder = json.JSONDecoder(parse_constant=lambda _: None)
        self._text = ""
        self._at = 0

    def members(self, streamed: Iterable[str], bare: str) -> Iterator[tuple[str, Any]]:
        """Yield the members of the document; of those in `streamed`, each element of the list by itself.

        A document that is a list has its elements yielded under the name `bare`. Raises ConfigurationError if the document is
        neither, is truncated or not JSON, or if one of its parts is too large.
        """
        wanted = frozenset(streamed)
        match self._peek():
            case "[":
                yield from ((bare, element) for element in self._elements())
            case "{":
                yield from self._object(wanted)
            case _:
                raise ConfigurationError(
                    f"{self._name} is not a trace: JSON of torch.profiler or of its ExecutionTraceObserver begins with {{ or ["
                )
        self._end()

    def _object(self, wanted: frozenset[str]) -> Iterator[tuple[str, Any]]:
        self._at += 1
        while self._peek() != "}":
            key = self._value()
            if not isinstance(key, str) or self._peek() != ":":
                raise self._broken()
            self._at += 1
            if key in wanted and self._peek() == "[":
                yield from ((key, element) for element in self._elements())
            else:
                yield key, self._value()
            self._comma("}")
        self._at += 1

    def _elements(self) -> Iterator[Any]:
        self._at += 1
        while self._peek() != "]":
            yield self._value()
            self._comma("]")
        self._at += 1

    def _end(self) -> None:
        """Read to the end of the file, so that a checksum is verified: nothing but space may follow."""
        while True:
            if self._text[self._at :].strip(_SPACE):
                raise self._broken()
            self._at = len(self._text)
            if not self._more():
                return

    def _comma(self, closing: str) -> None:
        found = self._peek()
        if found == ",":
            self._at += 1
        elif found != closing:
            raise self._broken()

    def _peek(self) -> str:
        """Return the next character that is not space, without taking it."""
        while True:
            found = _SPACES.match(self._text, self._at)
            self._at = found.end() if found else self._at
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                raise self._truncated()

    def _value(self) -> Any:
        self._peek()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except RecursionError:
                raise self._broken() from None
            except ValueError as error:
                if len(self._text) - self._at > _MOST_ELEMENT:
                    raise self._broken() from None
                inside = getattr(error, "pos", 0) < len(self._text) - 1 and "Unterminated" not in str(error)
                if not self._more():
                    raise (self._broken() if inside else self._truncated()) from None
                continue
            if end - self._at > _MOST_ELEMENT:
                raise self._broken()
            following = self._text[end : end + 1]
            if not following or following not in _AFTER:
                if len(self._text) - self._at <= _MOST_ELEMENT and self._more():
                    continue  # a number may go on in the next piece
                if following:
                    raise self._broken()
            self._at = end
            return value

    def _more(self) -> bool:
        """Read on; return whether there was anything. What is left is doubled, so that parsing again costs little."""
        parts, wanted = [self._text[self._at :]], len(self._text) - self._at + 1
        for piece in self._pieces:
            text = self._decode(piece)
            parts.append(text)
            wanted -= len(text)
            if wanted <= 0:
                break
        found = sum(map(len, parts[1:])) > 0
        self._text, self._at = "".join(parts), 0
        return found

    def _truncated(self) -> ConfigurationError:
        return ConfigurationError(
            f"{self._name} is truncated: JSON ends early. Copy it again, or record it again and let the profiler finish"
        )

    def _broken(self) -> ConfigurationError:
        return ConfigurationError(
            f"{self._name} is not JSON that torch.profiler writes: a part of it is malformed or longer than "
            f"{_MOST_ELEMENT >> 20} MiB. Record it again with export_chrome_trace()"
        )
