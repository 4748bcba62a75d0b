"""Timers on CLOCK_BOOTTIME."""

from __future__ import annotations

import os
import threading

import pytest

from ringfence.transport.alarm import Alarm, boot_seconds
from tests.limits import HANG


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("delay", [-boot_seconds(), -1.0, 0.0, 0.05], ids=["at boot", "past", "now", "soon"])
def test_alarm_is_called_at_its_time_and_not_before(delay: float) -> None:
    called: list[float] = []
    moment, before = boot_seconds() + delay, descriptors()
    alarm = Alarm("test", moment, lambda: called.append(boot_seconds()))
    alarm.join(HANG)
    assert len(called) == 1 and called[0] >= moment
    assert descriptors() == before


@pytest.mark.parametrize("delay", [3600.0, 1e18], ids=["an hour", "longer than any machine runs"])
def test_cancelled_alarm_is_not_called_and_leaks_nothing(delay: float) -> None:
    called, before = threading.Event(), descriptors()
    alarm = Alarm("test", boot_seconds() + delay, called.set)
    alarm.cancel()
    alarm.join(HANG)
    assert not alarm.is_alive() and not called.is_set()
    assert descriptors() == before
    alarm.cancel()


def test_callback_may_cancel_its_own_alarm() -> None:
    made: list[Alarm] = []
    ready = threading.Event()

    def work() -> None:
        ready.wait(HANG)
        made[0].cancel()

    made.append(Alarm("test", boot_seconds(), work))
    ready.set()
    made[0].join(HANG)
    assert not made[0].is_alive()


@pytest.mark.processes
def test_forked_child_keeps_no_descriptor_of_an_alarm() -> None:
    alarm = Alarm("test", boot_seconds() + 3600, lambda: None)
    own = (alarm._timer, alarm._cancelled)  # other threads of this process may open some at any time
    assert all(os.path.exists(f"/proc/self/fd/{each}") for each in own)
    child = os.fork()
    if not child:
        os._exit(any(os.path.exists(f"/proc/self/fd/{each}") for each in own))
    assert os.waitpid(child, 0)[1] == 0
    alarm.cancel()
    alarm.join(HANG)
