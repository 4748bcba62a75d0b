"""Parts of pages that the site makes from the code, between `<!-- reference: NAME -->` and `<!-- end of reference -->`.

Commands come from argparse, at 80 columns; settings from settings-keys.toml; policy keys from policy-keys.toml; errors from the
classes and their docstrings; promises from tests/promises.toml and the markers of tests; records from docs/records, verified.
"""

from __future__ import annotations

import argparse
import functools
import html
import inspect
import os
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from ringfence import cli, errors
from ringfence.record import envelope, selftest, signing_key, statement
from scripts import generated
from tests import promises

COLUMNS: Final = "80"
_DOCS: Final = Path(__file__).parents[2] / "docs"
_DATA: Final = _DOCS / "reference"
RECORDS: Final = _DOCS / "records"
POLICY_KEYS: Final[dict[str, list[dict[str, str]]]] = tomllib.loads((_DATA / "policy-keys.toml").read_text())
SETTINGS: Final[list[dict[str, str]]] = tomllib.loads((_DATA / "settings-keys.toml").read_text())["setting"]
FORMS: Final = {  # a method of TomlTable, and what it reads
    "text": "string",
    "texts": "string or list",
    "number": "integer",
    "flag": "boolean",
    "duration": "duration",
    "hexes": "hex or list",
    "file": "file",
    "files": "file or list",
    "contents": "file, folder or list",
    "table": "table",
    "tables": "list of tables",
}


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
        f"### {each['name']}\n\n{each['meaning']}\n\n- Default: {' '.join(each['default'].split())}.\n"
        f"- May differ between workers: {each.get('per_worker', 'no')}."
        for each in SETTINGS
    ]
    return "\n\n".join(sections)


def keys(name: str) -> str:
    """A table in a box that the site's style sheet knows."""
    rows = [
        (f"`{each['name']}`", FORMS[each["form"]], each["meaning"].replace("\n", " "), each.get("default", "required"))
        for each in POLICY_KEYS[name]
    ]
    return f'<div class="keys" markdown>\n\n{generated.table(("key", "value", "meaning", "default"), rows)}\n\n</div>'


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


def records(folder: Path = RECORDS) -> str:
    """A row for each self-test that was handed in. One that its key did not sign raises RecordError, which ends the build."""
    rows = []
    for file in sorted(folder.glob("*.json")):
        public = signing_key.read_public(file.with_suffix(".pem").read_bytes(), f"{file.stem}.pem")
        said = selftest.parse(statement.parse(envelope.verified_payload(file.read_bytes(), public)))
        versions = [said["environment"].get(name, "") for name in ("device", "driver", "torch", "ringfence")]
        cells = [*versions, selftest.verdict(said), said["began"], signing_key.key_id(public)[:16]]
        rows.append([f"[{file.stem}](../records/{file.name})", *map(_cell, cells)])
    return generated.table(("record", "device", "driver", "torch", "ringfence", "result", "began", "key"), rows)


def _cell(text: str) -> str:
    """A text from elsewhere, which is to stay text: neither HTML nor Markdown."""
    plain = html.escape(" ".join(text.split()))
    return "".join(f"&#{ord(letter)};" if letter in "|[]`*_\\" else letter for letter in plain)


PARTS: Final[dict[str, Callable[[], str]]] = {
    "commands": commands,
    "settings": settings,
    "errors": error_classes,
    "records": records,
    "promises": lambda: promises.tables(promises.sections(), promises.marked_tests()),
    **{f"policy-{name}": functools.partial(keys, name) for name in POLICY_KEYS},
}


def filled(text: str) -> str:
    """The page with each of its parts; a marker that names no part is a mistake."""
    return generated.filled(text, "reference", lambda name: PARTS[name]())
