"""Parts of documents that are made from records: what stands between `<!-- kind: name -->` and `<!-- end of kind -->`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence


def filled(text: str, kind: str, make: Callable[[str], str]) -> str:
    """The text with every part of a kind made anew, from its name."""
    place = re.compile(rf"(<!-- {kind}: ([a-z-]+) -->\n).*?(<!-- end of {kind} -->)", re.DOTALL)
    return place.sub(lambda part: f"{part[1]}{make(part[2])}\n{part[3]}", text)


def table(header: Sequence[str], rows: Iterable[Sequence[object]], left: int | None = None) -> str:
    """A table in Markdown; all columns after the first `left` are aligned to the right."""
    rule = ["---" if left is None or index < left else "---:" for index in range(len(header))]
    lines = [f"| {' | '.join(map(str, row))} |" for row in rows]
    return "\n".join([f"| {' | '.join(header)} |", f"|{'|'.join(rule)}|", *lines])
