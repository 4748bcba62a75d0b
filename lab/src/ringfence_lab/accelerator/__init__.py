"""A simulated accelerator for torch: the device "sim", for tests and studies on machines without a GPU.

Its memory faults when the host touches it, its streams are threads whose work really runs later, and its copies take the
time that is configured. So code that forgets to wait for a stream computes wrong numbers, as on a GPU, and the cost of
host-device copies can be measured. docs/reference/simulated-accelerator.md says what it simulates and what it does not.

    from ringfence_lab import accelerator

    accelerator.load()
    accelerator.configure(down_rate=10e9, up_rate=10e9)
    tensor = torch.ones(1000, device="sim")
"""

from ringfence_lab.accelerator.controls import (
    HeldKernel,
    Stats,
    bounce_buffer,
    capturing,
    confidential,
    configure,
    corrupt_next_copy,
    hold,
    load,
    prepare,
    reset,
    simulate_tee,
    sleep,
    stats,
)
from ringfence_lab.accelerator.tee import Tee

__all__ = ["prepare", "load", "configure", "confidential", "simulate_tee", "sleep", "hold", "reset", "stats"]
__all__ += ["capturing", "corrupt_next_copy", "bounce_buffer", "HeldKernel", "Stats", "Tee"]
