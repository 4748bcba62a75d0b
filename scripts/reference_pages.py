"""`scripts/reference`: the generated parts of docs/reference, from the code; or, with --check, whether they are fresh.

A part stands between `<!-- reference: NAME -->` and `<!-- end of reference -->`. Commands come from argparse, at 80 columns;
settings and policy keys from the tables next to their readers; errors from the classes and their docstrings.
"""

from __future__ import annotations

import argparse
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from ringfence import cli, errors
from ringfence.admission.policy_file import key_reference
from ringfence.admission.policy_file.key_reference import FORMS, PolicyKey
from ringfence.config.settings_reference import SETTINGS
from scripts import generated

ROOT: Final = Path(__file__).parents[1]
FOLDER: Final = ROOT / "docs" / "reference"
PAGES: Final = ("commands.md", "settings.md", "policy.md", "errors.md")
COLUMNS: Final = "80"


def commands() -> str:
    """Every command with its --help, and a list of them at the top."""
    os.environ.update(COLUMNS=COLUMNS, NO_COLOR="1")
    found = list(parsers(cli._parser()))
    lines: dict[str, list[str]] = {}
    for parser in found[1:]:
        command, _, action = parser.prog.removeprefix("ringfence ").partition(" ")
        lines.setdefault(command, []).append(f"[`{action or command}`](#{parser.prog.replace(' ', '-')})")
    contents = [f"- {first}" + (f": {', '.join(rest)}" if rest else "") for first, *rest in lines.values()]
    sections = [f"## {parser.prog}\n\n```text\n{parser.format_help().rstrip()}\n```" for parser in found]
    return "\n".join(contents) + "\n\n" + "\n\n".join(sections)


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """A parser and those of its subcommands, in the order of --help."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in dict.fromkeys(action.choices.values()):
                yield from parsers(inner)


def settings() -> str:
    """A section for each variable, so that each has an address."""
    sections = [
        f"### {each.name}\n\n{each.meaning}\n\n- Default: {each.default}.\n- May differ between workers: {each.per_worker}."
        for each in SETTINGS
    ]
    return "\n\n".join(sections)


def keys(wanted: Sequence[PolicyKey]) -> str:
    """A table in a box that the site's style sheet knows."""
    rows = [(f"`{each.name}`", FORMS[each.form], each.meaning, each.default) for each in wanted]
    if not rows:
        return "The table has no keys."
    return f'<div class="keys" markdown>\n\n{table(("key", "value", "meaning", "default"), rows)}\n\n</div>'


def error_classes() -> str:
    """The tree of exceptions, and what each of them means."""
    found = list(classes(errors.RingfenceError, 0))
    tree = ["RuntimeError", *(f"{'  ' * (depth + 1)}{each.__name__}" for each, depth in found)]
    sections = [f"## {each.__name__}\n\n{inspect.getdoc(each)}" for each, _ in found]
    return "```text\n" + "\n".join(tree) + "\n```\n\n" + "\n\n".join(sections)


def classes(base: type, depth: int) -> Iterator[tuple[type, int]]:
    """A class and those that derive from it, in the order in which the module defines them."""
    yield base, depth
    derived: list[type] = base.__subclasses__()
    for each in derived:
        if each.__module__ == errors.__name__:
            yield from classes(each, depth + 1)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


PARTS: Final[dict[str, Callable[[], str]]] = {
    "commands": commands,
    "settings": settings,
    "errors": error_classes,
    "policy-top": lambda: keys(key_reference.TOP),
    "policy-vtpm": lambda: keys(key_reference.VTPM),
    **{f"policy-{kind}": lambda kind=kind: keys(key_reference.KINDS[kind]) for kind in key_reference.KINDS},  # type: ignore[misc]
}


def filled(text: str) -> str:
    """The page with each of its parts made anew; a marker that names no part is a mistake."""
    return generated.filled(text, "reference", lambda name: PARTS[name]())


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/reference", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is stale")
    check = parser.parse_args().check
    texts = {FOLDER / name: (FOLDER / name).read_text() for name in PAGES}
    stale = {path: fresh for path, text in texts.items() if (fresh := filled(text)) != text}
    for path, fresh in stale.items():
        if check:
            print(f"{path.relative_to(ROOT)} is stale: run scripts/reference")
        else:
            path.write_text(fresh)
            print(f"wrote {path.relative_to(ROOT)}")
    if not stale:
        print("the reference pages are fresh")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
