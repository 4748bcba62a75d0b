"""Settings of the simulated GPU TEE: what a copy costs in confidential mode, each figure with its source.

A preset is a TOML file in `data`. Every figure is a table: {value, source, date}, or {value, assumed = true, reason} where
nobody has published or measured it. An unknown key, a missing figure and a figure without its origin are errors.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Final

from ringfence.errors import ConfigurationError

SWITCHES: Final = ("direct", "parallel_authentication", "overlap")
COUNTS: Final = ("cpu_threads", "engines", "authentication_parts", "piece_bytes")
UNLIMITED: Final = ("device_rate", "authentication_rate")  # 0 means that the stage takes no time
MAX_SERVERS: Final = 64  # driver threads, or copy engines of a device and direction
CHANGED: Final = "set by the caller"


@dataclass(frozen=True)
class Origin:
    """The source of a figure: a publication or measurement and its date, or the reason of an assumption."""

    text: str
    assumed: bool
    date: str = ""


def _figure(unit: str, about: str) -> Any:
    """Declare a figure of a preset."""
    return field(metadata={"figure": (unit, about)})


@dataclass(frozen=True)
class Tee:
    """How the simulated devices copy. All figures are in seconds and bytes, without dilation.

    A host-device copy in confidential mode is encrypted into a bounce buffer, transferred, and decrypted and authenticated
    at the other side. `dilation` multiplies every time: a machine with few cores can then simulate several devices, and
    ratios of times are what remains valid.

    Raises ConfigurationError if a value is out of range.
    """

    copy_overhead: float = _figure("s", "of each copy through a bounce buffer, whatever its size")
    plain_overhead: float = _figure("s", "of each host-device copy outside confidential mode")
    cpu_rate: float = _figure("B/s", "AES-GCM of one driver thread")
    cpu_threads: int = _figure("", "driver threads of the machine; the copies of all devices queue for them")
    engines: int = _figure("", "copy engines of each device and direction; a copy holds one from its start to its end")
    link_rate: float = _figure("B/s", "PCIe, of each device and direction")
    device_rate: float = _figure("B/s", "encryption and decryption on the device; 0: takes no time of its own")
    authentication_rate: float = _figure("B/s", "computing one tag on the device; 0: takes no time of its own")
    authentication_parts: int = _figure("", "pieces that the device authenticates at once with parallel_authentication")
    piece_bytes: int = _figure(
        "B", "that move on at once with overlap, and have a tag of their own with parallel_authentication"
    )
    peer_rate: float = _figure("B/s", "from device to device outside confidential mode")
    peer_overhead: float = _figure("s", "of each copy from device to device outside confidential mode")
    confidential: bool = True
    direct: bool = (
        False  # a copy between devices stays encrypted under a key of the pair; the CPU does not re-encrypt it
    )
    parallel_authentication: bool = False  # each piece has a tag of its own
    overlap: bool = False  # the stages of a copy run at the same time, piece by piece
    dilation: float = 1.0
    name: str = field(default="", compare=False)  # of the preset
    origins: Mapping[str, Origin] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in FIGURES:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigurationError(f"{name} of a simulated TEE is a number, not {value!r}")
            if name in COUNTS:
                most = MAX_SERVERS if name in ("cpu_threads", "engines") else 1 << 32
                if value != int(value) or not 1 <= value <= most:
                    raise ConfigurationError(
                        f"{name} of a simulated TEE is a whole number from 1 to {most}, not {value}"
                    )
                object.__setattr__(self, name, int(value))
            elif name.endswith("_overhead"):
                if not 0 <= value <= 10:
                    raise ConfigurationError(f"{name} of a simulated TEE is from 0 to 10 seconds, not {value}")
            elif not (1e3 <= value <= 1e18 or (value == 0 and name in UNLIMITED)):
                zero = ", or 0" if name in UNLIMITED else ""
                raise ConfigurationError(f"{name} of a simulated TEE is from 1e3 to 1e18 bytes/s{zero}, not {value}")
        for name in ("confidential", *SWITCHES):
            if not isinstance(getattr(self, name), bool):
                raise ConfigurationError(f"{name} of a simulated TEE is True or False, not {getattr(self, name)!r}")
        if not 1 <= self.dilation <= 1e6:
            raise ConfigurationError(f"dilation of a simulated TEE is from 1 to 1e6, not {self.dilation}")

    def with_values(self, **changes: Any) -> Tee:
        """Return the settings with other values, such as `overlap=True` or `cpu_rate=8e9`.

        Raises ConfigurationError for an unknown name or a value out of range.
        """
        known = {*FIGURES, *SWITCHES, "confidential", "dilation"}
        if unknown := sorted(set(changes) - known):
            raise ConfigurationError(f"a simulated TEE has no {', '.join(unknown)}: it has {', '.join(sorted(known))}")
        origins = {**self.origins, **{name: Origin(CHANGED, True) for name in changes if name in FIGURES}}
        return dataclasses.replace(self, origins=origins, **changes)

    def settings(self) -> dict[str, Any]:
        """Return the figures, switches and dilation, with which `Tee` makes the same."""
        return {name: getattr(self, name) for name in (*FIGURES, "confidential", *SWITCHES, "dilation")}

    def assumed(self) -> dict[str, str]:
        """Return the figures that were neither measured nor published, with the reason for each."""
        return {name: origin.text for name, origin in self.origins.items() if origin.assumed}


FIGURES: Final[dict[str, tuple[str, str]]] = {  # unit, and what it is
    each.name: each.metadata["figure"] for each in dataclasses.fields(Tee) if each.metadata
}


def names() -> tuple[str, ...]:
    """Return the names of the presets."""
    return tuple(sorted(file.name.removesuffix(".toml") for file in _folder().iterdir() if file.name.endswith(".toml")))


def load(name: str) -> Tee:
    """Return a preset, in confidential mode and without optimisations. Raises ConfigurationError for an unknown name."""
    if name not in names():
        raise ConfigurationError(f"no simulated TEE is called {name!r}: there are {', '.join(names())}")
    return parse((_folder() / f"{name}.toml").read_text(encoding="utf-8"), name)


def parse(text: str, name: str) -> Tee:
    """Parse a preset from TOML. Raises ConfigurationError if anything in it is unknown, missing or without its origin."""
    where = f"simulated TEE {name}"
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{where}: {error}") from None
    if unknown := sorted(set(document) - {"title", "notes", "figures"}):
        raise ConfigurationError(f"{where}: unknown {', '.join(unknown)}")
    figures = document.get("figures")
    if not isinstance(figures, dict) or set(figures) != set(FIGURES):
        raise ConfigurationError(f"{where}: the section [figures] needs {', '.join(FIGURES)}, and nothing else")
    origins = {figure: _origin(f"{where}: {figure}", found) for figure, found in figures.items()}
    return Tee(**{figure: found["value"] for figure, found in figures.items()}, name=name, origins=origins)


def dump(tee: Tee) -> str:
    """Return the figures as TOML with their origins; `parse` reads it. Switches and dilation are not part of it."""
    lines = [f"title = {json.dumps(tee.name)}", "", "[figures]"]
    for name in FIGURES:
        origin = tee.origins.get(name, Origin(CHANGED, True))
        text = json.dumps(origin.text, ensure_ascii=False)
        say = f"assumed = true, reason = {text}" if origin.assumed else f'source = {text}, date = "{origin.date}"'
        lines.append(f"{name} = {{ value = {getattr(tee, name)!r}, {say} }}")
    return "\n".join(lines) + "\n"


def _origin(where: str, found: object) -> Origin:
    if isinstance(found, dict) and "value" in found:
        if found.get("assumed") is True and set(found) == {"value", "assumed", "reason"} and found["reason"]:
            return Origin(str(found["reason"]), True)
        if set(found) == {"value", "source", "date"} and found["source"] and found["date"]:
            return Origin(str(found["source"]), False, str(found["date"]))
    raise ConfigurationError(f"{where}: a figure is {{value, source, date}} or {{value, assumed = true, reason}}")


def _folder() -> Any:
    return resources.files("ringfence_lab.accelerator") / "data"
