"""What a command needs of this installation before it begins: said in one line at once, not later by a worker's traceback.

Nothing large is imported for that: whoever starts workers needs no torch itself.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

from ringfence import torch_versions
from ringfence.cli import checks
from ringfence.errors import ConfigurationError


def workers() -> None:
    """What every worker imports."""
    from ringfence.dataplane import info

    if find_spec("torch") is None:
        raise ConfigurationError(f"workers need torch: {torch_versions.INSTALL}")
    info.wanted()


def backend() -> None:
    """What makes backend="ringfence" known to a worker that imports torch."""
    if found := checks.switched_off(os.environ):
        raise ConfigurationError(f"the backend is {found.text}: {found.fix}")


def models() -> None:
    """What the models are made of that are trained."""
    if find_spec("transformers") is None:
        raise ConfigurationError('models need transformers: python -m pip install "transformers>=5.0"')


def parquet() -> None:
    """What the layers of a study are kept with."""
    if find_spec("pyarrow") is None:
        raise ConfigurationError('studies are kept as Parquet: python -m pip install "pyarrow>=20"')
