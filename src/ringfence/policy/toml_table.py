"""A strict reader of TOML tables: every key is asked for by name and type, and a key that nobody asked for is an error.

    rules = Rules(ca=table.file("ca"), ids=table.texts("ids"), max_age=table.duration("max_age", 3600))
    table.done()

A policy that is read leniently admits more than its author meant: a mistyped `mesurement` would be no measurement at all.
Nothing here opens a file: how to read one is handed in, so that this stays a pure parser.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Collection, Mapping
from typing import Final, TypeVar, overload

from ringfence.errors import PolicyError

POLICY_BYTES: Final = 1 << 20  # of the policy itself
FILE_BYTES: Final = 4 << 20  # of a file that it names
TEXT_CHARACTERS: Final = 4096

# Current keys, and the names they had in older policies. An old name is refused in a table that takes the current one.
FORMER_NAMES: Final = {"max_session_age": "max_epoch_age", "reference_values": "golden"}

Read = Callable[[str, int], bytes]  # path as written in the policy, most bytes to read; raises OSError
D = TypeVar("D")

_DURATION: Final = re.compile(r"([1-9][0-9]{0,8})(s|m|h|d)")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_HEX: Final = re.compile(r"(?:[0-9a-f]{2})+")


class _Required:
    """The default of a key that has none."""


_REQUIRED: Final = _Required()


def parse(text: bytes, read: Read, where: str = "the policy") -> Table:
    """The root table of a policy's text. `where` opens every error message."""
    if len(text) > POLICY_BYTES:
        raise PolicyError(f"{where} has more than {POLICY_BYTES} bytes")
    try:
        values = tomllib.loads(text.decode("utf-8"))
    except UnicodeDecodeError:
        raise PolicyError(f"{where} is not UTF-8 text") from None
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits, a thousand brackets
        raise PolicyError(f"{where} is not TOML: {error}") from None
    return Table(values, where, read)


class Table:
    """One TOML table. Ask for every key it may hold, then call `done()`, which also closes the tables inside it."""

    def __init__(self, values: Mapping[str, object], where: str, read: Read) -> None:
        self.where = where
        self._values = values
        self._read = read
        self._known: dict[str, None] = {}  # in the order asked for
        self._inner: list[Table] = []

    @property
    def names(self) -> tuple[str, ...]:
        """The keys that are there, for tables whose keys are names that the author chose; asking for each is still due."""
        return tuple(self._values)

    # -- one value --------------------------------------------------------------------------------------------------

    @overload
    def text(self, name: str, *, allowed: Collection[str] = ...) -> str: ...
    @overload
    def text(self, name: str, default: D, *, allowed: Collection[str] = ...) -> str | D: ...
    def text(self, name: str, default: object = _REQUIRED, *, allowed: Collection[str] = ()) -> object:
        """A string, one of `allowed` if that is given."""
        value = self._take(name, default)
        return default if value is None else self._string(name, value, allowed)

    @overload
    def texts(self, name: str, *, allowed: Collection[str] = ...) -> tuple[str, ...]: ...
    @overload
    def texts(self, name: str, default: D, *, allowed: Collection[str] = ...) -> tuple[str, ...] | D: ...
    def texts(self, name: str, default: object = _REQUIRED, *, allowed: Collection[str] = ()) -> object:
        """A string, or a list of at least one; none of them twice."""
        value = self._take(name, default)
        return default if value is None else self._strings(name, value, allowed)

    @overload
    def number(self, name: str, *, least: int = ..., most: int = ...) -> int: ...
    @overload
    def number(self, name: str, default: D, *, least: int = ..., most: int = ...) -> int | D: ...
    def number(self, name: str, default: object = _REQUIRED, *, least: int = 0, most: int = (1 << 63) - 1) -> object:
        """A whole number from `least` to `most`."""
        value = self._take(name, default)
        if value is None:
            return default
        if type(value) is not int or not least <= value <= most:
            raise self._wrong(name, f"a whole number from {least} to {most}")
        return value

    @overload
    def flag(self, name: str) -> bool: ...
    @overload
    def flag(self, name: str, default: D) -> bool | D: ...
    def flag(self, name: str, default: object = _REQUIRED) -> object:
        """true or false."""
        value = self._take(name, default)
        if value is None:
            return default
        if type(value) is not bool:
            raise self._wrong(name, "true or false")
        return value

    @overload
    def duration(self, name: str) -> int: ...
    @overload
    def duration(self, name: str, default: D) -> int | D: ...
    def duration(self, name: str, default: object = _REQUIRED) -> object:
        """Seconds, written "90s", "30m", "12h" or "7d"."""
        value = self._take(name, default)
        if value is None:
            return default
        match = _DURATION.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            raise self._wrong(name, 'a duration such as "90s", "30m", "12h" or "7d"')
        return int(match[1]) * _SECONDS[match[2]]

    # -- bytes ------------------------------------------------------------------------------------------------------

    @overload
    def hexes(self, name: str, length: int) -> tuple[bytes, ...]: ...
    @overload
    def hexes(self, name: str, length: int, default: D) -> tuple[bytes, ...] | D: ...
    def hexes(self, name: str, length: int, default: object = _REQUIRED) -> object:
        """Any one of these values: a string, or a list of strings, each of `length` bytes in hexadecimal digits."""
        value = self._take(name, default)
        if value is None:
            return default
        strings = self._strings(name, value, ())
        if not all(len(each) == 2 * length and _HEX.fullmatch(each) for each in strings):
            raise self._wrong(name, f"{2 * length} hexadecimal digits (0-9, a-f), or a list of such")
        return tuple(bytes.fromhex(each) for each in strings)

    @overload
    def file(self, name: str) -> bytes: ...
    @overload
    def file(self, name: str, default: D) -> bytes | D: ...
    def file(self, name: str, default: object = _REQUIRED) -> object:
        """The content of the file that the key names, relative to the policy's folder."""
        value = self._take(name, default)
        return default if value is None else self._content(name, self._string(name, value, ()))

    @overload
    def files(self, name: str) -> tuple[bytes, ...]: ...
    @overload
    def files(self, name: str, default: D) -> tuple[bytes, ...] | D: ...
    def files(self, name: str, default: object = _REQUIRED) -> object:
        """The contents of the file, or of the list of files, that the key names."""
        value = self._take(name, default)
        if value is None:
            return default
        return tuple(self._content(name, path) for path in self._strings(name, value, ()))

    # -- tables -----------------------------------------------------------------------------------------------------

    @overload
    def table(self, name: str) -> Table: ...
    @overload
    def table(self, name: str, default: D) -> Table | D: ...
    def table(self, name: str, default: object = _REQUIRED) -> object:
        """The table inside this one."""
        value = self._take(name, default)
        if value is None:
            return default
        if not isinstance(value, dict):
            raise self._wrong(name, "a table")
        return self._open(value, f"{self.where}, {name}")

    @overload
    def tables(self, name: str) -> tuple[Table, ...]: ...
    @overload
    def tables(self, name: str, default: D) -> tuple[Table, ...] | D: ...
    def tables(self, name: str, default: object = _REQUIRED) -> object:
        """A list of at least one table: [[name]]."""
        value = self._take(name, default)
        if value is None:
            return default
        if not isinstance(value, list) or not value or not all(isinstance(each, dict) for each in value):
            raise self._wrong(name, f"one or more tables: [[{name}]]")
        return tuple(self._open(each, f"{self.where}, {name} {count}") for count, each in enumerate(value, 1))

    def done(self) -> None:
        """Nothing may be there that was not asked for, here and in the tables inside."""
        unknown = [name for name in self._values if name not in self._known]
        if unknown:
            known = ", ".join(self._known) or "none"
            raise PolicyError(f"{self.where}: unknown key {shown(unknown[0])}; known here: {known}")
        for table in self._inner:
            table.done()

    def error(self, text: str) -> PolicyError:
        """For a reader that finds values which do not go together: raise what this returns."""
        return PolicyError(f"{self.where}: {text}")

    # -- parts ------------------------------------------------------------------------------------------------------

    def _take(self, name: str, default: object) -> object:
        """Return the value, or None if it is absent and may be: TOML has no null."""
        self._known[name] = None
        former = FORMER_NAMES.get(name)
        if former is not None and former in self._values:
            raise PolicyError(f"{self.where}: the key {former} is called {name} now: rename it")
        if name not in self._values and default is _REQUIRED:
            raise PolicyError(f"{self.where}: {name} is missing")
        return self._values.get(name)

    def _string(self, name: str, value: object, allowed: Collection[str]) -> str:
        if not isinstance(value, str) or not 1 <= len(value) <= TEXT_CHARACTERS or not value.isprintable():
            raise self._wrong(name, f"a text of 1 to {TEXT_CHARACTERS} printable characters")
        if allowed and value not in allowed:
            raise self._wrong(name, "one of " + ", ".join(allowed))
        return value

    def _strings(self, name: str, value: object, allowed: Collection[str]) -> tuple[str, ...]:
        values = value if isinstance(value, list) else [value]
        strings = tuple(self._string(name, each, allowed) for each in values)
        if not strings or len(set(strings)) != len(strings):
            raise self._wrong(name, "a list of at least one text, none of them twice")
        return strings

    def _content(self, name: str, path: str) -> bytes:
        try:
            content = self._read(path, FILE_BYTES + 1)
        except OSError as error:
            raise PolicyError(f"{self.where}: {name}: cannot read {path}: {error.strerror}") from error
        if len(content) > FILE_BYTES:
            raise PolicyError(f"{self.where}: {name}: {path} has more than {FILE_BYTES} bytes")
        return content

    def _open(self, values: Mapping[str, object], where: str) -> Table:
        table = Table(values, where, self._read)
        self._inner.append(table)
        return table

    def _wrong(self, name: str, wanted: str) -> PolicyError:
        return PolicyError(f"{self.where}: {name} must be {wanted}; it is {shown(self._values.get(name))}")


def shown(value: object) -> str:
    """A value of the file in an error message: escaped and short, however deep or large it is."""
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a number of {value.bit_length()} bits"
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."
