"""Memory that workers of one machine share: a memfd of its sender, which others can only read.

Each communicator has one for its collectives, and each point-to-point link one for its payloads. It is sealed against resizing,
so a reader never reads beyond its end, and against new mappings that write. Its pages go with the last descriptor and mapping,
also after a kill.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref
from typing import Final

from ringfence import keys
from ringfence.dataplane.choice import Region
from ringfence.errors import ProtocolError
from ringfence.keys import SEGMENT_BYTES

_ADD_SEALS: Final = 1033
_GET_SEALS: Final = 1034
_SEAL, _SHRINK, _GROW, _FUTURE_WRITE = 1, 2, 4, 16
_SEALED: Final = _SHRINK | _GROW


def shared_bytes(peers: int) -> int:
    """Return how much memory a worker shares with this many others: at least four segments for each."""
    return max(keys.SHARED_SLOTS, 4 * peers) * SEGMENT_BYTES


class SharedMemory:
    """What this worker writes and others read. `descriptor` is what they are given."""

    def __init__(self, size: int) -> None:
        """Raises OSError if this kernel, or a sandbox, has no such memory."""
        self.descriptor = os.memfd_create("ringfence", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, size)
            self.view = _map(self.descriptor, size, mmap.PROT_READ | mmap.PROT_WRITE)
            fcntl.fcntl(self.descriptor, _ADD_SEALS, _SEALED | _FUTURE_WRITE | _SEAL)
        except OSError:
            os.close(self.descriptor)
            raise
        self.size = size
        self._process = os.getpid()

    def close(self) -> None:
        """Zero what no peer reads any more and unmap it, once no link uses it. A forked child has only the descriptor.

        The pages are freed when the peers have unmapped theirs.
        """
        if self.descriptor < 0:
            return
        os.close(self.descriptor)
        self.descriptor = -1
        if os.getpid() == self._process:
            self._wipe()
        self._unmap()

    def _wipe(self) -> None:
        """Zero what no peer has."""
        raise NotImplementedError

    def _unmap(self) -> None:
        del self.view  # a traceback may keep this object, and so would keep the mapping


class OwnMemory(SharedMemory):
    """The memory of a communicator, in slots that all of its links use."""

    def __init__(self, peers: int) -> None:
        """Raises OSError if this kernel, or a sandbox, has no such memory."""
        super().__init__(shared_bytes(peers))
        self.region = Region(self.view, peers, own=True)

    def _wipe(self) -> None:
        self.region.wipe()

    def _unmap(self) -> None:
        del self.region
        super()._unmap()


def map_peer(descriptor: int, worker: int) -> memoryview:
    """Map the memory of another worker for reading. Raises ProtocolError if it could change its size."""
    size = os.fstat(descriptor).st_size
    try:
        seals = fcntl.fcntl(descriptor, _GET_SEALS)
    except OSError:
        seals = 0
    if seals & _SEALED != _SEALED or not 0 < size <= keys.SHARED_LIMIT_BYTES or size % SEGMENT_BYTES:
        raise ProtocolError(f"the memory that worker {worker} shares has another form than this release writes")
    return _map(descriptor, size, mmap.PROT_READ).toreadonly()


def peer_region(memory: memoryview, worker: int, peers: int) -> Region:
    """Return the slots of another worker's memory, which it shares with so many. Raises ProtocolError if they are too few."""
    try:
        return Region(memory, peers, own=False)
    except ValueError as error:
        raise ProtocolError(f"the memory that worker {worker} shares: {error}") from None


_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_FAILED: Final = ctypes.c_void_p(-1).value


def _map(descriptor: int, size: int, protection: int) -> memoryview:
    """Map a file until the last view of it is gone. Unlike `mmap.mmap`, this keeps no descriptor that a child would inherit."""
    address = _libc.mmap(None, size, protection, mmap.MAP_SHARED, descriptor, 0)
    if address == _FAILED:
        raise OSError(ctypes.get_errno(), "cannot map shared memory")
    memory = (ctypes.c_char * size).from_address(address)
    weakref.finalize(memory, _unmap, address, size, os.getpid()).atexit = False
    if _libc.madvise(address, size, mmap.MADV_DONTFORK):
        raise OSError(ctypes.get_errno(), "cannot keep shared memory from children")
    return memoryview(memory).cast("B")


def _unmap(address: int, size: int, process: int) -> None:
    if os.getpid() == process:  # a forked child has something else there, or nothing
        _libc.munmap(address, size)
