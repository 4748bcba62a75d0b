"""Checks of this installation that commands make before they start workers.

A missing package is reported in one line by the command, not by the traceback of a worker. Packages are looked up and not
imported: a command that only starts workers needs no torch in its own process.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

from ringfence.backend import torch_versions
from ringfence.cli.checks import software
from ringfence.errors import ConfigurationError


def workers() -> None:
    """Check that worker processes can import torch and the data plane.

    Raises ConfigurationError if torch is missing or RINGFENCE_DATAPLANE names no data plane.
    """
    from ringfence.dataplane import info

    if find_spec("torch") is None:
        raise ConfigurationError(f"workers need torch: {torch_versions.INSTALL}")
    info.wanted()


def torch_here(command: str) -> None:
    """Check that the command itself can import torch. Raises ConfigurationError, which says what to install."""
    if find_spec("torch") is None:
        raise ConfigurationError(f"{command} needs torch: {torch_versions.INSTALL}")


def backend() -> None:
    """Check that torch registers backend="ringfence" when a worker imports it.

    Raises ConfigurationError if the environment prevents it.
    """
    if found := software.switched_off(os.environ):
        raise ConfigurationError(f"the backend is {found.text}: {found.fix}")
