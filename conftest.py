"""Fixtures for all tests: the worker pool, the backend under test, and whether long tests run in full.

`--fast` and `--rest` divide the tests in two: those that start no process and take at most a second or two, and all others.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.pool import IN_SHARED_MEMORY, ON_TWO_MACHINES, Pool

pytest_plugins = ("tests.forked.plugin",)
settings.register_profile("ringfence", deadline=None)  # a machine that others use too is not a finding
settings.load_profile("ringfence")
ROOT = Path(__file__).parent
TESTS = (ROOT / "tests", ROOT / "lab" / "tests")
WITHIN_ONE_PROCESS = ("unit", "vectors", "fuzz")  # folders of tests that start no process, but for marked ones
NOT_FAST = ("processes", "slow", "exhaustive", "nightly")  # of those folders
WITH_FRAMEWORKS = ("test_nvflare.py",)  # only with --full: they need what `scripts/install --frameworks` installs
LONG = (  # few and long tests. They begin first: begun last, one of these files would run alone at the end
    "test_frameworks.py",
    "test_strategies.py",
    "test_wheels.py",
    "test_image.py",
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
    parser.addoption("--fast", action="store_true", help="only tests that start no process and take few seconds")
    parser.addoption("--rest", action="store_true", help="only tests that --fast leaves out")
    parser.addoption("--full", action="store_true", help="long tests at their full length")
    parser.addoption(
        "--failures",
        type=Path,
        metavar="FILE",
        help="write what fails to a file, for scripts.retry; with =, or pytest takes the file for a test",
    )
    parser.addoption(
        "--backend",
        choices=(*BACKENDS, *ON_MACHINES),
        help="only this one of the backends that suites are run against",
    )


def pytest_configure(config: pytest.Config) -> None:
    # A shell without job control lets what it starts in the background ignore Ctrl-C, and all that this starts.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Workers of pytest-xdist have the environment of the process that starts them.
    if not hasattr(config, "workerinput"):
        # A worker that is killed while it compiles leaves an empty library, which no later run may load.
        cache = tempfile.TemporaryDirectory(prefix="ringfence-inductor-")
        config.add_cleanup(cache.cleanup)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache.name
        if file := config.getoption("--failures"):
            config.pluginmanager.register(FailureLog(file))
    if config.getoption("--fast"):
        sys.addaudithook(refuse_processes)


def refuse_processes(event: str, _: tuple[object, ...]) -> None:
    """Keep the marker `processes` true: with --fast, a test without it fails when it starts a process."""
    if event in ("subprocess.Popen", "os.fork", "os.posix_spawn") and "PYTEST_CURRENT_TEST" in os.environ:
        raise RuntimeError("a test that starts a process needs the marker `processes`")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With --rest, don't import a file of which --fast runs every test. A file that is named is not ignored."""
    if collection_path.name in WITH_FRAMEWORKS and not config.getoption("--full"):
        return True
    if config.getoption("--rest") and collection_path.suffix == ".py" and has_fast_tests(collection_path):
        text = collection_path.read_text()
        return not any(f"mark.{name}" in text for name in NOT_FAST) and "exhaustive" not in text
    return None


def has_fast_tests(path: Path) -> bool:
    return any(path.is_relative_to(tests / folder) for tests in TESTS for folder in WITHIN_ONE_PROCESS)


def is_fast(item: pytest.Item) -> bool:
    return has_fast_tests(item.path) and not any(item.get_closest_marker(name) for name in NOT_FAST)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONG)
    for item in items:
        if "exhaustive" in getattr(item, "fixturenames", ()):
            item.add_marker("exhaustive")
    for option, wanted in (("--fast", True), ("--rest", False)):
        if config.getoption(option):
            config.hook.pytest_deselected(items=[item for item in items if is_fast(item) is not wanted])
            items[:] = [item for item in items if is_fast(item) is wanted]


class FailureLog:
    """Writes one JSON object a line as soon as a test fails, so that a run that is stopped leaves them too."""

    def __init__(self, file: Path) -> None:
        self._file = file
        file.write_text("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._add(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._add(report)

    def _add(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed:
            with self._file.open("a") as lines:
                lines.write(json.dumps({"test": report.nodeid, "text": report.longreprtext}) + "\n")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        only = metafunc.config.getoption("--backend")
        # Session scope: pytest then runs all tests of one backend before those of the other.
        name = metafunc.definition.path.name
        plaintext = pytest.param("gloo", marks=pytest.mark.nightly)  # whether the tests are right
        every = (
            *(plaintext if each == "gloo" else each for each in BACKENDS),
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
    from ringfence_lab import accelerator

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
