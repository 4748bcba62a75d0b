"""`ringfence audit`, and what `ringfence selftest --record` hands to it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ringfence.cli.selftest.recording import Recording
from ringfence.cli.selftest.report import FAILED, PASSED, CheckResult, SelftestReport
from ringfence.errors import ConfigurationError
from ringfence.record import signing_key
from tests.cli.command import installation_without, ringfence, ringfence_here
from tests.unit import record_samples as samples
from tests.unit.log_samples import Session, read

SHOWN = """\
The signature shows that the holder of this key signed the record and that
nobody has changed it since. It shows neither who that is nor that what follows
is true: device, time and results are the signer's word.

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
    """A record that is signed, one that a stranger signed, and the public key."""
    (tmp_path / "record.json").write_bytes(samples.record())
    (tmp_path / "key.pem").write_bytes(signing_key.public_pem(samples.KEY.public_key()))
    (tmp_path / "other.pem").write_bytes(signing_key.public_pem(samples.STRANGER.public_key()))
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
    ],
)
def test_what_cannot_be_read_is_exit_code_2(folder: Path, arguments: tuple[str, ...], said: str) -> None:
    done = ringfence_here("audit", *arguments, folder=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


# -- the logs of a run --------------------------------------------------------------------------------------------------

LOGS_SHOWN = """\
A log shows that the process that was admitted as its worker wrote these entries
in this order, and that nobody has changed them since. What they say is that
worker's word. Whoever has a log can cut it after any signature.

NAME-0.jsonl: complete
  run           run-7
  generation    3
  rank          0
  roster        ROSTER
  policy        000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f
  began         BEGAN
  last          LAST
  ended         left
  entries       4
  head          HEAD
"""


def test_the_logs_of_a_run_are_shown(tmp_path: Path) -> None:
    session = Session()
    path = session.write(tmp_path / "record")
    found = read(path.read_bytes())
    done = ringfence_here("audit", "record", folder=tmp_path, COLUMNS="80")
    assert (done.returncode, done.stderr) == (0, "")
    expected = LOGS_SHOWN.replace("NAME", session.roster.hex()[:16]).replace("ROSTER", session.roster.hex())
    expected = expected.replace("HEAD", found.head.hex()).replace("BEGAN", str(found.begin.at))
    assert done.stdout == expected.replace("LAST", str(found.entries[-1].at))


@pytest.mark.real_start
def test_logs_are_verified_without_torch(tmp_path: Path) -> None:
    for rank in range(2):
        Session().write(tmp_path / "record", rank)
    python = installation_without(tmp_path / "environment", "torch")
    done = ringfence("audit", "record", "--json", folder=tmp_path, python=python)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["verified"] is True
    assert [(each["rank"], each["state"], each["entries"]) for each in found["logs"]] == [
        (0, "complete", 4),
        (1, "complete", 4),
    ]


def test_a_log_that_is_cut_is_no_reason_to_refuse_it(tmp_path: Path) -> None:
    path = Session().write(tmp_path / "record")
    path.write_bytes(path.read_bytes()[:-1])
    done = ringfence_here("audit", "record", "--json", folder=tmp_path)
    assert done.returncode == 0
    (found,) = json.loads(done.stdout)["logs"]
    assert (found["state"], found["entries"]) == ("cut", 3)
    assert "did not record the end of the session" in found["reason"]


def change_entry(folder: Path, path: Path) -> str:
    path.write_bytes(path.read_bytes().replace(b"it said", b"he said"))
    return "entry 3: it does not follow the line before it"


def rename(folder: Path, path: Path) -> str:
    path.rename(folder / ("0" * 16 + "-0.jsonl"))
    return "entry 0: its file has the name of another log"


def change_policy(folder: Path, path: Path) -> str:
    (name,) = read(path.read_bytes()).begin.fields["policy_files"].values()
    (folder / "blobs" / name).write_bytes(b"version = 2")
    return "was changed: it has another digest"


def lose_roster(folder: Path, path: Path) -> str:
    (folder / "blobs" / read(path.read_bytes()).begin.fields["listings"]).unlink()
    return "entry 0: the file blobs/"


@pytest.mark.promise("A log of a run that was changed is refused, with the entry named, or says less than before.")
@pytest.mark.parametrize("change", [change_entry, rename, change_policy, lose_roster])
def test_a_changed_log_is_refused_and_the_others_are_shown(tmp_path: Path, change: Callable[[Path, Path], str]) -> None:
    folder = tmp_path / "record"
    Session("second").write(folder, 1)
    reason = change(folder, Session().write(folder))
    done = ringfence_here("audit", "record", "--json", folder=tmp_path)
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert found["verified"] is False
    refused = [each["reason"] for each in found["logs"] if each["state"] == "refused"]
    assert len(refused) == (2 if change is change_policy else 1)  # both logs refer to the same policy
    assert all(reason in each for each in refused)
    assert "refused" in ringfence_here("audit", "record", folder=tmp_path).stdout


# -- writing ------------------------------------------------------------------------------------------------------------


def a_report(*states: str) -> SelftestReport:
    results = [CheckResult("order", f"check_{n}", "a title", state, "said /x", 0.1) for n, state in enumerate(states)]
    return SelftestReport("sim:0", 2, True, began="2026-11-18 12:00 UTC", results=results, confidential="no")


@pytest.mark.parametrize("states", [(PASSED, PASSED), (PASSED, FAILED)])
def test_a_self_test_is_recorded_whether_it_passed_or_not(tmp_path: Path, states: tuple[str, ...]) -> None:
    recording = Recording(tmp_path / "h100.json", None)
    recording.write(a_report(*states))
    assert "ringfence audit" in recording.description()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["h100.json", "h100.pem", "record.key"]
    done = ringfence_here("audit", "h100.json", "--key", "h100.pem", "--json", folder=tmp_path)
    said = json.loads(done.stdout)["predicate"]
    assert said["passed"] is (FAILED not in states)
    assert said["checks"] == {f"order/check_{n}": state for n, state in enumerate(states)}
    assert "/x" not in done.stdout  # texts of errors, which could name something, are in the report only


def test_one_key_signs_several_records(tmp_path: Path) -> None:
    for name in ("one", "two"):
        Recording(tmp_path / f"{name}.json", tmp_path / "mine.key").write(a_report(PASSED))
    assert (tmp_path / "one.pem").read_bytes() == (tmp_path / "two.pem").read_bytes()


def test_mistakes_are_found_before_the_test_runs(tmp_path: Path) -> None:
    (tmp_path / "there.pem").touch()
    for name, said in (
        ("record", "ends in .json"),
        ("there.json", "never overwritten"),
        ("no/folder/x.json", "not a folder"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            Recording(tmp_path / name, None)
    assert not (tmp_path / "record.key").exists()
    done = ringfence_here("selftest", "--key", "mine.key", folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--key signs a record" in done.stderr
