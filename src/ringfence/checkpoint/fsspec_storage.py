"""Checkpoints at URLs: whatever fsspec reaches, such as object stores, which have no rename.

A save writes its shards straight to the path and the index last, so a path has an index only if its checkpoint is complete.
"""

from __future__ import annotations

import contextlib
import posixpath
import threading
from collections.abc import Collection, Iterator
from typing import Any, Final

import fsspec

from ringfence.checkpoint.storage import INDEX_NAME, Input, Output, Storage
from ringfence.errors import CheckpointError, ConfigurationError

_SHARD: Final = ".shard"
_PART_BYTES: Final = 32 << 20  # of an upload in parts
_PARTS: Final = 9_000  # S3 takes at most 10,000


class FsspecStorage(Storage):
    """Folders at URLs. All ranks must reach the same ones.

    Args:
        options: Arguments of the file system, such as `endpoint_url` and `key` of s3fs. By default it finds its
            configuration by itself.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options

    def begin(self, path: str) -> str:
        """Return the path itself: nothing of it counts as a checkpoint before it has an index.

        Shards without an index are left alone: nothing tells those of a killed save from those of one that is running.
        Raises CheckpointError if there is anything else.
        """
        with _reported(f"cannot save to {path}"):
            system, root = self._at(path)
            found = self._list(path)
            if any(not name.endswith(_SHARD) for name in found):
                what = "a checkpoint" if INDEX_NAME in found else "something else"
                raise CheckpointError(
                    f"{path} exists and is {what}, which is never overwritten: save to a new path, or remove it"
                )
            system.makedirs(root, exist_ok=True)  # does nothing in object stores
        return path

    def create(self, place: str, name: str, size: int) -> Output:
        with _reported(f"cannot create {name} at {place}"):
            system, root = self._at(place)
            target = posixpath.join(root, name)
            if name == INDEX_NAME:
                return _WholeOutput(system, target)
            part = max(_PART_BYTES, -(-size // _PARTS))
            return _StreamOutput(target, system.open(target, "wb", block_size=part))

    def publish(self, place: str, path: str) -> None:
        """Do nothing: the index is there, and so is the checkpoint."""

    def discard(self, place: str, names: Collection[str]) -> None:
        """Remove the shards, unless there is an index: a request that seemed to fail may have written it."""
        with contextlib.suppress(Exception):
            system, root = self._at(place)
            found = self._list(place)
            for name in found if INDEX_NAME not in found else ():
                if name in names:
                    system.rm_file(posixpath.join(root, name))

    def contains_index(self, path: str) -> bool:
        with _reported(f"cannot read {path}"):
            return INDEX_NAME in self._list(path)

    def open(self, path: str, name: str) -> Input:
        with _reported(f"cannot open {name} at {path}"):
            system, root = self._at(path)
            return _ObjectInput(system, posixpath.join(root, name))

    def names(self, path: str) -> list[str]:
        with _reported(f"cannot list {path}"):
            found = self._list(path)
        if not found:
            raise CheckpointError(f"there is no checkpoint at {path}: name the URL that was given to save()")
        return found

    def replace(self, path: str, name: str, content: bytes) -> None:
        with _reported(f"cannot replace {name} at {path}"):
            system, root = self._at(path)
            system.pipe_file(posixpath.join(root, name), content)

    def _at(self, url: str) -> tuple[Any, str]:
        """Return the file system of a URL, and the path within it."""
        try:
            system, root = fsspec.core.url_to_fs(url, **self._options)
        except ImportError as error:
            raise ConfigurationError(f"{url} needs a package that is not installed: {error}") from error
        except ValueError as error:
            raise ConfigurationError(f"{url} is not a URL that fsspec knows: {error}") from error
        return system, root.rstrip("/")

    def _list(self, url: str) -> list[str]:
        """Return the names at a URL as they are now, not as the file system remembers them."""
        system, root = self._at(url)
        system.invalidate_cache()
        try:
            found = system.ls(root, detail=False)
        except FileNotFoundError:
            return []
        names = (posixpath.basename(each.rstrip("/")) for each in found if each.strip("/") != root.strip("/"))
        return sorted(names)


class _StreamOutput(Output):
    """A file that is written from beginning to end: what comes too early is kept until its turn.

    The sealing threads are never more than a few runs of segments apart, so that is a few MiB.
    """

    def __init__(self, path: str, file: Any) -> None:
        self._path, self._file = path, file
        self._lock = threading.Lock()
        self._position = 0
        self._early: dict[int, bytes] = {}

    def write_at(self, data: memoryview, offset: int) -> None:
        with self._lock, _reported(f"cannot write {self._path}"):
            if offset != self._position:
                self._early[offset] = bytes(data)
                return
            self._append(data)
            while (early := self._early.pop(self._position, None)) is not None:
                self._append(early)

    def _append(self, data: memoryview | bytes) -> None:
        self._file.write(bytes(data))
        self._position += len(data)

    def finish(self) -> None:
        if self._early:
            raise CheckpointError(f"a part of {self._path} before offset {min(self._early)} was not written")
        with _reported(f"cannot write {self._path}"):
            self._file.close()
        self._file = None

    def abort(self) -> None:
        if self._file is None:
            return
        file, self._file = self._file, None
        with contextlib.suppress(Exception):  # a local file has nothing to discard
            file.discard()
        with contextlib.suppress(Exception):
            if isinstance(file, fsspec.spec.AbstractBufferedFile):
                file.closed = True  # otherwise what is left would be uploaded when it is collected
            else:
                file.close()


class _WholeOutput(Output):
    """A small file that appears with one request. Raises CheckpointError if there is one by now."""

    def __init__(self, system: Any, path: str) -> None:
        self._system, self._path = system, path
        self._content = bytearray()

    def write_at(self, data: memoryview, offset: int) -> None:
        missing = offset + len(data) - len(self._content)
        self._content.extend(bytes(max(0, missing)))
        self._content[offset : offset + len(data)] = data

    def finish(self) -> None:
        with _reported(f"cannot write {self._path}"):
            try:
                self._system.pipe_file(self._path, bytes(self._content), mode="create")
            except FileExistsError as error:
                raise CheckpointError(
                    f"another save has written {self._path} meanwhile: save each checkpoint to a path of its own"
                ) from error

    def abort(self) -> None:
        self._content.clear()


class _ObjectInput(Input):
    """A file that is read by ranges, each of which is one request."""

    def __init__(self, system: Any, path: str) -> None:
        self._system, self._path = system, path
        self.size = int(system.size(path))

    def read_at(self, target: memoryview, offset: int) -> None:
        if not target:
            return
        with _reported(f"cannot read {self._path}"):
            found = self._system.cat_file(self._path, start=offset, end=offset + len(target))
        if len(found) != len(target):
            raise CheckpointError(f"{self._path} is shorter than it was when it was opened")
        target[:] = found

    def close(self) -> None:
        pass


@contextlib.contextmanager
def _reported(what: str) -> Iterator[None]:
    """Raise CheckpointError in place of whatever a file system raises: each has exceptions of its own."""
    try:
        yield
    except (CheckpointError, ConfigurationError):
        raise
    except Exception as error:
        said = getattr(error, "strerror", None) or str(error) or "no reason given"
        raise CheckpointError(f"{what}: {type(error).__name__}: {said}") from error
