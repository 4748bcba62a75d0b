"""A run of four workers on two machines, of which one is killed and replaced, audited where torch is not installed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ringfence as product
from ringfence import checkpoint
from ringfence.config.private_files import new_secret_file
from ringfence.record import manifest_files
from tests.cli.command import installation_without, ringfence
from tests.integration.netns import ADDRESSES, Hosts
from tests.integration.test_join_policy import BY_CERTIFICATE, Site
from tests.integration.test_readme import environment
from tests.integration.test_record import entries, recorded, states, train, until
from tests.limits import HANG
from tests.pool import Failure, Pool

EXAMPLE = Path(__file__).parents[2] / "examples" / "audit" / "run.sh"
WORLD = 4
SIDES = ("near", "near", "far", "far")
KILLED = 3


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts() as both:
        yield both


def begin(place: str, key: str, data: str) -> str:
    """Train on data that are named, save a checkpoint, and lose a worker."""
    train()
    product.record_data(data)
    anchor = checkpoint.save({"weight": torch.full((1000,), 3.0)}, f"{place}/first", key=key, step=1)
    until(lambda: recorded("checkpoint") and recorded("data"))
    dist.barrier()
    Path(place, "anchor").write_text(anchor)
    dist.barrier()
    if dist.get_rank() == KILLED:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(10))
    return anchor


def go_on(place: str, key: str, data: str) -> str:
    """Read what was saved, and save again."""
    train()
    product.record_data(data)
    state = {"weight": torch.empty(1000)}
    checkpoint.load(state, f"{place}/first", key=key, anchor=Path(place, "anchor").read_text())
    return checkpoint.save(state, f"{place}/second", key=key, step=2)


def collected(folder: Path, *machines: Path) -> Path:
    """Copy the folders of several machines into one, as an auditor gets them."""
    for machine in machines:
        shutil.copytree(machine, folder, dirs_exist_ok=True)
    return folder


@pytest.mark.promise("`ringfence audit --claims` names each log, session or claim that a record does not show.")
@pytest.mark.parametrize("by", ["certificate", pytest.param("secret", marks=pytest.mark.nightly)])
def test_every_claim_of_a_run_with_a_kill_and_a_rejoin(hosts: Hosts, tmp_path: Path, by: str) -> None:
    site, place, corpus = Site(tmp_path), tmp_path / "checkpoints", tmp_path / "corpus"
    for folder in (place, corpus):
        folder.mkdir()
    (corpus / "part").write_bytes(bytes(1000))
    root = manifest_files.write_manifest(corpus, tmp_path / "corpus.manifest", lambda count: None).root.hex()
    new_secret_file(tmp_path / "key")
    arguments = (str(place), str(tmp_path / "key"), str(tmp_path / "corpus.manifest"))
    environments = [
        {
            **(site.policy(BY_CERTIFICATE) | site.certificate(f"w{rank}") if by == "certificate" else {}),
            "RINGFENCE_RECORD": str(tmp_path / f"record-{side}"),
            "RINGFENCE_INTERFACE": ADDRESSES[side],
            "RINGFENCE_SAME_HOST": "shared",
        }
        for rank, side in enumerate(SIDES)
    ]
    with Pool([hosts.prefix(side) for side in SIDES]) as pool:
        failed = pool.run(begin, WORLD, args=arguments, env=environments)
        assert all(isinstance(each, Failure) for each in failed)
        (later, *_) = pool.check(go_on, WORLD, args=arguments, env=environments, renew=True)
        pool.leave()
        run_id = pool.run_id
    record = collected(tmp_path / "record", *(tmp_path / f"record-{side}" for side in set(SIDES)))
    said = entries(states(record, size=WORLD)[0])["code"]
    claims = {
        "run": run_id,
        "complete": True,
        "sealed": True,
        "scripts": said["digest"],
        "packages": said["packages"],
        "data": root,
        "checkpoints": [(place / "anchor").read_text(), later],
    }
    if by == "certificate":
        claims["workers"] = [f"spiffe://example.org/worker/w{rank}" for rank in range(WORLD)]
    lines = [f"{name} = {json.dumps(value)}" for name, value in claims.items() if value != ""]
    (tmp_path / "claims.toml").write_text("\n".join(lines))
    python = installation_without(tmp_path / "environment", "torch")
    words = ("audit", "record", "--claims", "claims.toml", "--page", "audit.html", "--json")
    done = ringfence(*words, folder=tmp_path, python=python)
    found = json.loads(done.stdout)
    shown = {each["claim"].partition(":")[0]: each["state"] for each in found["verdicts"]}
    assert (done.returncode, done.stderr) == (0, ""), found["verdicts"]
    assert len(found["logs"]) == 2 * WORLD
    if by == "certificate":
        assert set(shown.values()) == {"shown"} and len(shown) == 10
    else:
        assert [claim for claim, state in shown.items() if state != "shown"] == ["what workers presented admits them"]
        assert "any member could have signed as any other" in found["limits"][0]
    for path in sorted(record.glob(f"*-{KILLED}.jsonl")):  # leave out one log, of the session that has it last
        path.unlink()
    assert ringfence("audit", "record", "--claims", "claims.toml", folder=tmp_path, python=python).returncode == 1


@pytest.mark.nightly
@pytest.mark.real_start
def test_the_example_for_auditors(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", str(EXAMPLE)], cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=HANG
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "<h1>All claims are shown</h1>" in (tmp_path / "audit.html").read_text()
    assert json.loads((tmp_path / "run.json").read_text())["payloadType"] == "application/vnd.in-toto+json"
    with (tmp_path / "claims.toml").open("a") as claims:
        claims.write(f'checkpoints = "{"00" * 32}"\n')
    assert ringfence("audit", "record", "--claims", "claims.toml", folder=tmp_path).returncode == 1
