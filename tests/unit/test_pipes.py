"""A pipe in the place of a file: it is refused, and nobody waits for somebody who writes to it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ringfence.config.private_files import load_secret
from ringfence.config.settings import load_credential, load_policy
from ringfence.errors import ConfigurationError


@pytest.mark.promise("A pipe in the place of a secret, a key or a policy is refused.")
@pytest.mark.parametrize(
    "read",
    [load_secret, load_policy, lambda path: load_credential(__file__, path)],
    ids=["secret", "policy", "key"],
)
def test_a_pipe_is_refused(tmp_path: Path, read: Callable[[Path], object]) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigurationError, match="is not a regular file"):
        read(tmp_path / "pipe")
