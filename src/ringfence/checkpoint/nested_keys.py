"""What DCP's names lose of a nested state: keys that are integers become texts, and empty dicts vanish.

A save notes both in the metadata of the index (spec/checkpoint.md, The index), so that a load without a state to load into
gives the same state again. Needs no torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ringfence.errors import CheckpointError

NOTE: Final = "ringfence.keys"  # the reserved name in the metadata
Steps = tuple[str | int, ...]  # keys as texts, and positions in lists


@dataclass(frozen=True)
class KeyNote:
    """The dicts with integer keys, and which keys these are; and the dicts that are empty, by their paths."""

    integers: Mapping[Steps, frozenset[int]]
    empty: frozenset[Steps]

    def in_metadata(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """Return the metadata of an index: a user's, with this note in place of any other one."""
        found = without_note(metadata)
        if self.integers or self.empty:
            integers = [[list(path), sorted(keys)] for path, keys in sorted(self.integers.items(), key=_order)]
            found[NOTE] = {"integers": integers, "empty": [list(path) for path in sorted(self.empty, key=str)]}
        return found

    def add_empty(self, state: dict[str, Any]) -> None:
        """Add the dicts that are empty to a state whose keys are texts. Raises CheckpointError."""
        for path in self.empty:
            container: Any = state
            for step, following in itertools.pairwise(path):
                container = _child(container, step, {} if isinstance(following, str) else [])
            _child(container, path[-1], {})

    def restore_integers(self, state: dict[str, Any]) -> None:
        """Replace keys that are texts by the integers that they were. Raises CheckpointError."""
        for path, numbers in sorted(self.integers.items(), key=lambda entry: -len(entry[0])):  # inner ones first
            found: Any = state
            try:
                for step in path:
                    found = found[step]
                values = dict(found)
            except (LookupError, TypeError, ValueError) as error:
                raise _unfit(path) from error
            wanted = {str(number): number for number in numbers}
            if not wanted.keys() <= values.keys():
                raise _unfit(path)
            found.clear()
            found.update({wanted.get(key, key): value for key, value in values.items()})


def note_of(state: Mapping[Any, Any]) -> KeyNote:
    """Return what the names lose of a state. Raises CheckpointError for keys that cannot be kept."""
    integers: dict[Steps, frozenset[int]] = {}
    empty: set[Steps] = set()
    for path, found in _dicts((), state):
        if not found and path:
            empty.add(path)
        where = ".".join(map(str, path)) or "the state"
        if wrong := [key for key in found if not _is_kept(key)]:
            raise CheckpointError(f"{where} has the key {wrong[0]!r}: the keys of a dict must be texts or integers")
        if len({str(key) for key in found}) != len(found):
            raise CheckpointError(
                f"{where} has a key both as a text and as an integer, which have one name in a checkpoint: rename one"
            )
        if numbers := frozenset(key for key in found if type(key) is int):
            integers[path] = numbers
    return KeyNote(integers, frozenset(empty))


def merged(notes: Iterable[KeyNote]) -> KeyNote:
    """Return the note of a state that several ranks hold parts of."""
    integers: dict[Steps, frozenset[int]] = {}
    empty: frozenset[Steps] = frozenset()
    for note in notes:
        empty |= note.empty
        for path, numbers in note.integers.items():
            integers[path] = integers.get(path, frozenset()) | numbers
    return KeyNote(integers, empty)


def noted(metadata: Mapping[str, Any]) -> KeyNote:
    """Return the note in the metadata of an index. Raises CheckpointError if it has another form."""
    note = metadata.get(NOTE, {"integers": [], "empty": []})
    try:
        integers = {_path(path): frozenset(numbers) for path, numbers in note["integers"]}
        empty = frozenset(_path(path) for path in note["empty"])
    except (LookupError, TypeError, ValueError) as error:
        raise _unfit() from error
    if () in empty or any(type(number) is not int for numbers in integers.values() for number in numbers):
        raise _unfit()
    return KeyNote(integers, empty)


def without_note(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata that a user gave."""
    return {name: value for name, value in metadata.items() if name != NOTE}


def _dicts(path: Steps, value: Any) -> Iterator[tuple[Steps, Mapping[Any, Any]]]:
    """Yield all dicts that DCP takes apart: those in dicts and lists."""
    if isinstance(value, Mapping):
        yield path, value
        for key, each in value.items():
            yield from _dicts((*path, str(key)), each)
    elif isinstance(value, list):
        for place, each in enumerate(value):
            yield from _dicts((*path, place), each)


def _is_kept(key: Any) -> bool:
    """Return whether a key is an integer, or equal to its name: a member of an enum may be neither."""
    return type(key) is int or (isinstance(key, str) and str(key) == key)


def _child(container: Any, step: str | int, missing: Any) -> Any:
    """Return what a dict or list has at a step; put `missing` there first if there is nothing."""
    if isinstance(container, list) and type(step) is int:
        container.extend([None] * (step + 1 - len(container)))
        if container[step] is None:
            container[step] = missing
        return container[step]
    if isinstance(container, dict) and isinstance(step, str):
        return container.setdefault(step, missing)
    raise _unfit((step,))


def _path(steps: Iterable[Any]) -> Steps:
    path = tuple(steps)
    if any(type(step) is not str and (type(step) is not int or not 0 <= step < 1 << 32) for step in path):
        raise ValueError(f"the path {path}")
    return path


def _order(entry: tuple[Steps, frozenset[int]]) -> str:
    return str(entry[0])


def _unfit(path: Steps = ()) -> CheckpointError:
    where = f" at {'.'.join(map(str, path))}" if path else ""
    return CheckpointError(
        f"the note of keys ({NOTE} in the metadata) does not fit the items of the checkpoint{where}: it was made by a program "
        "that is not this one. Load into a state that has these keys, with load()"
    )
