"""A process group over sealed links, with all methods that torch calls.

`RingfenceProcessGroup` (process_group.py) adds groups inside one machine, whose members agree over a group of this class.
"""

from __future__ import annotations

from ringfence.backend.collective import CollectiveMethods
from ringfence.backend.transfers import TransferMethods


class SealedGroup(CollectiveMethods, TransferMethods):
    """Collectives and transfers of one group, sealed."""
