"""Fixtures for all tests: the worker pool, the backend under test, and whether long tests run in full."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.pool import IN_SHARED_MEMORY, ON_TWO_MACHINES, Pool

settings.register_profile("ringfence", deadline=None)  # a machine that others use too is not a finding
settings.load_profile("ringfence")
LEFT_OUT = ("processes", "slow")  # of --fast
LONG = (  # few and long tests. They begin first: begun last, one of these files would run alone at the end
    "test_frameworks.py",
    "test_strategies.py",
    "test_wheels.py",
    "test_strategies_device.py",
    "test_device_faults.py",
    "test_device_memory.py",
    "test_inference.py",
    "test_selftest.py",
    "test_device.py",
    "test_study.py",
)
BACKENDS = ("gloo", "ringfence")
ON_MACHINES = (IN_SHARED_MEMORY, ON_TWO_MACHINES)
SHARED = (  # also with memory that workers share
    "test_collectives.py",
    "test_functional.py",
    "test_groups.py",
    "test_objects.py",
    "test_order.py",
    "test_timeouts.py",
)
SPREAD = ("test_collectives.py", "test_groups.py", "test_order.py")  # and on two machines


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="only tests that start no process")
    parser.addoption("--full", action="store_true", help="long tests at their full length")
    parser.addoption(
        "--backend",
        choices=(*BACKENDS, *ON_MACHINES),
        help="only this one of the backends that suites are run against",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--fast"):
        sys.addaudithook(refuse_processes)


def refuse_processes(event: str, _: tuple[object, ...]) -> None:
    """Keep the marker `processes` true: with --fast, a test without it fails when it starts a process."""
    if event in ("subprocess.Popen", "os.fork", "os.posix_spawn") and "PYTEST_CURRENT_TEST" in os.environ:
        raise RuntimeError("a test that starts a process needs the marker `processes`")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONG)
    for item in items:
        if "exhaustive" in getattr(item, "fixturenames", ()):
            item.add_marker("exhaustive")
    if config.getoption("--fast"):
        left_out = [item for item in items if any(item.get_closest_marker(name) for name in LEFT_OUT)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not any(item.get_closest_marker(name) for name in LEFT_OUT)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        only = metafunc.config.getoption("--backend")
        # Session scope: pytest then runs all tests of one backend before those of the other.
        name = metafunc.definition.path.name
        every = (
            *BACKENDS,
            *([IN_SHARED_MEMORY] if name in SHARED else []),
            *([ON_TWO_MACHINES] if name in SPREAD else []),
        )
        metafunc.parametrize("backend", [only] if only else every, scope="session", indirect=True)


@pytest.fixture(scope="session")
def backend(request: pytest.FixtureRequest) -> str:
    """The backend of the pool's workers."""
    return str(request.param)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Workers that run until pytest ends."""
    with Pool() as workers:
        yield workers


@pytest.fixture(scope="session")
def device_library() -> Path:
    """The library of the simulated device, built here: a build within a worker would use up the time of its test."""
    from ringfence.lab import accelerator

    return accelerator.prepare()


@pytest.fixture(scope="module")
def devices(device_library: Path) -> Iterator[Pool]:
    """Workers that load the simulated device: a pool of their own, since it changes what torch's accelerator is."""
    with Pool() as workers:
        yield workers


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """Whether `--full` was given."""
    return bool(request.config.getoption("--full"))


@pytest.fixture(scope="session")
def exhaustive(request: pytest.FixtureRequest) -> bool:
    """Whether tests over all bits or all sizes try every one. Without --full: one bit of each byte, selected sizes."""
    return bool(request.config.getoption("--full"))
