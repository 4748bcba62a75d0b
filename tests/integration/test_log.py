"""Output of ringfence: each line has a prefix and the time, unless the program has configured logging."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from ringfence.log import announce
from tests.limits import HANG
from tests.pool import Failure, Pool, values

PREFIX = re.compile(r"ringfence: \d{4}-\d\d-\d\d \d\d:\d\d:\d\d ")
WORKERS = "2 workers, run "
WARNING = "this run has no id of its own"


def log_of(pool: Pool, rank: int) -> list[str]:
    return pool.workers[rank].log.read_text().splitlines()


def configure() -> None:
    logging.basicConfig(format="%(levelname)s|%(message)s")


def test_every_line_begins_with_a_prefix_and_the_time(pool: Pool) -> None:
    """Rank 0's announcement has two lines with the Python data plane; the warning uses logging."""
    here = {"RINGFENCE_RUN_ID": None, "RINGFENCE_INTERFACE": "127.0.0.1"}
    there = {"RINGFENCE_RUN_ID": None, "RINGFENCE_INTERFACE": "127.0.0.2"}
    slow = ["env", "-u", "TORCHELASTIC_RUN_ID", "RINGFENCE_DATAPLANE=python"]
    with pool.fresh([slow, slow]) as pair:
        values(pair.join("ringfence", 2, env=[here, there]))
        lines = log_of(pair, 0)
        assert len(lines) == 3 and all(PREFIX.match(line) for line in lines), lines
        assert WORKERS in lines[0] and "the data plane is not the compiled one" in lines[1] and WARNING in lines[2]

        pair.check(configure, 2, None)
        values(pair.join("ringfence", 2, env=[here, there]))
        first, second, third = log_of(pair, 0)[3:]
        assert first.startswith(f"ringfence: {WORKERS}") and second.startswith("ringfence: the data plane")
        assert third.startswith(f"WARNING|{WARNING}")


SCRIPT = """
import logging
from ringfence.log import LOGGER
LOGGER.info("not worth a word")
LOGGER.warning("one\\ntwo")
try:
    raise ValueError("three")
except ValueError:
    LOGGER.getChild("join").exception("a failure")
logging.basicConfig(format="%(message)s")
LOGGER.warning("configured")
"""


def test_every_line_of_a_message_and_of_a_traceback_has_the_prefix() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=HANG)
    *lines, last = done.stderr.splitlines()
    assert all(PREFIX.match(line) for line in lines), lines
    said = [PREFIX.sub("", line) for line in lines]
    assert said[:4] == ["one", "two", "a failure", "Traceback (most recent call last):"]
    assert said[-1] == "ValueError: three"
    assert (last, done.stdout) == ("configured", "")


@pytest.mark.parametrize(("seconds", "limit"), [(600, "1"), (1, "600")], ids=["its own", "torch's, which is shorter"])
def test_join_has_its_own_timeout(pool: Pool, seconds: float, limit: str) -> None:
    with pool.fresh() as pair:
        pair.check(start, 2, None)
        here = {"RINGFENCE_JOIN_TIMEOUT": limit}
        results = pair.join("ringfence", 2, seconds=seconds, env=[here, {**here, "RINGFENCE_RUN_ID": "another run"}])
    for result in results:
        assert isinstance(result, Failure) and result.type == "AdmissionError"
        assert "did not form within 1 s (the shorter of RINGFENCE_JOIN_TIMEOUT" in result.message


def start() -> None:
    """A worker has started."""


def test_a_line_is_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers and agents share a stderr, where what another one writes would come between a line and its newline."""
    written: list[str] = []
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=written.append, flush=lambda: None))
    announce("2 workers")
    assert [text[-10:] for text in written if text] == ["2 workers\n"]
