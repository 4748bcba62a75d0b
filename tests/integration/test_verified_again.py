"""Workers are verified again during a session: a revoked one ends it on all, by name, with traffic and without."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringfence.errors import RingfenceError
from ringfence.transport import alarm
from tests.integration.test_revocation import HOUR, LISTED, TODAY, Site
from tests.limits import FAR, HANG
from tests.pool import Failure, Pool

EVERY = 3600  # seconds: tests set the timer, so that no verdict depends on a clock
VERIFIED = LISTED.replace("[[admit]]", f'verify_every = "{EVERY}s"\n[[admit]]', 1)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool() as found:
        yield found


class VerifiedSite(Site):
    """Machines whose policy has workers verified again."""

    def __init__(self, folder: Path, machines: int, every: int = EVERY) -> None:
        super().__init__(folder, machines)
        for number in self.machines:
            text = VERIFIED.replace(f"{EVERY}s", f"{every}s")
            (folder / str(number) / "policy.toml").write_text(text)
        self.publish(number=1, start=TODAY - HOUR)


def proofs() -> Any:
    return dist.group.WORLD._session._proofs


def verify_now() -> None:
    """Let the timer expire now."""
    timer = proofs()._alarm._timer
    now = alarm._Itimerspec(alarm._Timespec(0, 0), alarm._Timespec(0, 1))  # a nanosecond from now
    assert alarm._libc.timerfd_settime(timer, 0, ctypes.byref(now), None) == 0


def all_reduce() -> float:
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    return float(tensor[0])


def until_it_ends(flag: str, busy: bool, verifiers: tuple[int, ...], times: int = 1) -> str:
    """Work, or idle, until the session ends; once the file `flag` exists, verify neighbours. Return how it ended."""
    engine, told, idle = dist.group.WORLD._session.engine, 0, threading.Event()
    try:
        assert all_reduce() == dist.get_world_size()
        while engine.failure is None:
            if busy:
                assert all_reduce() == dist.get_world_size(), "a wrong sum"
            else:
                idle.wait(0.01)
            is_next = told < times and dist.get_rank() in verifiers and os.path.exists(flag)
            if is_next and proofs().reverification.ticks == told:
                told += 1
                verify_now()
        all_reduce()
    except RingfenceError as error:
        return f"{type(error).__name__}: {error}"
    return "it did not end"


def revoked_session(
    pool: Pool,
    site: Site,
    change: Callable[[], None],
    *,
    busy: bool = True,
    verifiers: tuple[int, ...] = (0,),
    times: int = 1,
    env: list[Mapping[str, str]] | None = None,
) -> list[str]:
    """Return how the session ended on each worker after a change on one of them."""
    flag = site.folder / "changed"
    joined = pool.join("ringfence", len(site.machines), env=env or site.environments(), seconds=FAR, renew=True)
    assert not any(isinstance(each, Failure) for each in joined), joined
    call = pool.start(until_it_ends, len(site.machines), (str(flag), busy, verifiers, times))
    change()
    flag.touch()
    ends = call.wait(HANG)
    assert all(isinstance(each, str) for each in ends), ends
    return ends


@pytest.mark.promise(
    "With `verify_every`, a worker that no longer passes ends the session on every worker, by name, within two intervals."
)
@pytest.mark.parametrize("busy", [True, False], ids=["traffic", "idle"])
@pytest.mark.parametrize(("revoked", "verifier"), [(2, 0), (5, 1), (0, 1)], ids=["child", "grandchild", "root"])
def test_a_revoked_worker_ends_the_session_by_name(
    pool: Pool, tmp_path: Path, busy: bool, revoked: int, verifier: int
) -> None:
    """It holds the list of before, as an attacker would. Only its verifier has the new one."""
    site = VerifiedSite(tmp_path, 6)
    ends = revoked_session(
        pool,
        site,
        lambda: site.publish(100 + revoked, number=2, to=[verifier]),
        busy=busy,
        verifiers=(verifier,),
    )
    for end in ends:
        assert f"worker {revoked} no longer passes verification by worker {verifier}" in end, ends
        assert f"/worker/w{revoked} was revoked" in end, ends
