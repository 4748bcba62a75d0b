"""Fixtures that all tests share: the pool of workers, the backend under test, the extent of the run."""

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
    """The name that is handed to torch.distributed."""
    return str(request.param)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Workers that live as long as pytest."""
    with Pool() as workers:
        yield workers


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """Whether long tests run at their full length."""
    return bool(request.config.getoption("--full"))
