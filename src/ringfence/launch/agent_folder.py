"""The folder of an agent's Unix socket, and the removal of folders whose agent was killed."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import socket
import stat
import tempfile
from pathlib import Path
from typing import Final

SOCKET: Final = "agent"
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


@functools.cache
def prefix() -> str:
    """Return how the names of folders begin on this machine, until it is started anew.

    The folder for temporary files may be on a file system that machines share, where the socket of an agent on another
    machine refuses connections too.
    """
    return f"ringfence-agent-{hashlib.sha256(_BOOT.read_bytes()).hexdigest()[:8]}-"


def new_folder() -> str:
    """Create a folder that only this user can enter, after removing those of this user's agents that were killed."""
    remove_abandoned(tempfile.gettempdir())
    return tempfile.mkdtemp(prefix=prefix())


def listen(door: socket.socket, path: str, backlog: int) -> None:
    """Listen at `path`. The name appears only then: a socket that does not listen yet looks like that of a killed agent."""
    early = f"{path}.new"
    door.bind(early)
    door.listen(backlog)
    os.rename(early, path)


def remove_abandoned(parent: str) -> None:
    """Remove the folders of this user's agents on this machine that were killed: those whose socket refuses connections."""
    with contextlib.suppress(OSError):
        names = [name for name in os.listdir(parent) if name.startswith(prefix())]
        for name in names:
            with contextlib.suppress(OSError):  # it is another user's, a symbolic link, or was removed meanwhile
                _remove(os.path.join(parent, name))


def _remove(path: str) -> None:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(folder).st_uid != os.geteuid():
            return
        if not stat.S_ISSOCK(os.stat(SOCKET, dir_fd=folder, follow_symlinks=False).st_mode):
            return
        if not _refuses(f"/proc/self/fd/{folder}/{SOCKET}"):
            return
        os.unlink(SOCKET, dir_fd=folder)
        os.rmdir(path)  # removes nothing else that is in it
    finally:
        os.close(folder)


def _refuses(path: str) -> bool:
    """Whether nobody listens. A busy agent is not taken for one that is gone: the error is another one."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        return probe.connect_ex(path) == errno.ECONNREFUSED
