"""JSON whose objects have exactly the names that a format gives them: unknown, missing and duplicate names are refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from ringfence.admission.policy_file.toml_table import quoted
from ringfence.admission.proofs import jose
from ringfence.errors import RecordError

Kind = Any  # of a value: a type, the form of an object, or a list with the kind of each value
Form = Mapping[str, Kind]  # of an object: the kind of each name's value
Json = dict[str, Any]
HEX: Final = re.compile(r"(?:[0-9a-f]{2})*")  # texts that stand for bytes
SHA_256: Final = re.compile(r"[0-9a-f]{64}")
NUMBERS: Final = 1 << 63
_TYPES: Final = {
    str: "a text",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    dict: "an object",
    list: "a list",
}


def read(data: bytes, what: str) -> object:
    """Parse JSON without duplicate names. `what` names it in messages. Raises RecordError."""
    try:
        return jose.read_json(data)
    except ValueError as error:
        raise RecordError(f"{what} is not valid JSON: {quoted(str(error))}") from None


def check_numbers(value: object) -> None:
    """Raise RecordError if a number anywhere in a value is too large, or infinite, as 1e999 is."""
    left = [value]
    while left:  # without recursion: a parser may nest more deeply than functions can
        each = left.pop()
        if isinstance(each, dict | list):
            left.extend(each.values() if isinstance(each, dict) else each)
        elif isinstance(each, int | float) and not abs(each) < NUMBERS:
            raise RecordError("a number is too large")


def fields(value: object, form: Form, what: str) -> Json:
    """Return an object that has exactly the names of `form`, with values of its types. Raises RecordError."""
    if not isinstance(value, dict):
        raise RecordError(f"{what} is not a JSON object")
    if value.keys() != form.keys():
        different = sorted(value.keys() ^ form.keys())[0]
        raise RecordError(f"{what} {'lacks' if different in form else 'has an unknown field'} {quoted(different)}")
    for name, kind in form.items():
        check_type(value[name], kind, f"{what}: {name}")
    return value


def check_type(value: object, kind: Kind, what: str) -> None:
    """Raise RecordError unless a value is of a kind. A number of type float may be written without a fraction."""
    if isinstance(kind, dict):
        fields(value, kind, what)
    elif isinstance(kind, list) and isinstance(value, list):
        for each in value:
            check_type(each, kind[0], what)
    elif type(value) is not kind and not (kind is float and type(value) is int):
        raise RecordError(f"{what} is not {_TYPES[list if isinstance(kind, list) else kind]}")
    elif isinstance(value, int | float) and not abs(value) < NUMBERS:  # nor infinite, nor no number
        raise RecordError(f"{what} is too large")
