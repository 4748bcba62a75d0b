"""`ringfence selftest` on the simulated device: it passes, and it fails where the staging is broken on purpose."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
from pathlib import Path

import pytest

from ringfence.cli import main, selftest
from ringfence.cli.selftest import catalogue, worker
from ringfence.cli.selftest.device import open_device
from ringfence.cli.selftest.report import summary
from ringfence.cli.selftest.workers import Plan, Workers
from ringfence.errors import ConfigurationError
from tests.cli.command import ringfence
from tests.cli.selftest_worker import CHOOSE
from tests.integration.device_scenarios import FAULTS
from tests.limits import HANG

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
ATTEMPTS = 14  # some with longer kernels
FAULT = "copies to the host wait for the caller's stream"


def changed(change: str) -> Plan:
    """Two quick workers on the simulated device, with one change."""
    return Plan("sim", 2, True, (sys.executable, "-m", "tests.cli.selftest_worker", change))


@pytest.fixture
def find_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))


@pytest.mark.nightly
def test_every_check_passes_on_the_simulated_device(tmp_path: Path) -> None:
    options = ("--device", "sim", "--quick", "--report", "report.json")
    done = ringfence("selftest", *options, folder=tmp_path, timeout=HANG, COLUMNS="80")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"PASSED: \d+ checks with 2 workers on sim:0, sim:1", done.stdout)
    assert "Confidential mode: no" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["passed"]
    assert [each["name"] for each in report["results"]] == [
        check.name for section in catalogue.SECTIONS for check in section.checks
    ]
    assert set(report["rates"]) >= {"device to host, pinned", "host to device, pageable"}
    assert all(each["ratio"] > 0 for each in report["all_reduce"])
    content = json.dumps(report)
    assert socket.gethostname() not in content
    assert "127.0.0.1" not in content
    assert str(tmp_path) not in content


@pytest.mark.nightly  # test_device_order.py leaves out every wait in the gate
@pytest.mark.usefixtures("find_tests")
def test_a_wait_that_is_left_out_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    """On a device in confidential mode, which is detected as well."""
    report = selftest.execute(changed(FAULT), ["order"])
    print(summary(report))
    said = capsys.readouterr().out
    assert {result.name for result in report.failed} >= {"producer", "own_stream"}
    assert "FAILED: " in report.verdict
    assert re.search(r"!! +producer +the kernel that produces.*: FAILED: worker.* wrong numbers in 1 of 1 runs", said)
    assert "Meaning: a collective reads its input before the kernel that produces it has ended." in said
    assert "What to do: Do not train on this device" in said
    assert "Confidential mode: yes\n  - torch reports pinned memory as not pinned" in said
    assert any("blocked its thread" in reason for reason in report.reasons)


@pytest.mark.nightly  # test_device_order.py leaves out every wait in the gate
@pytest.mark.usefixtures("find_tests")
def test_every_wait_that_is_left_out_is_noticed(tmp_path: Path) -> None:
    """The checks notice each fault that the tests of the staging know."""
    unnoticed = {(fault, name) for fault, entry in FAULTS.items() for name in entry[3]}
    with contextlib.ExitStack() as stack:
        workers = Workers(changed(CHOOSE), tmp_path)
        stack.callback(workers.end, at_once=True)
        assert all(outcome.state == "right" for outcome in workers.answers(120))
        for _ in range(ATTEMPTS):
            for fault, check in sorted(unnoticed):
                if any(outcome.state == "wrong" for outcome in workers.ask(f"{fault}/{check}", 60)):
                    unnoticed.remove((fault, check))
    assert not unnoticed


def test_workers_know_every_check_of_the_catalogue() -> None:
    named = [check.name for section in catalogue.SECTIONS[1:] for check in section.checks]
    assert sorted([*named, catalogue.CONFIDENTIAL]) == sorted(worker.CHECKS)


def test_without_an_accelerator_the_error_says_what_to_do() -> None:
    with pytest.raises(ConfigurationError, match=r"without support for an accelerator|finds no GPU.*--device sim"):
        open_device("", 0)


def test_arguments_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--workers", "1"], ["--workers", "many"], ["--only", "nothing"]):
        with pytest.raises(SystemExit):
            main(["selftest", *arguments])
        assert "error: argument" in capsys.readouterr().err
