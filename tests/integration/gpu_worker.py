"""One worker in a process of its own that is admitted by its GPUs: minted ones, asked through NVIDIA's own bindings.

    python -m tests.integration.gpu_worker FOLDER RANK WORLD_SIZE SECONDS HOW

FOLDER holds a policy and the test's root (root.pem, root.key), and becomes the store. HOW says what is wrong with this
worker's GPUs.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pynvml
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from ringfence.admission.policy import Policy
from ringfence.admission.proofs import kinds, nvidia
from ringfence.admission.proofs.nvidia import Gpu, Rules
from ringfence.config.settings import Settings
from ringfence.errors import RingfenceError
from ringfence.evidence import nvml
from ringfence.session.join import join
from tests import provers
from tests.integration.admitted_worker import FolderStore, goodbye
from tests.unit import nvidia_mint as mint
from tests.unit.nvml_driver import Driver

GPUS = 2
NONCE = bytes(32)


def root_in(folder: Path) -> mint.Issuer:
    key = load_pem_private_key((folder / "root.key").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return mint.Issuer(x509.load_pem_x509_certificate((folder / "root.pem").read_bytes()), key)


def main(folder: str, rank: str, world_size: str, seconds: str, how: str) -> dict[str, Any]:
    root = root_in(Path(folder))
    settings = Settings.from_environment({"RINGFENCE_POLICY": str(Path(folder) / "policy.toml")})
    assert settings.policy is not None
    policy = kinds.policy_of(settings.policy, time.time, None)
    if how != "pinned root":  # what a policy file leads to; all others verify by the same rules under the test's root
        ((_, rules),) = settings.policy.rules[0].proofs
        assert isinstance(rules, Rules)
        policy = Policy((nvidia.verifier(rules, time.time, root=root.certificate),))
    prover = provers.of_nvidia(lambda nonce: collect(root, nonce, int(rank), how))
    try:
        member = join(
            FolderStore(Path(folder)),
            int(rank),
            int(world_size),
            settings,
            ("127.0.0.1", 1),
            float(seconds),
            b"",
            admission=(policy, prover),
        )
    except RingfenceError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return goodbye(member)


def collect(root: mint.Issuer, nonce: bytes, rank: int, how: str) -> list[Gpu]:
    """As a worker does, from a driver that holds two GPUs."""
    devices = [mint.Device.under(root, GPUS * rank + place + 1) for place in range(GPUS)]
    if how == "other firmware":
        devices[1].measurements[33] = bytes(48)
    if how == "a GPU is kept back":
        devices.pop()
    driver = Driver(root, *devices)
    if how == "recorded":
        nonce = NONCE
    pynvml.nvmlLib = driver
    return nvml.collect(nonce, nvml.load(), root=root.certificate)


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
