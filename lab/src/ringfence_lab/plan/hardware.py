"""Hardware profiles: what a byte, a message and a step cost on some machine, each figure with its source and date.

A profile is a TOML file. Every figure is a table: {value, source, date}, or {value, assumed = true, reason} where nobody has
published or measured it. An unknown key, a missing figure and a figure without its origin are errors: a plan is worth what its
inputs are worth. `extends` names a profile whose figures hold where this one says nothing.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources
from typing import Any, Final

from ringfence.errors import ConfigurationError

# section, name: (unit in the file, factor to bytes, seconds and plain numbers, what it is)
FIGURES: Final[dict[tuple[str, str], tuple[str, float, str]]] = {
    ("network", "rate"): ("Gbit/s", 1e9 / 8, "of one node, each way"),
    ("network", "latency"): ("µs", 1e-6, "from one node to another"),
    ("node", "workers"): ("", 1, "that share a node"),
    ("node", "cores"): ("", 1, "of a node, for its workers' communication"),
    ("core", "seal"): ("ns/B", 1e-9, "AES-256-GCM on one core"),
    ("core", "open"): ("ns/B", 1e-9, "the same, backwards"),
    ("core", "send"): ("ns/B", 1e-9, "system calls and the kernel's network stack"),
    ("core", "receive"): ("ns/B", 1e-9, "the same, backwards"),
    ("core", "reduce"): ("ns/B", 1e-9, "adding float32"),
    ("core", "copy"): ("ns/B", 1e-9, "from memory to memory"),
    ("core", "message"): ("µs", 1e-6, "per-message overhead: of a segment, at each of its ends"),
    ("core", "switch"): ("µs", 1e-6, "what a message waits for each worker that a core has to share with"),
    ("memory", "rate"): ("GB/s", 1e9, "of a node: what all stages of all its workers read and write"),
    ("inside", "rate"): ("GB/s", 1e9, "between two workers of a node, each way; 0: as outside, through the host"),
    ("inside", "sealed"): ("", 1, "1: ringfence seals inside a node too (same_host); 0: its workers share memory"),
    ("inside", "copy"): ("ns/B", 1e-9, "to memory that workers of a node share, or from it"),
    ("inside", "message"): ("µs", 1e-6, "per-message overhead inside a node: of a segment, at each of its ends"),
    ("device", "plain_copy_rate"): ("GB/s", 1e9, "between a device and its host, in the clear; 0: no device"),
    ("device", "plain_copy_overhead"): ("µs", 1e-6, "of each such copy"),
    ("device", "copy_rate"): ("GB/s", 1e9, "the same in confidential mode"),
    ("device", "copy_overhead"): ("µs", 1e-6, "of each copy in confidential mode"),
    ("device", "overlap"): ("", 1, "1: copies in both directions run at once in confidential mode; 0: they serialise"),
    ("device", "computing"): ("", 1, "1: computing goes on during copies in confidential mode; 0: nothing is credited"),
    ("device", "peer_rate"): ("GB/s", 1e9, "between devices of a node outside confidential mode; 0: through the hosts"),
    ("device", "peer_overhead"): ("µs", 1e-6, "of each such copy"),
    ("compute", "flops"): ("TFLOP/s", 1e12, "of one worker, at best"),
    ("compute", "utilisation"): ("", 1, "of that, in training"),
    ("compute", "busy"): ("", 1, "1: computing takes the cores (a CPU); 0: it leaves them free (a GPU)"),
}
FROM_STUDY: Final = "measured"  # the origin of a figure before `dump` names the study
SECTIONS: Final = tuple(dict.fromkeys(section for section, _ in FIGURES))
VARIANT_FIGURES: Final = {
    "factor": "times the stages' costs per byte, as fitted",
    "message": "µs: its own overhead for each segment at each end",
    "switch": "µs: its own wait for each worker that a core is shared with",
    "idle": "the share of its time that a worker's thread waits; a core rests while all its workers do",
    "cold": "times what a byte costs, added, where memory is far larger than a core's cache",
    "half": "times what a byte of float32 costs to add: what bfloat16 costs more, whatever the cause",
    "staged": "ns/B: copying what a call keeps beside the tensors it was given",
    "fresh": "ns/B: getting such memory from the system, above the size from which it is given back each time",
    "between": "times what the network stack costs on the loopback: what it costs between machines, or network namespaces",
    "tail": "times what the model finds left to do when computing ends that leaves the cores free; may be above 1",
    "beside": "times its core seconds where computing takes the same cores; above 1 if the two slow each other down",
}


@dataclass(frozen=True)
class Figure:
    """A number and its source."""

    value: float  # as it stands in the file, in the file's unit
    origin: str  # source and date, or the reason of an assumption
    assumed: bool


@dataclass(frozen=True, eq=False)
class Hardware:
    """A profile. `core.seal` is read as `hardware["core", "seal"]`, in seconds and bytes."""

    name: str
    title: str
    figures: Mapping[tuple[str, str], Figure]
    variants: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # what was fitted for a variant
    notes: tuple[str, ...] = ()
    values: Mapping[tuple[str, str], float] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        found = {key: figure.value * FIGURES[key][1] for key, figure in self.figures.items()}
        object.__setattr__(self, "values", found)

    def __getitem__(self, key: tuple[str, str]) -> float:
        return self.values[key]

    def assumed(self) -> dict[str, str]:
        """Return the figures that were neither measured nor published, with the reason for each."""
        return {f"{a}.{b}": figure.origin for (a, b), figure in self.figures.items() if figure.assumed}

    def with_values(self, **changes: float) -> Hardware:
        """Return the profile with other figures, such as `core_seal=0.1`, in the units of the file."""
        figures = dict(self.figures)
        for name, value in changes.items():
            section, _, what = name.partition("_")
            figures[section, what] = Figure(value, "asked for", True)
        return Hardware(self.name, self.title, figures, self.variants, self.notes)


@lru_cache(maxsize=1)
def names() -> tuple[str, ...]:
    """Return the names of the package's profiles."""
    files = sorted(file.name for file in _folder().iterdir() if file.name.endswith(".toml"))
    return tuple(name for file in files if not _document(name := file.removesuffix(".toml")).get("base"))


@lru_cache(maxsize=32)
def load(name: str) -> Hardware:
    """Return a profile of the package. Raises ConfigurationError for an unknown name."""
    if name not in names():
        raise ConfigurationError(f"no hardware profile is called {name!r}: {', '.join(names())}, or the path of a file")
    return parse(_text(name), name)


def parse(text: str, name: str) -> Hardware:
    """Parse a profile from TOML. Raises ConfigurationError if anything in it is unknown or missing."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"hardware profile {name}: {error}") from None
    return _hardware(name, _merged(document, name))


def _merged(document: dict[str, Any], name: str) -> dict[str, Any]:
    """Merge a document into the one that it extends, section by section."""
    base = document.pop("extends", None)
    document.pop("base", None)
    if base is None:
        return document
    if not isinstance(base, str) or not (_folder() / f"{base}.toml").is_file():
        raise ConfigurationError(f"hardware profile {name}: extends {base!r}, which is no profile of this package")
    under = _merged(_document(base), base)
    for section, content in document.items():
        both = isinstance(content, dict) and isinstance(under.get(section), dict)
        under[section] = {**under[section], **content} if both else content
    return under


def _hardware(name: str, document: dict[str, Any]) -> Hardware:
    unknown = set(document) - {"title", "notes", "variants", *SECTIONS}
    if unknown:
        raise ConfigurationError(f"hardware profile {name}: unknown {', '.join(sorted(unknown))}")
    title, notes = document.get("title"), document.get("notes", [])
    if not isinstance(title, str) or not isinstance(notes, list):
        raise ConfigurationError(f"hardware profile {name}: it needs a title, and notes are a list")
    for section in SECTIONS:
        content = document.get(section)
        if not isinstance(content, dict):
            raise ConfigurationError(f"hardware profile {name}: the section [{section}] is missing")
        for key in content:
            if (section, key) not in FIGURES:
                raise ConfigurationError(f"hardware profile {name}: unknown figure {section}.{key}")
    figures = {key: _figure(name, key, document[key[0]].get(key[1])) for key in FIGURES}
    return Hardware(name, title, figures, _variants(name, document.get("variants", {})), tuple(map(str, notes)))


def _figure(name: str, key: tuple[str, str], found: object) -> Figure:
    where = f"hardware profile {name}: {key[0]}.{key[1]}"
    if not isinstance(found, dict):
        raise ConfigurationError(f"{where} is missing, or no table {{value, source, date}}")
    value = found.get("value")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e15:
        raise ConfigurationError(f"{where} has no number as its value")
    if found.get("assumed") is True and set(found) == {"value", "assumed", "reason"}:
        return Figure(float(value), str(found["reason"]), True)
    if set(found) == {"value", "source", "date"}:
        return Figure(float(value), f"{found['source']} ({found['date']})", False)
    raise ConfigurationError(
        f"{where}: a figure is {{value, source, date}} or {{value, assumed = true, reason}}, not {{{', '.join(found)}}}"
    )


def _variants(name: str, found: object) -> dict[str, dict[str, float]]:
    if not isinstance(found, dict):
        raise ConfigurationError(f"hardware profile {name}: [variants.NAME] tables are expected under variants")
    for variant, content in found.items():
        wrong = not isinstance(content, dict) or set(content) != set(VARIANT_FIGURES)
        if wrong or not all(isinstance(value, int | float) for value in content.values()):
            raise ConfigurationError(
                f"hardware profile {name}: variants.{variant} needs {', '.join(VARIANT_FIGURES)}, all numbers"
            )
    return {variant: {key: float(value) for key, value in content.items()} for variant, content in found.items()}


def dump(hardware: Hardware, source: str, date: str) -> str:
    """Return the profile as TOML, with `source` and `date` for figures whose origin is FROM_STUDY."""
    lines = [f"title = {json.dumps(hardware.title)}"]
    for section in SECTIONS:
        lines.append(f"\n[{section}]")
        for (place, key), figure in hardware.figures.items():
            if place == section:
                said, day = (source, date) if figure.origin == FROM_STUDY else _split(figure.origin)
                origin = json.dumps(figure.origin if figure.assumed else said, ensure_ascii=False)
                say = f"assumed = true, reason = {origin}" if figure.assumed else f"source = {origin}, date = {day!r}"
                lines.append(f"{key} = {{ value = {figure.value:.6g}, {say} }}")
    for variant, content in hardware.variants.items():
        lines.append(f"\n[variants.{json.dumps(variant)}]")
        lines += [f"{key} = {value:.6g}" for key, value in content.items()]
    return "\n".join(lines) + "\n"


def _split(origin: str) -> tuple[str, str]:
    """Return the source and the date of a figure that was read from a profile."""
    source, _, date = origin.removesuffix(")").rpartition(" (")
    return source, date


def _document(name: str) -> dict[str, Any]:
    return tomllib.loads(_text(name))


def _text(name: str) -> str:
    text: str = (_folder() / f"{name}.toml").read_text(encoding="utf-8")
    return text


def _folder() -> Any:
    return resources.files("ringfence_lab.plan") / "data" / "hardware"
