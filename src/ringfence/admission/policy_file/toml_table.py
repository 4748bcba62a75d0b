"""A strict reader of TOML tables: keys are requested by name and type, and a key that was not requested is an error.

    rules = Rules(ca=table.file("ca"), ids=table.texts("ids"), max_age=table.duration("max_age", 3600))
    table.done()

A lenient reader would admit more than the policy's author meant: a misspelt `mesurement` would be no measurement at all.
This module opens no files: the caller passes a function that reads them.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, TypeVar

from ringfence.errors import PolicyError

POLICY_BYTES: Final = 1 << 20  # of the policy itself
FILE_BYTES: Final = 4 << 20  # of a file named in it
FOLDER_FILES: Final = 1 << 16  # files of one key that may name a folder
FOLDER_BYTES: Final = 64 << 20  # all of them together
TEXT_CHARACTERS: Final = 4096

Read = Callable[[str, int], bytes]  # path as written in the policy, most bytes to read; raises OSError
ListFolder = Callable[[str], list[str] | None]  # path; returns the names in a folder, or None if it is no folder
D = TypeVar("D")

_REQUIRED: Final[Any] = object()  # the default of a key that has none; fits any type, so `number(name)` is an int
_DURATION: Final = re.compile(r"([1-9][0-9]{0,8})(s|m|h|d)")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_HEX: Final = re.compile(r"(?:[0-9a-f]{2})+")


def no_files(path: str, limit: int) -> bytes:
    """The `Read` of a table that names no files."""
    raise FileNotFoundError(path)


def no_folders(path: str) -> list[str] | None:
    """The `ListFolder` of a policy whose files are not on a disk."""
    return None


def parse(text: bytes, read: Read, where: str = "the policy", list_folder: ListFolder = no_folders) -> TomlTable:
    """Parse a policy and return its root table. `where` begins every error message. Raises PolicyError."""
    if len(text) > POLICY_BYTES:
        raise PolicyError(f"{where} has more than {POLICY_BYTES} bytes")
    try:
        values = tomllib.loads(text.decode("utf-8"))
    except UnicodeDecodeError:
        raise PolicyError(f"{where} is not UTF-8 text") from None
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits, a thousand brackets
        raise PolicyError(f"{where} is not TOML: {error}") from None
    return TomlTable(values, where, read, list_folder)


class TomlTable:
    """One TOML table. Request every key that it may have, then call `done()`, which checks inner tables too.

    All methods raise PolicyError. A key with a default may be absent.
    """

    def __init__(
        self, values: Mapping[str, object], where: str, read: Read, list_folder: ListFolder = no_folders
    ) -> None:
        self.where = where
        self._values = values
        self._read = read
        self._list_folder = list_folder
        self._known: dict[str, None] = {}  # in the order of the requests
        self._inner: list[TomlTable] = []

    @property
    def names(self) -> tuple[str, ...]:
        """The keys that are present, for tables whose keys the author chooses; each must still be requested."""
        return tuple(self._values)

    # -- one value --------------------------------------------------------------------------------------------------

    def text(self, name: str, default: D = _REQUIRED, *, allowed: Collection[str] = ()) -> str | D:
        """Return a string, one of `allowed` if that is given."""
        value = self._take(name, default)
        return default if value is None else self._string(name, value, allowed)

    def texts(self, name: str, default: D = _REQUIRED, *, allowed: Collection[str] = ()) -> tuple[str, ...] | D:
        """Return a string or a list of distinct strings, not empty, as a tuple."""
        value = self._take(name, default)
        return default if value is None else self._strings(name, value, allowed)

    def number(self, name: str, default: D = _REQUIRED, *, least: int = 0, most: int = (1 << 63) - 1) -> int | D:
        """Return a whole number from `least` to `most`."""
        value = self._take(name, default)
        if value is None:
            return default
        if type(value) is not int or not least <= value <= most:
            raise self._wrong(name, f"a whole number from {least} to {most}")
        return value

    def flag(self, name: str, default: D = _REQUIRED) -> bool | D:
        """Return true or false."""
        value = self._take(name, default)
        if value is None:
            return default
        if type(value) is not bool:
            raise self._wrong(name, "true or false")
        return value

    def duration(self, name: str, default: D = _REQUIRED) -> int | D:
        """Return a duration in seconds, written "90s", "30m", "12h" or "7d"."""
        value = self._take(name, default)
        if value is None:
            return default
        match = _DURATION.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            raise self._wrong(name, 'a duration such as "90s", "30m", "12h" or "7d"')
        return int(match[1]) * _SECONDS[match[2]]

    # -- bytes ------------------------------------------------------------------------------------------------------

    def hexes(self, name: str, length: int, default: D = _REQUIRED) -> tuple[bytes, ...] | D:
        """Return accepted values: a string, or a list of strings, each of `length` bytes in hexadecimal digits."""
        value = self._take(name, default)
        if value is None:
            return default
        strings = self._strings(name, value, ())
        if not all(len(each) == 2 * length and _HEX.fullmatch(each) for each in strings):
            raise self._wrong(name, f"{2 * length} hexadecimal digits (0-9, a-f), or a list of such")
        return tuple(bytes.fromhex(each) for each in strings)

    def file(self, name: str, default: D = _REQUIRED) -> bytes | D:
        """Return the content of the file that the key names, relative to the policy's folder."""
        value = self._take(name, default)
        return default if value is None else self._content(name, self._string(name, value, ()))

    def files(self, name: str, default: D = _REQUIRED) -> tuple[bytes, ...] | D:
        """Return the contents of the file, or of the list of files, that the key names."""
        value = self._take(name, default)
        if value is None:
            return default
        return tuple(self._content(name, path) for path in self._strings(name, value, ()))

    def contents(self, name: str, default: D = _REQUIRED, *, limit: int) -> tuple[tuple[str, bytes], ...] | D:
        """Return path and content of each file that the key names: a file, a folder of files, or a list of these.

        A file may have `limit` bytes. Names that begin with a dot are skipped in folders.
        """
        value = self._take(name, default)
        if value is None:
            return default
        found: list[tuple[str, bytes]] = []
        left = FOLDER_BYTES
        for path in self._strings(name, value, ()):
            for file in self._files_at(name, path):
                content = self._content(name, file, limit)
                found.append((file, content))
                left -= len(content)
                if left < 0 or len(found) > FOLDER_FILES:
                    raise PolicyError(
                        f"{self.where}: {name}: more than {FOLDER_FILES} files or {FOLDER_BYTES} bytes: remove old files"
                    )
        return tuple(found)

    # -- tables -----------------------------------------------------------------------------------------------------

    def table(self, name: str, default: D = _REQUIRED) -> TomlTable | D:
        """Return an inner table."""
        value = self._take(name, default)
        if value is None:
            return default
        if not isinstance(value, dict):
            raise self._wrong(name, "a table")
        return self._open(value, f"{self.where}, {name}")

    def tables(self, name: str, default: D = _REQUIRED) -> tuple[TomlTable, ...] | D:
        """Return the tables of an array, [[name]], with at least one."""
        value = self._take(name, default)
        if value is None:
            return default
        if not isinstance(value, list) or not value or not all(isinstance(each, dict) for each in value):
            raise self._wrong(name, f"one or more tables: [[{name}]]")
        return tuple(self._open(each, f"{self.where}, {name} {count}") for count, each in enumerate(value, 1))

    def done(self) -> None:
        """Check that every key was requested, here and in the inner tables."""
        unknown = [name for name in self._values if name not in self._known]
        if unknown:
            known = ", ".join(self._known) or "none"
            raise PolicyError(f"{self.where}: unknown key {quoted(unknown[0])}; known here: {known}")
        for table in self._inner:
            table.done()

    def error(self, text: str) -> PolicyError:
        """Return an error for the caller to raise, for values that contradict each other."""
        return PolicyError(f"{self.where}: {text}")

    # -- parts ------------------------------------------------------------------------------------------------------

    def _take(self, name: str, default: object) -> object:
        """Return the value, or None if it is absent and may be: TOML has no null."""
        self._known[name] = None
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

    def _files_at(self, name: str, path: str) -> list[str]:
        """Return the file, or those of the folder, in order. A folder must have at least one."""
        try:
            names = self._list_folder(path)
        except OSError as error:
            raise PolicyError(f"{self.where}: {name}: cannot read {path}: {error.strerror}") from error
        if names is None:
            return [path]
        files = [f"{path.rstrip('/')}/{each}" for each in sorted(names) if not each.startswith(".")]
        if not files:
            raise PolicyError(f"{self.where}: {name}: the folder {path} is empty: put the files into it")
        return files

    def _content(self, name: str, path: str, limit: int = FILE_BYTES) -> bytes:
        try:
            content = self._read(path, limit + 1)
        except OSError as error:
            raise PolicyError(f"{self.where}: {name}: cannot read {path}: {error.strerror}") from error
        if len(content) > limit:
            raise PolicyError(f"{self.where}: {name}: {path} has more than {limit} bytes")
        return content

    def _open(self, values: Mapping[str, object], where: str) -> TomlTable:
        table = TomlTable(values, where, self._read, self._list_folder)
        self._inner.append(table)
        return table

    def _wrong(self, name: str, wanted: str) -> PolicyError:
        return PolicyError(f"{self.where}: {name} must be {wanted}; it is {quoted(self._values.get(name))}")


def quoted(value: object) -> str:
    """Format a value of the file for an error message: escaped and short."""
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a number of {value.bit_length()} bits"
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."
