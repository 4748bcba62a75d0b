"""The real handshake on processes: workers admit each other by their GPUs, and by tokens of a service; bad ones are refused."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from ringfence.admission.proofs import nvidia, reference_values
from tests.integration.admitted_worker import ROOT, assert_refused, run_workers
from tests.integration.token_service import signer_in
from tests.limits import HANG
from tests.unit import nvidia_mint
from tests.unit.token_mint import ISSUER, key_set


def pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


# -- GPUs -----------------------------------------------------------------------------------------------------------


def write_gpu_policy(folder: Path, top: nvidia_mint.Issuer) -> None:
    """It asks for two GPUs of one kind."""
    gpu = nvidia_mint.Device.under(top).gpu(bytes(32))
    claims = nvidia.verify_report(gpu, bytes(32), nvidia_mint.NOW, root=top.certificate)
    (folder / "gpu.toml").write_text(reference_values.write(claims.reference_values()))
    (folder / "policy.toml").write_text(
        'version = 1\n[[admit]]\n[admit.nvidia]\nreference_values = "gpu.toml"\ngpus = 2\n'
    )


def run_gpu_workers(folder: Path, hows: Sequence[str], seconds: float = 30.0) -> list[dict[str, Any]]:
    folder = Path(tempfile.mkdtemp(dir=folder))
    top = nvidia_mint.root()
    write_gpu_policy(folder, top)
    (folder / "root.pem").write_bytes(top.certificate.public_bytes(Encoding.PEM))
    (folder / "root.key").write_bytes(pem(top.key))
    workers = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.integration.gpu_worker",
                str(folder),
                *map(str, (rank, len(hows), seconds)),
                how,
            ],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, how in enumerate(hows)
    ]
    return [json.loads(worker.communicate(timeout=HANG)[0]) for worker in workers]


def test_workers_admit_each_other_by_their_gpus(tmp_path: Path) -> None:
    found = run_gpu_workers(tmp_path, ["good"] * 3)
    assert [each.get("by") for each in found] == ["NVIDIA GPU attestation"] * 3, found
    assert len({each["roster"] for each in found}) == len({each["key"] for each in found}) == 1


@pytest.mark.promise("A guest or GPU whose measurements differ from the reference values is rejected.")
def test_workers_with_other_gpus_than_the_policys_are_refused(tmp_path: Path) -> None:
    bad = {
        "other firmware": "reference values in measurement 33",
        "a GPU is kept back": "1 GPUs are presented, where the policy asks for another number",
        "recorded": "not made for this connection",
    }
    reasons = ["3 of 4 workers are missing", *bad.values()]
    assert_refused(reasons, lambda patience: run_gpu_workers(tmp_path, ["good", *bad], patience))


def test_minted_gpus_are_refused_under_the_pinned_root(tmp_path: Path) -> None:
    """What a policy file leads to verifies by NVIDIA's root, whatever root the evidence was minted under."""
    reasons = ["not valid under NVIDIA's root"] * 2
    assert_refused(reasons, lambda patience: run_gpu_workers(tmp_path, ["pinned root", "good"], patience))


# -- tokens ---------------------------------------------------------------------------------------------------------

POLICY = f"""
version = 1
[[admit]]
[admit.token]
issuer = "{ISSUER}"
keys = "keys.json"
[admit.token.claims]
measres = "success"
"""


def environment(folder: Path, claims: dict[str, object] | None = None, key: str = "service.key") -> dict[str, str]:
    command = [sys.executable, "-m", "tests.integration.token_service", str(folder / key), json.dumps(claims or {})]
    return {"RINGFENCE_POLICY": str(folder / "policy.toml"), "RINGFENCE_TOKEN_COMMAND": shlex.join(command)}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A policy that trusts a service, the service's key, and another key."""
    for name in ("service.key", "unauthenticated_peer.key"):
        (tmp_path / name).write_bytes(pem(ec.generate_private_key(ec.SECP384R1())))
    (tmp_path / "keys.json").write_bytes(key_set(signer_in(tmp_path / "service.key")))
    (tmp_path / "policy.toml").write_text(POLICY)
    return tmp_path


def test_workers_admit_each_other_by_tokens(site: Path) -> None:
    found = run_workers(site, [environment(site)] * 3)
    assert [each.get("by") for each in found] == ["attestation token"] * 3, found
    assert len({each["roster"] for each in found}) == len({each["key"] for each in found}) == 1


def test_workers_whose_tokens_do_not_admit_are_refused(site: Path) -> None:
    bad = {
        "does not have the claims that the policy asks for": environment(site, {"measres": "failure"}),
        "expired": environment(site, {"exp": 1}),
        "not made for this connection": environment(site, {"eat_nonce": "0" * 64}),
        "signature was not made with the key": environment(site, key="unauthenticated_peer.key"),
    }
    reasons = ["4 of 5 workers are missing", *bad]
    assert_refused(reasons, lambda patience: run_workers(site, [environment(site), *bad.values()], patience))


def test_a_broken_token_command_ends_the_join_at_once(site: Path) -> None:
    """Not at the deadline, where it would look like a missing worker."""
    broken = {**environment(site), "RINGFENCE_TOKEN_COMMAND": str(site / "no-such-command")}
    reasons = ["", "does not start: No such file or directory; set RINGFENCE_TOKEN_COMMAND"]
    assert_refused(reasons, lambda patience: run_workers(site, [environment(site), broken], patience))
