"""Shared memory between workers of one machine: what a reader relies on, and what it cannot do."""

from __future__ import annotations

import faulthandler
import mmap
import os
import resource
from collections.abc import Iterator

import pytest

from ringfence import keys
from ringfence.dataplane.shared import OwnMemory, map_peer, peer_region, shared_bytes
from ringfence.errors import ProtocolError

SLOT = keys.SEGMENT_BYTES


@pytest.fixture
def memory() -> Iterator[OwnMemory]:
    found = OwnMemory(peers=3)
    yield found
    found.close()


def test_readers_cannot_write(memory: OwnMemory) -> None:
    with pytest.raises(PermissionError):
        mmap.mmap(memory.descriptor, memory.size)
    with pytest.raises(PermissionError):
        os.pwrite(memory.descriptor, b"x", 0)
    mapping = mmap.mmap(memory.descriptor, memory.size, prot=mmap.PROT_READ)
    with pytest.raises(TypeError):
        mapping[0] = 1


@pytest.mark.parametrize("size", [0, SLOT, 1 << 30])
def test_nobody_can_resize_it(memory: OwnMemory, size: int) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(memory.descriptor, size)


def unsealed(size: int) -> int:
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    return descriptor


@pytest.mark.parametrize("size", [0, SLOT, SLOT + 1, keys.SHARED_LIMIT_BYTES + SLOT])
def test_memory_that_its_owner_could_shrink_is_refused(size: int) -> None:
    descriptor = unsealed(size)
    try:
        with pytest.raises(ProtocolError, match="another form"):
            map_peer(descriptor, 1)
    finally:
        os.close(descriptor)


def test_what_is_no_memory_is_refused() -> None:
    reader, writer = os.pipe()
    try:
        with pytest.raises(ProtocolError, match="another form"):
            map_peer(reader, 1)
    finally:
        os.close(reader)
        os.close(writer)


def test_a_reader_sees_what_the_owner_writes_also_after_it_closed(memory: OwnMemory) -> None:
    mapping = map_peer(memory.descriptor, 1)
    memory.view[5] = 7
    memory.close()
    assert mapping[5] == 7


def test_memory_with_too_few_parts_for_its_peers_is_refused(memory: OwnMemory) -> None:
    with pytest.raises(ProtocolError, match="two for each peer"):
        peer_region(map_peer(memory.descriptor, 1), 1, memory.size // SLOT // 2 + 1)


@pytest.mark.processes
def test_a_forked_child_has_no_mapping(memory: OwnMemory) -> None:
    memory.view[0] = 1
    child = os.fork()
    if not child:  # DONTFORK: to read it ends the child
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _ = memory.view[0]
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status  # a signal, or the report of a sanitizer


def test_every_link_has_at_least_two_slots_of_its_own() -> None:
    for peers in (1, 3, 7, 31, 63):
        assert shared_bytes(peers) // SLOT // 2 // peers >= 2
        assert shared_bytes(peers) <= keys.SHARED_LIMIT_BYTES
