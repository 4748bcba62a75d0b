"""Makes the manifest of a folder, and compares a folder with one (spec/record.md, 5).

1. `files_in` lists the folder in the order of names (the caller's thread).
2. `_contents` hands pieces of the files to threads, a bounded number ahead, and takes their digests in the same order.
3. A thread opens, reads and hashes its piece, and keeps the digest for a run that resumes this one (in parallel).
4. The caller's thread adds each file to the tree and writes its line, or compares it.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import secrets
import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from ringfence import keys
from ringfence.config.cores import usable_cores
from ringfence.config.private_files import check_unshared
from ringfence.errors import ConfigurationError, RecordError
from ringfence.record import manifest
from ringfence.record.manifest import Entry, Summary, Tree, name_text

Progress = Callable[[int], None]  # is told of bytes that were hashed
_THREADS: Final = min(16, usable_cores())
_AHEAD: Final = 8  # pieces for each thread
_READ_BYTES: Final = 1 << 18


class DataFile(NamedTuple):
    """A file that was found below a folder."""

    name: bytes
    path: bytes
    size: int
    version: bytes

    @property
    def pieces(self) -> int:
        """Into how many pieces it is divided. An empty file has one, which is empty."""
        return max(1, -(-self.size // keys.DATA_PIECE_BYTES))


def _version(status: os.stat_result) -> bytes:
    """Return what differs if a file was changed. Unlike mtime, ctime cannot be set back."""
    return f"{status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}".encode("ascii")


def _opener(path: str | bytes, flags: int) -> int:
    """Open a file that is not a link, and do not wait for the writer of a pipe."""
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)


@contextlib.contextmanager
def _named(path: bytes) -> Iterator[None]:
    """Name the file or folder in an error of the file system."""
    try:
        yield
    except OSError as error:
        raise ConfigurationError(f"cannot read {name_text(path)}: {error.strerror}") from error


# -- the files ----------------------------------------------------------------------------------------------------------


def files_in(folder: Path) -> Iterator[DataFile]:
    """Yield every file below a folder, in the order of their names' bytes.

    Raises RecordError for anything but folders and regular files, ConfigurationError if a folder cannot be read.
    """
    top = os.path.join(os.fsencode(folder), b"")
    listings = [_listing(top)]
    while listings:
        entry = next(listings[-1], None)
        if entry is None:
            listings.pop()
        elif entry.is_dir(follow_symlinks=False):
            listings.append(_listing(entry.path))
        else:
            with _named(entry.path):
                status = entry.stat(follow_symlinks=False)
            name = entry.path.removeprefix(top)
            if not stat.S_ISREG(status.st_mode):
                link = stat.S_ISLNK(status.st_mode)
                kind = "a symbolic link: `cp -rL` makes a copy without links" if link else "neither a file nor a folder"
                raise RecordError(f"{name_text(name)} is {kind}")
            yield DataFile(name, entry.path, status.st_size, _version(status))


def _listing(folder: bytes) -> Iterator[os.DirEntry[bytes]]:
    """Return the entries of a folder so that the names of all files are in order: "a.b" is before "a/b"."""
    with _named(folder), os.scandir(folder) as found:
        return iter(sorted(found, key=lambda each: each.name + b"/" * each.is_dir(follow_symlinks=False)))


# -- hashing ------------------------------------------------------------------------------------------------------------


def _hash_piece(file: DataFile, number: int, progress: Progress) -> bytes:
    """Read and hash a piece of a file. Raises RecordError if the file is not what it was when it was found."""
    at = number * keys.DATA_PIECE_BYTES
    left = min(keys.DATA_PIECE_BYTES, file.size - at)
    state = hashlib.sha256(keys.DATA_PIECE + left.to_bytes(8, "big"))
    buffer = memoryview(bytearray(min(_READ_BYTES, left)))
    with _named(file.path), open(file.path, "rb", buffering=0, opener=_opener) as stream:
        while left and (count := os.preadv(stream.fileno(), [buffer[:left]], at)):
            state.update(buffer[:count])
            at, left = at + count, left - count
            progress(count)
        if left or _version(os.fstat(stream.fileno())) != file.version:
            raise RecordError(
                f"{name_text(file.name)} changed while it was hashed: stop what writes to it, and try again"
            )
    return state.digest()


class _Resumable:
    """Digests of pieces, kept in a file for the next run if this one is interrupted.

    The file has 64 bytes for each: a key, which stands for the file's name and version and the piece's number, and the digest.
    No record spans two blocks of a file system, so a crash leaves a record as it was written or not at all.
    """

    def __init__(self, kept: BinaryIO) -> None:
        self._kept = kept
        kept.seek(0)
        content = kept.read()
        kept.truncate(len(content) - len(content) % 64)
        self._known = {content[at : at + 32]: content[at + 32 : at + 64] for at in range(0, len(content) - 63, 64)}

    def piece(self, file: DataFile, number: int, progress: Progress) -> bytes:
        """Return the digest of a piece, which is hashed unless it is known. Any thread may call this."""
        key = keys.digest(keys.DATA_RESUME, file.name, file.version, number.to_bytes(8, "big"))
        if key in self._known:
            progress(min(keys.DATA_PIECE_BYTES, file.size - number * keys.DATA_PIECE_BYTES))
            return self._known[key]
        made = _hash_piece(file, number, progress)
        self._kept.write(key + made)  # unbuffered, at the end of the file
        return made


def _contents(
    files: Iterable[DataFile], hash_piece: Callable[[DataFile, int, Progress], bytes], progress: Progress
) -> Iterator[tuple[DataFile, bytes]]:
    """Yield each file with the digest of its contents, in the same order."""
    waiting: deque[tuple[DataFile, Future[bytes]]] = deque()
    found: list[bytes] = []
    pieces = ((file, number) for file in files for number in range(file.pieces))
    pool = ThreadPoolExecutor(_THREADS, "ringfence-hash")
    try:
        for piece in itertools.chain(pieces, [None]):  # None: there are no more
            if piece is not None:
                waiting.append((piece[0], pool.submit(hash_piece, *piece, progress)))
            while len(waiting) > (0 if piece is None else _AHEAD * _THREADS):
                file, future = waiting.popleft()
                found.append(future.result())
                if len(found) == file.pieces:
                    yield file, keys.digest(keys.DATA_CONTENTS, *found)
                    found.clear()
    finally:
        pool.shutdown(cancel_futures=True)


# -- manifests ----------------------------------------------------------------------------------------------------------


def write_manifest(folder: Path, output: Path, progress: Progress) -> Summary:
    """Write the manifest of a folder to a new file, whole or not at all, and return its summary.

    A run that is interrupted leaves `OUTPUT.part`, and the next one hashes only what is not in there or has changed since.
    Raises RecordError if the folder holds anything but files, or one changes; ConfigurationError.
    """
    if os.path.lexists(output):
        raise ConfigurationError(f"{output} exists; a manifest is never overwritten: name a new file with --output")
    if output.resolve().is_relative_to(folder.resolve()):
        raise ConfigurationError(f"{output} would be part of the data: name a file elsewhere with --output")
    part = output.with_name(f"{output.name}.part")
    new = output.with_name(f".ringfence-{secrets.token_hex(8)}")
    tree = Tree()
    try:
        with open(part, "a+b", buffering=0, opener=_opener) as kept, open(new, "xb", opener=_opener) as file:
            check_unshared(part, os.fstat(kept.fileno()))
            file.write(manifest.HEADER)
            for found, digest in _contents(files_in(folder), _Resumable(kept).piece, progress):
                entry = Entry(found.name, found.size, digest)
                tree.add(entry)
                file.write(entry.line())
            file.write(tree.summary().line())
            file.flush()
            os.fsync(file.fileno())
        new.replace(output)
        part.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigurationError(f"cannot write {output}: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):  # it was renamed, or never made
            new.unlink()
    return tree.summary()


def compare(source: BinaryIO, expected: Summary, folder: Path, progress: Progress) -> list[str]:
    """Return how a folder differs from a manifest with this summary: a text for each file.

    Raises RecordError if the manifest is another, if the folder holds anything but files, or if one changes.
    """
    differences: list[str] = []
    digests: deque[bytes] = deque()
    tree = Tree()

    def of_same_size() -> Iterator[DataFile]:
        files = files_in(folder)
        file = next(files, None)
        for entry in itertools.chain(manifest.read(source, tree), [None]):  # None: the manifest has no more
            while file is not None and (entry is None or file.name < entry.name):
                differences.append(f"{name_text(file.name)} is not in the manifest")
                file = next(files, None)
            if entry is None:
                return
            if file is None or file.name != entry.name:
                differences.append(f"{name_text(entry.name)} is missing")
                continue
            if file.size == entry.size:
                digests.append(entry.digest)
                yield file
            else:
                differences.append(f"{name_text(file.name)} has {file.size:,} bytes, not {entry.size:,}")
            file = next(files, None)

    for file, digest in _contents(of_same_size(), _hash_piece, progress):
        if digest != digests.popleft():
            differences.append(f"{name_text(file.name)} has other contents")
    if tree.summary() != expected:
        raise RecordError("the manifest changed while it was read")
    return differences
