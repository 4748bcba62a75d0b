"""Ties each section of spec/ to the models of formal/ that cover it, so that a change of the protocol asks for its models.

formal/sections.toml has the models of each section, or the reason why there are none, and the digest of the text that they fit.
"""

from __future__ import annotations

import fnmatch
import hashlib
import re
import tomllib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
_HEADING: Final = re.compile(r"^#+ +(.+)$", re.MULTILINE)


def sections(document: str) -> dict[str, str]:
    """Return the text of each section by its heading, up to the next heading of any level.

    Raises ValueError if two sections have one heading, or if text stands before the first.
    """
    first, *parts = _HEADING.split(document)
    titles = parts[::2]
    if first.strip() or len(set(titles)) != len(titles):
        raise ValueError("two sections have one heading, or text stands before the first")
    return dict(zip(titles, parts[1::2], strict=True))


def digest(text: str) -> str:
    """Return the digest of a section. Line breaks and spaces do not count."""
    return hashlib.sha256(" ".join(text.split()).encode()).hexdigest()[:16]


def section_problems(models: Collection[str], formal: Path, spec: Path = ROOT / "spec") -> Iterator[str]:
    """Yield sections that no table names or that changed, and rows that name no section or no model."""
    table = tomllib.loads((formal / "sections.toml").read_text())
    found = {path.name: sections(path.read_text()) for path in sorted(spec.glob("*.md"))}
    for name in sorted(set(table) ^ set(found)):
        yield f"sections.toml: {name} is there or in spec/, not in both"
    for name in sorted(set(table) & set(found)):
        for title in sorted(set(table[name]) ^ set(found[name])):
            yield f"sections.toml: spec/{name}, {title}: in the table or in the text, not in both"
        for title in (title for title in found[name] if title in table[name]):
            for problem in _row_problems(table[name][title], digest(found[name][title]), models):
                yield f"sections.toml: spec/{name}, {title}: {problem}"


def _row_problems(row: dict[str, object], now: str, models: Collection[str]) -> Iterator[str]:
    named = row.get("models", [])
    assert isinstance(named, list)
    if set(row) not in ({"models", "digest"}, {"none", "digest"}) or not (named or row.get("none")):
        yield "a row has a digest, and either models or a reason why there are none"
    for pattern in named:
        if not fnmatch.filter(models, pattern):
            yield f"no model is called {pattern}"
    if row.get("digest") != now:
        covered = f"the models {', '.join(named)} cover it" if named else f"it has no model ({row.get('none')})"
        yield f"the text changed, and {covered}: change the models, or if they fit as they are, set digest to {now}"
