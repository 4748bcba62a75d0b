"""The lifetime of sessions: the age limit ends one on every worker; a change of membership needs a new one."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringfence.errors import MismatchError, RingfenceError
from ringfence.transport import alarm
from tests.key_audit import CONTROL, fingerprints, keys_held
from tests.limits import FAR, HANG
from tests.pool import Call, Failure, Pool, values

AGE = 600  # seconds: tests end a session by setting its timer
POLICY = f'version = 1\nmax_session_age = "{AGE}s"\n\n[[admit]]\n[admit.secret]\n'


@pytest.fixture
def aged(tmp_path: Path) -> dict[str, str]:
    """Return the environment of workers whose policy limits the age of a session."""
    policy = tmp_path / "policy.toml"
    policy.write_text(POLICY)
    return {"RINGFENCE_POLICY": str(policy)}


def session() -> Any:
    return dist.group.WORLD._session


def all_reduce() -> float:
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    return float(tensor[0].item())


def all_reduce_for_ever() -> None:
    while all_reduce() == dist.get_world_size():
        continue


def reach_the_age() -> None:
    """Let the timer of the session's age expire now, on one worker: it ends the session for all."""
    if dist.get_rank() == 0:
        timer = session()._age_limit._timer
        now = alarm._Itimerspec(alarm._Timespec(0, 0), alarm._Timespec(0, 1))  # a nanosecond from now
        assert alarm._libc.timerfd_settime(timer, 0, ctypes.byref(now), None) == 0


def all_reduce_beyond_the_age() -> None:
    all_reduce()
    reach_the_age()
    all_reduce_for_ever()


def all_reduce_after_the_age() -> None:
    all_reduce()
    reach_the_age()
    idle = threading.Event()
    while session().engine.failure is None:
        idle.wait(0.01)
    all_reduce()


def leave_and_look_for_threads() -> tuple[list[str], list[str]]:
    before = [thread.name for thread in threading.enumerate()]
    timer = session()._age_limit
    dist.destroy_process_group()
    timer.join()
    return before, [thread.name for thread in threading.enumerate()]


def session_and_sum() -> tuple[str, float]:
    """Check that the session works, and return what distinguishes it from others."""
    key = session().engine.keys.session_key.reveal()
    return hashlib.sha256(key).hexdigest(), all_reduce()


def wait_for_the_death_of(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    all_reduce_for_ever()


# -- age --------------------------------------------------------------------------------------------------------------


@pytest.mark.promise("A session that reaches `max_session_age` ends on every worker.")
@pytest.mark.parametrize("work", [all_reduce_beyond_the_age, all_reduce_after_the_age], ids=["busy", "idle"])
def test_an_expired_session_ends_on_every_worker(pool: Pool, aged: dict[str, str], work: Any) -> None:
    for result in pool.run(work, 3, env=aged, seconds=FAR, timeout=HANG, renew=True):
        assert isinstance(result, Failure), result
        assert result.type == "AbortedError", result
        assert f"this session has reached {AGE} s, the policy's max_session_age" in result.message
        assert "Destroy the process group and initialise it anew" in result.message


@pytest.mark.promise("A session that reaches `max_session_age` ends on every worker.")
def test_the_session_age_advances_during_suspend(pool: Pool, aged: dict[str, str]) -> None:
    """Suspending a machine is not possible here, so the test reads from the kernel which clock each timer uses."""
    before = alarm.boot_seconds()
    results = values(pool.run(boot_time_timers, 2, env=aged, renew=True))
    for (end,) in results:
        assert before + AGE <= end <= alarm.boot_seconds() + AGE


def boot_time_timers() -> list[float]:
    """Return when this process's timers of CLOCK_BOOTTIME expire, as listed by the kernel."""
    ends = []
    for file in Path("/proc/self/fdinfo").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor of this listing
            fields = dict(line.split(":", 1) for line in file.read_text().splitlines() if ":" in line)
            if fields.get("clockid", "").strip() == str(time.CLOCK_BOOTTIME):
                seconds, nanoseconds = map(int, re.findall(r"\d+", fields["it_value"]))
                ends.append(alarm.boot_seconds() + seconds + nanoseconds / 1e9)
    return ends


def test_the_same_workers_form_a_new_session_after_expiry(pool: Pool, aged: dict[str, str]) -> None:
    old = values(pool.run(session_and_sum, 3, env=aged, renew=True))
    assert all(isinstance(result, Failure) for result in pool.start(all_reduce_beyond_the_age, 3).wait(HANG))
    new = values(pool.run(session_and_sum, 3, env=aged, renew=True))
    assert len(set(old)) == len(set(new)) == 1
    assert old[0][0] != new[0][0]
    assert old[0][1] == new[0][1] == 3


def test_a_session_that_ends_in_time_leaves_no_timer(pool: Pool, aged: dict[str, str]) -> None:
    for before, after in values(pool.run(leave_and_look_for_threads, 2, env=aged, renew=True)):
        assert "ringfence age" in before
        assert "ringfence age" not in after


def test_a_policy_without_max_session_age_sets_no_timer(pool: Pool) -> None:
    pool.join("ringfence", 2, renew=True)
    assert values(pool.start(has_no_clock, 2).wait(HANG)) == [True, True]


def has_no_clock() -> bool:
    return session()._age_limit is None


# -- the end of its keys ----------------------------------------------------------------------------------------------


def busy_links() -> list[Any]:
    """Open links of both lanes and of two groups; return what a script may keep of them."""
    tensor = torch.ones(1000)
    rank, size = dist.get_rank(), dist.get_world_size()
    kept = [dist.group.WORLD, dist.new_group(), dist.isend(tensor, (rank + 1) % size)]
    dist.all_reduce(tensor, group=kept[1])
    dist.recv(torch.empty(1000), (rank - 1) % size)
    dist.broadcast(tensor, 0)
    dist.barrier()
    return kept


def roots() -> frozenset[int]:
    """Return fingerprints of the secrets that all links of this session derive from."""
    engine = session().engine
    return fingerprints([engine.keys.session_key.reveal(), *engine.keys._shared.values()])


def leave_and_look_for_keys() -> tuple[set[str], set[str]]:
    kept, known = busy_links(), roots()
    before = set(keys_held(known))
    dist.barrier()
    dist.destroy_process_group()
    assert kept
    return before, set(keys_held(known))


def fail_and_look_for_keys() -> tuple[str, set[str], list[str], set[str]]:
    """Fail the session; return the error, the keys after it, the errors of pending and later requests, and the final keys."""
    kept, known = busy_links(), roots()
    pending = dist.irecv(torch.empty(3), (dist.get_rank() + 1) % dist.get_world_size(), tag=9)
    try:
        dist.barrier()  # no worker fails before all have reached this point
        if dist.get_rank():
            dist.all_reduce(torch.ones(3))
        else:
            dist.broadcast(torch.ones(3), 0)
        dist.barrier()
        failure = ""
    except RingfenceError as error:
        failure = f"{type(error).__name__}: {error}"
    failed = set(keys_held(known))
    ends = []
    for late in (pending.wait, all_reduce, lambda: dist.all_reduce(torch.ones(3), group=kept[1])):
        try:
            late()
            ends.append("")
        except RingfenceError as error:
            ends.append(str(error))
    dist.destroy_process_group()
    return failure, failed, ends, set(keys_held(known))


@pytest.mark.promise("A worker that left a session, or saw it fail, holds no key that opens a recorded link.")
@pytest.mark.nightly  # the next test holds after a failure, in the gate
def test_a_worker_that_leaves_holds_no_session_key(pool: Pool) -> None:
    with pool.fresh() as own:  # processes that hold no keys of other tests
        for before, after in values(own.run(leave_and_look_for_keys, 3)):
            assert before == {"Secret", "X25519PrivateKey", "MLKEM768PrivateKey", "AESGCM", "bytes", *CONTROL}
            assert not after


@pytest.mark.promise("A worker that left a session, or saw it fail, holds no key that opens a recorded link.")
def test_a_failed_session_keeps_control_keys_only(pool: Pool) -> None:
    with pool.fresh() as own:
        for failure, failed, ends, left in values(own.run(fail_and_look_for_keys, 3)):
            assert MismatchError.__name__ in failure
            assert failed <= CONTROL
            assert all(failure.partition(": ")[2] in end for end in ends), ends
            assert not left


# -- membership -------------------------------------------------------------------------------------------------------


@pytest.mark.promise("A change of membership is a new session with new keys.")
def test_a_change_of_membership_is_a_new_session(pool: Pool) -> None:
    """Of four workers one dies; three continue in the next generation, and four in the one after."""
    with pool.fresh() as own:
        found = [values(own.run(session_and_sum, 4, seconds=FAR))]
        for result in own.start(wait_for_the_death_of, 4, (3,)).wait(HANG):
            assert isinstance(result, Failure)
        found += [values(own.run(session_and_sum, size)) for size in (3, 4)]
        for size, results in zip((4, 3, 4), found, strict=True):
            assert len(set(results)) == 1
            assert results[0][1] == size
        assert len({results[0][0] for results in found}) == 3, "a session's keys came back"


@pytest.mark.promise("A worker of an older generation does not come back.")
def test_a_worker_of_an_older_generation_cannot_rejoin(pool: Pool) -> None:
    """It looks for its own generation and finds no worker; the new session does not wait for it."""
    with pool.fresh() as own:
        values(own.run(session_and_sum, 2))
        stale = {"RINGFENCE_GENERATION": str(own.generation)}
        results = own.join("ringfence", 2, seconds=3, env=[{}, stale], renew=True)
        assert [type(result) for result in results] == [Failure, Failure]
        assert "1 of 2 workers are missing: rank 1" in results[0].message
        assert f"generation {own.generation - 1}, did not form" in results[1].message


def fail_to_join() -> str:
    """Wait in vain for another worker; torch has numbered the group by then."""
    os.environ.update(RINGFENCE_JOIN_TIMEOUT="1", RINGFENCE_RUN_ID="nobody else", RINGFENCE_GENERATION="0")
    try:
        dist.init_process_group("ringfence", store=dist.HashStore(), rank=1, world_size=2)
    except RingfenceError as error:
        return str(error)
    return "joined"


def test_a_worker_whose_join_failed_joins_workers_that_are_new(pool: Pool) -> None:
    """A process that goes on after a failed join, as in `ringfence.rejoin`, and one that was started since."""
    with pool.fresh() as pair:
        pair.check(os.getpid, 2, None)
        pair.workers[0].send(("leave",))
        pair.workers[1].send(("run", sys.path, fail_to_join.__module__, fail_to_join.__qualname__, ()))
        _, said = Call(pair, 2).wait(HANG)
        assert "did not form within 1 s" in said
        assert values(pair.run(all_reduce, 2, env={"RINGFENCE_JOIN_TIMEOUT": "60"})) == [2, 2]
