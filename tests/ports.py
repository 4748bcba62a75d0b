"""TCP ports for tests that must name one before a server listens there.

A port that was free a moment ago may be anybody's by the time it is used, if it is one of those that the kernel gives to
connections. The ports here are below them, and a block of them belongs to one process: the one that has bound the block's
abstract Unix socket. Such a name is as wide as a port, one network namespace, and ends with its process, however that ends.
"""

from __future__ import annotations

import secrets
import socket

BLOCK = 8
FIRST, BLOCKS = 10_000, 1_250  # up to 19,999; `ringfence demo` takes others, and Slurm's script those from 29,400 on

_held: dict[int, socket.socket] = {}  # by the first port of what is claimed
_unused: list[int] = []  # ports of claimed blocks that were not given away yet


def port() -> int:
    """Return a port that nobody else has, until this process ends."""
    if not _unused:
        _unused.extend(block())
    return _unused.pop()


def block() -> range:
    """Return `BLOCK` consecutive ports that nobody else has, until `release` or the end of this process."""
    start = secrets.randbelow(BLOCKS)
    for number in (*range(start, BLOCKS), *range(start)):
        first = FIRST + BLOCK * number
        if claim(range(first, first + BLOCK)):
            return range(first, first + BLOCK)
    raise RuntimeError(f"all ports from {FIRST} to {FIRST + BLOCK * BLOCKS - 1} are claimed by tests, or in use")


def claim(ports: range) -> bool:
    """Claim these ports; return False if another test has them, or another program uses one."""
    mark = socket.socket(socket.AF_UNIX)
    try:
        mark.bind(f"\0port {ports.start} is of a test of ringfence")
    except OSError:
        mark.close()
        return False
    if not all(map(_is_free, ports)):
        mark.close()
        return False
    _held[ports.start] = mark
    return True


def release(ports: range) -> None:
    """Let others have these ports."""
    _held.pop(ports.start).close()


def _is_free(number: int) -> bool:
    """Return whether no socket of any address has this port, not even one whose connection ended a moment ago."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.socket(family) as probe:
        try:
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            probe.bind(("", number))
        except OSError:
            return False
    return True
