"""Loads the simulated accelerator and sets how it behaves."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, cast

from ringfence.errors import ConfigurationError
from ringfence_lab.accelerator import build
from ringfence_lab.accelerator.tee import FIGURES, SWITCHES, Tee

if TYPE_CHECKING:
    import torch

DEVICE: Final = "sim"
DEVICES_VARIABLE: Final = "RINGFENCE_SIM_DEVICES"
DEFAULT_DEVICES: Final = 2
MAX_DEVICES: Final = 8
LIBCRYPTO: Final = "libcrypto.so.3"  # of OpenSSL 3

_loading = threading.Lock()


class Stats(NamedTuple):
    """Counts of this process, since it loaded the device, in the order of the library."""

    pinned_bytes: int  # pinned host memory that is allocated now: in use and cached
    pinned_peak_bytes: int
    host_blocked_seconds: float  # how long threads of the host waited
    copies_down: int  # device to host
    copies_up: int  # host to device
    bytes_down: int
    bytes_up: int
    sealed_copies: int  # through a bounce buffer: two for a copy from device to device that the host re-encrypts
    sealed_bytes: int
    late_seconds: float  # for which simulated time stood still, because this machine was too slow
    crypto_seconds: float  # CPU time of encryption and decryption
    host_waits: int  # how often threads of the host have begun to wait for streams, events and copies
    device_bytes: tuple[int, ...]  # memory in use, of each device
    device_reserved_bytes: tuple[int, ...]  # and with what its allocator has cached


def prepare() -> Path:
    """Build the device's library if needed, which takes half a minute of CPU time; return its path. Loads nothing.

    Raises ConfigurationError if it cannot be built.
    """
    import torch

    return build.library(Path(torch.__file__).parent, torch.__version__, torch.compiled_with_cxx11_abi())


def load(devices: int | None = None) -> None:
    """Make the device "sim" available in this process, with this number of devices; build it if needed.

    Without an argument there are $RINGFENCE_SIM_DEVICES devices, or 2; at most 8. A second call does nothing. Call it
    before the first backward pass: torch's autograd engine starts its threads for the devices that it finds then.

    Raises ConfigurationError if the device cannot be built, if another number of devices is loaded already, or if torch
    has another accelerator in this process.
    """
    with _loading:
        ops = _loaded_ops()
        if ops is None:
            _load(devices)
        elif devices not in (None, ops.devices()):
            raise ConfigurationError(f"this process has {ops.devices()} simulated devices already, not {devices}")


def _load(devices: int | None) -> None:
    import torch

    from ringfence_lab.accelerator import device_module

    count = _number_of_devices() if devices is None else devices
    if not 1 <= count <= MAX_DEVICES:
        raise ConfigurationError(f"the simulated accelerator has 1 to {MAX_DEVICES} devices, not {count}")
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is not None:
        raise ConfigurationError(
            f"torch has the accelerator {found.type} in this process, and cannot have a simulated one as well"
        )
    torch.ops.load_library(str(prepare()))
    torch.ops.ringfence_sim.start(count)
    device_module.register(DEVICE)
    atexit.register(torch.ops.ringfence_sim.stop)  # before the libraries that kernels use are torn down


def configure(
    *,
    kernel: float = 0.0,
    down: float = 0.0,
    up: float = 0.0,
    down_rate: float = 0.0,
    up_rate: float = 0.0,
    jitter: float = 0.0,
    seed: int = 0,
    lag: float = 0.001,
) -> None:
    """Set how long kernels and copies take that are launched from now on.

    `kernel` is in seconds, for each kernel. A copy from device to host takes `down` seconds and its bytes over `down_rate`
    (bytes per second; 0: as fast as the machine can); a copy to the device takes `up` and `up_rate`. Each device has one copy
    engine for each direction, for which the copies of all its streams queue. With `jitter`, every kernel and copy is delayed
    by a random time of up to so many seconds; `seed` and the order of launches on a stream determine the delays.

    A busy machine executes kernels and copies late. A stream's clock stays on time for up to `lag` seconds, which its next
    tasks make up for. With a lag of minutes, events measure the configured times on any machine.
    """
    times = (kernel, down, up, down_rate, up_rate, jitter, lag)
    _ops().configure(*map(float, times), seed & (2**63 - 1))


def confidential(on: bool) -> None:
    """Behave as a GPU in confidential mode, or not.

    A copy from or to pinned memory then blocks the calling thread until it is done, and with it all that was queued on its
    stream; `Tensor.is_pinned()` is False.
    """
    _ops().confidential(on)


def simulate_tee(tee: Tee | None) -> None:
    """Copy as a GPU with a trusted execution environment from now on; None ends that.

    Copies between host and device, and between devices, then take the times of `tee` instead of those of `configure`. In
    confidential mode they are encrypted into a bounce buffer and authenticated at the other side with AES-256-GCM, copies
    from and to the host block the calling thread, and `Tensor.is_pinned()` is False. A copy whose bounce buffer was changed
    fails: its target is overwritten and every later call on the device raises RuntimeError.

    Every call makes new keys. Copies that are queued already keep the settings that they were queued with.

    Raises ConfigurationError if OpenSSL's libcrypto is missing, which confidential mode needs.
    """
    ops = _ops()
    if tee is None:
        ops.end_tee()
        return
    if tee.confidential and (problem := ops.load_libcrypto(LIBCRYPTO)):
        raise ConfigurationError(
            f"confidential copies need OpenSSL 3, and {LIBCRYPTO} cannot be loaded ({problem}): install it "
            "(on Debian `apt-get install libssl3`)"
        )
    figures = [float(getattr(tee, name)) for name in FIGURES]
    switches = [tee.confidential, *(getattr(tee, name) for name in SWITCHES)]
    ops.simulate_tee(figures, [bool(each) for each in switches], float(tee.dilation))


def corrupt_next_copy(after: int = 0, position: int = 0) -> None:
    """Flip a bit of the bounce buffer of the next copy, or of a later one: `after` more are left alone before it.

    `position` is the byte: 0 is the first one of the ciphertext, and -1 the last one of the tags, which follow it.
    """
    _ops().corrupt(after, position)


def bounce_buffer() -> torch.Tensor:
    """Return what the bounce buffer of the latest confidential copy holds: ciphertext, and its tags of 16 bytes each."""
    return cast("torch.Tensor", _ops().bounce_buffer())


def sleep(seconds: float) -> None:
    """Launch a kernel on the current stream that takes this long."""
    _ops().sleep(float(seconds))


class HeldKernel:
    """A kernel that runs until it is released. At the end of a `with` statement it is released."""

    def __init__(self) -> None:
        self.released = False
        self._kernel = _ops().hold()

    def release(self) -> None:
        """End the kernel. A second call does nothing."""
        self.released = True
        _ops().release(self._kernel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def hold() -> HeldKernel:
    """Launch a kernel on the current stream that runs until the caller releases it."""
    return HeldKernel()


def reset() -> None:
    """Undo `configure`, `confidential` and `simulate_tee`."""
    configure()
    confidential(False)
    simulate_tee(None)


def stats() -> Stats:
    """Return what the device counted so far."""
    values, counted = _ops().stats(), Stats._fields[:-2]
    memory = values[len(counted) :]  # in use and reserved, of each device
    found = [
        value / 1e9 if name.endswith("_seconds") else value  # from nanoseconds
        for name, value in zip(counted, values, strict=False)
    ]
    return Stats._make([*found, tuple(memory[::2]), tuple(memory[1::2])])


@contextlib.contextmanager
def capturing(stream: Any) -> Iterator[None]:
    """Mark a stream as being captured into a graph: `stream.is_capturing()` is True, and waiting for it raises.

    Work that is launched on it runs nevertheless.
    """
    place = (stream.device_index, stream.stream_id)
    _ops().set_capturing(*place, True)
    try:
        yield
    finally:
        _ops().set_capturing(*place, False)


def _number_of_devices() -> int:
    text = os.environ.get(DEVICES_VARIABLE) or str(DEFAULT_DEVICES)
    try:
        return int(text)
    except ValueError:
        raise ConfigurationError(f"{DEVICES_VARIABLE} is {text!r}: give a number from 1 to {MAX_DEVICES}") from None


def _loaded_ops() -> Any:
    """Return the operators of the loaded device, or None."""
    import torch

    return torch.ops.ringfence_sim if hasattr(torch.ops.ringfence_sim, "start") else None


def _ops() -> Any:
    ops = _loaded_ops()
    if ops is None:
        raise ConfigurationError("the simulated accelerator is not loaded: call ringfence_lab.accelerator.load() first")
    return ops
