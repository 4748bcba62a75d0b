"""The claims that a policy expects of a token: reading, comparing, encoding and explaining them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ringfence.admission import encoding
from ringfence.admission.policy_file.toml_table import TomlTable, quoted
from ringfence.errors import AdmissionError, PolicyError

NAME_CHARACTERS: Final = 128

Expected = tuple[str, ...] | int | bool | Mapping[str, "Expected"]


def read_claims(table: TomlTable) -> dict[str, Expected]:
    for name in table.names:  # chosen by the author; they go to terminals and into errors
        if not 1 <= len(name) <= NAME_CHARACTERS or not name.isprintable():
            raise table.error(
                f"{quoted(name)} must be the name of a claim, 1 to {NAME_CHARACTERS} printable characters"
            )
    return {name: _read_claim(table, name) for name in table.names}


def _read_claim(table: TomlTable, name: str) -> Expected:
    """Read an expected claim: a text, a list of accepted texts, a number, true or false, or a table of such."""
    inner: TomlTable | None = None
    try:
        inner = table.table(name)
    except PolicyError:
        for read in (table.flag, table.number, table.texts):
            try:
                return read(name)
            except PolicyError:
                continue
        raise table.error(
            f"{name} must be a text, a list of texts, a whole number, true or false, or a table of such"
        ) from None
    expected = read_claims(inner)
    if not expected:
        raise inner.error("names no claim")
    return expected


def encode_claims(expected: Mapping[str, Expected]) -> bytes:
    """Return a canonical encoding, with a tag for each type."""
    parts = [encoding.number(len(expected), 2)]
    for name, wanted in sorted(expected.items()):
        parts.append(encoding.blob(name.encode()))
        if isinstance(wanted, Mapping):
            parts += [b"t", encode_claims(wanted)]
        elif isinstance(wanted, tuple):
            parts += [b"s", encoding.number(len(wanted), 2), *(encoding.blob(each.encode()) for each in sorted(wanted))]
        else:
            parts += [b"b" if isinstance(wanted, bool) else b"n", encoding.number(wanted, 8)]
    return b"".join(parts)


def explain_claims(expected: Mapping[str, Expected], within: str = "") -> list[str]:
    lines = []
    for name, wanted in sorted(expected.items()):
        if isinstance(wanted, Mapping):
            lines += explain_claims(wanted, f"{within}{name}.")
        else:
            lines.append(f"{within}{name} is {_expected_text(wanted)}")
    return lines


def _expected_text(wanted: tuple[str, ...] | int | bool) -> str:
    if isinstance(wanted, tuple):
        return " or ".join(wanted)
    return str(wanted).lower()


def compare_claims(where: str, claims: Mapping[str, object], expected: Mapping[str, Expected]) -> None:
    for name, wanted in expected.items():
        value = claims.get(name)
        if isinstance(wanted, Mapping):
            compare_claims(f"{where}, in {name}", value if isinstance(value, dict) else {}, wanted)
        elif not _agrees(value, wanted):
            said = quoted(value) if name in claims else "nothing"
            raise AdmissionError(
                f"{where} claims {said} for {name}; the policy asks for {_expected_text(wanted)}",
                to_peer=f"{where} does not have the claims that the policy asks for",
            )


def _agrees(value: object, wanted: tuple[str, ...] | int | bool) -> bool:
    """Whether type and value are equal: 1 equals True in Python, and must not here."""
    if isinstance(wanted, tuple):
        return isinstance(value, str) and value in wanted
    return type(value) is type(wanted) and value == wanted
