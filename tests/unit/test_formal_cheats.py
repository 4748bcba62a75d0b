"""Ways to make the record of formal/ say more than was proved, each refused without a prover.

The record is plain text, so anyone who changes a model can paste new digests into it. `paste` does that, with the digest that
`scripts/prove` would compute: what is refused then is refused for another reason.
"""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from scripts.proof_claims import claims
from scripts.proofs import FOLDER, digest, models, problems, sources
from tests.spec_sections import section_problems, sections

ROOT = Path(__file__).parents[2]
NAMES = [model.name for model in models()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of formal/ that a test may change."""
    return Path(shutil.copytree(FOLDER, tmp_path / "formal"))


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    """A copy of spec/ that a test may change."""
    return Path(shutil.copytree(ROOT / "spec", tmp_path / "spec"))


@pytest.fixture
def record() -> dict[str, Any]:
    return copy.deepcopy(json.loads((FOLDER / "verdicts.json").read_text()))


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def paste(record: dict[str, Any], folder: Path) -> None:
    """Write the digests of the folder as it is now into the record."""
    for model in models(folder):
        entry = record["models"][model.name]
        entry["digest"] = digest(record["prover"], model, sources(model, folder), entry)


CHANGED = "its files, its table or its verdicts changed after it was proved"
SEALED = "inj-event(Opens(g, i, o, m)) ==> inj-event(Seals(g, i, o, m))"


def test_a_query_made_true_is_refused_with_its_new_digest(folder: Path, record: dict[str, Any]) -> None:
    edit(folder / "origin.pv", SEALED, "inj-event(Opens(g, i, o, m)) ==> true")
    assert f"origin: {CHANGED}" in list(problems(record, folder))
    paste(record, folder)
    assert list(problems(record, folder)) == ["origin: the prover was asked something else as receiver-agrees"]


@pytest.mark.parametrize("weaker", ["event(Opens(g, i, o, m))", "inj-event(Seals(g, i, o', m))"])
def test_a_weaker_query_is_refused_with_its_new_digest(folder: Path, record: dict[str, Any], weaker: str) -> None:
    edit(folder / "origin.pv", SEALED, f"inj-event(Opens(g, i, o, m)) ==> {weaker}")
    paste(record, folder)
    assert list(problems(record, folder)) == ["origin: the prover was asked something else as receiver-agrees"]


@pytest.mark.parametrize("old", ["(*CHECK receiver-tag*) if link_tag = ", "new drawn: bitstring;\n  in(net, (c1"])
def test_a_changed_process_is_refused(folder: Path, record: dict[str, Any], old: str) -> None:
    edit(folder / "origin.pv", old, old.replace("link_tag", "tag(sealed)").replace("new drawn", "new other"))
    assert list(problems(record, folder)) == [f"origin: {CHANGED}"]


def test_files_in_another_order_are_refused(folder: Path, record: dict[str, Any]) -> None:
    listed = '["crypto.pvl", "kinds/token.pvl", "clear.pvl", "edge.pvl", "edge.pv"]'
    edit(folder / "models.toml", listed, '["kinds/token.pvl", "crypto.pvl", "clear.pvl", "edge.pvl", "edge.pv"]')
    assert list(problems(record, folder)) == [f"edge-token: {CHANGED}"]


def test_queries_in_another_order_are_refused(folder: Path, record: dict[str, Any]) -> None:
    two = 'no-repeat = "proved"\norigin-keys-differ = "proved"\n'
    edit(folder / "models.toml", two, "".join(reversed(two.splitlines(keepends=True))))
    paste(record, folder)
    assert "origin: models.toml expects other queries than the files have, or in another order" in list(
        problems(record, folder)
    )


@pytest.mark.parametrize("name", ["link_better.pv", "link_better.pvl", "kinds/oracle.pvl"])
def test_a_model_that_no_list_names_is_refused(folder: Path, record: dict[str, Any], name: str) -> None:
    (folder / name).write_text("process 0\n")
    assert list(problems(record, folder)) == [f"{name}: no model of models.toml has this file"]


def test_a_shorter_list_of_attacks_is_refused_with_its_new_digest(folder: Path, record: dict[str, Any]) -> None:
    edit(folder / "models.toml", 'session-salt = ["no-repeat", "origin-keys-differ"]', 'session-salt = ["no-repeat"]')
    paste(record, folder)
    found = "origin, session-salt: attacks on no-repeat, origin-keys-differ, and models.toml lists no-repeat"
    assert list(problems(record, folder)) == [found]


def test_an_edited_verdict_is_refused(record: dict[str, Any]) -> None:
    record["models"]["tree"]["variants"]["go"]["verdicts"]["two-rosters"] = "unknown"
    assert list(problems(record)) == [f"tree: {CHANGED}"]


def test_verdicts_of_another_prover_are_refused(record: dict[str, Any]) -> None:
    record["prover"] = "ProVerif 2.99"
    assert list(problems(record)) == [f"{name}: {CHANGED}" for name in NAMES]


def test_a_mutant_that_is_dropped_everywhere_is_refused(folder: Path, record: dict[str, Any]) -> None:
    edit(folder / "models.toml", 'origin-phase = ["origin-keys-differ"]\n', "")
    del record["models"]["origin"]["variants"]["origin-phase"]
    paste(record, folder)
    assert list(problems(record, folder)) == ["origin.pv: no mutant removes the check origin-phase"]


def test_a_model_that_is_dropped_everywhere_is_refused(folder: Path, record: dict[str, Any]) -> None:
    text = (folder / "models.toml").read_text()
    (folder / "models.toml").write_text(text[: text.index('[[model]]\nname = "record"')])
    del record["models"]["record"]
    assert list(problems(record, folder)) == ["record.pv: no model of models.toml has this file"]
    left = [model.name for model in models(folder)]
    assert "sections.toml: spec/record.md, 7. The first line: no model is called record" in list(
        section_problems(left, folder)
    )


# -- the sections of the specification ------------------------------------------------------------------------------


def test_every_section_of_the_specification_has_its_models_or_a_reason() -> None:
    assert list(section_problems(NAMES, FOLDER)) == []


def test_a_change_of_the_protocol_that_touches_no_model_is_refused(spec: Path) -> None:
    edit(spec / "link.md", "place          = lane (1) ‖ channel (1) ‖", "place          = lane (1) ‖")
    (found,) = section_problems(NAMES, FOLDER, spec)
    assert found.startswith("sections.toml: spec/link.md, 2. Keys: the text changed, and the models link, ")
    assert "change the models, or if they fit as they are, set digest to " in found


def test_other_line_breaks_are_no_change(spec: Path) -> None:
    text = (spec / "admission.md").read_text()
    (spec / "admission.md").write_text(text.replace(" checks", "\nchecks"))
    assert list(section_problems(NAMES, FOLDER, spec)) == []


def test_a_new_section_or_document_is_refused(spec: Path) -> None:
    with (spec / "launch.md").open("a") as file:
        file.write("\n## A new message\n\nIt says more.\n")
    (spec / "gossip.md").write_text("# Gossip\n")
    assert list(section_problems(NAMES, FOLDER, spec)) == [
        "sections.toml: gossip.md is there or in spec/, not in both",
        "sections.toml: spec/launch.md, A new message: in the table or in the text, not in both",
    ]


def test_a_row_without_models_and_without_a_reason_is_refused(folder: Path) -> None:
    edit(folder / "sections.toml", 'none = "cost"', 'none = ""')
    (found,) = section_problems(NAMES, folder)
    assert found.endswith("a row has a digest, and either models or a reason why there are none")


def test_two_sections_with_one_heading_are_refused() -> None:
    with pytest.raises(ValueError, match="one heading"):
        sections("# A\n\n## B\n\n## B\n")


# -- the claims of the threat model ---------------------------------------------------------------------------------


def parts() -> dict[str, str]:
    """The rows of the threat model's table of assets and its sections of the third level."""
    page = (ROOT / "docs/security/threat-model.md").read_text()
    rows = page.partition("## Assets\n")[2].partition("\n## ")[0].splitlines()
    assets = {row.split("|")[1].strip(): row.split("|")[2] for row in rows if row.startswith("| ")}
    del assets["asset"]
    titles = [part.partition("\n") for part in page.split("\n### ")[1:]]
    return assets | {title: text.partition("\n## ")[0] for title, _, text in titles}


@pytest.mark.parametrize("name", list(parts()))
def test_a_part_of_the_threat_model_has_a_query_or_says_that_it_has_none(name: str) -> None:
    stated = [claim.sentence for claim in claims(FOLDER) if claim.document == "docs/security/threat-model.md"]
    text = " ".join(parts()[name].split())
    assert any(sentence in text for sentence in stated)
