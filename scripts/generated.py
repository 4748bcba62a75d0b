"""Parts of documents that are made from records: what stands between `<!-- kind: name -->` and `<!-- end of kind -->`."""

from __future__ import annotations

import re
from collections.abc import Callable


def filled(text: str, kind: str, make: Callable[[str], str]) -> str:
    """The text with every part of a kind made anew, from its name."""
    place = re.compile(rf"(<!-- {kind}: ([a-z-]+) -->\n).*?(<!-- end of {kind} -->)", re.DOTALL)
    return place.sub(lambda part: f"{part[1]}{make(part[2])}\n{part[3]}", text)
