"""The containers of the manifests run: two nodes on this machine, with the command, the variables and the policy of each."""

from __future__ import annotations

import datetime
import shutil
import subprocess
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from ringfence.config.private_files import new_secret_file
from tests import ports
from tests.certificates import Authority, private_pem
from tests.integration.test_readme import environment
from tests.limits import HANG
from tests.manifests import OVERLAYS, ROOT, Node, documents, name_of, parsed, policy_of

DAY = datetime.timedelta(days=1)


def credentials(folder: Path) -> None:
    """What the Secret has, and what cert-manager's driver would write for a pod of the namespace."""
    folder.mkdir()
    new_secret_file(folder / "run.secret")
    start, end = datetime.datetime.now(datetime.UTC) - DAY, datetime.datetime.now(datetime.UTC) + DAY
    authority = Authority(start=start, end=end)
    name = x509.DNSName("train-node-0-0-x7k2p.ml.training.example.org")
    issued = authority.issue(name, start=start, end=end)
    (folder / "tls.crt").write_bytes(x509.load_der_x509_certificate(issued.chain[0]).public_bytes(Encoding.PEM))
    (folder / "tls.key").touch(mode=0o600)
    (folder / "tls.key").write_bytes(private_pem(issued.key))
    (folder / "ca.crt").write_bytes(authority.pem)


def node_on_this_machine(file: Path, rank: int, folder: Path, endpoint: str) -> tuple[list[str], dict[str, str]]:
    """A node's command and environment: as in the manifest, but for addresses and the places of files."""
    node = Node(file)
    node.env |= {"NODE_RANK": str(rank), "PET_NODE_RANK": str(rank), "RUN_ID": "9d0c1a7e"}
    node.env |= {"RINGFENCE_INTERFACE": "127.0.0.1", "RINGFENCE_POLICY": str(folder / "policy.toml")}
    for name, value in node.env.items():
        node.env[name] = value.replace("/credentials/", f"{folder}/credentials/")
    command = [
        f"--rdzv-endpoint={endpoint}" if word.startswith("--rdzv-endpoint=") else word for word in node.expanded()
    ]
    return command, {**environment(folder), **node.env}


@pytest.mark.nightly
@pytest.mark.parametrize("file", OVERLAYS, ids=name_of)
def test_kubectl_makes_of_an_overlay_what_the_other_tests_check(file: Path) -> None:
    """By the Kustomize that kubectl has; it asks no cluster."""
    assert shutil.which("kubectl"), "kubectl is not installed"
    done = subprocess.run(["kubectl", "kustomize", file.parent], capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0 and not done.stderr, done.stderr
    ours, theirs = (
        {(each["kind"], each["metadata"]["name"]): each for each in found}
        for found in (documents(file), parsed(done.stdout))
    )
    assert len(theirs) >= 3 and ours == theirs


@pytest.mark.parametrize(
    ("example", "proof"),
    [
        ("kubernetes/overlays/cert-manager/kustomization.yaml", "certificate"),
        ("kubeflow/trainjob.yaml", "shared secret"),
    ],
)
def test_both_nodes_of_a_manifest_form_one_run(example: str, proof: str, tmp_path: Path) -> None:
    file = ROOT / "examples" / example
    credentials(tmp_path / "credentials")
    (tmp_path / "policy.toml").write_text(policy_of(file).replace("/credentials/", f"{tmp_path}/credentials/"))
    endpoint = f"127.0.0.1:{ports.port()}"
    started = []
    for rank in range(2):
        command, env = node_on_this_machine(file, rank, tmp_path, endpoint)
        with open(tmp_path / f"{rank}.log", "w") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        started.append(process)
    try:
        codes = [process.wait(HANG) for process in started]
    finally:
        for process in started:
            process.terminate()
            process.wait(HANG)
    first, second = ((tmp_path / f"{rank}.log").read_text() for rank in range(2))
    assert codes == [0, 0], first + second
    assert "4 workers, run 9d0c1a7e" in first and f"admitted by {proof}" in first
    assert "loss" in first and "loss" not in second
