"""The variants of a gpu-tee cell as settings of the simulated devices. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ringfence_lab.accelerator.tee import FIGURES, SWITCHES, Tee

_SWITCHES: Final[Mapping[str, tuple[str, ...]]] = {
    "direct": ("direct",),
    "parallel-authentication": ("parallel_authentication",),
    "overlap": ("overlap",),
    "all": SWITCHES,
}
_IN_THE_CLEAR: Final = ("plain", "plain-again")


def tee_of(variant: str, figures: Mapping[str, float], dilation: float = 1.0) -> Tee:
    """Return the settings of the devices for a variant: its switches over these figures."""
    settings: dict[str, Any] = {name: figures[name] for name in FIGURES}
    settings |= dict.fromkeys(_SWITCHES.get(variant, ()), True)
    return Tee(**settings, confidential=variant not in _IN_THE_CLEAR, dilation=dilation)


def figures_of(tee: Tee) -> dict[str, Any]:
    """Return the figures by name, without switches and dilation."""
    return {name: getattr(tee, name) for name in FIGURES}
