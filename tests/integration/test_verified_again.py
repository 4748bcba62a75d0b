"""Workers are verified again during a session: a revoked one ends it on all, by name, with traffic and without."""

from __future__ import annotations

import ctypes
import gc
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from ringfence.admission.policy import Policy, Prover
from ringfence.admission.proofs import certificate, snp
from ringfence.admission.proofs.snp_chain import line
from ringfence.admission.proofs.snp_report import PRODUCTS
from ringfence.errors import RingfenceError
from ringfence.session.join import credentials
from ringfence.transport import alarm
from tests import provers
from tests.integration.test_admit_by_gpu_and_token import POLICY as TOKENS
from tests.integration.test_admit_by_gpu_and_token import pem
from tests.integration.test_revocation import HOUR, LISTED, TODAY, Site
from tests.integration.token_service import signer_in
from tests.limits import FAR, HANG
from tests.pool import ROOT, Failure, Pool, values
from tests.unit import snp_mint
from tests.unit.token_mint import key_set

EVERY = 3600  # seconds: tests set the timer, so that no verdict depends on a clock
BUSY = pytest.mark.parametrize(
    "busy", [True, pytest.param(False, marks=pytest.mark.nightly)], ids=["traffic", "idle"]
)  # the revoked are tested in both in the gate
VERIFIED = LISTED.replace("[[admit]]", f'verify_every = "{EVERY}s"\n[[admit]]', 1)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool() as found:
        yield found


@dataclass(frozen=True)
class Machines:
    """Workers that a test configures itself."""

    folder: Path
    machines: range

    def environments(self) -> Sequence[Mapping[str, str]]:
        return [{}] * len(self.machines)


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
    before = proofs().reverification.ticks
    try:
        assert all_reduce() == dist.get_world_size()
        while engine.failure is None:
            if busy:
                assert all_reduce() == dist.get_world_size(), "a wrong sum"
            else:
                idle.wait(0.01)
            is_next = told < times and dist.get_rank() in verifiers and os.path.exists(flag)
            honest = proofs().verifications >= told * (len(engine.edges) - 1)  # all but one have answered
            if is_next and honest and proofs().reverification.ticks == before + told:
                told += 1
                verify_now()
        all_reduce()
    except RingfenceError as error:
        return f"{type(error).__name__}: {error}"
    return "it did not end"


def revoked_session(
    pool: Pool,
    site: Site | Machines,
    change: Callable[[], None],
    *,
    busy: bool = True,
    verifiers: tuple[int, ...] = (0,),
    times: int = 1,
    env: Sequence[Mapping[str, str]] | None = None,
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


@pytest.mark.promise(
    "With `verify_every`, a worker that no longer passes ends the session on every worker, by name, within two intervals."
)
def test_a_worker_whose_own_list_names_it_ends_the_session_in_its_own_name(pool: Pool, tmp_path: Path) -> None:
    site = VerifiedSite(tmp_path, 3)
    for end in revoked_session(pool, site, lambda: site.publish(102, number=2, to=[2])):
        assert "worker 2 cannot prove itself again: " in end and "/worker/w2 was revoked" in end


def test_a_renewed_certificate_passes_and_another_name_does_not(pool: Pool, tmp_path: Path) -> None:
    """The ones of before are revoked meanwhile. Worker 2 then has a certificate of the name of worker 1."""
    site = VerifiedSite(tmp_path, 3)

    def renew() -> None:
        for number in site.machines:
            site.issue(number, 200 + number)
        site.publish(100, 101, 102, number=2)

    values(pool.join("ringfence", 3, env=site.environments(), seconds=FAR, renew=True))
    renew()
    assert values(pool.start(verify_and_wait, 3).wait(HANG)) == [(2, 2), (1, 1), (1, 1)]
    for file in ("own.pem", "own.key"):
        (tmp_path / "2" / file).write_bytes((tmp_path / "1" / file).read_bytes())
    call = pool.start(until_it_ends, 3, (str(tmp_path / "1"), False, (0,)))
    for end in call.wait(HANG):
        assert "worker 2 no longer passes verification by worker 0: it proves to be " in end
        assert "/worker/w1', and was admitted as " in end and "/worker/w2'" in end


def verify_and_wait() -> tuple[int, int]:
    """Verify the neighbours, and wait until they have and were; return the proofs of both kinds that this took."""
    thread, edges = proofs(), len(dist.group.WORLD._session.engine.edges)
    verify_now()
    idle = threading.Event()
    while (thread.verifications, thread.proofs) < (edges, edges) and dist.group.WORLD._session.engine.failure is None:
        idle.wait(0.01)
    dist.barrier()  # all have
    return thread.verifications, thread.proofs


def verify_and_look_for_credentials() -> list[str]:
    verify_and_wait()
    gc.collect()
    found = [each for each in gc.get_objects() if isinstance(each, certificate.Credential)]
    return [repr(each) for each in found if each.key is not None]


def test_no_key_of_a_credential_is_kept_between_verifications(pool: Pool, tmp_path: Path) -> None:
    site = VerifiedSite(tmp_path, 2)
    values(pool.join("ringfence", 2, env=site.environments(), seconds=FAR, renew=True))
    assert values(pool.start(verify_and_look_for_credentials, 2).wait(HANG)) == [[], []]


def test_files_are_found_although_the_script_changes_its_folder(pool: Pool, tmp_path: Path) -> None:
    site = VerifiedSite(tmp_path, 2)
    relative = [
        {name: os.path.relpath(value, ROOT) for name, value in site.environment(number).items()} for number in range(2)
    ]
    values(pool.join("ringfence", 2, env=relative, seconds=FAR, renew=True))
    assert values(pool.start(verify_from_elsewhere, 2, (str(tmp_path),)).wait(HANG)) == [(1, 1), (1, 1)]


def verify_from_elsewhere(folder: str) -> tuple[int, int]:
    before = os.getcwd()
    try:
        os.chdir(folder)
        os.environ["RINGFENCE_POLICY"] = "elsewhere.toml"
        return verify_and_wait()
    finally:
        os.chdir(before)


def test_a_policy_that_was_edited_ends_the_session(pool: Pool, tmp_path: Path) -> None:
    site = VerifiedSite(tmp_path, 2)

    def edit() -> None:
        file = tmp_path / "1" / "policy.toml"
        file.write_text(file.read_text().replace("12h", "13h"))

    for end in revoked_session(pool, site, edit):
        assert "worker 1 cannot prove itself again: its policy was changed while the session went on" in end


def test_a_worker_that_the_secret_admitted_is_not_asked(pool: Pool, tmp_path: Path) -> None:
    """Beside one with a certificate, which is."""
    site = VerifiedSite(tmp_path, 2)
    for number in site.machines:
        file = tmp_path / str(number) / "policy.toml"
        file.write_text(file.read_text() + "[[admit]]\n[admit.secret]\n")
    by_secret = {"RINGFENCE_POLICY": str(tmp_path / "1" / "policy.toml")}
    by_certificate = site.environment(0)
    values(pool.join("ringfence", 2, env=[by_certificate, by_secret], seconds=FAR, renew=True))
    assert values(pool.start(verify_until_ticked, 2).wait(HANG)) == [(0, 1), (1, 0)]


def verify_until_ticked() -> tuple[int, int]:
    thread, idle = proofs(), threading.Event()
    verify_now()
    while thread.reverification.ticks < 1 or thread.verifications + thread.proofs < 1:
        idle.wait(0.01)
    dist.barrier()
    return thread.verifications, thread.proofs


def threads() -> list[str]:
    return [
        each.name for each in threading.enumerate() if each.name in ("ringfence proofs", "ringfence verifies again")
    ]


def leave_and_look_for_threads() -> tuple[list[str], list[str]]:
    before, started = threads(), [each for each in threading.enumerate() if each.name in threads()]
    dist.destroy_process_group()
    for each in started:
        each.join()
    return before, threads()


def test_a_session_that_ends_leaves_no_thread(pool: Pool, tmp_path: Path) -> None:
    site = VerifiedSite(tmp_path, 2)
    values(pool.join("ringfence", 2, env=site.environments(), seconds=FAR, renew=True))
    for before, after in values(pool.start(leave_and_look_for_threads, 2).wait(HANG)):
        assert sorted(before) == ["ringfence proofs", "ringfence verifies again"] and not after


@pytest.mark.slow
def test_the_timer_goes_off_by_itself(pool: Pool, tmp_path: Path) -> None:
    """An interval of a real length. A busy machine may take a worker for silent: it is an AdmissionError as well."""
    site = VerifiedSite(tmp_path, 2, every=5)
    for end in revoked_session(pool, site, lambda: site.publish(101, number=2, to=[0]), busy=False, verifiers=()):
        assert "AdmissionError" in end and "worker 1" in end


# -- evidence ---------------------------------------------------------------------------------------------------------


def attested_by_token(folder: Path, size: int) -> Sequence[Mapping[str, str]]:
    """A token service of the workers; what it says of each is in a file. Without the file it fails."""
    (folder / "service.key").write_bytes(pem(ec.generate_private_key(ec.SECP384R1())))
    (folder / "keys.json").write_bytes(key_set(signer_in(folder / "service.key")))
    (folder / "policy.toml").write_text(TOKENS.replace("[[admit]]", f'verify_every = "{EVERY}s"\n[[admit]]'))
    script = f'test -e "$0" && exec {sys.executable} -m tests.integration.token_service "$1" "$(cat "$0")" "$2"'
    found = []
    for rank in range(size):
        (folder / f"claims-{rank}").write_text("{}")
        command = ["sh", "-c", script, str(folder / f"claims-{rank}"), str(folder / "service.key")]
        found.append({"RINGFENCE_POLICY": str(folder / "policy.toml"), "RINGFENCE_TOKEN_COMMAND": shlex.join(command)})
    return found


@pytest.mark.promise(
    "With `verify_every`, a worker that no longer passes ends the session on every worker, by name, within two intervals."
)
@BUSY
@pytest.mark.parametrize("how", ["another verdict", "no answer"])
def test_a_worker_without_a_good_token_ends_the_session(pool: Pool, tmp_path: Path, busy: bool, how: str) -> None:
    environments = attested_by_token(tmp_path, 3)

    def change() -> None:
        if how == "no answer":
            (tmp_path / "claims-2").unlink()
        else:
            (tmp_path / "claims-2").write_text('{"measres": "failure"}')

    site = Machines(tmp_path, range(3))
    ends = revoked_session(pool, site, change, busy=busy, env=environments, times=2 if how == "no answer" else 1)
    for end in ends:
        if how == "no answer":
            assert f"worker 2 did not prove itself again to worker 0 within {EVERY} s" in end, ends
        else:
            assert "worker 2 no longer passes verification by worker 0: " in end and "measres" in end, ends


def be_a_guest(folder: str, flag: str, changed: int) -> None:
    """Give this process a chip of the test, in the place of that of a machine, with roots of the test."""
    home = Path(folder)
    vm = snp_mint.Foundry.__new__(snp_mint.Foundry)
    vm.product, vm.chip = PRODUCTS["milan"], (home / "chip").read_bytes()
    key = load_pem_private_key((home / "chip.key").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    vm.chip_key = key
    roots = {"milan": line(PRODUCTS["milan"], (home / "roots.pem").read_bytes())}
    leaf = (home / "chip.der").read_bytes()

    def report(data: bytes) -> tuple[bytes, bytes]:
        """Another guest answers in the place of the one that was admitted, once the flag is there."""
        replaced = dist.get_rank() == changed and os.path.exists(flag) if dist.is_initialized() else False
        return vm.report(data, changes={0x90: bytes(48)} if replaced else None), leaf

    def admission_of(*_: object) -> tuple[Policy, Prover]:
        verifier = snp.verifier(vm.rules, time.time, known=roots)
        return Policy((verifier,), verify_every=EVERY), provers.of_snp(report)

    vars(credentials)["admission_of"] = admission_of


@pytest.mark.promise(
    "With `verify_every`, a worker that no longer passes ends the session on every worker, by name, within two intervals."
)
@BUSY
@pytest.mark.parametrize(("changed", "verifier"), [(5, 1), (0, 3)], ids=["grandchild", "root"])
def test_a_guest_that_was_replaced_ends_the_session(tmp_path: Path, busy: bool, changed: int, verifier: int) -> None:
    vm = snp_mint.foundry()
    (tmp_path / "chip").write_bytes(vm.chip)
    (tmp_path / "chip.key").write_bytes(pem(vm.chip_key))
    (tmp_path / "chip.der").write_bytes(vm.certificate())
    (tmp_path / "roots.pem").write_bytes(vm.pem)
    site = Machines(tmp_path, range(6))
    with Pool() as own:
        values(own.run(be_a_guest, 6, None, (str(tmp_path), str(tmp_path / "changed"), changed)))
        ends = revoked_session(own, site, lambda: None, busy=busy, verifiers=(verifier,), env=[{}] * 6)
    for end in ends:
        assert f"worker {changed} no longer passes verification by worker {verifier}: " in end, ends
        assert "measurement" in end, ends
