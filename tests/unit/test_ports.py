"""Ports of tests: two processes never have the same one."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ports

ROOT = Path(__file__).parents[2]
CLAIM = "import sys; from tests import ports; print(ports.claim(range(*map(int, sys.argv[1:]))))"


def other_process_claims(wanted: range) -> bool:
    command = [sys.executable, "-c", CLAIM, str(wanted.start), str(wanted.stop)]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout == "True\n"


@pytest.mark.processes
def test_a_block_belongs_to_one_process_until_it_is_released() -> None:
    block = ports.block()
    assert not other_process_claims(block)
    ports.release(block)
    assert other_process_claims(block)
    assert ports.claim(block), "the claim of a process did not end with it"
    ports.release(block)


def test_every_port_is_given_once() -> None:
    given = [ports.port() for _ in range(3 * ports.BLOCK)]
    assert len(set(given)) == len(given)
    assert all(ports.FIRST <= port < ports.FIRST + ports.BLOCK * ports.BLOCKS for port in given)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_port_that_a_program_uses_is_not_claimed(host: str) -> None:
    block = ports.block()
    ports.release(block)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, block[3]), family=family):
        assert not ports.claim(block)
    assert ports.claim(block)
    ports.release(block)
