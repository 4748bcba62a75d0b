"""What the documents name exists: settings, files, headings; and no file carries what only its author knows."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

from ringfence.backend.inside import NCCL_SETTINGS
from ringfence.config.settings import KNOWN
from scripts.site import reference

ROOT = Path(__file__).parents[2]
SINGLE = (".pre-commit-config.yaml", "Containerfile", "conftest.py", "mkdocs.yml", "pyproject.toml", "setup.py")
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("spec/**/*.md"), *ROOT.glob("formal/**/*.md")]
)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_security_says_where_to_report_a_vulnerability() -> None:
    section = (ROOT / "SECURITY.md").read_text().split("## Reporting a vulnerability")[1].split("\n## ")[0]
    assert "private vulnerability reporting](https://" in section


def test_every_setting_is_documented() -> None:
    pattern = re.compile(r"\bRINGFENCE_[A-Z_]*[A-Z]\b")
    used = {
        name
        for folder in ("src", "lab/src")
        for file in (ROOT / folder).rglob("*.py")
        for name in pattern.findall(file.read_text())
    }
    assert used == set(KNOWN)


def test_the_guide_to_nccl_names_the_variables_that_ringfence_sets() -> None:
    listed = re.findall(r"^\| `(NCCL_\w+)=(\S+)` \|", (ROOT / "docs/guides/nccl.md").read_text(), re.MULTILINE)
    assert dict(listed[:-1]) == NCCL_SETTINGS and listed[-1] == ("NCCL_RAS_ENABLE", "0")


def test_nothing_installs_ringfence_by_its_name_alone() -> None:
    """It is installed from a clone. By its name an index would be asked, and could answer with anything."""
    pattern = re.compile(r"pip install(?: -\S+)* [\"']?ringfence|ringfence\[")
    folders = [file for file in files_of_the_project() if file.relative_to(ROOT).parts[0] != "tests"]
    folders.remove(ROOT / "pyproject.toml")  # an extra that names another of the same project asks no index
    found = {name_of(file): pattern.findall(file.read_text()) for file in folders if "results" not in file.parts}
    assert not {name: hits for name, hits in found.items() if hits}


def test_what_is_said_to_be_installed_is_what_the_project_asks_for() -> None:
    asked = (ROOT / "pyproject.toml").read_text() + (ROOT / "lab/pyproject.toml").read_text()
    told = {
        wanted
        for file in files_of_the_project()
        if file.relative_to(ROOT).parts[0] in ("docs", "lab", "scripts", "src") and "results" not in file.parts
        for wanted in re.findall(r"pip install \"([a-z][^\"{]*>=[^\"{]*)\"", file.read_text())
    }
    assert told
    assert not {wanted for wanted in told if f'"{wanted}"' not in asked}


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", with_parts(document)):
        path, _, anchor = target.partition("#")
        if path.startswith("https://"):
            continue
        goal = (document.parent / path).resolve() if path else document
        assert goal.exists(), f"{target} is not there"
        assert not anchor or anchor in anchors_in(goal), f"{target}: no such heading"


@functools.cache
def with_parts(document: Path) -> str:
    """The text as the site shows it."""
    return reference.filled(document.read_text())


def anchors_in(document: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", with_parts(document), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_example_is_short_and_differs_from_gloo_in_one_line() -> None:
    text = (ROOT / "examples/ddp.py").read_text()
    assert len(text.splitlines()) <= 60
    assert len(re.findall(r'^.*"ringfence".*$', text, flags=re.MULTILINE)) == 1


def files_of_the_project() -> list[Path]:
    """Every text of ours: what a virtualenv or a tool put beside it is left out, and what was recorded or found by chance."""
    named = (".ci", ".github", "docs", "examples", "formal", "lab", "scripts", "spec", "src", "tests")
    folders = [ROOT / name for name in named]
    inside = [
        file
        for folder in folders
        for file in folder.rglob("*")
        if not {"__pycache__", "ringfence.egg-info", "ringfence_lab.egg-info", "build"} & set(file.parts)
        and file.suffix != ".so"
    ]
    ours = {*ROOT.glob("*.md"), *(ROOT / name for name in SINGLE), *inside} - recorded()
    return sorted(file for file in ours if file.is_file())


def recorded() -> set[Path]:
    """What others' hardware said, and what the fuzzer found: bytes, not words."""
    evidence = {file for file in (ROOT / "tests/evidence").rglob("*") if file.name != "SOURCES.md"}
    found = {file for file in (ROOT / "tests/fuzz/found").iterdir() if file.suffix != ".md"}
    return {file for file in evidence | found if file.is_file() and file.suffix != ".pyc"}


def test_no_file_names_a_path_of_somebodys_machine() -> None:
    folders = "|".join(("home", "root", "work", "opt", "Users"))
    pattern = re.compile(rf"(?<![\w.~/-])/(?:{folders})/\w+|\.\./shared")
    found = {name_of(file): pattern.findall(file.read_text()) for file in files_of_the_project()}
    assert not {name: hits for name, hits in found.items() if hits}


def test_no_test_is_skipped_or_left_for_later() -> None:
    words = "|".join(("TO" + "DO", "FIX" + "ME", r"pytest\.mark\." + "skip", r"pytest\." + "skip", "x" + "fail"))
    pattern = re.compile(rf"\b(?:{words})\b")
    found = {
        name_of(file): pattern.findall(file.read_text()) for file in files_of_the_project() if file.suffix == ".py"
    }
    assert not {name: hits for name, hits in found.items() if hits}
