"""Forked loader workers: the process group closes only its own descriptors in a child, before and after its end."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from tests.pool import Pool

_kept: list[object] = []  # a script may keep a reference to a destroyed group


def keep_group() -> None:
    dist.all_reduce(torch.ones(1))
    _kept.append(dist.group.WORLD)


def descriptors_lost_in_a_child(count: int) -> list[int]:
    """Open pipes; return those that a forked child does not have."""
    pipes = [descriptor for _ in range(count) for descriptor in os.pipe()]
    identities = [os.fstat(descriptor).st_ino for descriptor in pipes]
    report, answer = os.pipe()
    child = os.fork()
    if child == 0:
        lost = [d for d, identity in zip(pipes, identities, strict=True) if not _is(d, identity)]
        os.write(answer, ",".join(map(str, lost)).encode() or b"none")
        os._exit(0)
    os.close(answer)
    text = os.read(report, 65536).decode()
    os.waitpid(child, 0)
    for descriptor in (*pipes, report):
        os.close(descriptor)
    assert text, "the child could not answer: its end of the pipe is closed"
    return [] if text == "none" else [int(number) for number in text.split(",")]


def _is(descriptor: int, identity: int) -> bool:
    try:
        return os.fstat(descriptor).st_ino == identity
    except OSError:
        return False


def sockets_in_a_child() -> tuple[int, int]:
    """The number of sockets to peers of this process and of a forked child."""
    report, answer = os.pipe()
    before = _sockets()
    child = os.fork()
    if child == 0:
        os.write(answer, str(len(_sockets() & before)).encode())
        os._exit(0)
    os.close(answer)
    kept = int(os.read(report, 100))
    os.close(report)
    os.waitpid(child, 0)
    return len(before), kept


def _sockets() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            continue  # the listing's own descriptor
    return {target for target in found if target.startswith("socket:")}


def test_a_forked_child_holds_no_socket_of_the_group(pool: Pool) -> None:
    with pool.fresh() as own:  # new workers: Gloo would have left sockets open
        own.check(keep_group, 2, "ringfence")
        for parent, child in own.check(sockets_in_a_child, 2, "ringfence"):
            assert parent > 1
            assert child == 1  # the harness's own


def test_child_forked_after_the_group_keeps_new_descriptors(pool: Pool) -> None:
    pool.check(keep_group, 2, "ringfence")
    assert pool.check(descriptors_lost_in_a_child, 2, None, (200,)) == [[], []]


def test_parent_continues_after_a_fork(pool: Pool) -> None:
    pool.check(keep_group, 2, "ringfence")
    pool.check(sockets_in_a_child, 2, "ringfence")
    pool.check(keep_group, 2, "ringfence")
