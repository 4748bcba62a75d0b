"""Checkpoints on the disks of this machine, and which storage a path has."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Collection, Iterator
from typing import Final

from ringfence.checkpoint.storage import INDEX_NAME, Input, Output, Storage
from ringfence.config.private_files import sync_folder, temporary_file
from ringfence.errors import CheckpointError, ConfigurationError

_PARTIAL: Final = ".partial-"
_RANDOM_BYTES: Final = 8
_RANDOM: Final = re.compile(rf"[0-9a-f]{{{2 * _RANDOM_BYTES}}}")


class LocalOutput(Output):
    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)

    def write_at(self, data: memoryview, offset: int) -> None:
        while data:
            written = os.pwrite(self._descriptor, data, offset)
            data, offset = data[written:], offset + written

    def finish(self) -> None:
        os.fsync(self._descriptor)
        self.abort()

    def abort(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)


class LocalInput(Input):
    def __init__(self, path: str) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO would wait for a writer
        found = os.fstat(self._descriptor)
        if not stat.S_ISREG(found.st_mode):
            self.close()
            raise CheckpointError(f"{path} is not a regular file, so this is not a checkpoint that was saved here")
        self.size = found.st_size

    def read_at(self, target: memoryview, offset: int) -> None:
        while target:
            count = os.preadv(self._descriptor, [target], offset)
            if not count:
                raise CheckpointError(f"{self._path} is shorter than it was when it was opened")
            target, offset = target[count:], offset + count

    def prefetch(self, offset: int, size: int) -> None:
        os.posix_fadvise(self._descriptor, offset, size, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)


class LocalStorage(Storage):
    """Folders of this machine, which all ranks must see: a local disk on one node, a shared file system on several.

    A save goes to `PATH.partial-RANDOM`, and the folder is renamed when its files are on disk. Rank 0 holds a lock (flock) on
    it meanwhile. The next save to the same path removes what killed ones left: folders that nobody has locked. Where the file
    system has no locks, they stay.
    """

    def __init__(self) -> None:
        self._locks: dict[str, int] = {}  # descriptors, by place

    def begin(self, path: str) -> str:
        path = os.path.abspath(path)
        with _reported(f"cannot save to {path}"):
            _refuse_existing(path)
            parent, name = os.path.split(path)
            if not os.path.isdir(parent):
                os.makedirs(parent, exist_ok=True)
                sync_folder(os.path.dirname(parent))
            for entry in os.listdir(parent):
                if entry.startswith(name + _PARTIAL) and _RANDOM.fullmatch(entry, len(name + _PARTIAL)):
                    _remove_abandoned(os.path.join(parent, entry), _new_place(path))
            return self._locked_place(path)

    def _locked_place(self, path: str) -> str:
        """Create the folder of a save and lock it. Another save can take it for abandoned before it is locked."""
        while True:
            place = _new_place(path)
            os.mkdir(place)
            with contextlib.suppress(FileNotFoundError, BlockingIOError):
                self._locks[place] = descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                if not _is_lockable(descriptor) or os.path.isdir(place):
                    return place
            self._unlock(place)

    def _unlock(self, place: str) -> None:
        descriptor = self._locks.pop(place, -1)
        if descriptor >= 0:
            os.close(descriptor)

    def create(self, place: str, name: str, size: int) -> Output:
        try:
            return LocalOutput(os.path.join(place, name))
        except FileNotFoundError as error:
            raise CheckpointError(
                f"this rank does not see {place}, which rank 0 made: save to storage that all ranks share"
            ) from error

    def publish(self, place: str, path: str) -> None:
        path = os.path.abspath(path)
        with _reported(f"cannot publish {path}"):
            _refuse_existing(path)
            sync_folder(place)
            os.rename(place, path)  # fails on a folder that is not empty
            sync_folder(os.path.dirname(path))
        self._unlock(place)

    def discard(self, place: str, names: Collection[str]) -> None:
        shutil.rmtree(place, ignore_errors=True)
        self._unlock(place)

    def contains_index(self, path: str) -> bool:
        return os.path.isfile(os.path.join(path, INDEX_NAME))

    def open(self, path: str, name: str) -> Input:
        with _reported(f"cannot open {os.path.join(path, name)}"):
            return LocalInput(os.path.join(path, name))

    def names(self, path: str) -> list[str]:
        if not os.path.isdir(path):
            raise CheckpointError(f"there is no checkpoint at {path}: name the folder that was given to save()")
        with _reported(f"cannot list {path}"):
            return sorted(os.listdir(path))

    def replace(self, path: str, name: str, content: bytes) -> None:
        target = os.path.join(path, name)
        with _reported(f"cannot replace {target}"):
            mode = stat.S_IMODE(os.stat(target).st_mode)
            with temporary_file(target, content, mode) as temporary:
                os.replace(temporary, target)
            sync_folder(path)


def _new_place(path: str) -> str:
    return f"{path}{_PARTIAL}{secrets.token_hex(_RANDOM_BYTES)}"


def _is_lockable(descriptor: int) -> bool:
    """Lock a folder until all copies of the descriptor are closed. Returns whether its file system can.

    Raises BlockingIOError if another process has locked it.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


def _remove_abandoned(place: str, name: str) -> None:
    """Remove the folder of a save that was killed: one that is not locked.

    It is renamed to `name` before. So a save that runs after all, on a machine that does not see the lock, cannot publish it
    with some of its files removed: it fails.
    """
    with contextlib.suppress(OSError):
        descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if _is_lockable(descriptor):
                os.rename(place, name)
                shutil.rmtree(name, ignore_errors=True)
        finally:
            os.close(descriptor)


def _refuse_existing(path: str) -> None:
    """Raise CheckpointError unless the path is free or an empty folder."""
    if os.path.lexists(path) and not (os.path.isdir(path) and not os.listdir(path)):
        what = "a checkpoint" if os.path.lexists(os.path.join(path, INDEX_NAME)) else "something else"
        raise CheckpointError(
            f"{path} exists and is {what}, which is never overwritten: save to a new path, or remove it"
        )


@contextlib.contextmanager
def _reported(what: str) -> Iterator[None]:
    """Raise CheckpointError in place of OSError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{what}: {error.strerror or error}") from error


def storage_for(path: str) -> Storage:
    """Return the storage of a path: fsspec's for a URL, otherwise the disks of this machine.

    Raises ConfigurationError if fsspec is not installed.
    """
    if "://" not in path:
        return LocalStorage()
    try:
        from ringfence.checkpoint.fsspec_storage import FsspecStorage
    except ImportError as error:
        raise ConfigurationError(f"{path} is a URL, which needs fsspec: pip install fsspec") from error
    return FsspecStorage()
