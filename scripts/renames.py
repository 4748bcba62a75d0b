"""Print what was renamed since a commit: words, policy keys, settings, files, and the definitions in every file of Python.

scripts/renames            since the commit before names were put into the field's words
scripts/renames COMMIT     since another
"""

from __future__ import annotations

import ast
import difflib
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from ringfence.admission.policy_file import toml_table
from ringfence.config import settings

ROOT = Path(__file__).parents[1]
BEFORE = "8a7ec5b"


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)  # noqa: S603, S607
    return done.stdout


def files_since(commit: str) -> Iterator[tuple[str, str]]:
    """Every file of source, tests, scripts and documents that was changed or moved: its old and its new path."""
    found = git(
        "diff", "--name-status", "--find-renames=40%", "-l0", commit, "HEAD", "--", "src", "tests", "scripts", "docs"
    )
    for line in found.splitlines():
        status, *paths = line.split("\t")
        if status[0] in "RM":
            yield paths[0], paths[-1]


def definitions(text: str) -> list[str]:
    """Classes, functions and methods in the order of the file, with the class they are in."""
    names: list[str] = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                names.append(prefix + child.name)
                visit(child, f"{prefix}{child.name}.")

    visit(ast.parse(text), "")
    return names


def renamed(old: list[str], new: list[str]) -> Iterator[tuple[str, str]]:
    """Definitions that stand in the same place of a file under another name."""
    matcher = difflib.SequenceMatcher(a=old, b=new, autojunk=False)
    for kind, a, b, c, d in matcher.get_opcodes():
        if kind == "replace" and b - a == d - c:
            yield from zip(old[a:b], new[c:d], strict=True)


def main() -> None:
    commit = sys.argv[1] if len(sys.argv) > 1 else BEFORE
    table = tomllib.loads((ROOT / "tests" / "vocabulary.toml").read_text())
    print("words")
    for kind in ("words", "phrases", "identifiers"):
        for old, new in table[kind].items():
            print(f"  {old} -> {new}")
    for title, renames in (("policy keys", toml_table.RENAMED), ("settings", settings.RENAMED)):
        print(title)
        for old, new in renames.items():
            print(f"  {old} -> {new}")
    pairs = list(files_since(commit))
    print("files")
    for old, new in pairs:
        if old != new and not old.startswith("docs/results"):
            print(f"  {old} -> {new}")
    print("definitions")
    for old, new in pairs:
        if new.endswith(".py") and (ROOT / new).exists():
            names = list(renamed(definitions(git("show", f"{commit}:{old}")), definitions((ROOT / new).read_text())))
            if names:
                print(f"  {new}")
            for before, after in names:
                print(f"    {before} -> {after}")


if __name__ == "__main__":
    main()
