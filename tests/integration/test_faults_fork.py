"""Forked children: they hold no connection of their parent, cannot use its keys, and do not disturb it."""

from __future__ import annotations

import gc
import os
import pickle
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from ringfence.admission.proofs.secret import SharedSecret
from ringfence.admission.tree import Tree
from ringfence.config.settings import Settings
from ringfence.errors import RingfenceError
from ringfence.session.join import Membership, listen
from tests.integration.join_cluster import World
from tests.integration.test_join_policy import Site, environments
from tests.key_audit import CONTROL, keys_held
from tests.limits import FAR, HANG
from tests.pool import Pool

WORLD = 3


def sockets() -> set[str]:
    """Return the inodes of the sockets of this process."""
    held = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            held.add(os.readlink(descriptor))
        except FileNotFoundError:  # the one that listed the directory
            continue
    return {name for name in held if name.startswith(("socket:", "anon_inode:[event"))}


def in_a_child(function: Callable[[], Any]) -> Any:
    """Run a function in a forked child and return its result."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, pickle.dumps(function()))
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        found = pipe.read()
    os.waitpid(child, 0)
    return pickle.loads(found)


def connected() -> None:
    """Open links of both lanes and of two groups."""
    tensor = torch.ones(10)
    dist.all_reduce(tensor)
    dist.all_reduce(tensor, group=dist.new_group())
    rank, size = dist.get_rank(), dist.get_world_size()
    sending = dist.isend(tensor, (rank + 1) % size)
    dist.recv(torch.empty(10), (rank - 1) % size)
    sending.wait()


def compare_sockets() -> tuple[int, set[str]]:
    """Return the number of sockets that the group opened, and those that a child holds."""
    connected()
    links = [link for each in dist.group.WORLD._session.engine.communicators.active.values() for link in each.links()]
    ours = {os.readlink(f"/proc/self/fd/{link.stream.fileno()}") for link in links if link.stream is not None}
    edges = {os.readlink(f"/proc/self/fd/{edge.fileno()}") for edge in dist.group.WORLD._session.engine.edges}
    return len(ours | edges), in_a_child(sockets) & (ours | edges)


@pytest.mark.promise("A child that Python forks holds no key and no connection, and can neither seal nor open.")
def test_a_forked_child_holds_no_socket_of_the_group(pool: Pool) -> None:
    for count, kept in pool.check(compare_sockets, WORLD, renew=True):
        assert count >= 5  # links of two lanes and two groups, and an edge of the tree
        assert kept == set()


def compare_keys() -> tuple[Counter[str], Counter[str]]:
    """Return the keys in this worker and in a child, while groups, works and requests are referenced."""
    connected()
    removed = dist.new_group()
    dist.all_reduce(torch.ones(10), group=removed)
    work = dist.all_reduce(torch.ones(10), async_op=True)
    dist.destroy_process_group(removed)
    ours, theirs = keys_held(), in_a_child(keys_held)
    work.wait()
    return ours, theirs


@pytest.mark.promise("A child that Python forks holds no key and no connection, and can neither seal nor open.")
def test_a_forked_child_holds_no_key(pool: Pool) -> None:
    for ours, theirs in pool.check(compare_keys, WORLD, renew=True):
        assert set(ours) >= {"Secret", "X25519PrivateKey", "AESGCM", *CONTROL}
        assert not theirs


@contextmanager
def attaching() -> Iterator[threading.Event]:
    """Return an event that is set once a worker has been admitted by its parent and waits for the others."""
    event, attach = threading.Event(), Tree.attach_parent

    def attached(tree: Tree, *arguments: Any) -> Any:
        event.set()
        return attach(tree, *arguments)

    with patch.object(Tree, "attach_parent", attached):
        yield event


def fork_while_joining(environment: dict[str, str]) -> tuple[set[str], Counter[str], set[str], Counter[str], int]:
    """Join two of three workers in threads; return the keys here, those in a child, and the number of joining workers."""
    before = sockets()
    with World(3, timeout=FAR) as world, listen(Settings()), attaching() as event:
        world.start([0, 1], {rank: Settings.from_environment(environment) for rank in (0, 1)})
        assert event.wait(HANG)
        ours, theirs = (sockets(), keys_held()), in_a_child(lambda: (sockets(), keys_held()))
        world.start([2], {2: Settings.from_environment(environment)})
        joined = [outcome for outcome in world.finish().values() if isinstance(outcome, Membership)]
        return ours[0] - before, ours[1], theirs[0] - before, theirs[1], len(joined)


SHOWN = {"secret": {"Secret"}, "certificate": {"ECPrivateKey"}, "both": {"Secret", "ECPrivateKey"}}


@pytest.mark.promise("A child that Python forks holds no key and no connection, and can neither seal nor open.")
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.nightly] if kind != "both" else []) for kind in SHOWN]
)
def test_a_child_forked_during_a_join_holds_nothing_of_it(pool: Pool, tmp_path: Path, kind: str) -> None:
    for attempt in range(3):  # what another thread used at the moment of the fork may be left, seldom (limitations.md)
        folder = tmp_path / str(attempt)
        folder.mkdir()
        args = environments(Site(folder), kind)[:1]
        (found,) = pool.check(fork_while_joining, 1, backend=None, args=args, timeout=HANG)
        ours, our_keys, theirs, their_keys, joined = found
        if not their_keys:
            break
    assert len(ours) >= 4, "two listeners, both ends of a connection"
    assert set(our_keys) >= {"X25519PrivateKey", *CONTROL, *SHOWN[kind]}
    assert not theirs
    assert not their_keys
    assert joined == 3, "the parent went on"


def fail_to_join(environment: dict[str, str]) -> tuple[list[str], Counter[str]]:
    """Join two of three workers until the deadline; return their errors and the keys that the errors keep."""
    for deadline in (2.0, 20.0, 100.0):  # on a busy machine it may pass before the worker has been admitted
        settings = {rank: Settings.from_environment(environment) for rank in (0, 1)}
        world = World(3, timeout=deadline)
        with attaching() as event:
            world.start([0, 1], settings)
            ends = [world.error(rank) for rank in (0, 1)]
        for each in settings.values():
            each.forget()  # the caller's own
        if event.is_set():
            break
    assert event.is_set()
    return ends, keys_held()


def fail_to_make_a_group(environment: dict[str, str]) -> tuple[str, Counter[str], Counter[str]]:
    """Initialise a group as a script does; return the error, the keys that it keeps, and those in a child."""
    with patch.dict(os.environ, environment):
        try:
            seconds = timedelta(seconds=0.5)
            dist.init_process_group("ringfence", store=dist.HashStore(), rank=0, world_size=2, timeout=seconds)
        except RingfenceError as error:
            kept = error
    return str(kept), keys_held(), in_a_child(keys_held)


@pytest.mark.nightly  # test_start.py has failures after the join in the gate
@pytest.mark.promise("The error of an initialisation that failed keeps no key.")
def test_the_error_of_a_failed_join_keeps_no_key(pool: Pool, tmp_path: Path) -> None:
    """The frames of its traceback would keep the credentials alive: here a secret and a certificate."""
    environment = environments(Site(tmp_path), "both")[:1]
    ((ends, kept),) = pool.check(fail_to_join, 1, backend=None, args=environment, timeout=HANG)
    assert all("AdmissionError" in end for end in ends)
    assert not kept
    with Pool() as fresh:
        ((error, kept, theirs),) = fresh.check(fail_to_make_a_group, 1, backend=None, args=environment)
    assert "1 of 2 workers are missing: rank 1" in error
    assert not kept
    assert not theirs


def what_could_verify() -> tuple[int, bool, bool]:
    """Return the keys of the secret in this worker, and whether it or a child holds a part of the policy."""
    engine = dist.group.WORLD._session.engine
    gc.collect()
    keys = sum(isinstance(each, SharedSecret) for each in gc.get_objects())
    return (
        keys,
        engine.acceptor.peer_verifier is not None,
        in_a_child(lambda: engine.acceptor.peer_verifier is not None),
    )


@pytest.mark.promise("Once a run has formed, a worker keeps no shared secret, and no key from it that admits.")
def test_no_credential_is_kept_without_peer_verification(pool: Pool) -> None:
    assert pool.check(what_could_verify, WORLD, renew=True) == [(0, False, False)] * WORLD


def try_in_a_child() -> list[str]:
    def attempt() -> list[str]:
        tensor = torch.ones(10)
        found = []
        for operation in (lambda: dist.all_reduce(tensor), lambda: dist.send(tensor, (dist.get_rank() + 1) % WORLD)):
            try:
                operation()
                found.append("")
            except RingfenceError as error:
                found.append(str(error))
        return found

    connected()
    return in_a_child(attempt)


@pytest.mark.promise("A child that Python forks holds no key and no connection, and can neither seal nor open.")
def test_a_collective_in_a_forked_child_raises(pool: Pool) -> None:
    for messages in pool.check(try_in_a_child, WORLD, renew=True):
        assert all("forked child" in message for message in messages)


def seal_in_a_child() -> list[str]:
    """Seal in a child with sealers that were taken before the fork, so that the cleanup at fork does not apply."""
    connected()
    (communicator, *_) = dist.group.WORLD._session.engine.communicators.active.values()
    outbox = next(iter(communicator.outboxes.values()))
    sealer, origin = outbox.sealer, communicator.origin

    def attempt() -> list[str]:
        room = memoryview(bytearray(26))
        found = []
        for seal in (
            lambda: sealer.seal_into(b"header", b"ten bytes.", room),
            lambda: sealer.tag(b"header"),
            lambda: origin.seal_into(0, b"header", b"ten bytes.", room),
        ):
            try:
                seal()
                found.append("")
            except RingfenceError as error:
                found.append(str(error))
        return found

    return in_a_child(attempt)


@pytest.mark.promise("A child that Python forks holds no key and no connection, and can neither seal nor open.")
def test_a_seal_in_a_forked_child_raises(pool: Pool) -> None:
    for messages in pool.check(seal_in_a_child, WORLD, renew=True):
        assert len(messages) == 3
        assert all("forked child" in message for message in messages)


def go_on_after_forks() -> float:
    connected()
    for _ in range(3):
        in_a_child(os.getpid)
        connected()
    tensor = torch.ones(10)
    dist.all_reduce(tensor)
    return tensor[0].item()


def test_forks_do_not_disturb_the_parent(pool: Pool) -> None:
    assert pool.check(go_on_after_forks, WORLD, renew=True) == [float(WORLD)] * WORLD


def meet(path: str, rank: int) -> list[float]:
    """Create a group of two and return its sums, waited for in both ways."""
    store = dist.FileStore(path, 2)
    dist.init_process_group("ringfence", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=FAR))
    tensors = [torch.ones(10), torch.ones(10)]
    dist.all_reduce(tensors[0])
    dist.all_reduce(tensors[1], async_op=True).get_future().wait()
    dist.destroy_process_group()
    return [tensor[0].item() for tensor in tensors]


def meet_a_child(path: str) -> list[list[float]]:
    """Create a group of one worker, as in a notebook, then a group with a forked child."""
    dist.init_process_group("ringfence", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(10), async_op=True).get_future().wait()
    dist.destroy_process_group()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, pickle.dumps(meet(path, 1)))
        finally:
            os._exit(0)
    os.close(writer)
    mine = meet(path, 0)
    with os.fdopen(reader, "rb") as pipe:
        theirs = pickle.load(pipe)
    os.waitpid(child, 0)
    return [mine, theirs]


def replace_the_parents_groups() -> float:
    """Create groups, as FSDP and device meshes do, then other groups in a forked child."""
    dist.init_process_group("ringfence", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(1), group=dist.new_group([0]))

    def in_the_child() -> float:
        dist.destroy_process_group()
        dist.init_process_group("ringfence", store=dist.HashStore(), rank=0, world_size=1)
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        dist.destroy_process_group()
        return tensor.item()

    found: float = in_a_child(in_the_child)
    dist.destroy_process_group()
    return found


def test_a_forked_child_can_destroy_the_groups_of_its_parent() -> None:
    with Pool() as fresh:
        assert fresh.check(replace_the_parents_groups, 1, None) == [1.0]


def test_a_forked_child_can_join_another_run(tmp_path: Path) -> None:
    with Pool() as fresh:
        ((mine, theirs),) = fresh.check(meet_a_child, 1, None, (str(tmp_path / "store"),), HANG)
    assert mine == theirs == [2.0, 2.0]
