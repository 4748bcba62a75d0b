"""Entry point `torchrun.handlers`: torch loads it wherever its rendezvous is imported, so it imports nothing itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def handler() -> Callable[[Any], Any]:
    """Return what torchrun calls with its parameters for `--rdzv-backend=ringfence`."""
    return _create


def _create(params: Any) -> Any:
    from ringfence.launch.handler import create

    return create(params)
