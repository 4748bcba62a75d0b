"""`ringfence bench admission` as a user runs it."""

from __future__ import annotations

import json

import pytest

from tests.cli.command import ringfence

QUICK = ("bench", "admission", "--workers", "4,16,32")


@pytest.mark.nightly
def test_it_says_what_was_measured_and_what_is_predicted() -> None:
    done = ringfence(*QUICK, COLUMNS="80")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # no progress where nobody watches
    assert "16,384" in done.stdout
    assert "predicted" in done.stdout
    text = " ".join(done.stdout.split())
    assert "Check of the fit with 32 workers" in text
    assert "4 of 4, 16 of 16, 32 of 32 workers verified the whole roster" in text
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_scripts_read_it_as_json() -> None:
    done = ringfence(*QUICK, "--json")
    found = json.loads(done.stdout)
    assert [group["workers"] for group in found["groups"]] == [4, 16, 32]
    assert found["predicted"][0]["workers"] == 16_384
    assert found["machine"]["cpu"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--workers", "one"), "not a number from 2"),
        (("--workers", "1"), "not a number from 2"),
        (("--verifiers", "-1"), "not a number from 0"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: tuple[str, ...], words: str) -> None:
    done = ringfence("bench", "admission", *arguments)
    assert done.returncode == 2
    assert words in done.stderr
