"""The evidence in the logs of real workers, verified by another process that has nothing but the record, and no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringfence.config.settings import Settings
from ringfence.evidence import tsm
from ringfence.record import begin, log
from ringfence.record.evidence import NOT_KEPT, REFUSED, VERIFIED, verify_shown
from ringfence.record.log import LogEntry
from ringfence.record.log_file import Blobs, open_folder
from ringfence.session.join.provers import Machine, policy_of
from ringfence.session.recording import recorder_for
from tests.fake_tsm import Kernel
from tests.integration.join_cluster import World
from tests.integration.test_join_policy import BY_BOTH
from tests.integration.test_join_policy import Site as OneFolder
from tests.integration.test_record import train
from tests.integration.test_revocation import TODAY, Site
from tests.limits import HANG
from tests.pool import Pool
from tests.unit import snp_mint, tdx_mint
from tests.unit.evidence_samples import Run, snp_run, tdx_run, test_roots
from tests.unit.log_samples import VERSIONS
from tests.unit.test_collect import VCEK, table

assert test_roots  # a fixture, used by name
VERIFY = """
import json, sys
from pathlib import Path
sys.modules["torch"] = None
from ringfence.record import evidence, log
from ringfence.record.log_file import Blobs
folder = Path(sys.argv[1])
begins = [log.read(path.open("rb")).begin for path in folder.glob("*.jsonl")]
session = {each.fields["rank"]: each for each in begins} if sys.argv[2] == "all" else {}
begins.sort(key=lambda each: each.fields["rank"])
print(json.dumps([evidence.verify_shown(each, Blobs(folder), session) for each in begins]))
"""


def shown(folder: Path, logs: str = "all") -> list[list[list[Any]]]:
    """What a process without torch finds of each worker, by rank. `logs`: whether it has all logs, or each by itself."""
    command = [sys.executable, "-c", VERIFY, str(folder), logs]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr
    found: list[list[list[Any]]] = json.loads(done.stdout)
    return found


def record(pool: Pool, folder: Path, environments: list[Mapping[str, str]]) -> None:
    with pool.fresh() as fresh:
        fresh.check(train, len(environments), env=[{**each, "RINGFENCE_RECORD": str(folder)} for each in environments])
        fresh.leave()


def renew_lists(new: Mapping[str, bytes]) -> None:
    """Go on after the authority has published another list."""
    train()
    if dist.get_rank() == 0:
        for name, content in new.items():
            Path(name).write_bytes(content)
    dist.all_reduce(torch.ones(10))


def test_lists_that_are_renewed_during_a_run_are_not_those_of_its_record(pool: Pool, tmp_path: Path) -> None:
    """The log has the lists by which its worker was admitted, from the folder that the policy names."""
    site, folder = Site(tmp_path, 2), tmp_path / "record"
    site.publish(7)
    revoking = site.authority.revoke(101, number=2, start=TODAY, end=TODAY.replace(year=TODAY.year + 1))
    new = {str(tmp_path / str(number) / "lists" / "ca.crl"): revoking for number in site.machines}
    env = [{**each, "RINGFENCE_RECORD": str(folder)} for each in site.environments()]
    with pool.fresh() as fresh:
        fresh.check(renew_lists, 2, env=env, args=(new,))
        fresh.leave()
    assert shown(folder) == [
        [["certificate", VERIFIED, "", {"identity": f"spiffe://example.org/worker/w{rank}"}]] for rank in range(2)
    ]
    alone = shown(folder, "alone")
    assert [each[0][1] for each in alone] == [VERIFIED] * 2
    assert "the log of worker 0, which admitted it, is not here" in alone[1][0][2]


@pytest.mark.parametrize("same_host", ["shared", "sealed"])
def test_a_secret_without_a_policy(pool: Pool, tmp_path: Path, same_host: str) -> None:
    record(pool, tmp_path / "record", [{"RINGFENCE_SAME_HOST": same_host}] * 2)
    for (part,) in shown(tmp_path / "record"):
        assert part[:2] == ["secret", NOT_KEPT]
    begins = [log.read(path.open("rb")).begin for path in (tmp_path / "record").glob("*.jsonl")]
    assert {each.fields["same_host"] for each in begins} == {same_host}


def test_a_secret_and_a_certificate(pool: Pool, tmp_path: Path) -> None:
    site = OneFolder(tmp_path)
    policy = {**site.policy(BY_BOTH, "both.toml"), **site.secret(), "RINGFENCE_SAME_HOST": "sealed"}
    record(pool, tmp_path / "record", [{**policy, **site.certificate(f"w{rank}")} for rank in range(2)])
    for rank, parts in enumerate(shown(tmp_path / "record")):
        assert [part[:2] for part in parts] == [["secret", NOT_KEPT], ["certificate", VERIFIED]]
        assert parts[1][3] == {"identity": f"spiffe://example.org/worker/w{rank}"}


def test_a_record_has_the_files_that_the_settings_have_read(tmp_path: Path) -> None:
    site = Site(tmp_path, 1)
    site.publish(7)
    used = (tmp_path / "0" / "lists" / "ca.crl").read_bytes()
    settings = Settings.from_environment({**site.environment(0), "RINGFENCE_RECORD": str(tmp_path / "record")})
    site.publish(8)
    made = recorder_for(settings)
    assert made is not None and made._policy is not None
    assert made._policy.contents["lists/ca.crl"] == used != (tmp_path / "0" / "lists" / "ca.crl").read_bytes()
    made.forget()


# -- hardware -------------------------------------------------------------------------------------------------------


def tdx_guest() -> Kernel:
    return Kernel(tsm.TDX, lambda data, level: tdx_mint.foundry().quote(data))


def snp_guest() -> Kernel:
    vm = snp_mint.foundry()
    auxblob = table((VCEK, vm.certificate()))
    return Kernel(tsm.SNP, lambda data, level: vm.report(data), auxblob=auxblob, level_floor=0)


def written(folder: Path, run: Run, guest: Kernel, size: int) -> list[LogEntry]:
    """Join as guests of this kernel, and return the first line of each worker's log."""
    assert run.policy is not None
    for name, content in run.policy.contents.items():
        (folder / name).write_bytes(content)
    settings = Settings.from_environment({"RINGFENCE_POLICY": str(folder / "policy.toml")})
    admission = {rank: policy_of(settings, Machine(files=guest)) for rank in range(size)}
    key, blobs = bytes(range(32)), Blobs(folder / "record")
    open_folder(folder / "record")
    with World(size, record_key=key) as world:
        world.start(range(size), dict.fromkeys(range(size), settings), admission)
        joined = [each.record for each in world.members()]
    found = []
    for rank, join in enumerate(joined):
        assert join is not None and join.presentation is not None
        fields = begin.fields_of(join, rank, key, blobs, policy=settings.policy, versions=VERSIONS, before="")
        found.append(LogEntry(log.BEGIN, 0, log.FIRST.hex(), 1000 * join.presentation.at + 1, fields))
    return found


@pytest.mark.usefixtures("test_roots")
@pytest.mark.parametrize(("run", "guest"), [(tdx_run, tdx_guest), (snp_run, snp_guest)], ids=["TDX", "SEV-SNP"])
def test_guests_that_admitted_each_other_are_verified(tmp_path: Path, run: Any, guest: Any) -> None:
    """Real joins over TLS; and evidence of one of them in the log of another is refused."""
    begins, blobs = written(tmp_path, run(), guest(), 4), Blobs(tmp_path / "record")
    session = dict(enumerate(begins))
    for begins_with in begins:
        (found,) = verify_shown(begins_with, blobs, session)
        assert (found.verdict, found.facts["debug"]) == (VERIFIED, "no"), found
    for rank, other in ((0, 1), (1, 2), (3, 0)):
        lent = begins[other].fields["presentation"]
        for fields in (lent, {**lent, "preimage": begins[rank].fields["presentation"]["preimage"]}):
            lying = replace(begins[rank], fields={**begins[rank].fields, "presentation": fields})
            (found,) = verify_shown(lying, blobs, session)
            assert found.verdict == REFUSED
