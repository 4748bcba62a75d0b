"""The recorded verdicts fit the models of formal/: a changed model, a wrong verdict, a mutant without an attack are refused."""

from __future__ import annotations

import copy
import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts import proofs
from scripts.proof_claims import claim_problems, claims, write_claims
from scripts.proofs import (
    BASE,
    FOLDER,
    Model,
    ProverError,
    main,
    models,
    mutate,
    names_of,
    problems,
    queries,
    run,
    sources,
)

CHANGED = "its files, its table or its verdicts changed after it was proved"
RECORD: dict[str, Any] = json.loads((FOLDER / "verdicts.json").read_text())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of formal/ that a test may change."""
    return Path(shutil.copytree(FOLDER, tmp_path / "formal"))


@pytest.fixture
def record() -> dict[str, Any]:
    return copy.deepcopy(RECORD)


def model(name: str) -> Model:
    return next(each for each in models() if each.name == name)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_the_record_fits_the_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0, capsys.readouterr().err
    assert capsys.readouterr().out.startswith("ProVerif 2.")


def test_a_changed_model_is_refused(folder: Path) -> None:
    edit(folder / "link.pvl", "new nonce_a: bitstring;", "")
    found = list(problems(RECORD, folder))
    assert found == [f"{name}: {CHANGED}" for name in ("link", "link-insider", "link-quantum")]


@pytest.mark.parametrize("verdict", ["false", "unknown"])
def test_a_property_that_was_not_proved_is_refused(record: dict[str, Any], verdict: str) -> None:
    record["models"]["tree"]["variants"][BASE]["verdicts"]["one-roster"] = verdict
    found = f"tree, {BASE}: one-roster must be proved, and the prover says {verdict}"
    assert list(problems(record)) == [f"tree: {CHANGED}", found]


def test_a_limitation_without_an_attack_is_refused(record: dict[str, Any]) -> None:
    record["models"]["tree"]["variants"][BASE]["verdicts"]["two-rosters"] = "true"
    found = f"tree, {BASE}: two-rosters must be attack, and the prover says true"
    assert list(problems(record)) == [f"tree: {CHANGED}", found]


@pytest.mark.parametrize("verdict", ["true", "unknown"])
def test_a_mutant_without_an_attack_is_refused(record: dict[str, Any], verdict: str) -> None:
    record["models"]["edge-secret"]["variants"]["generation"]["verdicts"]["child-agrees"] = verdict
    changed, found = problems(record)
    assert changed == f"edge-secret: {CHANGED}"
    attacked, _, listed = found.partition(", and models.toml lists ")
    assert attacked.startswith("edge-secret, generation: attacks on ")
    assert "child-agrees" not in attacked
    assert "child-agrees" in listed


@pytest.mark.parametrize("variant", [BASE, "dialler-nonce"])
def test_a_good_end_that_is_not_reachable_is_refused(record: dict[str, Any], variant: str) -> None:
    record["models"]["link-insider"]["variants"][variant]["verdicts"]["good-end"] = "true"
    found = f"link-insider, {variant}: good-end must be reachable, and the prover says true"
    assert list(problems(record)) == [f"link-insider: {CHANGED}", found]


def without_model(record: dict[str, Any]) -> None:
    del record["models"]["origin"]


def without_variant(record: dict[str, Any]) -> None:
    del record["models"]["origin"]["variants"]["group-info"]


def without_query(record: dict[str, Any]) -> None:
    del record["models"]["origin"]["variants"][BASE]["verdicts"]["no-repeat"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (without_model, ["origin: in the record or in models.toml, not in both"]),
        (without_variant, ["origin: the record has other variants than models.toml"]),
        (without_query, [f"origin: {CHANGED}", f"origin, {BASE}: the record has other queries than models.toml"]),
    ],
)
def test_a_record_with_a_gap_is_refused(
    record: dict[str, Any], change: Callable[[dict[str, Any]], None], expected: list[str]
) -> None:
    change(record)
    assert list(problems(record)) == expected


def test_a_property_without_a_mutant_is_refused(folder: Path) -> None:
    edit(folder / "models.toml", 'own-entry = ["one-roster", "inner-own-entry"]\n', "")
    found = list(problems(RECORD, folder))
    assert "tree: no mutant has an attack on one-roster" in found
    assert "tree.pv: no mutant removes the check own-entry" in found


def test_a_query_that_models_toml_does_not_expect_is_refused(folder: Path) -> None:
    edit(folder / "models.toml", 'no-repeat = "proved"\n', "")
    assert "origin: models.toml expects other queries than the files have, or in another order" in list(
        problems(RECORD, folder)
    )


def test_every_query_of_a_file_has_a_name() -> None:
    for each in models():
        texts = sources(each)
        declared = sum(text.count("\nquery ") for text in texts.values())
        assert declared == len(queries(texts)), each.name


def test_a_mutant_differs_in_the_named_check_only() -> None:
    texts = sources(model("link"))
    mutant = mutate(texts, ["acceptor-nonce"])
    assert "(*CHECK acceptor-nonce*)" not in mutant["link.pvl"]
    assert mutant["link.pvl"].count("(*CHECK ") == texts["link.pvl"].count("(*CHECK ") - 1
    assert mutant["link.pv"] == texts["link.pv"]
    with pytest.raises(ValueError, match="no file marks the check of-nothing"):
        mutate(texts, ["of-nothing"])


def test_a_sentence_that_no_document_has_is_refused(folder: Path) -> None:
    edit(folder / "claims.toml", "Policies must be equal on all workers.", "Policies may differ.")
    edit(folder / "claims.toml", "A proof is valid on one connection only.", "A proof is valid for ever.")
    write_claims(folder)
    found = list(claim_problems(folder, names_of(models())))
    assert found == [
        "claims.toml: not a promise of tests/promises.toml: A proof is valid for ever.",
        "claims.toml: docs/security/threat-model.md does not say: Policies may differ.",
    ]


def test_a_claim_needs_a_query_and_a_query_a_claim(folder: Path) -> None:
    edit(folder / "claims.toml", '"tree/session-secret"', '"tree/session-secrets"')
    found = list(claim_problems(folder, names_of(models())))
    assert found == [
        "claims.toml: no model has the query tree/session-secrets",
        "claims.toml: tree/session-secret backs no sentence",
        "formal/README.md: the table of claims is stale: run scripts/prove --claims",
    ]


def test_a_claim_has_queries_or_says_why_it_has_none(folder: Path) -> None:
    edit(folder / "claims.toml", 'none = "World sizes are not modelled."\n', "")
    (found, _) = claim_problems(folder, names_of(models()))
    assert found.startswith("claims.toml: name queries, or say why there are none: With any value above half of it")


def test_every_claim_is_a_row_of_the_table() -> None:
    page = (FOLDER / "README.md").read_text()
    assert all(f"| **{claim.sentence}**" in page for claim in claims(FOLDER))


# A program in place of the prover, where the subject is how its output is read.


def program(folder: Path, text: str) -> str:
    path = folder / "proverif"
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.mark.processes
def test_verdicts_are_read_from_the_summary_in_the_order_of_the_queries(tmp_path: Path) -> None:
    texts = sources(model("origin"))
    ends = ["is false", "is true", "is true", "cannot be proved", "is true", "is true"]
    lines = [f"Query not event({number}) {end}." for number, end in enumerate(ends)]
    summary = "\n".join(["RESULT not event(x) is true.", "Verification summary:", "", *lines])
    found, _ = run(program(tmp_path, summary), texts)
    expected = ["false", "true", "true", "unknown", "true", "true"]
    words = [f"not event({number})" for number in range(6)]
    assert found == dict(zip(queries(texts), zip(words, expected, strict=True), strict=True))


@pytest.mark.processes
def test_a_prover_that_fails_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ProverError, match="0 verdicts for 6 queries"):
        run(program(tmp_path, "Error: Syntax error."), sources(model("origin")))


def test_a_model_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "edge"])
    assert "no model is called edge" in capsys.readouterr().err


def test_without_a_prover_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.delenv("PROVERIF", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path) + os.pathsep)
    assert main([]) == 2
    assert "put `proverif` in the path, or set PROVERIF" in capsys.readouterr().err
    assert json.loads((proofs.FOLDER / "verdicts.json").read_text()) == RECORD
