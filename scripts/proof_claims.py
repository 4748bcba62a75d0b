"""The table of formal/README.md: sentences of the documents, the queries behind them, and the tests beside them.

formal/claims.toml says which queries back which sentence. A sentence is a promise of tests/promises.toml, or stands as it is
in a document of docs/security.
"""

from __future__ import annotations

import fnmatch
import tomllib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tests.promises import marked_tests, sections

ROOT: Final = Path(__file__).parents[1]
BEGIN: Final = "<!-- claims: written by scripts/prove from claims.toml -->"
END: Final = "<!-- end of claims -->"
DOCUMENTS: Final = ("docs/security/threat-model.md", "docs/security/limitations.md")


class Claim(NamedTuple):
    """A sentence and the queries that back it: `model/query`, or `model/query@variant` for an attack; `*` is any text."""

    sentence: str
    queries: tuple[str, ...] = ()
    none: str = ""  # why it has no query
    document: str = ""  # in which it stands, unless it is a promise
    limits: str = ""  # which part of it the queries show
    tests: tuple[str, ...] = ()  # files, if it is not a promise


def claims(folder: Path) -> list[Claim]:
    """Return the claims of a folder. Raises TypeError if a table has an unknown key or lacks a required one."""
    tables = tomllib.loads((folder / "claims.toml").read_text())["claim"]
    return [
        Claim(**{**table, "queries": tuple(table.get("queries", ())), "tests": tuple(table.get("tests", ()))})
        for table in tables
    ]


def claim_problems(folder: Path, known: Collection[str]) -> Iterator[str]:
    """Yield sentences that no document has, queries that no model has, queries that back nothing, and a stale table.

    `known` has every query of the models, and every attack of a mutant.
    """
    listed = claims(folder)
    for claim in listed:
        yield from _sentence_problems(claim)
        for pattern in claim.queries:
            if not fnmatch.filter(known, pattern):
                yield f"claims.toml: no model has the query {pattern}"
    backing = {name for claim in listed for pattern in claim.queries for name in fnmatch.filter(known, pattern)}
    for name in sorted(set(known) - backing):
        if "@" not in name and not name.endswith("/good-end"):
            yield f"claims.toml: {name} backs no sentence"
    if table(listed) not in (folder / "README.md").read_text():
        yield "formal/README.md: the table of claims is stale: run scripts/prove --claims"


def _sentence_problems(claim: Claim) -> Iterator[str]:
    if bool(claim.queries) == bool(claim.none):
        yield f"claims.toml: name queries, or say why there are none: {claim.sentence}"
    if not claim.document:
        if claim.sentence not in {promise.text for section in sections() for promise in section.promises}:
            yield f"claims.toml: not a promise of tests/promises.toml: {claim.sentence}"
    elif claim.document not in DOCUMENTS:
        yield f"claims.toml: {claim.document} is none of {', '.join(DOCUMENTS)}"
    elif claim.sentence not in " ".join((ROOT / claim.document).read_text().split()):
        yield f"claims.toml: {claim.document} does not say: {claim.sentence}"
    for file in claim.tests:
        if not (ROOT / file).is_file():
            yield f"claims.toml: {file} does not exist"


def table(listed: Sequence[Claim]) -> str:
    """Return the table in Markdown, between the comments that mark it."""
    marked = marked_tests()
    lines = [BEGIN, "| claim | queries | tests |", "|---|---|---|"]
    for claim in listed:
        name = Path(claim.document).stem.replace("-", " ").capitalize()
        source = f" ([{name}](../{claim.document}))" if claim.document else ""
        limits = f"<br>{claim.limits}" if claim.limits else ""
        files = claim.tests or sorted({test.partition("::")[0] for test in marked.get(claim.sentence, ())})
        tests = "<br>".join(f"[`{Path(file).name}`](../{file})" for file in files) or "none"
        names = "<br>".join(f"`{query}`" for query in claim.queries) or f"none. {claim.none}"
        lines.append(f"| **{claim.sentence}**{source}{limits} | {names} | {tests} |")
    return "\n".join([*lines, END])


def write_claims(folder: Path) -> None:
    """Replace the table in the folder's README.md."""
    page = folder / "README.md"
    before, _, rest = page.read_text().partition(BEGIN)
    page.write_text(before + table(claims(folder)) + rest.partition(END)[2])
