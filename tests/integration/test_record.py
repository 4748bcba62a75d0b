"""The record of a run, written by real workers: what it says, and what a kill, a full disk or a fork leaves of it."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringfence import checkpoint, keys
from ringfence.admission.binding import Binding, parse_preimage
from ringfence.admission.policy import Evidence, verify
from ringfence.admission.proofs import kinds
from ringfence.backend import sessions
from ringfence.checkpoint import KeyFile, LocalStorage
from ringfence.checkpoint.opening import open_index
from ringfence.config.private_files import new_secret_file
from ringfence.config.settings import Settings
from ringfence.errors import AbortedError
from ringfence.record import begin
from ringfence.record import folder as record_folder
from ringfence.record.folder import COMPLETE, CUT, LogState
from ringfence.record.log_file import Blobs
from ringfence.session.recording import Recorder, recorder_for
from tests.cli.command import ringfence
from tests.integration.chaos import kill, tails
from tests.integration.chaos_nodes import Nodes, Shape
from tests.integration.rejoins import SCRIPT as REJOINING
from tests.integration.rejoins import Watched
from tests.integration.test_join_policy import BY_CERTIFICATE, Site
from tests.key_audit import keys_held
from tests.limits import FAR, HANG
from tests.pool import IN_SHARED_MEMORY, Failure, Pool

REQUIRED = 'version = 1\nrecord = "required"\n[[admit]]\n[admit.secret]\n'


def until(condition: Callable[[], object]) -> None:
    """Wait for another thread."""
    end, pause = time.monotonic() + FAR, threading.Event()
    while not condition():
        assert time.monotonic() < end
        pause.wait(0.02)


def recorder() -> Recorder:
    found = sessions.only_session().recorder
    assert found is not None
    return found


def state() -> LogState:
    """What an audit says of this worker's own log now."""
    assert recorder()._file is not None
    folder = Path(os.environ["RINGFENCE_RECORD"])
    session = sessions.only_session()
    (found,) = [each for each in record_folder.audit(folder) if each.name.startswith(session_name(session))]
    return found


def session_name(session: Any) -> str:
    return f"{recorder()._join.roster_digest[:8].hex()}-{session.engine.rank}."


def recorded(kind: str) -> bool:
    found = state().log
    return found is not None and any(entry.kind == kind for entry in found.entries)


def train() -> str:
    """Exchange tensors, and wait until the heads of all workers are recorded."""
    until(lambda: recorder().head)
    dist.all_reduce(torch.ones(50_000))
    until(lambda: recorded("heads"))
    dist.barrier()
    return recorder().head


def states(folder: Path, *, size: int) -> list[LogState]:
    """The logs of the last session, by rank."""
    found = sorted(record_folder.audit(folder), key=lambda each: each.log.begin.at if each.log else 0)[-size:]
    return sorted(found, key=lambda each: each.log.begin.fields["rank"] if each.log else 0)


def entries(state: LogState) -> dict[str, dict[str, Any]]:
    """The last entry of each kind."""
    assert state.log is not None, state.reason
    return {entry.kind: entry.fields for entry in state.log.entries}


@pytest.mark.parametrize(("group", "size"), [("ringfence", 2), (IN_SHARED_MEMORY, 4)])
def test_every_worker_writes_a_log_that_is_complete(pool: Pool, tmp_path: Path, group: str, size: int) -> None:
    env = {"RINGFENCE_RECORD": str(tmp_path / "record")}
    with pool.fresh() as fresh:
        fresh.check(train, size, group, env=env)
        fresh.leave()
        found = states(tmp_path / "record", size=size)
        assert [each.state for each in found] == [COMPLETE] * size, found
        for rank, each in enumerate(found):
            said = entries(each)
            assert (said["begin"]["rank"], said["begin"]["run"]) == (rank, fresh.run_id)
            assert said["begin"]["versions"]["torch"] == torch.__version__
            assert said["end"] == {"how": "left", "text": ""}
            assert said["heads"]["missing"] == 0
            assert said["code"]["script"] == "pool_worker.py" or said["code"]["script"] == ""
            assert b'"torch ' in Blobs(tmp_path / "record").get(said["code"]["packages"])
            assert each.log is not None
            sealed, shared = (sum(sum(peer[at : at + 2]) for peer in each.log.peers.values()) for at in (0, 2))
            assert (sealed > 200_000, shared > 200_000) == (group == "ringfence", group != "ringfence")
            assert "rejoined" not in said and "lost" not in said
        assert len({entries(each)["heads"]["list"] for each in found}) == 1
        secret = fresh.secret_file.read_bytes().strip()
        for path in (tmp_path / "record").rglob("*"):
            if path.is_file():
                assert secret not in path.read_bytes()


def test_the_next_session_names_the_heads_of_the_one_before(pool: Pool, tmp_path: Path) -> None:
    env = {"RINGFENCE_RECORD": str(tmp_path / "record")}
    with pool.fresh() as fresh:
        fresh.check(train, 2, env=env)
        fresh.leave()
        first = [each.log for each in states(tmp_path / "record", size=2)]
        fresh.check(train, 2, env=env, renew=True)
        fresh.leave()
        found = states(tmp_path / "record", size=2)
    listed = Blobs(tmp_path / "record").get(entries(found[0])["heads"]["list"])
    for before, each in zip(first, found, strict=True):
        assert before is not None
        said = entries(each)
        assert each.state == COMPLETE
        assert said["begin"]["before"] == before.head.hex()
        assert said["rejoined"]["before"] == before.head.hex()
        assert said["rejoined"]["generation"] == before.begin.fields["generation"]
        assert before.head.hex().encode() in listed


def test_what_is_kept_of_a_certificate_admits_the_worker_again(pool: Pool, tmp_path: Path) -> None:
    """An auditor needs nothing but the record: the policy with its files, the roster, the proof and what it covers."""
    site, folder = Site(tmp_path), tmp_path / "record"
    env = [
        {**site.policy(BY_CERTIFICATE), **site.certificate(f"w{rank}"), "RINGFENCE_RECORD": str(folder)}
        for rank in range(2)
    ]
    with pool.fresh() as fresh:
        fresh.check(train, 2, env=env)
        fresh.leave()
    blobs = Blobs(folder)
    for rank, each in enumerate(states(folder, size=2)):
        assert each.state == COMPLETE and each.log is not None
        said = each.log.begin.fields
        files = {name: blobs.get(digest) for name, digest in said["policy_files"].items()}
        assert set(files) == {"policy.toml", "ca.pem"}
        file = kinds.read(files["policy.toml"], lambda name, limit, files=files: files[name])  # type: ignore[misc]
        policy = kinds.policy_of(file, time.time, None)
        listings = begin.verify(each.log.begin, blobs)
        shown = said["presentation"]
        (part,) = shown["parts"]
        evidence = Evidence(
            entry=listings[rank].entry,
            kind=shown["kind"],
            proof=blobs.get(part["proof"]),
            binding=Binding(bytes.fromhex(shown["preimage"])),
            at=shown["at"],
        )
        assert verify(policy, evidence).identity == f"spiffe://example.org/worker/w{rank}"
        for listing in listings:
            verify(policy, listing)
        assert parse_preimage(evidence.binding.preimage).entry_digest == listings[rank].entry.digest
        for path in folder.rglob("*"):
            assert not path.is_file() or b"PRIVATE KEY" not in path.read_bytes()


def end_without_goodbye() -> None:
    train()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(10))


def test_a_killed_worker_leaves_a_log_and_others_record_the_loss(pool: Pool, tmp_path: Path) -> None:
    env = {"RINGFENCE_RECORD": str(tmp_path / "record")}
    with pool.fresh() as fresh:
        failed = fresh.run(end_without_goodbye, 2, env=env)
        assert [isinstance(each, Failure) and each.type for each in failed] == ["PeerLostError", "Death"]
        fresh.leave()
        found = states(tmp_path / "record", size=2)
    assert [each.state for each in found] == [COMPLETE, CUT]
    assert entries(found[1])["heads"]["missing"] == 0
    said = entries(found[0])
    assert said["lost"]["worker"] == 1 and "worker 1" in said["lost"]["text"]
    assert said["end"]["how"] == "failed" and said["end"]["text"] == said["lost"]["text"]


def fork_and_write() -> None:
    train()
    own = recorder()
    held = keys_held()
    assert held["Ed25519PrivateKey"] == 1  # of the record
    assert held["ECPrivateKey"] == 0  # of TLS, which has signed it
    child = os.fork()
    if not child:
        try:
            own.add("checkpoint", {"action": "written", "anchor": "00" * 32})
            own.close()
            os._exit(0 if own._file is None and not keys_held()["Ed25519PrivateKey"] else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    recorder().add("checkpoint", {"action": "read", "anchor": "11" * 32})
    until(lambda: recorded("checkpoint"))


def keys_left() -> int:
    return keys_held()["Ed25519PrivateKey"]


@pytest.mark.nightly
def test_a_forked_child_writes_nothing(pool: Pool, tmp_path: Path) -> None:
    with pool.fresh() as fresh:
        fresh.check(fork_and_write, 1, env={"RINGFENCE_RECORD": str(tmp_path / "record")})
        fresh.leave()
        (found,) = states(tmp_path / "record", size=1)
        (held,) = fresh.check(keys_left, 1, None)
    assert held == 0
    assert found.state == COMPLETE and found.log is not None
    actions = [each.fields["action"] for each in found.log.entries if each.kind == "checkpoint"]
    assert actions == ["read"]


def fill_the_disk() -> str:
    """Let no file of this process outgrow its log: then a write fails as on a full disk."""
    train()
    if dist.get_rank() == 0:
        size = (Path(os.environ["RINGFENCE_RECORD"]) / state().name).stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        recorder().add("checkpoint", {"action": "written", "anchor": "00" * 32})
        until(lambda: not recorder()._open)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    dist.barrier()
    try:
        for _ in range(1000):
            dist.all_reduce(torch.ones(10))
    except AbortedError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("required", [False, True])
def test_a_full_disk_ends_the_run_only_if_the_policy_requires_a_record(
    pool: Pool, tmp_path: Path, required: bool
) -> None:
    env = {"RINGFENCE_RECORD": str(tmp_path / "record")}
    if required:
        (tmp_path / "policy.toml").write_text(REQUIRED)
        env["RINGFENCE_POLICY"] = str(tmp_path / "policy.toml")
    with pool.fresh() as fresh:
        results = fresh.run(fill_the_disk, 2, env=env, timeout=HANG)
        written = fresh.workers[0].read_log()
        fresh.leave()
        found = states(tmp_path / "record", size=2)
    assert "no longer writes a record of this session" in written and "File too large" in written
    for result in results:
        text = result.message if isinstance(result, Failure) else result
        assert ("The policy requires a record" in text) is required
    assert [each.state for each in found] == [CUT, COMPLETE]
    if required:
        assert set(entries(found[1])["begin"]["policy_files"]) == {"policy.toml"}


def add_too_much() -> bool:
    train()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keys, "RECORD_QUEUE", 0)  # as if so many entries waited
        recorder().add("checkpoint", {"action": "written", "anchor": "00" * 32})
    dist.all_reduce(torch.ones(10))
    return recorder()._open


def test_a_queue_that_is_full_ends_the_record_and_not_the_run(pool: Pool, tmp_path: Path) -> None:
    """An entry that is dropped would be a gap that no reader sees."""
    with pool.fresh() as fresh:
        assert fresh.check(add_too_much, 2, env={"RINGFENCE_RECORD": str(tmp_path / "record")}) == [False] * 2
        fresh.leave()
        assert "0 entries wait for the disk" in fresh.workers[1].read_log()
    assert [each.state for each in states(tmp_path / "record", size=2)] == [CUT] * 2


def test_a_start_that_fails_leaves_no_descriptor(tmp_path: Path) -> None:
    settings = Settings(record=tmp_path / "record")
    before = sorted(os.listdir("/proc/self/fd"))
    for _ in range(3):
        made = recorder_for(settings)
        assert made is not None
        made.forget()
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert os.listdir(tmp_path / "record") == ["blobs"]


def test_a_worker_without_a_folder_does_not_start_if_the_policy_requires_one(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(REQUIRED)
    with pool.fresh() as fresh:
        (result,) = fresh.run(train, 1, env={"RINGFENCE_POLICY": str(tmp_path / "policy.toml")})
    assert isinstance(result, Failure) and result.type == "ConfigurationError"
    assert "set RINGFENCE_RECORD to a folder" in result.message


def test_a_folder_that_others_can_open_fails_the_start(pool: Pool, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pool.fresh() as fresh:
        (result,) = fresh.run(train, 1, env={"RINGFENCE_RECORD": str(tmp_path)})
    assert isinstance(result, Failure) and result.type == "ConfigurationError"
    assert "chmod 700" in result.message


def save_and_load(place: str, key: str) -> str:
    """Save, load what was saved, and return the anchor."""
    train()
    state = {"weight": torch.full((1000,), 3.0)}
    anchor = checkpoint.save(state, place, key=key, step=1)
    checkpoint.load({"weight": torch.empty(1000)}, place, key=key, anchor=anchor)
    until(lambda: recorded("checkpoint"))
    return anchor


def test_checkpoints_are_recorded_and_name_the_record(pool: Pool, tmp_path: Path) -> None:
    new_secret_file(tmp_path / "key")
    place, key = str(tmp_path / "step-1"), str(tmp_path / "key")
    with pool.fresh() as fresh:
        env = {"RINGFENCE_RECORD": str(tmp_path / "record")}
        results = fresh.check(save_and_load, 2, args=(place, key), env=env)
        fresh.leave()
        found = states(tmp_path / "record", size=2)
    (anchor,) = set(results)
    for each in found:
        assert each.log is not None
        said = [entry.fields for entry in each.log.entries if entry.kind == "checkpoint"]
        assert said == [{"action": "written", "anchor": anchor}, {"action": "read", "anchor": anchor}]
    head = open_index(LocalStorage(), place, KeyFile(key)).index.head.hex()
    assert f'"previous":"{head}"' in (tmp_path / "record" / found[0].name).read_text()


SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(10))
dist.destroy_process_group()
"""


@pytest.mark.nightly  # test_audit.py has records of launched workers in the gate
@pytest.mark.real_start
def test_the_launcher_lets_the_workers_record(tmp_path: Path) -> None:
    """Also in a session that is over at once: which code ran is always there."""
    new_secret_file(tmp_path / "secret")
    (tmp_path / "script.py").write_text(SCRIPT)
    words = ("run", "--nproc-per-node", "2", "--record", "record", "script.py", "--lr", "0.1")
    done = ringfence(*words, folder=tmp_path, RINGFENCE_SECRET_FILE="secret")
    assert done.returncode == 0, done.stderr
    found = states(tmp_path / "record", size=2)
    assert [each.state for each in found] == [COMPLETE] * 2
    for each in found:
        said = entries(each)
        assert said["end"]["how"] == "left"
        assert (said["code"]["script"], said["code"]["digest"]) == (
            "script.py",
            hashlib.sha256(SCRIPT.encode()).hexdigest(),
        )
        blobs = Blobs(tmp_path / "record")
        assert json.loads(blobs.get(said["code"]["arguments"])) == ["--lr", "0.1"]
        packages = json.loads(blobs.get(said["code"]["packages"]))
        assert any(name.startswith("torch ") and len(digest) == 64 for name, digest in packages.items())


@pytest.mark.real_start
def test_the_launcher_refuses_a_folder_that_others_can_open(tmp_path: Path) -> None:
    new_secret_file(tmp_path / "secret")
    (tmp_path / "open").mkdir(mode=0o755)
    done = ringfence("run", "--record", "open", "script.py", folder=tmp_path, RINGFENCE_SECRET_FILE="secret")
    assert done.returncode == 2
    assert "chmod 700" in done.stderr


@pytest.mark.nightly  # test_audit.py has a kill and a rejoin in the gate
@pytest.mark.real_start  # processes are found by their command lines
@pytest.mark.timeout(900)  # several waits, each with a limit of its own
def test_a_kill_and_a_rejoin_are_in_the_record(tmp_path: Path) -> None:
    """The worker that stays says in its next log which session it was in; the new one finds the log of the one killed."""
    folder = tmp_path / "record"
    flags = ("--rejoin", "--rdzv-conf", "last_call_timeout=1", "--record", str(folder))
    with Nodes(Shape("ringfence", 2, 1, flags=flags, script=REJOINING), tmp_path) as nodes:
        run = Watched(nodes)
        for node in range(2):
            nodes.start(node)
        run.wait(lambda: nodes.last_step() >= 10)
        kill(nodes.workers(1)[:1])
        run.wait(nodes.digest)
        for agent in nodes.agents.values():
            assert agent.wait(HANG) == 0, tails(tmp_path)
    logs = sorted((each.log for each in record_folder.audit(folder) if each.log), key=lambda each: each.begin.at)
    assert len(logs) == 4
    by_rank = [[each for each in logs if each.begin.fields["rank"] == rank] for rank in range(2)]
    (stayed, rejoined), (killed, new) = by_rank
    assert (stayed.is_complete, rejoined.is_complete, new.is_complete) == (True, True, True)
    assert not killed.is_complete
    said = {entry.kind: entry.fields for entry in stayed.entries}
    assert said["lost"]["worker"] == 1 and said["end"]["how"] == "failed"
    again = {entry.kind: entry.fields for entry in rejoined.entries}
    assert again["rejoined"]["before"] == again["begin"]["before"] == stayed.head.hex()
    assert again["rejoined"]["generation"] == stayed.begin.fields["generation"] != rejoined.begin.fields["generation"]
    assert new.begin.fields["before"] == killed.head.hex()
    assert again["heads"]["missing"] == 0
    listed = Blobs(folder).get(again["heads"]["list"])
    assert killed.head.hex().encode() in listed and stayed.head.hex().encode() in listed
