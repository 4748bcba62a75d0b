"""What DCP's names lose of a nested state: keys that are integers become texts, and empty dicts vanish.

A conversion to a sealed checkpoint notes both in its metadata, so that the way back gives the same state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from ringfence.errors import CheckpointError

NOTE: Final = "ringfence.keys"  # the name in the metadata
Steps = list[str | int]  # keys as texts, and positions in lists


def note_of(state: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the metadata to add, empty if nothing would be lost. Raises CheckpointError for keys that cannot be kept."""
    integers: list[list[Any]] = []
    empty: list[Steps] = []
    for path, found in _dicts([], state):
        if not found and path:
            empty.append(path)
        where = ".".join(map(str, path)) or "the state"
        if wrong := [key for key in found if type(key) not in (str, int)]:
            raise CheckpointError(f"{where} has the key {wrong[0]!r}: the keys of a dict must be texts or integers")
        if len({str(key) for key in found}) != len(found):
            raise CheckpointError(f"{where} has a key both as a text and as an integer")
        if numbers := [key for key in found if type(key) is int]:
            integers.append([path, numbers])
    return {NOTE: {"integers": integers, "empty": empty}} if integers or empty else {}


def restore(state: dict[str, Any], metadata: Mapping[str, Any]) -> None:
    """Give a state the keys and empty dicts again that `note_of` noted."""
    note = metadata.get(NOTE, {"integers": [], "empty": []})
    for path in note["empty"]:
        container: Any = state
        for step in path[:-1]:
            container = container.setdefault(step, {}) if isinstance(container, dict) else container[step]
        container[path[-1]] = {}
    for path, numbers in sorted(note["integers"], key=lambda entry: -len(entry[0])):  # inner ones first
        found: Any = state
        for step in path:
            found = found[step]
        wanted = {str(number): number for number in numbers}
        items = list(found.items())
        found.clear()
        found.update({wanted.get(key, key): value for key, value in items})


def _dicts(path: Steps, value: Any) -> Iterator[tuple[Steps, Mapping[Any, Any]]]:
    if isinstance(value, Mapping):
        yield path, value
        for key, each in value.items():
            yield from _dicts([*path, str(key)], each)
    elif isinstance(value, list):
        for place, each in enumerate(value):
            yield from _dicts([*path, place], each)
