"""Sealed streams: any range, any number of threads, and no byte that was changed, moved, cut off or added."""

from __future__ import annotations

import itertools
import os
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfence.checkpoint import streams
from ringfence.checkpoint.streams import (
    BODY,
    FIRST,
    HEADER,
    SEGMENT,
    SealingThreads,
    StreamReader,
    StreamWriter,
    Want,
)
from ringfence.errors import CheckpointError
from ringfence.keys import Secret
from tests.unit.checkpoint_samples import MemoryFile

KEY = Secret(os.urandom(32))
SIZES = [0, 1, FIRST - 1, FIRST, FIRST + 1, FIRST + BODY, FIRST + BODY + 1, 4 * SEGMENT + 17]


def content(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def reader(stream: bytes, threads: SealingThreads, bound: bytes = b"bound") -> StreamReader:
    return StreamReader(MemoryFile(stream), KEY, bound, threads)


def read_range(stream: StreamReader, start: int, size: int) -> bytes:
    found = bytearray(size)
    stream.read([Want(start, memoryview(found))])
    return bytes(found)


@pytest.mark.parametrize("size", SIZES)
def test_sizes_are_those_of_the_layout(size: int) -> None:
    stream = streams.seal(KEY, b"bound", content(size))
    assert len(stream) == streams.sealed_size(size)
    assert streams.plaintext_size(len(stream)) == size
    assert streams.unseal(KEY, b"bound", stream) == content(size)


@given(st.integers(0, 1 << 40))
def test_a_stream_has_the_size_of_one_plaintext_or_of_none(size: int) -> None:
    assert streams.plaintext_size(streams.sealed_size(size)) == size
    segment = streams.segment_at(size)
    assert streams.segment_start(segment) <= size < streams.segment_start(segment + 1)
    try:
        assert streams.sealed_size(streams.plaintext_size(size)) == size
    except CheckpointError:
        assert size < HEADER + 16 or (size - 1) % SEGMENT < 16


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("size", SIZES)
def test_writing_in_parts_gives_the_same_stream(size: int, threads: int) -> None:
    data, chance = content(size), random.Random(size)
    with SealingThreads(threads) as pool:
        for parts in ([size], [chance.randrange(size + 1) for _ in range(3)], [*range(0, min(size, 900), 7)]):
            file = MemoryFile()
            writer = StreamWriter(file, KEY, b"bound", pool)
            cuts = [0, *sorted(parts), size]
            for start, end in itertools.pairwise(cuts):
                writer.write(memoryview(data)[start:end])
            writer.finish()
            assert streams.unseal(KEY, b"bound", file.content) == data


@given(st.lists(st.tuples(st.integers(0, 3 * SEGMENT), st.integers(0, 2 * SEGMENT)), max_size=5))
@settings(max_examples=20)
def test_any_ranges_are_read(ranges: list[tuple[int, int]]) -> None:
    data = content(3 * SEGMENT)
    targets = [(start, bytearray(min(size, len(data) - start))) for start, size in ranges]
    with SealingThreads(1) as pool:
        stream = reader(STREAM, pool)
        stream.read([Want(start, memoryview(target)) for start, target in targets])
    assert all(data[start : start + len(target)] == target for start, target in targets)


STREAM = streams.seal(KEY, b"bound", content(3 * SEGMENT))


def is_refused(stream: bytes) -> bool:
    """Whether reading and verifying refuse a stream of three segments and a bit."""
    found = bytearray(3 * SEGMENT)
    for check in (lambda each: each.verify(), lambda each: each.read([Want(0, memoryview(found))])):
        try:
            with SealingThreads(1) as pool:
                check(StreamReader(MemoryFile(stream), KEY, b"bound", pool, expected=3 * SEGMENT))
        except CheckpointError:
            continue
        return False
    return True


def test_changed_bits_are_found() -> None:
    chance = random.Random(1)
    places = [*range(HEADER), HEADER, SEGMENT - 1, SEGMENT, len(STREAM) - 1]
    for place in places + [chance.randrange(len(STREAM)) for _ in range(20)]:
        changed = bytearray(STREAM)
        changed[place] ^= 1 << chance.randrange(8)
        assert is_refused(bytes(changed)), place
    assert not is_refused(STREAM)


def test_cut_moved_and_added_segments_are_found() -> None:
    last = len(STREAM) - 3 * SEGMENT
    assert is_refused(STREAM[:-1])
    assert is_refused(STREAM[: 3 * SEGMENT])
    assert is_refused(STREAM + b"\0")
    assert is_refused(STREAM + STREAM[-last:])
    assert is_refused(
        STREAM[:SEGMENT] + STREAM[2 * SEGMENT : 3 * SEGMENT] + STREAM[SEGMENT : 2 * SEGMENT] + STREAM[-last:]
    )
    assert is_refused(streams.seal(KEY, b"another", content(3 * SEGMENT)))
    assert is_refused(b"")


def test_a_stream_cut_at_a_segment_is_refused_without_an_expected_size() -> None:
    with SealingThreads(1) as pool:
        stream = reader(STREAM[: 2 * SEGMENT], pool)
        assert read_range(stream, 0, 100) == content(3 * SEGMENT)[:100]
        with pytest.raises(CheckpointError, match="segment 1 of 2"):
            stream.verify()


def test_what_does_not_authenticate_is_wiped() -> None:
    changed = bytearray(STREAM)
    changed[SEGMENT] ^= 1
    target = bytearray(b"x" * 3 * SEGMENT)
    with SealingThreads(1) as pool, pytest.raises(CheckpointError):
        reader(bytes(changed), pool).read([Want(0, memoryview(target))])
    assert not any(target[FIRST : FIRST + BODY])


def test_no_two_streams_of_a_key_have_the_same_header() -> None:
    assert len({streams.seal(KEY, b"", b"")[:HEADER] for _ in range(100)}) == 100


@pytest.mark.parametrize("threads", [1, 2])
def test_a_failure_in_a_thread_is_raised_and_leaves_no_work(threads: int) -> None:
    class Full(MemoryFile):
        def write_at(self, data: memoryview, offset: int) -> None:
            if offset > 2 * SEGMENT:
                raise OSError(28, "No space left on device")

    def write(pool: SealingThreads) -> None:
        writer = StreamWriter(Full(), KEY, b"", pool)
        writer.write(memoryview(bytes(20 * SEGMENT)))
        writer.finish()

    with SealingThreads(threads) as pool, pytest.raises(OSError, match="space"):
        write(pool)
