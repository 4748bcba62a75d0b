"""The examples of key services: the key stays in the service, and a wrapped key opens under its own context only.

``--full`` also runs the one for AWS KMS, against a server of this process (moto).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.checkpoint_aws_kms import KmsKey
from examples.checkpoint_kms import NAME, ServiceKey
from ringfence import checkpoint
from ringfence.checkpoint import KeyWrapper
from ringfence.errors import CheckpointError
from tests.cli.command import ringfence
from tests.limits import HANG
from tests.object_stores import s3_server
from tests.unit.checkpoint_samples import empty_state, is_same, key_file, small_state

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "checkpoint_kms.py"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "service_key" in metafunc.fixturenames:
        names = ["socket", "aws"] if metafunc.config.getoption("--full") else ["socket"]
        metafunc.parametrize("service_key", names, indirect=True)


@pytest.fixture
def socket(tmp_path: Path) -> Iterator[str]:
    """The socket of a service in a process of its own."""
    path = str(tmp_path / "keys.sock")
    with subprocess.Popen([sys.executable, str(EXAMPLE), "serve", path], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == f"serving {NAME}\n"
            yield path
        finally:
            process.kill()


@pytest.fixture
def service_key(request: pytest.FixtureRequest) -> Iterator[KeyWrapper]:
    if request.param == "socket":
        yield ServiceKey(request.getfixturevalue("socket"))
        return
    with s3_server() as options:
        client = import_module("boto3").client(
            "kms",
            endpoint_url=options["endpoint_url"],
            region_name="eu-central-1",
            aws_access_key_id="test",
            aws_secret_access_key="test",
        )
        yield KmsKey(client, client.create_key()["KeyMetadata"]["Arn"])


def test_a_state_comes_back(service_key: KeyWrapper, tmp_path: Path) -> None:
    anchor = checkpoint.save(small_state(), tmp_path / "one", key=service_key, step=1)
    state = empty_state()
    info = checkpoint.load(state, tmp_path / "one", key=service_key, anchor=anchor)
    assert is_same(state, small_state())
    assert info.key_name == service_key.name


@pytest.mark.promise("A data key that a key service has wrapped opens under the context of its own save only.")
def test_a_wrapped_key_opens_under_its_own_context_only(service_key: KeyWrapper) -> None:
    secret = os.urandom(32)
    wrapped = service_key.wrap(secret, b"context")
    assert secret not in wrapped
    assert service_key.unwrap(wrapped, b"context") == secret
    for changed, context in ((wrapped, b"other"), (wrapped[:-1] + bytes([wrapped[-1] ^ 1]), b"context")):
        with pytest.raises(Exception, match=r"not wrapped with|InvalidCiphertext"):
            service_key.unwrap(changed, context)


@pytest.mark.promise("A data key that a key service has wrapped opens under the context of its own save only.")
def test_the_data_key_of_another_save_is_refused(service_key: KeyWrapper, tmp_path: Path) -> None:
    """The header of one index over the body of another, with an id to match: KMS refuses the context."""
    for name in ("one", "two"):
        checkpoint.save({"x": torch.ones(3)}, tmp_path / name, key=service_key)
    one, two = ((tmp_path / name / "index").read_bytes() for name in ("one", "two"))
    start = len(b"ringfence sealed") + 2
    (tmp_path / "one" / "index").write_bytes(one[:start] + two[start : start + 16] + one[start + 16 :])
    with pytest.raises(CheckpointError, match="does not unwrap its data key"):
        checkpoint.verify(tmp_path / "one", key=service_key)


def test_rewrap_from_a_file_to_the_service(service_key: KeyWrapper, tmp_path: Path) -> None:
    anchor = checkpoint.save(small_state(), tmp_path / "one", key=key_file(tmp_path))
    checkpoint.rewrap(tmp_path / "one", key=tmp_path / "key", new_key=service_key)
    assert checkpoint.verify(tmp_path / "one", key=service_key).anchor == anchor


# -- the service of the example ---------------------------------------------------------------------------------------


def test_the_example_runs_and_the_command_uses_it(socket: str, tmp_path: Path) -> None:
    variables: dict[str, Any] = {"KEY_SERVICE": socket, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "try"],
        cwd=tmp_path,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert done.stdout == f"step 1, key {NAME}: [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]\n", done.stderr
    key = "python:examples.checkpoint_kms:key"
    verified = ringfence("checkpoint", "verify", "checkpoint", "--key", key, folder=tmp_path, **variables)
    assert (verified.returncode, verified.stderr) == (0, "")


def test_a_user_who_is_not_admitted_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "keys.sock")
    command = [sys.executable, str(EXAMPLE), "serve", path, "--user", str(os.getuid() + 1)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline()
            with pytest.raises(CheckpointError, match="may not use the key"):
                checkpoint.save(small_state(), tmp_path / "one", key=ServiceKey(path))
            assert not (tmp_path / "one").exists()
        finally:
            process.kill()


def test_a_service_that_is_gone_fails_the_load(socket: str, tmp_path: Path) -> None:
    checkpoint.save(small_state(), tmp_path / "one", key=ServiceKey(socket))
    with pytest.raises(CheckpointError, match="does not unwrap its data key"):
        checkpoint.load(empty_state(), tmp_path / "one", key=ServiceKey(socket + ".gone"))


def test_another_service_does_not_open_it(socket: str, tmp_path: Path) -> None:
    checkpoint.save(small_state(), tmp_path / "one", key=ServiceKey(socket))
    path = str(tmp_path / "other.sock")
    with subprocess.Popen([sys.executable, str(EXAMPLE), "serve", path], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline()
            with pytest.raises(CheckpointError, match="not wrapped with this key and context"):
                checkpoint.load(empty_state(), tmp_path / "one", key=ServiceKey(path))
        finally:
            process.kill()
