"""Sealed streams in the layout of Tink's AES256_GCM_HKDF_1MB (spec/checkpoint.md, Streams), with access to any segment.

    header: u8 40 ‖ salt (32) ‖ nonce prefix (7)
    key   = HKDF-SHA-256(data key, salt, info = associated data)
    nonce = prefix ‖ u32 segment number ‖ 1 for the last segment, otherwise 0

A segment has 1 MiB of ciphertext with its tag, the first one together with the header. Threads seal straight from the
caller's memory and open straight into it: OpenSSL runs without the interpreter's lock.
"""

from __future__ import annotations

import collections
import contextlib
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from ringfence import keys
from ringfence.checkpoint.storage import Input, Output
from ringfence.errors import CheckpointError

SEGMENT: Final = keys.STREAM_SEGMENT_BYTES
TAG: Final = keys.TAG_BYTES
HEADER: Final = 1 + keys.STREAM_SALT_BYTES + keys.STREAM_PREFIX_BYTES
FIRST: Final = SEGMENT - HEADER - TAG  # plaintext bytes of the first segment
BODY: Final = SEGMENT - TAG  # of every other one but the last
RUN: Final = 4  # segments that a thread seals or opens in one go
DEFAULT_THREADS: Final = 2

Progress = Callable[[int], object]  # called in any thread, with the bytes sealed or opened since the last call


def unseen(_: int) -> None:
    """The `Progress` that nobody looks at."""


# -- arithmetic -------------------------------------------------------------------------------------------------------


def segment_count(size: int) -> int:
    """Return the number of segments of a plaintext of this size."""
    return 1 if size <= FIRST else 1 - (FIRST - size) // BODY


def sealed_size(size: int) -> int:
    """Return the size of a stream of this plaintext size."""
    return HEADER + size + TAG * segment_count(size)


def plaintext_size(sealed: int) -> int:
    """Return the plaintext size of a stream of this size. Raises CheckpointError if no stream has it."""
    count = max(1, -(-sealed // SEGMENT))
    size = sealed - HEADER - TAG * count
    if size < 0 or sealed_size(size) != sealed:
        raise CheckpointError(f"a sealed file cannot have {sealed} bytes: it is truncated, or was extended")
    return size


def segment_at(position: int) -> int:
    """Return the number of the segment that holds this byte of the plaintext."""
    return 0 if position < FIRST else 1 + (position - FIRST) // BODY


def segment_start(segment: int) -> int:
    """Return where in the plaintext a segment begins."""
    return 0 if segment == 0 else FIRST + (segment - 1) * BODY


def sealed_start(segment: int) -> int:
    """Return where in the stream the ciphertext of a segment begins."""
    return HEADER if segment == 0 else segment * SEGMENT


class _Cipher:
    """The key and nonces of one stream."""

    def __init__(self, data_key: keys.Secret, associated_data: bytes, header: bytes) -> None:
        salt, self._prefix = header[1 : 1 + keys.STREAM_SALT_BYTES], header[1 + keys.STREAM_SALT_BYTES :]
        self.aead = AESGCM(keys.derive(data_key, salt, associated_data).reveal())

    def nonce(self, segment: int, last: bool) -> bytes:
        return self._prefix + segment.to_bytes(4, "big") + (b"\1" if last else b"\0")


def new_header() -> bytes:
    """Return the header of a new stream."""
    return bytes([HEADER]) + secrets.token_bytes(HEADER - 1)


# -- small streams, in memory -------------------------------------------------------------------------------------------


def seal(data_key: keys.Secret, associated_data: bytes, data: bytes, header: bytes | None = None) -> bytes:
    """Seal bytes. `header` is for test vectors only: by default it is drawn at random, as it must be."""
    header = header or new_header()
    cipher, count, view = _Cipher(data_key, associated_data, header), segment_count(len(data)), memoryview(data)
    parts = [header]
    for segment in range(count):
        part = view[segment_start(segment) : segment_start(segment + 1)]
        parts.append(cipher.aead.encrypt(cipher.nonce(segment, segment == count - 1), part, None))
    return b"".join(parts)


def unseal(data_key: keys.Secret, associated_data: bytes, stream: bytes) -> bytes:
    """Open what `seal` made. Raises CheckpointError."""
    size = plaintext_size(len(stream))
    if stream[0] != HEADER:
        raise CheckpointError("a sealed stream with an unknown header")
    cipher, count, view = _Cipher(data_key, associated_data, stream[:HEADER]), segment_count(size), memoryview(stream)
    parts = []
    for segment in range(count):
        part = view[sealed_start(segment) : sealed_start(segment + 1)]
        try:
            parts.append(cipher.aead.decrypt(cipher.nonce(segment, segment == count - 1), part, None))
        except InvalidTag:
            raise CheckpointError(f"segment {segment} of {count} does not authenticate") from None
    return b"".join(parts)


# -- threads ----------------------------------------------------------------------------------------------------------


class SealingThreads:
    """Threads that seal and open, with memory of their own.

    Args:
        count: How many of them seal or open at a time. One more reads or writes files meanwhile.
    """

    def __init__(self, count: int = DEFAULT_THREADS) -> None:
        if count < 1:
            raise ValueError(f"threads must be at least 1, not {count}")
        self._count = count
        self._pool = ThreadPoolExecutor(count + 1, "ringfence-seal")
        self.turns = threading.Semaphore(count)
        self._local = threading.local()
        self._pending: collections.deque[Future[object]] = collections.deque()

    def __enter__(self) -> SealingThreads:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def scratch(self) -> tuple[memoryview, memoryview]:
        """Return memory of the calling thread for one segment, sealed and plain."""
        if not hasattr(self._local, "memory"):
            self._local.memory = memoryview(bytearray(SEGMENT)), memoryview(bytearray(SEGMENT))
        return self._local.memory  # type: ignore[no-any-return]

    def submit(self, work: Callable[[], object]) -> None:
        """Run `work` soon, in order of submission. Blocks while much is pending; raises what earlier work raised."""
        if len(self._pending) > 2 * self._count + 1:
            self._pending.popleft().result()
        self._pending.append(self._pool.submit(work))

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Wait for all work at the end, also if some of it has failed."""
        try:
            yield
        finally:
            self.wait()

    def wait(self) -> None:
        """Wait for all work. Raises what the first one that failed raised, once none is running."""
        failure: BaseException | None = None
        while self._pending:
            try:
                self._pending.popleft().result()
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure


# -- writing ----------------------------------------------------------------------------------------------------------


class StreamWriter:
    """Seals a stream into a file, from `base` on.

    Memory that is passed to `write` must not change until `flush` returns. After a failure every call raises CheckpointError:
    a part of the stream is missing.
    """

    def __init__(
        self,
        output: Output,
        data_key: keys.Secret,
        associated_data: bytes,
        threads: SealingThreads,
        base: int = 0,
        progress: Progress = unseen,
    ) -> None:
        header = new_header()
        self._progress = progress
        self._cipher = _Cipher(data_key, associated_data, header)
        self._output, self._threads, self._base = output, threads, base
        self._segment = 0  # the number of the next one
        self._room = FIRST  # plaintext bytes of the next one
        self._rest, self._used = bytearray(BODY), 0  # the begun segment
        self._free: list[bytearray] = []
        self.position = 0
        self._failure: BaseException | None = None
        output.write_at(memoryview(header), base)

    def write(self, data: memoryview) -> None:
        """Append bytes. A full segment is kept back until more follows: the last one is marked."""
        with self._remembered():
            self._append(data)

    def _append(self, data: memoryview) -> None:
        self.position += len(data)
        while self._used + len(data) > self._room:
            if self._used:
                take = self._room - self._used
                self._rest[self._used : self._room] = data[:take]
                data, self._used = data[take:], self._room
                self._submit_rest(last=False)
            else:
                count = min(RUN, 1 + (len(data) - 1 - self._room) // BODY)
                run = [data[: self._room]]
                for place in range(count - 1):
                    run.append(data[self._room + place * BODY : self._room + (place + 1) * BODY])
                data = data[self._room + (count - 1) * BODY :]
                self._submit(run, last=False)
        self._rest[self._used : self._used + len(data)] = data
        self._used += len(data)

    def flush(self) -> None:
        """Wait until memory that was passed to `write` is no longer used."""
        with self._remembered():
            self._threads.wait()

    def finish(self) -> None:
        """Seal the last segment, and make the file durable."""
        with self._remembered():
            self._submit_rest(last=True)
            self._threads.wait()
            self._output.finish()

    @contextlib.contextmanager
    def _remembered(self) -> Iterator[None]:
        """Keep a failure: whoever catches it must not be able to finish the stream."""
        if self._failure is not None:
            raise CheckpointError(
                f"an earlier write failed, so the file is not complete: {self._failure}"
            ) from self._failure
        try:
            yield
        except BaseException as failure:
            self._failure = failure
            raise

    def _submit_rest(self, last: bool) -> None:
        used, size = self._rest, self._used
        self._rest, self._used = (self._free.pop() if self._free else bytearray(BODY)), 0
        self._submit([memoryview(used)[:size]], last, lambda: self._free.append(used))

    def _submit(self, run: list[memoryview], last: bool, done: Callable[[], object] | None = None) -> None:
        first, self._segment, self._room = self._segment, self._segment + len(run), BODY
        if self._segment > keys.STREAM_SEGMENTS:
            raise CheckpointError("a shard has more than 4 PiB: save with more ranks")
        self._threads.submit(lambda: self._seal(first, run, last, done))

    def _seal(self, first: int, run: list[memoryview], last: bool, done: Callable[[], object] | None) -> None:
        sealed, _ = self._threads.scratch()
        for segment, data in enumerate(run, first):
            target = sealed[: len(data) + TAG]
            with self._threads.turns:
                self._cipher.aead.encrypt_into(self._cipher.nonce(segment, last), data, None, target)
            self._output.write_at(target, self._base + sealed_start(segment))
            self._progress(len(data))
        if done is not None:
            done()


# -- reading ----------------------------------------------------------------------------------------------------------


class Want(NamedTuple):
    """A range of the plaintext, and the memory that it is wanted in."""

    start: int
    target: memoryview


class StreamReader:
    """Opens ranges of a stream in a file, from `base` on.

    Args:
        expected: The size of the plaintext, if it is known.

    Raises:
        CheckpointError: The file has another size, or no header.
    """

    def __init__(
        self,
        file: Input,
        data_key: keys.Secret,
        associated_data: bytes,
        threads: SealingThreads,
        base: int = 0,
        expected: int | None = None,
    ) -> None:
        self.size = plaintext_size(file.size - base)
        if expected not in (None, self.size):
            raise CheckpointError(
                f"it has {self.size} bytes, and {expected} are expected: it is truncated, or was extended"
            )
        header = bytearray(HEADER)
        file.read_at(memoryview(header), base)
        if header[0] != HEADER:
            raise CheckpointError("a sealed stream with an unknown header")
        self._cipher = _Cipher(data_key, associated_data, bytes(header))
        self._file, self._threads, self._base = file, threads, base
        self.count = segment_count(self.size)

    def read(self, wants: Iterable[Want], progress: Progress = unseen) -> None:
        """Open ranges into memory; each segment is opened once, and verified before anything of it is copied.

        Raises CheckpointError if a segment does not authenticate; all memory is then undefined.
        """
        parts: dict[int, list[Want]] = {}  # by segment, with starts within it
        for start, target in wants:
            for segment in range(segment_at(start), segment_at(start + len(target) - 1) + 1) if target else ():
                begin = segment_start(segment)
                low, high = max(start, begin), min(start + len(target), segment_start(segment + 1))
                parts.setdefault(segment, []).append(Want(low - begin, target[low - start : high - start]))
        ordered = sorted(parts)
        with self._threads.working():
            for place in range(0, len(ordered), RUN):
                run = ordered[place : place + RUN]
                self._prefetch(run)
                self._threads.submit(lambda run=run: progress(self._open_run(run, parts)))  # type: ignore[misc]

    def verify(self, progress: Progress = unseen) -> None:
        """Open every segment and keep nothing. Raises CheckpointError."""

        def work(run: range) -> None:
            _, plain = self._threads.scratch()
            progress(sum(self._open(segment, plain) for segment in run))

        with self._threads.working():
            for first in range(0, self.count, RUN):
                run = range(first, min(first + RUN, self.count))
                self._prefetch(run)
                self._threads.submit(lambda run=run: work(run))  # type: ignore[misc]

    def _prefetch(self, run: Sequence[int]) -> None:
        """Threads that read at several places of a file defeat the system's own readahead."""
        start = sealed_start(run[0])
        self._file.prefetch(self._base + start, sealed_start(run[-1] + 1) - start)

    def _open_run(self, run: Sequence[int], parts: dict[int, list[Want]]) -> int:
        for segment in run:
            wanted = parts[segment]
            if len(wanted) == 1 and len(wanted[0].target) == self._length(segment):
                self._open(segment, wanted[0].target)
                continue
            _, plain = self._threads.scratch()
            self._open(segment, plain)
            for start, target in wanted:
                target[:] = plain[start : start + len(target)]
        return sum(map(self._length, run))

    def _length(self, segment: int) -> int:
        return min(segment_start(segment + 1), self.size) - segment_start(segment)

    def _open(self, segment: int, target: memoryview) -> int:
        length = self._length(segment)
        sealed, target = self._threads.scratch()[0][: length + TAG], target[:length]
        self._file.read_at(sealed, self._base + sealed_start(segment))
        nonce = self._cipher.nonce(segment, segment == self.count - 1)
        try:
            with self._threads.turns:
                self._cipher.aead.decrypt_into(nonce, sealed, None, target)
        except InvalidTag:
            with contextlib.suppress(TypeError):  # memory that was not authenticated must not stay
                target[:] = bytes(length)
            raise CheckpointError(
                f"segment {segment} of {self.count} does not authenticate: the file was damaged or changed"
            ) from None
        return length
