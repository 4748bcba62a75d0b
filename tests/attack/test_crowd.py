"""A run forms while peers without credentials send expensive proofs: real processes, sockets and TLS."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.attack.crowd import CROWD
from tests.attack.hostile import KINDS


@pytest.mark.promise("A run of 8 forms in twice its usual time plus 1 s while 56 connections send expensive proofs.")
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_forms_during_a_flood_of_expensive_proofs(kind: str, full: bool) -> None:
    """In at most twice its time without the attack, plus one second."""
    command = [sys.executable, "-m", "tests.attack.crowd", kind, "--rounds", "10" if full else "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["turned_away"] >= len(CROWD), "there was no attack"
    assert found["attacked"] <= 2 * found["alone"] + 1.0, found
