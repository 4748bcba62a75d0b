"""`ringfence doctor` forms a real group of one worker, and says "not ready" with the error where torch lets it form none."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ringfence.cli.checks.check import Check
from ringfence.cli.checks.group import group
from ringfence.config.private_files import new_secret_file
from tests.cli.command import installation_with_changed_torch, ringfence

# torch 2.15 and a group without a default backend; a crash; torch before 2.13, which does not ask a group for new ones.
RAISES = """
def _new_process_group_helper(*args, **kwargs):
    raise RuntimeError("Could not find the default backend type 0 for Process Group with name ringfence.")
"""
CRASHES = """
def _new_process_group_helper(*args, **kwargs):
    os.abort()
"""
PLAINTEXT = """
def hasattr(value, name, genuine=hasattr):
    return name != "new_group" and genuine(value, name)
"""


@pytest.mark.nightly
def test_a_torch_that_forms_no_group_is_not_ready(tmp_path: Path) -> None:
    new_secret_file(tmp_path / "run.secret")
    python = installation_with_changed_torch(tmp_path / "environment", RAISES)
    done = ringfence("doctor", python=python, RINGFENCE_SECRET_FILE=str(tmp_path / "run.secret"))
    assert done.returncode == 1, done.stdout
    assert 'ok  backend       registered: backend="ringfence"' in done.stdout  # which says nothing about groups
    assert (
        "!!  group         one worker cannot form a group: RuntimeError: Could not find the default backend "
        "type 0 for Process Group with name ringfence.\n"
    ) in done.stdout
    assert done.stdout.endswith(
        "Not ready. To repair:\n  see the whole error with: python -P -m ringfence.cli.one_worker\n"
    )


@pytest.mark.promise("`ringfence doctor` reports a torch that crashes or makes plaintext groups.")
@pytest.mark.parametrize(
    ("added", "said"),
    [
        pytest.param(CRASHES, "the process ended with SIGABRT", marks=pytest.mark.nightly),
        (PLAINTEXT, "torch made a group of 'gloo', which is not encrypted"),
    ],
    ids=["crash", "plaintext"],
)
def test_doctor_fails_if_torch_crashes_or_makes_plaintext_groups(tmp_path: Path, added: str, said: str) -> None:
    python = installation_with_changed_torch(tmp_path, added)
    done = ringfence("doctor", "--json", python=python)
    (found,) = [check for check in json.loads(done.stdout)["checks"] if check["name"] == "group"]
    assert found["good"] is False
    assert said in found["text"]


def test_a_group_that_does_not_form_in_time_is_not_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = group(os.environ, [], seconds=0.05)
    assert (found.good, found.text) == (False, "one worker did not form a group within 0.05 s")
    assert not list(tmp_path.iterdir())  # no secret is left behind


def test_settings_of_a_run_do_not_reach_the_group() -> None:
    """`settings` and `secret` find what is wrong with those; one mistake is one finding."""
    wrong = {"RINGFENCE_SECRET_FILE": "/none", "RINGFENCE_PORTS": "abc", "RINGFENCE_POLICY": "/none"}
    assert group({**os.environ, **wrong}, []).good is True


def test_the_group_is_skipped_while_software_is_missing() -> None:
    fault: dict[str, Any] = {"value": None, "good": False}
    found = group(os.environ, [Check("torch", "missing", **fault), Check("backend", "none", **fault)])
    assert (found.good, found.text) == (None, "skipped: first repair torch, backend")
