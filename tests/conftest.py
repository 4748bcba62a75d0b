"""Fixtures for all tests: the worker pool, the backend under test, and whether long tests run in full."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.pool import Pool

BACKENDS = ("gloo", "ringfence")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="long tests at their full length")
    parser.addoption("--backend", choices=BACKENDS, help="only this one of the backends that suites are run against")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        only = metafunc.config.getoption("--backend")
        # Session scope: pytest then runs all tests of one backend before those of the other.
        metafunc.parametrize("backend", [only] if only else BACKENDS, scope="session", indirect=True)


@pytest.fixture(scope="session")
def backend(request: pytest.FixtureRequest) -> str:
    """The backend's name for torch.distributed."""
    return str(request.param)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Workers that run until pytest ends."""
    with Pool() as workers:
        yield workers


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """Whether `--full` was given."""
    return bool(request.config.getoption("--full"))
