"""Groups inside one machine: which groups use the backend that a script asks for, and how they agree on it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ringfence
from ringfence.backend import inside
from ringfence.backend.sealed_store import SealedStore
from ringfence.errors import CollectiveTimeoutError, RingfenceError, UnsupportedError
from ringfence.runtime import same_machine
from tests.integration.inside import POLICY, Records, hybrid_losses, kind, mesh_of, tell, write_policy
from tests.integration.inside import alone as losses_alone
from tests.pool import Failure, Pool

SEALED = "RingfenceProcessGroup ringfence"
INSIDE = "inside gloo"


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_policy(tmp_path_factory.mktemp("policy"))


def collectives(group: Any) -> list[float]:
    """Several kinds of collectives; the results that every rank must have."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    tensor = torch.full((3,), rank + 1.0)
    dist.all_reduce(tensor, group=group)
    gathered = [torch.empty(1) for _ in range(size)]
    dist.all_gather(gathered, torch.tensor([float(rank)]), group=group)
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, rank, group=group)
    dist.barrier(group=group)
    return [tensor[0].item(), *(each.item() for each in gathered), *map(float, objects)]


# -- which groups -----------------------------------------------------------------------------------------------------


def ask() -> dict[str, Any]:
    """All ways to ask for a group on one machine."""
    found: dict[str, Any] = {"default": kind(dist.group.WORLD)}
    groups = {
        "gloo": dist.new_group(backend="gloo"),
        "by device": dist.new_group(backend="cpu:gloo"),
        "ringfence": dist.new_group(backend="ringfence"),
        "none": dist.new_group(),
        "pair": dist.new_group([0, 1], backend="gloo"),
        "another order": dist.new_group([1, 0], backend="gloo", sort_ranks=False),
        "nccl": dist.new_group(backend="nccl"),
        "subgroup": dist.new_subgroups(2, backend="gloo")[0],
    }
    for name, group in groups.items():
        found[name] = kind(group)
        assert collectives(group)[0] == 3.0
    ringfence.assert_sealed()
    found["workers"] = len(ringfence.workers(groups["gloo"]))
    found["listening"] = listening()
    for name in ("gloo", "pair"):
        dist.destroy_process_group(groups[name])
    again = dist.new_group(backend="gloo")
    found["again"] = kind(again), collectives(again)[0]
    found["links"] = len(dist.group.WORLD._session.engine.communicators.active)
    return found


def listening() -> list[str]:
    """The addresses on which this process listens for TCP."""
    lines = subprocess.run(["ss", "-Hltnp"], check=True, capture_output=True, text=True).stdout.splitlines()
    return [line.split()[3] for line in lines if f"pid={os.getpid()}," in line]


def test_groups_on_one_machine_use_the_backend_asked_for(pool: Pool, env: dict[str, str]) -> None:
    for found in pool.check(ask, 2, env=env, renew=True):
        assert found["default"] == found["ringfence"] == found["none"] == SEALED
        for name in ("gloo", "by device", "pair", "another order", "subgroup"):
            assert found[name].startswith("inside"), name
        assert found["gloo"] == INSIDE
        assert found["nccl"] == SEALED  # this torch has no NCCL, and says so in the log
        assert found["again"] == (INSIDE, 3.0)
        assert found["workers"] == 2
        assert found["listening"] and all(address.startswith("127.0.0.1:") for address in found["listening"])
        assert found["links"] <= 9  # destroyed groups have closed theirs


def many_at_once(count: int) -> float:
    """Asynchronous collectives, so that Gloo's threads and this one compete for the interpreter's lock."""
    group, total = dist.new_group(backend="gloo"), 0.0
    for _ in range(count // 8):
        tensors = [torch.ones(256) for _ in range(8)]
        works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
        for work in works:
            work.wait()
        total += tensors[-1][0].item()
    return total


@pytest.mark.nightly
def test_many_asynchronous_collectives_do_not_deadlock(pool: Pool, env: dict[str, str]) -> None:
    """A process group that is a Python subclass stops here after some thousands, in torch's C++ code."""
    assert pool.check(many_at_once, 2, args=(16000,), env=env, renew=True) == [4000.0] * 2


def bound_sockets() -> tuple[list[str], int]:
    """Ask for Gloo groups; return what they are, and how many abstract sockets of ringfence this process bound for them."""
    names: list[bytes] = []

    def record(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "socket.bind" and isinstance(arguments[1], bytes):
            names.append(arguments[1])

    sys.addaudithook(record)
    groups = [dist.new_group(backend=name) for name in ("gloo", "cpu:gloo")]
    return [kind(group).split()[0] for group in groups], sum(name.startswith(b"\0ringfence/1") for name in names)


@pytest.mark.promise("Beside a ringfence default group, a script that asks for a Gloo group gets a ringfence group.")
def test_without_the_key_everything_is_sealed(pool: Pool, env: dict[str, str]) -> None:
    """And no worker listens for the proof that others are on its machine; with the key, it does for each group."""
    with pool.fresh() as fresh:  # an audit hook stays until its process ends
        assert fresh.check(bound_sockets, 2) == [(["RingfenceProcessGroup"] * 2, 0)] * 2
    with pool.fresh() as fresh:
        assert fresh.check(bound_sockets, 2, env=env) == [(["inside"] * 2, 2)] * 2


def asks_for_gloo() -> str:
    return kind(dist.new_group(backend="gloo"))


def test_a_backend_that_the_policy_does_not_name_is_sealed(pool: Pool, tmp_path: Path) -> None:
    env = write_policy(tmp_path, POLICY.replace('["gloo", "nccl"]', '"nccl"'))
    assert pool.check(asks_for_gloo, 2, env=env, renew=True) == [SEALED] * 2


def test_workers_with_and_without_the_key_do_not_admit_each_other(pool: Pool, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("with", "without")]
    for folder in folders:
        folder.mkdir()
    texts = (POLICY, POLICY.replace('inside_machine = ["gloo", "nccl"]\n', ""))
    envs = [write_policy(folder, text) for folder, text in zip(folders, texts, strict=True)]
    with pool.fresh() as fresh:
        for result in fresh.join("ringfence", 2, env=envs):
            assert isinstance(result, Failure) and "have different policies" in result.message


def mesh() -> tuple[list[str], list[float], float]:
    found = mesh_of({"inner": "gloo"})
    kinds = [kind(found.get_group(name)) for name in ("outer", "inner")]
    ringfence.assert_sealed()
    return kinds, hybrid_losses(found)[0], collectives(found.get_group("inner"))[0]


def test_a_mesh_dimension_uses_the_backend_asked_for(pool: Pool, env: dict[str, str]) -> None:
    for kinds, losses, total in pool.check(mesh, 4, env=env, renew=True):
        assert kinds == [SEALED, INSIDE]
        assert losses == pytest.approx(losses_alone(), rel=1e-5)
        assert total == 3.0


def required() -> tuple[str, str]:
    group = dist.new_group(backend="gloo")
    try:
        dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
    except RingfenceError as error:
        return kind(group), str(error)
    return kind(group), "made"


@pytest.mark.promise("`RINGFENCE_REQUIRE=1` refuses process groups of other backends, and RPC agents.")
def test_require_permits_only_groups_with_proof(pool: Pool, env: dict[str, str]) -> None:
    with pool.fresh() as fresh:  # a process in which it was set once refuses Gloo for ever
        for found, error in fresh.check(required, 2, env={**env, "RINGFENCE_REQUIRE": "1"}):
            assert found == INSIDE
            assert "RINGFENCE_REQUIRE=1 refuses it" in error


@pytest.mark.promise("`RINGFENCE_REQUIRE=1` refuses process groups of other backends, and RPC agents.")
def test_require_refuses_a_default_group_of_the_permitted_backend(pool: Pool, env: dict[str, str]) -> None:
    """The proof needs a session, so it cannot cover the group that comes before all others."""
    with pool.fresh() as fresh:
        for result in fresh.join("gloo", 2, env={**env, "RINGFENCE_REQUIRE": "1"}):
            assert isinstance(result, Failure) and "RINGFENCE_REQUIRE=1 refuses it" in result.message


# -- agreement --------------------------------------------------------------------------------------------------------


def one_says_no(how: str) -> tuple[str, float, list[str]]:
    """Worker 1 has another view than the others."""
    records = Records()
    patch = pytest.MonkeyPatch()
    if dist.get_rank() == 1:
        if how == "hint":
            patch.setattr(inside, "place", lambda: b"elsewhere")
        elif how == "proof":
            patch.setattr(same_machine.MachineProof, "run", lambda self: frozenset())
        elif how == "user":
            patch.setattr(same_machine, "uid_of", lambda connection: 4321)
        elif how == "backend":
            patch.setitem(inside.AVAILABLE, "gloo", lambda: False)
    try:
        group = dist.new_group(backend="gloo")
        return kind(group), collectives(group)[0], records.texts
    finally:
        patch.undo()


@pytest.mark.promise("The members of a group inside a machine decide together: all use the backend, or all are sealed.")
@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("hint", "different machines"),
        ("proof", "has no proof"),
        ("user", "has no proof"),
        ("backend", "worker 1 lacks this backend"),
    ],
)
def test_one_member_that_says_no_seals_the_group_for_all(
    pool: Pool, env: dict[str, str], how: str, reason: str
) -> None:
    for found, total, texts in pool.check(one_says_no, 3, args=(how,), env=env, renew=True):
        assert (found, total) == (SEALED, 6.0)
        assert any("is sealed" in text and reason in text for text in texts), texts


def never_comes() -> str:
    """Worker 1 does not create the group."""
    if dist.get_rank() == 1:
        return ""
    try:
        dist.new_group(backend="gloo", timeout=timedelta(seconds=2))
    except RingfenceError as error:
        return type(error).__name__
    return "made"


@pytest.mark.promise("The members of a group inside a machine decide together: all use the backend, or all are sealed.")
def test_a_member_that_does_not_come_is_an_error_in_time(pool: Pool, env: dict[str, str]) -> None:
    """In the time of the group: that of the default group is longer than the pool waits."""
    results = pool.check(never_comes, 3, env=env, renew=True, seconds=600)
    assert results[1] == "" and {results[0], results[2]} <= {"CollectiveTimeoutError", "AbortedError"}


def cannot_connect() -> str:
    """The backend of worker 1 fails after the agreement."""
    patch = pytest.MonkeyPatch()
    if dist.get_rank() == 1:

        def fail(*_: Any) -> None:
            raise OSError("no loopback interface")

        patch.setitem(inside.MAKERS, "gloo", fail)
    try:
        dist.new_group(backend="gloo")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        patch.undo()
    return "made"


def test_a_backend_that_fails_to_connect_ends_the_session_on_all(pool: Pool, env: dict[str, str]) -> None:
    results = pool.check(cannot_connect, 3, env=env, renew=True, seconds=600)
    assert all("no loopback interface" in text for text in results), results
    assert results[1].startswith("OSError")


# -- the rendezvous ---------------------------------------------------------------------------------------------------


class Watched(dist.Store):  # type: ignore[misc]
    """A store that records the keys that are set in it."""

    def __init__(self, inner: Any, keys: list[str]) -> None:
        super().__init__()
        self._inner, self._keys = inner, keys

    def set(self, key: str, value: Any) -> None:
        self._keys.append(key)
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        return self._inner.get(key)  # type: ignore[no-any-return]

    def check(self, keys: list[str]) -> bool:
        return self._inner.check(keys)  # type: ignore[no-any-return]

    def wait(self, keys: list[str], *timeout: Any) -> None:
        self._inner.wait(keys, *timeout)


def keys_in_the_runs_store() -> tuple[list[str], list[str], float]:
    """Replace the run's store by one that records what is set."""
    c10d = dist.distributed_c10d
    name, store = c10d._world.pg_map[dist.group.WORLD]
    keys: list[str] = []
    watched = Watched(store, keys)
    c10d._world.pg_map[dist.group.WORLD] = (name, watched)
    try:
        group = dist.new_group(backend="gloo")
        total = collectives(group)[0]
        values = dict(inside._groups[group]._values)
    finally:
        c10d._world.pg_map[dist.group.WORLD] = (name, store)
    return keys, sorted(values), total


@pytest.mark.promise("The rendezvous of a group inside a machine does not use the run's store.")
def test_the_rendezvous_does_not_use_the_runs_store(pool: Pool, env: dict[str, str]) -> None:
    for keys, values, total in pool.check(keys_in_the_runs_store, 2, env=env, renew=True):
        assert keys == [] and total == 3.0
        assert values == ["gloo/0/0", "gloo/0/1"]


def store() -> SealedStore:
    return SealedStore(dist.new_group(backend="ringfence"), timedelta(seconds=20))


def publish_and_read() -> tuple[list[bytes], bool, bool, list[str]]:
    """Every member publishes; all read all. A prefix and C++ in between, as backends use it."""
    mine = store()
    prefixed = dist.PrefixStore("p", mine)
    rank, size = dist.get_rank(), dist.get_world_size()
    before = mine.check(["p/never"])
    prefixed.set(f"{rank}", b"\0value of " + str(rank).encode())
    if rank == 0:
        prefixed.set("long", bytes(1 << 20))
    found = [bytes(prefixed.get(str(other))) for other in range(size)]
    assert len(prefixed.get("long")) == 1 << 20
    prefixed.wait([str(other) for other in range(size)], timedelta(seconds=5))
    refused = []
    for call in (
        lambda: mine.add("a", 1),
        lambda: mine.set("x", bytes((1 << 20) + 1)),
        lambda: mine.compare_set("a", "", "b"),
    ):
        try:
            call()
        except UnsupportedError as error:
            refused.append(str(error))
    try:
        mine.wait(["never"], timedelta(seconds=0.3))
    except CollectiveTimeoutError as error:
        refused.append(str(error))
    dist.barrier()
    return found, before, mine.check([f"p/{other}" for other in range(size)]), refused


def test_the_sealed_store_publishes_values(pool: Pool) -> None:
    for found, before, after, refused in pool.check(publish_and_read, 3, renew=True):
        assert found == [b"\0value of 0", b"\0value of 1", b"\0value of 2"]
        assert not before and after
        assert len(refused) == 4 and "no other member published 'never' within 0.3 s" in refused[3]


def wait_for_a_dead_member() -> str:
    mine = store()
    dist.barrier()
    if dist.get_rank() == 1:
        os._exit(1)
    try:
        mine.get("from worker 1")
    except RingfenceError as error:
        mine.check(["from worker 1"])  # never raises
        return str(error)
    return ""


def test_waiting_in_the_store_ends_with_the_session(pool: Pool) -> None:
    with pool.fresh() as fresh:
        results = fresh.run(wait_for_a_dead_member, 3)
    assert all("worker 1" in str(results[rank]) for rank in (0, 2))


# -- NCCL, as far as it can be tested without it ----------------------------------------------------------------------


def test_nccl_is_bound_to_the_loopback_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in inside.NCCL_SETTINGS:
        monkeypatch.setenv(name, "eth0")
    made: list[Any] = []

    class Backend:
        class Options:
            pass

        def __init__(self, *args: Any) -> None:
            made.append(args)

        def _set_sequence_number_for_group(self) -> None:
            pass

    class Sealed:
        _ranks = (4, 5)

        def rank(self) -> int:
            return 1

        def size(self) -> int:
            return 2

        def getGroupName(self) -> str:
            return "7"

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Backend, raising=False)
    inside._nccl("store", Sealed(), timedelta(seconds=9))  # type: ignore[arg-type]
    ((store, rank, size, options),) = made
    assert (store, rank, size, options._timeout, options.global_ranks_in_group) == (
        "store", 1, 2, timedelta(seconds=9), [4, 5],
    )  # fmt: skip
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=lo" and os.environ["NCCL_IB_DISABLE"] == "1"


def test_tell(pool: Pool, env: dict[str, str]) -> None:
    """The sentence that attacks look for arrives."""
    assert pool.check(tell_both, 2, env=env, renew=True) == [[True, True]] * 2


def tell_both() -> list[bool]:
    return [tell(dist.new_group(backend=name)) for name in ("gloo", "ringfence")]


@pytest.fixture(scope="module", autouse=True)
def _leave(pool: Pool) -> Iterator[None]:
    yield
    pool.leave()
