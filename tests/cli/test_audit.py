"""`ringfence audit`, and what `ringfence selftest --record` hands to it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ringfence.cli.selftest.report import FAILED, PASSED, CheckResult, SelftestReport, statement_of
from ringfence.cli.signed_file import SignedFile
from ringfence.errors import ConfigurationError
from ringfence.record import signing_key
from tests.cli.command import installation_without, ringfence, ringfence_here
from tests.unit import record_samples as samples

SHOWN = """\
The signature shows that the holder of this key signed the record and that
nobody has changed it since. It shows neither who that is nor that what follows
is true: that is the signer's word.

  signed by     Ed25519 key
                KEY

The record says: FAILED: 1 of 2 checks.
  dirHash       ringfence
                abababababababababababababababababababababababababababababababab
  sha256        ringfence/dataplane/_core.abi3.so
                cdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcd
  began         2026-11-18 12:00 UTC
  workers       2 on cuda:0
  device        cuda, a GPU?[31m
  confidential  no
  sections      start, order
  25.00 GB/s    device to host, pinned
  failed        order/producer
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A record that is signed, one that another key signed, and the public key."""
    (tmp_path / "record.json").write_bytes(samples.record())
    (tmp_path / "key.pem").write_bytes(signing_key.public_pem(samples.KEY.public_key()))
    (tmp_path / "other.pem").write_bytes(signing_key.public_pem(samples.OTHER_KEY.public_key()))
    return tmp_path


def test_what_is_printed(folder: Path) -> None:
    """First what a signature is worth; and nothing in a record controls the terminal."""
    checks = {"start/begin": "passed", "order/producer": "failed"}
    (folder / "failed.json").write_bytes(
        samples.record(checks=checks, passed=False, environment={"device": "cuda, a GPU\x1b[31m"})
    )
    done = ringfence_here("audit", "failed.json", "--key", "key.pem", folder=folder, COLUMNS="80")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == SHOWN.replace("KEY", signing_key.key_id(samples.KEY.public_key()))


@pytest.mark.real_start
def test_it_needs_no_torch(folder: Path) -> None:
    python = installation_without(folder / "environment", "torch")
    done = ringfence("audit", "record.json", "--key", "key.pem", "--json", folder=folder, python=python)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["verified"] is True
    assert found["predicate"] == samples.predicate()
    assert found["subjects"][0] == {"name": "ringfence", "algorithm": "dirHash", "digest": "ab" * 32}


def test_a_record_of_another_key_is_refused(folder: Path) -> None:
    done = ringfence_here("audit", "record.json", "--key", "other.pem", folder=folder)
    assert (done.returncode, done.stdout) == (1, "")
    assert "record.json is refused: the record was signed with another key" in done.stderr
    done = ringfence_here("audit", "record.json", "--key", "other.pem", "--json", folder=folder)
    assert done.returncode == 1
    assert json.loads(done.stdout)["verified"] is False


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("record.json", "--key", "record.json"), "record.json is not a public key in PEM form"),
        (("missing.json", "--key", "key.pem"), "cannot read missing.json: No such file or directory"),
        (("record.json", "--key", "."), "cannot read .: Is a directory"),
        (("record.json",), "give the public key of its signer with --key FILE"),
        ((".", "--key", "key.pem"), "omit --key for a folder"),
        ((".",), "there is no log in ."),
        (("record.json", "--key", "key.pem", "--page", "x.html"), "--claims and --page are for the logs of a run"),
        ((".", "--claims", "missing.toml"), "there is no log in ."),
    ],
)
def test_what_cannot_be_read_is_exit_code_2(folder: Path, arguments: tuple[str, ...], said: str) -> None:
    done = ringfence_here("audit", *arguments, folder=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


# -- writing ------------------------------------------------------------------------------------------------------------


def a_report(*states: str) -> SelftestReport:
    results = [CheckResult("order", f"check_{n}", "a title", state, "said /x", 0.1) for n, state in enumerate(states)]
    return SelftestReport("sim:0", 2, True, began="2026-11-18 12:00 UTC", results=results, confidential="no")


@pytest.mark.parametrize("states", [(PASSED, PASSED), (PASSED, FAILED)])
def test_a_self_test_is_recorded_whether_it_passed_or_not(tmp_path: Path, states: tuple[str, ...]) -> None:
    recording = SignedFile(tmp_path / "h100.json", None)
    recording.write(statement_of(a_report(*states)))
    assert "ringfence audit" in recording.description()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["h100.json", "h100.pem", "record.key"]
    done = ringfence_here("audit", "h100.json", "--key", "h100.pem", "--json", folder=tmp_path)
    said = json.loads(done.stdout)["predicate"]
    assert said["passed"] is (FAILED not in states)
    assert said["checks"] == {f"order/check_{n}": state for n, state in enumerate(states)}
    assert "/x" not in done.stdout  # texts of errors, which could name something, are in the report only


def test_one_key_signs_several_records(tmp_path: Path) -> None:
    for name in ("one", "two"):
        SignedFile(tmp_path / f"{name}.json", tmp_path / "mine.key").write(statement_of(a_report(PASSED)))
    assert (tmp_path / "one.pem").read_bytes() == (tmp_path / "two.pem").read_bytes()


def test_mistakes_are_found_before_the_test_runs(tmp_path: Path) -> None:
    (tmp_path / "there.pem").touch()
    for name, said in (
        ("record", "ends in .json"),
        ("there.json", "never overwritten"),
        ("no/folder/x.json", "not a folder"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            SignedFile(tmp_path / name, None)
    assert not (tmp_path / "record.key").exists()
    done = ringfence_here("selftest", "--key", "mine.key", folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--key signs a record" in done.stderr
