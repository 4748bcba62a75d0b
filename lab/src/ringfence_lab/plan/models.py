"""Models as the planner uses them: the number of elements of each parameter tensor, in order of registration.

The models of the package come from meta tensors of transformers, as the `source` of each says. Others are made from a number of
parameters or from a list of tensor sizes.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any, Final

from ringfence.errors import ConfigurationError

TOKENS: Final = 2048  # of a sequence, where nothing else is known
_ASPECT: Final = 128  # width over layers of the decoder that stands for a bare number of parameters
_MOST_ELEMENTS: Final = 10**15


@dataclass(frozen=True)
class Model:
    """A model's parameters, and what computing one sample of its training data costs."""

    name: str
    source: str  #                   where the list comes from: class, configuration and version
    parameters: tuple[int, ...]  #   elements of each tensor, in order of registration
    sample: str  #                   what one sample is: an image, a sequence of so many tokens
    forward_flops: int  #            for one sample; multiplications and additions are counted separately

    @property
    def elements(self) -> int:
        """The number of parameters of the model."""
        return sum(self.parameters)

    def step_flops(self, samples: int) -> float:
        """Return the operations of a forward and a backward pass; the latter costs twice the former."""
        return 3.0 * self.forward_flops * samples


@lru_cache(maxsize=1)
def names() -> tuple[str, ...]:
    """Return the names of the package's models, smallest first."""
    files = [file.name for file in _folder().iterdir() if file.name.endswith(".json")]
    found = [file.removesuffix(".json") for file in files]
    return tuple(sorted(found, key=lambda name: (load(name).elements, name)))


@lru_cache(maxsize=32)
def load(name: str) -> Model:
    """Return a model of the package. Raises ConfigurationError for an unknown name."""
    file = _folder() / f"{name}.json"
    if not name.replace("-", "").isalnum() or not file.is_file():
        raise ConfigurationError(f"no model is called {name!r}; `ringfence plan models` lists the names")
    found = json.loads(file.read_text(encoding="utf-8"))
    return Model(
        name=name,
        source=found["source"],
        parameters=tuple(_unrolled(found["parameters"])),
        sample=found["sample"],
        forward_flops=found["forward_flops"],
    )


def of_count(count: float, tokens: int = TOKENS) -> Model:
    """Return a model of which only the number of parameters is known.

    The tensors are those of a decoder-only transformer without embeddings whose width is 128 times its layers, scaled to
    the exact number. A token costs two operations per parameter, which leaves out attention scores.
    """
    if not 1 <= count <= _MOST_ELEMENTS or count != int(count):
        raise ConfigurationError(f"a number of parameters is whole and from 1 to {_MOST_ELEMENTS:.0e}, not {count:g}")
    whole = int(count)
    layers = max(1, round((whole / (12 * _ASPECT**2)) ** (1 / 3)))
    shares = (1, 1, 1, 1, 4, 4)  # queries, keys, values, output, and the two layers of a perceptron
    parameters = _split(whole, [share for _ in range(layers) for share in shares])
    source = f"{count:.3g} parameters, assumed to be a decoder of {layers} equal layers"
    return Model("decoder", source, parameters, f"a sequence of {tokens} tokens", 2 * whole * tokens)


def of_tensors(sizes: Sequence[int], name: str, tokens: int = TOKENS) -> Model:
    """Return a model from the elements of its tensors, in order of registration."""
    if not sizes or not all(0 < size <= _MOST_ELEMENTS for size in sizes):
        raise ConfigurationError(f"{name}: a list of tensors has at least one size, and each is a positive number")
    source = f"{len(sizes)} tensors listed in {name}"
    return Model(name, source, tuple(sizes), f"a sequence of {tokens} tokens", 2 * sum(sizes) * tokens)


def of_listing(text: str, name: str, tokens: int = TOKENS) -> Model:
    """Return a model from a list of its tensors: JSON, or a text with a size or shape at the end of each line."""
    if text.lstrip().startswith(("[", "{")):
        try:
            content = json.loads(text)
        except ValueError as error:
            raise ConfigurationError(f"{name} is not JSON: {error}") from None
        listed = content.values() if isinstance(content, dict) else content
        shapes = [(json.dumps(item), item if isinstance(item, list) else [item]) for item in listed]
    else:
        lines = [line.partition("#")[0].strip() for line in text.splitlines()]
        shapes = [(line, re.split(r"[x×]", line.split()[-1])) for line in lines if line]
    return of_tensors([_elements(shape, name, entry) for entry, shape in shapes], name, tokens)


def _elements(shape: list[Any], name: str, entry: str) -> int:
    try:
        sizes = [int(each) for each in shape]
    except (TypeError, ValueError):
        sizes = []
    if not sizes or min(sizes) < 1:
        raise ConfigurationError(f"{name}: {entry!r} is not the size or shape of a tensor, such as 4096 or 4096x11008")
    return math.prod(sizes)


def blocks(parameters: Sequence[int]) -> list[tuple[int, int]]:
    """Return the repeated blocks of a model, such as its layers, as pairs of the first tensor and the one past the last."""
    found = []
    at = 0
    for item in rolled(list(parameters)):
        if not isinstance(item, dict):
            at += 1
            continue
        length = len(item["of"])
        for _ in range(item["times"]):
            if length > 1:
                found.append((at, at + length))
            at += length
    return found


def _split(whole: int, shares: Sequence[int]) -> tuple[int, ...]:
    """Split a number in proportion to shares; the parts add up to it exactly."""
    total = sum(shares)
    ends = [whole * before // total for before in itertools.accumulate(shares)]
    parts = (end - start for start, end in itertools.pairwise([0, *ends]))
    return tuple(part for part in parts if part)


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
    return resources.files("ringfence_lab.plan") / "data" / "models"
