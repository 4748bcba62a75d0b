"""Models as the planner sees them: how many elements each parameter has, in the order in which they were registered.

The lists come from meta tensors (`scripts/models`), so a model of any size costs nothing to look at, here and there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

from ringfence.errors import ConfigurationError


@dataclass(frozen=True)
class Model:
    """A model's parameters and what one sample of its training data costs to compute."""

    name: str
    source: str  #                   the class and configuration that the list was taken from, and with which version
    parameters: tuple[int, ...]  #   elements of each, in order of registration
    sample: str  #                   what one sample is: an image, a sequence of so many tokens
    forward_flops: int  #            for one sample, multiplications and additions counted apart

    @property
    def elements(self) -> int:
        """How many parameters the model has, in the usual sense of the word."""
        return sum(self.parameters)

    def step_flops(self, samples: int) -> float:
        """Forward and backward; the backward pass costs twice the forward one."""
        return 3.0 * self.forward_flops * samples


@lru_cache(maxsize=1)
def names() -> tuple[str, ...]:
    """All models that come with the package, the smallest first."""
    files = [file.name for file in _folder().iterdir() if file.name.endswith(".json")]
    found = [file.removesuffix(".json") for file in files]
    return tuple(sorted(found, key=lambda name: (load(name).elements, name)))


@lru_cache(maxsize=32)
def load(name: str) -> Model:
    """A model by name."""
    file = _folder() / f"{name}.json"
    if not name.replace("-", "").isalnum() or not file.is_file():
        raise ConfigurationError(f"no model is called {name!r}; `ringfence plan models` lists those that are known")
    found = json.loads(file.read_text(encoding="utf-8"))
    return Model(
        name=name,
        source=found["source"],
        parameters=tuple(_unrolled(found["parameters"])),
        sample=found["sample"],
        forward_flops=found["forward_flops"],
    )


def rolled(parameters: list[int]) -> list[Any]:
    """The list with repeated runs written once, as {"times": n, "of": [...]}: a model is mostly equal blocks."""
    result: list[Any] = []
    at = 0
    while at < len(parameters):
        length, times = _longest_repetition(parameters, at)
        if times > 1:
            result.append({"times": times, "of": parameters[at : at + length]})
        else:
            result.append(parameters[at])
        at += length * times
    return result


def _longest_repetition(parameters: list[int], at: int) -> tuple[int, int]:
    """The block from here on whose repetitions reach farthest, and how often it is there."""
    best = (1, 1)
    for length in range(1, min(64, (len(parameters) - at) // 2) + 1):
        block = parameters[at : at + length]
        times = 1
        while parameters[at + times * length : at + (times + 1) * length] == block:
            times += 1
        if times > 1 and times * length > best[0] * best[1]:
            best = (length, times)
    return best


def _unrolled(items: list[Any]) -> list[int]:
    result: list[int] = []
    for item in items:
        result.extend(item["of"] * item["times"] if isinstance(item, dict) else [item])
    return result


def _folder() -> Any:
    return resources.files("ringfence.lab.plan") / "data" / "models"
