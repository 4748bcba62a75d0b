"""A run forms while peers without credentials send expensive proofs: real processes, sockets and TLS."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.attack.crowd import CROWD
from tests.attack.hostile import KINDS


def measured(kind: str, rounds: int) -> dict[str, Any]:
    """What `tests.attack.crowd` measures. It fails unless all workers of every run are admitted."""
    command = [sys.executable, "-m", "tests.attack.crowd", kind, "--rounds", str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["turned_away"] >= len(CROWD), "there was no attack"
    return found


@pytest.mark.promise("A run of 8 forms while 56 connections send expensive proofs.")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.nightly) if kind != "certificate" else kind for kind in KINDS]
)
def test_a_run_forms_during_a_flood_of_expensive_proofs(kind: str) -> None:
    """However long that takes here; every connection of the crowd is turned away meanwhile."""
    measured(kind, 1)
