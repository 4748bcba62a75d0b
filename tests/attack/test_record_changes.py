"""The record of a whole run, changed at random: two verifiers that share no code find the same, and never all of it."""

from __future__ import annotations

import ast
import os
from pathlib import Path
from typing import TypeGuard

import pytest

from ringfence.record.claims import SHOWN
from tests import second_verifier
from tests.attack import record_verifiers
from tests.attack.record_changes import CHANGES, LIES, MARK
from tests.unit import run_samples

NIGHTLY = int(os.environ.get("RECORD_CHANGES", "50000"))


def is_import(node: ast.AST) -> TypeGuard[ast.Import | ast.ImportFrom]:
    return isinstance(node, ast.Import | ast.ImportFrom)


def test_the_second_verifier_has_no_code_of_the_package() -> None:
    tree = ast.walk(ast.parse(Path(second_verifier.__file__).read_text()))
    names = {
        node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in tree if is_import(node)
    }
    assert "cryptography.exceptions" in names
    assert not [name for name in names if name is None or name.partition(".")[0] in ("ringfence", "tests")]


@pytest.mark.promise("A log of a run that was changed is refused, with the entry named, or says less than before.")
def test_a_changed_record_does_not_show_all_that_is_claimed(tmp_path: Path) -> None:
    done = record_verifiers.run(tmp_path, 300, seed=3)
    assert done.total() == 300


@pytest.mark.parametrize("kind", CHANGES)
def test_every_kind_of_change_is_found(tmp_path: Path, kind: str) -> None:
    done = record_verifiers.run(tmp_path, 2, seed=4, kinds=[kind])
    assert done == {kind: 2}


def test_a_log_with_nothing_left_in_it_is_refused(tmp_path: Path) -> None:
    sample = record_verifiers.Sample.write(tmp_path)
    name = next(name for name in sample.files if name.endswith(".jsonl"))
    assert record_verifiers.refused_alone(sample, {name: b""})


def test_a_cut_log_of_a_lost_worker_that_no_later_log_took_up_shows_less(tmp_path: Path) -> None:
    """Its replacement began with an empty folder, so that no head tells an earlier loss from a cut."""
    first, second = run_samples.sessions()
    logs, before = run_samples.write_session(tmp_path, first, is_first=True)
    before[run_samples.KILLED] = ""
    run_samples.write_session(tmp_path, second, before)
    lines = logs[run_samples.KILLED].read_bytes().splitlines(keepends=True)
    for end in [at for at, line in enumerate(lines, 1) if MARK in line]:
        logs[run_samples.KILLED].write_bytes(b"".join(lines[:end]))
        _, verdicts = record_verifiers.evaluate(tmp_path)
        failed = {claim for claim, each in verdicts.items() if each.state != SHOWN}
        assert failed >= {"complete", "only this code ran", "only these data were used"}, failed
        assert failed >= {"nothing left a machine unsealed", "these checkpoints descend from the run"}, failed


@pytest.mark.parametrize("kind", LIES)
def test_both_verifiers_agree_on_what_a_worker_records(tmp_path: Path, kind: str) -> None:
    done = record_verifiers.run(tmp_path, 10, seed=5, kinds=[kind])
    assert done == {kind: 10}


@pytest.mark.nightly
@pytest.mark.timeout(4 * 3600)
def test_many_changed_records(tmp_path: Path) -> None:
    assert record_verifiers.run(tmp_path, NIGHTLY, seed=6).total() == NIGHTLY
