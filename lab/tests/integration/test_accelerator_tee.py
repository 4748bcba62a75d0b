"""Confidential copies of the simulated accelerator: their time, their encryption, and what a changed bit does."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from lab.tests.integration import accelerator_tee as tee
from lab.tests.integration.test_accelerator_process import completed, run
from tests.limits import HANG
from tests.pool import Pool

Check = Callable[[Callable[[], None]], None]


@pytest.fixture(scope="module")
def check() -> Iterator[Check]:
    """Runs a function in a process of its own that has the devices."""
    with Pool() as pool:

        def checked(function: Callable[[], None]) -> None:
            pool.check(function, world=1, backend=None, timeout=HANG)  # the first one builds the device if needed

        yield checked


@pytest.mark.parametrize("scenario", tee.SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_confidential_copies(check: Check, scenario: Callable[[], None]) -> None:
    check(scenario)


def test_a_gap_before_a_reservation_is_used() -> None:
    with Pool() as pool:  # of its own: the worker is left with a copy that does not end
        pool.check(tee.a_gap_before_a_reservation_is_used, world=1, backend=None, timeout=HANG)


def test_after_a_refused_copy_every_call_raises() -> None:
    program = """
from ringfence_lab.accelerator import tee
accelerator.simulate_tee(tee.load("h100"))
tensor, event = torch.ones(1000, device="sim:0"), torch.Event("sim")
event.record()
accelerator.corrupt_next_copy()
calls = [lambda: tensor.to("sim:1").cpu(), torch.accelerator.synchronize, event.synchronize, tensor.cpu,
         lambda: tensor.add_(1), lambda: torch.ones(3, device="sim:1"), lambda: torch.ones(3).to("sim"),
         lambda: accelerator.simulate_tee(tee.load("h100"))]
for call in calls:
    try:
        call()
    except RuntimeError as error:
        assert "confidential copy 1 of 4000 bytes from sim:0 to the host failed authentication" in str(error), error
        continue
    raise SystemExit("the failure was silent")
"""
    done = run(program)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a task failed: confidential copy 1 of 4000 bytes" in done.stderr


def test_a_missing_libcrypto_is_named() -> None:
    """Only confidential mode needs it."""
    program = """
from ringfence.errors import ConfigurationError
from ringfence_lab.accelerator import controls, tee
controls.LIBCRYPTO = "libcrypto-of-nobody.so.3"
h100 = tee.load("h100")
accelerator.simulate_tee(h100.with_values(confidential=False))
try:
    accelerator.simulate_tee(h100)
except ConfigurationError as error:
    assert "libcrypto-of-nobody.so.3" in str(error) and "apt-get install libssl3" in str(error), error
else:
    raise SystemExit("it was not missing")
assert torch.ones(3).to("sim").sum().item() == 3
controls.LIBCRYPTO = "libc.so.6"
try:
    accelerator.simulate_tee(h100)
except ConfigurationError as error:
    assert "it has no " in str(error), error
else:
    raise SystemExit("another library was accepted")
"""
    completed(program)
