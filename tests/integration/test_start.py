"""The start of a session: after a failure between settings and loop no key is left in memory, and the others are told."""

from __future__ import annotations

import os
import secrets
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from ringfence.errors import RingfenceError
from ringfence.session import session
from tests.integration.test_faults_fork import in_a_child, sockets
from tests.integration.test_join_policy import Site, environments
from tests.key_audit import keys_held
from tests.pool import Pool

SECONDS = 600.0  # longer than the pool waits: a worker that is not told of a failure hangs


def begin(path: str, rank: int) -> None:
    store = dist.FileStore(path, 2)
    dist.init_process_group("ringfence", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=SECONDS))


def frames_of(error: BaseException | None) -> Iterator[FrameType]:
    while error is not None:
        entry = error.__traceback__
        while entry is not None:
            yield entry.tb_frame
            entry = entry.tb_next
        error = error.__cause__ or error.__context__


# -- failures after the join -------------------------------------------------------------------------------------------


@contextmanager
def another_table() -> Iterator[None]:
    """Rank 0 proposes a schedule table of an unknown version."""
    changed = b"\x09" + session.Session.table.to_bytes()[1:]
    with patch.object(session, "_proposed", return_value=SimpleNamespace(to_bytes=lambda: changed)):
        yield


@contextmanager
def no_descriptors() -> Iterator[None]:
    """A machine that cannot open more files when the links are set up."""
    with patch.object(session, "TcpNetwork", side_effect=OSError(24, "Too many open files")):
        yield


@contextmanager
def no_timer() -> Iterator[None]:
    """The same when the loop already runs."""
    with patch.object(session.Session, "_limit_age", side_effect=OSError(24, "Too many open files")):
        yield


FAILURES = {"table": (another_table, 0), "network": (no_descriptors, 1), "timer": (no_timer, 1)}  # and at which rank


def fail_to_start(path: str, kind: str) -> tuple[int, str, Counter[str]]:
    """Return this worker's rank, its error, and the keys that the error still holds."""
    rank = dist.FileStore(f"{path}-ranks", 2).add("next", 1) - 1
    prepare, where = FAILURES[kind]
    kept = None
    try:
        with prepare() if rank == where else nullcontext():
            begin(path, rank)
        dist.all_reduce(torch.ones(3))
    except Exception as error:
        kept = error
    held = keys_held()
    if dist.is_initialized():
        dist.destroy_process_group()
    return rank, f"{type(kept).__name__}: {kept}", held


@pytest.mark.promise("The error of an initialisation that failed keeps no key.")
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.nightly) if kind != "timer" else kind for kind in FAILURES]
)
def test_failure_after_the_join_deletes_keys_and_is_reported(tmp_path: Path, kind: str) -> None:
    with Pool() as fresh:
        ends = fresh.check(fail_to_start, 2, backend=None, args=(str(tmp_path / "store"), kind))
    errors = {rank: error for rank, error, _ in ends}
    for rank, error, held in ends:
        if rank == 1 or kind == "table":  # rank 0's group has formed otherwise, and has TLS keys until it is destroyed
            assert not held, f"rank {rank} keeps {held}: {error}"
    if kind == "table":
        assert all("ProtocolError: schedule table of version 9" in error for error in errors.values())
    else:
        assert "OSError: [Errno 24] Too many open files" in errors[1]
    if kind == "network":
        assert errors[0].startswith("AbortedError: worker 1 reported") and "Too many open files" in errors[0]
    if kind == "timer":
        assert errors[0].startswith("PeerLostError: worker 1 left the run")


# -- credentials that cannot be used -----------------------------------------------------------------------------------


def look_for_key(variables: dict[str, str], key: bytes) -> tuple[str, list[str], Counter[str]]:
    """Start with these settings; return the error, its stack frames that contain the key's bytes, and the keys held."""
    with patch.dict(os.environ, variables):
        try:
            dist.init_process_group("ringfence", store=dist.HashStore(), rank=0, world_size=2)
        except RingfenceError as error:
            kept = error
    found = [
        f"{frame.f_code.co_name}: {name}"
        for frame in frames_of(kept)
        if frame.f_code is not look_for_key.__code__
        for name, value in frame.f_locals.items()
        if isinstance(value, bytes | bytearray) and key in value
    ]
    return str(kept), found, keys_held()


@pytest.mark.promise("The error of an initialisation that failed keeps no key.")
@pytest.mark.parametrize("kind", ["secret without its newline", "key of another certificate"])
def test_error_of_an_unusable_credential_holds_no_key(tmp_path: Path, kind: str) -> None:
    if kind.startswith("secret"):
        key = secrets.token_hex(32).encode()
        file = tmp_path / "run.secret"
        file.touch(0o600)
        file.write_bytes(key)
        variables = {"RINGFENCE_SECRET_FILE": str(file)}
    else:
        site = Site(tmp_path)
        first, second = (environments(site, "certificate")[rank] for rank in range(2))
        variables = dict(first) | {"RINGFENCE_KEY_FILE": second["RINGFENCE_KEY_FILE"]}
        key = Path(second["RINGFENCE_KEY_FILE"]).read_bytes()
    with Pool() as fresh:
        ((error, found, held),) = fresh.check(look_for_key, 1, backend=None, args=(variables, key))
    assert error and not found and not held, error


# -- forks ------------------------------------------------------------------------------------------------------------


def fork_at_the_start(path: str) -> list[tuple[str, Counter[str], int]]:
    """Fork before and after the join, as another thread might; return what the children hold."""
    rank = dist.FileStore(f"{path}-ranks", 2).add("next", 1) - 1
    found = []
    before = sockets()

    def forking(name: str) -> Any:
        genuine = getattr(session, name)

        def call(*arguments: Any) -> Any:
            found.append((name, in_a_child(keys_held), len(in_a_child(sockets) - before)))
            return genuine(*arguments)

        return patch.object(session, name, call)

    with forking("listen"), forking("TcpNetwork"), forking("ProgressLoop"):
        begin(path, rank)
    dist.destroy_process_group()
    return found


@pytest.mark.promise("A child that Python forks holds no key and no connection, and can neither seal nor open.")
def test_child_forked_before_the_loop_holds_no_credentials(tmp_path: Path) -> None:
    with Pool() as fresh:
        for found in fresh.check(fork_at_the_start, 2, backend=None, args=(str(tmp_path / "store"),)):
            assert [name for name, _, _ in found] == ["listen", "TcpNetwork", "ProgressLoop"]
            assert all(not held and not open for _, held, open in found), found
