"""Manifests of data sets: lines of canonical JSON that list files, and the root of a Merkle tree over them (spec/record.md, 5).

This is the format only; manifest_files.py reads and hashes folders. Reading and writing take memory for one line and one digest
for each level of the tree, however many files there are.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from typing import BinaryIO, Final, NamedTuple
from urllib.parse import quote_from_bytes, unquote_to_bytes

from ringfence import keys
from ringfence.errors import RecordError

HEADER: Final = b'{"type":"%b"}\n' % keys.RECORD_DATA.encode("ascii")
_SAFE: Final = bytes(set(range(0x21, 0x7F)) - set(b'"%\\')).decode("ascii")  # stand for themselves in a name
_FILE: Final = re.compile(rb'\{"digest":"([0-9a-f]{64})","name":"([!-~]+)","size":([0-9]{1,18})\}\n')
_LINE_BYTES: Final = 3 * keys.DATA_NAME_BYTES + 128  # more than any line has


class Entry(NamedTuple):
    """A file of a data set."""

    name: bytes  # its path below the folder, with "/" between the parts
    size: int
    digest: bytes  # of its contents

    def line(self) -> bytes:
        """Return the line of the manifest."""
        return f'{{"digest":"{self.digest.hex()}","name":"{name_text(self.name)}","size":{self.size}}}\n'.encode(
            "ascii"
        )


class Summary(NamedTuple):
    """What the last line of a manifest says of all files. The root stands for every name, size and byte."""

    files: int
    size: int
    root: bytes

    def line(self) -> bytes:
        """Return the last line of the manifest."""
        return f'{{"bytes":{self.size},"files":{self.files},"root":"{self.root.hex()}"}}\n'.encode("ascii")


class Tree:
    """The Merkle tree over entries, which are added in the order of their names' bytes."""

    def __init__(self) -> None:
        self._complete: list[tuple[int, bytes]] = []  # trees of 2**height leaves, the highest first
        self._files = self._size = 0
        self._last = b""

    def add(self, entry: Entry) -> None:
        """Add the next file. Raises RecordError if its name cannot be that of a file, or is not after the last one."""
        if len(entry.name) > keys.DATA_NAME_BYTES or b"\0" in entry.name:
            raise RecordError(f"{name_text(entry.name[:100])}... is not the name of a file, or is too long")
        if {b"", b".", b".."} & set(entry.name.split(b"/")):
            raise RecordError(f"{name_text(entry.name[:100])} is not the name of a file below a folder")
        if entry.name <= self._last:
            raise RecordError(f"{name_text(entry.name[:100])} is listed twice or out of order")
        self._last = entry.name
        self._files += 1
        self._size += entry.size
        height, node = 0, keys.digest(keys.DATA_FILE, entry.name, entry.size.to_bytes(8, "big"), entry.digest)
        while self._complete and self._complete[-1][0] == height:
            node = keys.digest(keys.DATA_NODE, self._complete.pop()[1], node)
            height += 1
        self._complete.append((height, node))

    def summary(self) -> Summary:
        """Return the root and what it is of. Raises RecordError if there is no file."""
        if not self._complete:
            raise RecordError("there is no file")
        *rest, (_, node) = self._complete
        for _, before in reversed(rest):
            node = keys.digest(keys.DATA_NODE, before, node)
        return Summary(self._files, self._size, keys.digest(keys.DATA_ROOT, self._files.to_bytes(8, "big"), node))


def name_text(name: bytes) -> str:
    """Return a name as manifests and messages have it: bytes that are not printable ASCII as `%` and two digits."""
    return quote_from_bytes(name, safe=_SAFE)


def read(source: BinaryIO, tree: Tree) -> Iterator[Entry]:
    """Yield the files of a manifest, and add them to an empty tree. Nothing is verified until the last was taken.

    Raises RecordError if the manifest was changed or is not written as ringfence writes it.
    """
    if source.readline(_LINE_BYTES) != HEADER:
        raise RecordError("the first line is not that of a data manifest, or is one of a newer ringfence")
    number = 2
    while found := _FILE.fullmatch(line := source.readline(_LINE_BYTES)):
        digest, name, size = found.groups()
        entry = Entry(unquote_to_bytes(name), int(size), bytes.fromhex(digest.decode("ascii")))
        if entry.line() != line:
            raise RecordError(f"line {number} of the manifest is not written as ringfence writes it")
        tree.add(entry)
        yield entry
        number += 1
    if number == 2 or line != tree.summary().line():
        raise RecordError(
            f"line {number} of the manifest is neither a file nor the root of those before it: a line was changed, added or "
            "left out"
        )
    if source.readline(1):
        raise RecordError("the manifest goes on after its root")


def check(source: BinaryIO) -> Summary:
    """Read a manifest as a whole. Raises RecordError as `read` does."""
    tree = Tree()
    deque(read(source, tree), 0)
    return tree.summary()
