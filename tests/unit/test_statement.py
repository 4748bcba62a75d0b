"""The statement of a run: what it takes from the logs, and what is neither signed nor read."""

from __future__ import annotations

import copy
import hashlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from ringfence import keys
from ringfence.errors import RecordError
from ringfence.record import provenance, statement
from ringfence.record.statement import Statement, Subject
from tests.unit import statement_samples as samples
from tests.unit.log_samples import POLICY_DIGEST, VERSIONS, Session, read, signed_again


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "record"


def test_it_says_what_the_logs_say(folder: Path) -> None:
    made = samples.statement(folder)
    assert made.kind == "https://slsa.dev/provenance/v1"
    assert made.subjects == (Subject("checkpoint/abababababababab", "ringfenceCheckpoint", samples.ANCHOR),)
    arguments, packages = (hashlib.sha256(each).hexdigest() for each in (b'["--lr","0.1"]', b"{}"))
    assert made.predicate["buildDefinition"] == {
        "buildType": "https://ringfence.github.io/ringfence/record/run/v1",
        "externalParameters": {
            "run": "run-7",
            "code": [{"script": "train.py", "digest": samples.SCRIPT, "arguments": arguments}],
        },
        "internalParameters": {"versions": [VERSIONS], "policies": [POLICY_DIGEST.hex()]},
        "resolvedDependencies": [
            {"name": "train.py", "digest": {"sha256": samples.SCRIPT}},
            {"name": "packages", "digest": {"sha256": packages}},
            {"name": "checkpoint/cdcdcdcdcdcdcdcd", "digest": {"ringfenceCheckpoint": samples.OLDER}},
            {"name": "data/efefefefefefefef", "digest": {"ringfenceData": samples.ROOT}},
        ],
    }
    details = made.predicate["runDetails"]
    assert details["builder"] == {"id": "https://ringfence.github.io/ringfence/record/builder/v1"}
    assert details["metadata"]["invocationId"] == "run-7"
    assert provenance.parse(statement.parse(made.encode())) == made.predicate


def test_it_has_the_signed_part_of_each_log_and_their_times(folder: Path) -> None:
    """A log that goes on has the same bytes up to there."""
    paths = samples.write_logs(folder)
    logs = [read(path.read_bytes()) for path in paths]
    signed = [path.read_bytes() for path in paths]
    paths[1].write_bytes(signed[1] + b'{"at":')
    details = provenance.statement_of(folder, ()).predicate["runDetails"]
    assert details["byproducts"] == [
        {
            "name": path.name,
            "digest": {"sha256": hashlib.sha256(content).hexdigest()},
            "annotations": {"bytes": len(content), "complete": rank == 0, "workers": 2},
        }
        for rank, (path, content) in enumerate(zip(paths, signed, strict=True))
    ]
    for name, at in (
        ("startedOn", min(each.begin.at for each in logs)),
        ("finishedOn", max(each.entries[-1].at for each in logs)),
    ):
        text = details["metadata"][name]
        assert text.endswith("Z")
        assert datetime.fromisoformat(text) == datetime.fromtimestamp(at / 1000, UTC)


def test_workers_that_differ_are_all_named(folder: Path) -> None:
    samples.write_logs(folder)
    other = {"script": "", "digest": "", "arguments": "", "packages": ""}
    for name in ("arguments", "packages"):
        other[name] = next(path.name for path in (folder / "blobs").iterdir() if path.read_bytes() == b"{}")
    Session("second").write(folder, 0, (("code", other), samples.LEFT))
    definition = provenance.statement_of(folder, ()).predicate["buildDefinition"]
    assert [each["script"] for each in definition["externalParameters"]["code"]] == ["", "train.py"]
    named = [each["name"] for each in definition["resolvedDependencies"]]
    assert named.count("train.py") == 1 and "" not in named


def test_a_run_without_a_checkpoint_needs_a_model(folder: Path) -> None:
    Session().write(folder, 0, (samples.LEFT,))
    with pytest.raises(RecordError, match="name the exported model with --model"):
        provenance.statement_of(folder, ())
    model = Subject("export", "sha256", "00" * 32)
    assert provenance.statement_of(folder, [model]).subjects == (model,)


def test_one_refused_log_is_enough(folder: Path) -> None:
    _, second = samples.write_logs(folder)
    second.write_bytes(second.read_bytes().replace(samples.ANCHOR.encode(), samples.OLDER.encode()))
    with pytest.raises(RecordError, match=rf"{second.name} is refused: entry \d+: "):
        provenance.statement_of(folder, ())


@pytest.mark.parametrize("anchor", ["", "AB" * 32, "checkpoint"])
def test_an_anchor_that_is_none_is_not_signed(folder: Path, anchor: str) -> None:
    """A worker can write any text into its log."""
    session = Session()
    path = session.write(folder, 0, (("checkpoint", {"action": "written", "anchor": samples.ANCHOR}),))
    path.write_bytes(
        signed_again(path.read_bytes(), session.record_key(0), lambda lines: lines[2].update(anchor=anchor))
    )
    with pytest.raises(RecordError, match=r"entry 2: its `anchor` does not have the form of one"):
        provenance.statement_of(folder, ())


def test_logs_of_several_runs_are_not_mixed(folder: Path) -> None:
    samples.write_logs(folder)
    Session("second", run="run-8").write(folder, 0, (samples.LEFT,))
    with pytest.raises(RecordError, match="logs of several runs"):
        provenance.statement_of(folder, ())


def test_a_clock_that_no_calendar_has_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringfence.record.log_file._milliseconds", lambda: 1 << 62)
    with pytest.raises(RecordError, match="its time"):
        samples.write_logs(folder)


def changed(predicate: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A predicate in which one value, at a path of names and indices, is another."""
    found = copy.deepcopy(predicate)
    *before, last = path.split("/")
    inner: Any = found
    for each in before:
        inner = inner[int(each)] if each.isdecimal() else inner[each]
    inner[last] = value
    return found


@pytest.mark.parametrize(
    ("path", "value", "refusal"),
    [
        ("note", 1, "unknown field 'note'"),
        ("buildDefinition/note", "", "buildDefinition has an unknown field 'note'"),
        ("buildDefinition/buildType", "https://example.org/build", "not about a run of ringfence"),
        ("buildDefinition/externalParameters/note", "", "unknown field 'note'"),
        ("buildDefinition/externalParameters/run", "run-8", "names two runs"),
        ("buildDefinition/externalParameters/code/0/note", "", "unknown field 'note'"),
        ("buildDefinition/externalParameters/code", {}, "code is not a list"),
        ("buildDefinition/internalParameters/versions/0/torch", 2, "torch is not a text"),
        ("buildDefinition/internalParameters/policies", [1], "policies is not a text"),
        ("buildDefinition/resolvedDependencies/0/uri", "", "unknown field 'uri'"),
        ("buildDefinition/resolvedDependencies/0/digest", {"md5": "ab"}, "digest is not one of"),
        ("buildDefinition/resolvedDependencies/0/digest", {}, "exactly one digest"),
        ("runDetails/builder/id", "https://example.org/builder", "not about a run of ringfence"),
        ("runDetails/builder/version", {}, "unknown field 'version'"),
        ("runDetails/metadata/finishedOn", None, "finishedOn is not a text"),
        ("runDetails/byproducts/0/annotations/bytes", True, "bytes is not an integer"),
        ("runDetails/byproducts/0/annotations/note", "", "unknown field 'note'"),
        ("runDetails/byproducts/0", [], "byproducts is not a JSON object"),
    ],
)
def test_other_predicates_are_refused(folder: Path, path: str, value: Any, refusal: str) -> None:
    made = samples.statement(folder)
    before, _, last = path.rpartition("/")
    if last.isdecimal():
        path, value = before, [value]
    other = Statement(made.subjects, keys.RECORD_PROVENANCE, changed(made.predicate, path, value))
    with pytest.raises(RecordError, match=refusal):
        provenance.parse(statement.parse(other.encode()))
