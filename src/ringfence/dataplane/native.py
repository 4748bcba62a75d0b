"""Loads the compiled data plane, unless `RINGFENCE_DATAPLANE=python` asks for the slower one in Python.

Raises ConfigurationError if it is missing. Both put the same bytes on the wire, so workers of one run may differ.
"""

from __future__ import annotations

from typing import Any

from ringfence.dataplane import info
from ringfence.errors import ConfigurationError
from ringfence.keys import KEY_PHASE_SHIFT, SHARED_FROM_BYTES, TAG_BYTES
from ringfence.link.frames import FRAME_BYTES, HEADER_BYTES, HOP_BYTES

_INTERFACE = 7
_LAYOUT = (_INTERFACE, HEADER_BYTES, HOP_BYTES, TAG_BYTES, 40, KEY_PHASE_SHIFT, FRAME_BYTES, SHARED_FROM_BYTES)


def _load() -> Any:
    """Return the compiled module, or None if the data plane in Python is to be used."""
    if info.wanted() == "python":
        return None
    try:
        from ringfence.dataplane import _core
    except ImportError as error:
        raise info.missing(f" ({error})") from error
    if tuple(_core.LAYOUT) != _LAYOUT:
        raise ConfigurationError(
            f"the compiled data plane was built for another version of ringfence ({_core.__file__}): install again"
        )
    return _core


CORE = _load()
COMPILED = CORE is not None


def compile_program(*parts: Any) -> Any:
    """Return a program in the form that the compiled data plane executes; None without it."""
    return CORE.compile(*parts) if COMPILED else None


def release_gil(on: bool = True) -> None:
    """Release the interpreter's lock around system calls on large pieces, for a process that has several channels.

    The data plane in Python always does.
    """
    if COMPILED:
        CORE.release_gil(on)


def stages(on: bool) -> dict[str, int]:
    """Switch the clocks on or off; return the nanoseconds per stage since the last call.

    Only the compiled data plane has clocks; the result is empty without it.
    """
    found: dict[str, int] = CORE.stages(on) if COMPILED else {}
    return found


def events(on: bool) -> list[tuple[str, int, int, int]]:
    """Switch event recording on or off; return the events since the last call.

    An event is (stage, start, end, worker), with times in monotonic nanoseconds. Only the compiled data plane records them.
    """
    found: list[tuple[str, int, int, int]] = CORE.events(on) if COMPILED else []
    return found
