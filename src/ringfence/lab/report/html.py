"""Pieces of HTML: escaped text, tables, lists of terms."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Final

_NUMBER: Final = re.compile(r"[±–]?[\d.,]*( ?(s|ms|µs|%|[KMG]i?B|B))?( \[[\d., ]+\])?")


def paragraph(text: str, kind: str = "") -> str:
    return f"<p{_class(kind)}>{escape(text)}</p>"


def bullets(items: Iterable[str]) -> str:
    """A list of texts."""
    return "<ul>\n" + "\n".join(f"<li>{escape(item)}</li>" for item in items) + "\n</ul>"


def terms(pairs: Mapping[str, str], kind: str = "") -> str:
    """Names and what belongs to them; commands in the type of commands."""
    lines = []
    for name, text in pairs.items():
        shown = f"<code>{escape(text)}</code>" if text.startswith("ringfence ") else escape(text)
        lines.append(f"<dt>{escape(name)}</dt><dd>{shown}</dd>")
    return f"<dl{_class(kind)}>\n" + "\n".join(lines) + "\n</dl>"


def table(
    header: Sequence[str], groups: Mapping[str, Iterable[Sequence[str]]], caption: str = "", kind: str = ""
) -> str:
    """Rows under the names of their groups; a group without a name has no line of its own."""
    groups = {name: list(rows) for name, rows in groups.items()}
    every = [row for rows in groups.values() for row in rows]
    numbers = [index > 0 and all(_NUMBER.fullmatch(row[index]) for row in every) for index in range(len(header))]
    heads = "".join(
        f'<th scope="col"{_class("number" if number else "")}>{escape(name)}</th>'
        for name, number in zip(header, numbers, strict=True)
    )
    bodies = []
    for name, rows in groups.items():
        lines = [f'<tr><th scope="rowgroup" colspan="{len(header)}">{escape(name)}</th></tr>'] if name else []
        lines += [f"<tr><td>{escape(row[0])}</td>{''.join(_cell(text) for text in row[1:])}</tr>" for row in rows]
        bodies.append("<tbody>\n" + "\n".join(lines) + "\n</tbody>")
    told = f"<caption>{escape(caption)}</caption>" if caption else ""
    inside = f"<table{_class(kind)}>{told}<thead><tr>{heads}</tr></thead>\n" + "\n".join(bodies) + "\n</table>"
    return f'<div class="wide" tabindex="0">{inside}</div>'


def _cell(text: str) -> str:
    return f"<td{_class('number' if _NUMBER.fullmatch(text) else '')}>{escape(text)}</td>"


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""
