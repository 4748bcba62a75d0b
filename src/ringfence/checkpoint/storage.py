"""Where checkpoints are stored: the few operations on folders and files that saving and loading need."""

from __future__ import annotations

import abc
from collections.abc import Collection
from typing import Final

INDEX_NAME: Final = "index"


class Output(abc.ABC):
    """A new file. Several threads call `write_at`; in all they write every byte once."""

    @abc.abstractmethod
    def write_at(self, data: memoryview, offset: int) -> None: ...

    @abc.abstractmethod
    def finish(self) -> None:
        """Make the content durable and close the file."""

    @abc.abstractmethod
    def abort(self) -> None:
        """Close the file; its content is worthless. Does nothing after `finish`."""


class Input(abc.ABC):
    """A file that is read at any place, by several threads."""

    size: int

    @abc.abstractmethod
    def read_at(self, target: memoryview, offset: int) -> None:
        """Fill `target`. Raises CheckpointError if the file ends before."""

    @abc.abstractmethod
    def close(self) -> None: ...

    def prefetch(self, offset: int, size: int) -> None:  # noqa: B027 (most files need none)
        """Begin to read a range that `read_at` will want soon. Does not wait."""

    def read(self, limit: int) -> bytes:
        """Return the beginning of the file, at most `limit` bytes."""
        found = bytearray(min(self.size, limit))
        self.read_at(memoryview(found), 0)
        return bytes(found)


class Storage(abc.ABC):
    """Folders with checkpoints. All paths are of one kind, such as paths of this machine or URLs.

    A save calls `begin` on rank 0, `create` on all ranks with the place that `begin` returned, the index last, and then
    `publish` on rank 0. Only then may `contains_index` be true for the path. Two saves to one path may run at the same time:
    neither removes a file of the other.
    """

    @abc.abstractmethod
    def begin(self, path: str) -> str:
        """Return a fresh place for the files of a save. Raises CheckpointError if the path exists."""

    @abc.abstractmethod
    def create(self, place: str, name: str, size: int) -> Output:
        """Create a file of this size, 0 if it is not known."""

    @abc.abstractmethod
    def publish(self, place: str, path: str) -> None:
        """Make the files appear at the path, all at once and durably. Raises CheckpointError if the path exists by now."""

    @abc.abstractmethod
    def discard(self, place: str, names: Collection[str]) -> None:
        """Remove what a save wrote that is not published, as far as possible.

        `names` are those of its shards, which occur in no other save. Not all of them need exist.
        """

    @abc.abstractmethod
    def contains_index(self, path: str) -> bool:
        """Return whether there is a complete checkpoint."""

    @abc.abstractmethod
    def open(self, path: str, name: str) -> Input:
        """Open a file of a checkpoint. Raises CheckpointError if there is none."""

    @abc.abstractmethod
    def names(self, path: str) -> list[str]:
        """Return the names of the files of a checkpoint, in order."""

    @abc.abstractmethod
    def replace(self, path: str, name: str, content: bytes) -> None:
        """Replace a file as a whole."""
