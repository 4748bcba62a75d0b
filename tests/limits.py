"""Time limits of tests of faults: the error of the fault ends a call, not a timeout.

Such a test sets every timeout that could end the call to `FAR`, and asserts the kind of error and the worker that it names. If
the fault is not reported, the pool gives up after `HANG` and shows the stacks of the workers.
"""

from __future__ import annotations

from typing import Final
from unittest.mock import patch

FAR: Final = 600.0  # seconds of a timeout that must not be what ends a call
HANG: Final = 540.0  # seconds until a process counts as hanging: less than pytest's limit for a test, and than FAR
FAR_OUTAGE: Final = {"RINGFENCE_OUTAGE_TIMEOUT": f"{FAR:g}"}  # a worker that leaves drains its links for as long

# Decorates functions of workers. If a data connection ends, its worker is blamed after a second, unless an abort or a goodbye
# explains the end; on a busy machine the explanation may take longer.
no_early_blame = patch("ringfence.runtime.engine.SUSPICION_SECONDS", FAR)
