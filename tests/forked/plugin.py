"""pytest's side: the option `--real-starts`, the marker `real_start`, and how many interpreters were forked."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.forked import asking

COUNTS = "forked_interpreters"
IN_ONE_PROCESS = ("fuzz", "unit", "vectors")  # folders whose tests start so little that a zygote would take longer


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--real-starts", action="store_true", help="start each interpreter; none is forked from one with torch"
    )


@pytest.hookimpl(trylast=True)  # other plugins set variables
def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--real-starts"):
        asking.install(asking.Zygote.of(os.environ))
        asking.state.real = True  # outside tests: a worker of pytest-xdist is started


def pytest_unconfigure() -> None:
    asking.uninstall()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """With the marker, the test and the fixtures that are set up for it start real interpreters."""
    folder = (
        item.path.relative_to(asking.ROOT / "tests").parts[0] if item.path.is_relative_to(asking.ROOT / "tests") else ""
    )
    asking.state.real = item.get_closest_marker("real_start") is not None or folder in IN_ONE_PROCESS
    try:
        return (yield)
    finally:
        asking.state.real = True


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Give a controller of pytest-xdist the counts of this worker."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput[COUNTS] = (asking.state.forked, asking.state.started)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    forked, started = getattr(node, "workeroutput", {}).get(COUNTS, (0, 0))
    asking.state.forked += forked
    asking.state.started += started


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if asking.state.forked or asking.state.started:
        terminalreporter.line(f"Interpreters: {asking.state.forked} forked, {asking.state.started} started")
