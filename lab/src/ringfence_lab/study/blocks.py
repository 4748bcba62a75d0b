"""Tables of a grid's file and the values in them. What is not understood is an error that names its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from ringfence.errors import ConfigurationError
from ringfence_lab.bench.netns import burst_bytes
from ringfence_lab.bench.units import bytes_of
from ringfence_lab.plan import models, traces

GRADIENT_BYTES: Final = 4  # DDP cuts buckets of float32, whatever a hook sends in their place


class Block:
    """One table of the file. Its errors name the table."""

    def __init__(self, table: dict[str, Any], where: str) -> None:
        self._table = table
        self.where = where

    def has(self, key: str) -> bool:
        return key in self._table

    def refuse(self, key: str, problem: object) -> ConfigurationError:
        return ConfigurationError(f"{self.where}, {key}: {problem}")

    def one(self, key: str, parse: Callable[[Any], Any], default: Any = None) -> Any:
        if key not in self._table:
            if default is None:
                raise self.refuse(key, "is missing")
            return default
        try:
            return parse(self._table[key])
        except ValueError as error:
            raise self.refuse(key, error) from None

    def listed(self, key: str, parse: Callable[[Any], Any], default: Any = None) -> list[Any]:
        values = self._table.get(key, default)
        if not isinstance(values, list | tuple) or not values:
            raise self.refuse(key, "write a list with at least one value")
        try:
            return [parse(value) for value in values]
        except ValueError as error:
            raise self.refuse(key, error) from None

    def check_keys(self, known: set[str]) -> None:
        unknown = set(self._table) - known
        if unknown:
            raise self.refuse(sorted(unknown)[0], f"is unknown here; known are {', '.join(sorted(known))}")


def name_of(known: Any) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if not isinstance(value, str) or value not in known:
            raise ValueError(f"{value!r} is none of {', '.join(known)}")
        return value

    return parse


def whole(value: Any) -> int:
    if type(value) is not int or not 0 < value < 10**6:
        raise ValueError(f"{value!r} is no whole number above zero")
    return value


def positive(value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise ValueError(f"{value!r} is no number above zero")
    return float(value)


def truth(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError(f"{value!r} is neither true nor false")
    return value


def size(value: Any) -> int:
    if not isinstance(value, str):
        raise ValueError(f'{value!r}: write a size such as "25MiB"')
    return bytes_of(value)


def rate(value: Any) -> str:
    try:
        burst_bytes(str(value))
    except ConfigurationError:
        raise ValueError(f'{value!r}: write a rate such as "1gbit"') from None
    return str(value)


def bucket(value: Any) -> float | None:
    """Parse a bucket size in MiB; None is DDP's default."""
    return None if value == "default" else positive(value)


def replayed(block: Block, name: str, bucket_mb: float | None, samples: int, busy: bool) -> tuple[traces.Trace, float]:
    """Return what a block replays of a step of a model, and the seconds of computing in the whole step."""
    model = models.load(name)
    seconds = model.step_flops(samples) / block.one("flops", positive)
    most = min(block.one("most", size, traces.MOST_BYTES), traces.MOST_BYTES)
    return traces.trace(model, bucket_mb, GRADIENT_BYTES, seconds, busy, most_bytes=most), seconds
