"""ringfence, slowed on purpose: tests of its costs must detect it."""

from __future__ import annotations

from typing import Any

from ringfence.device import slots
from ringfence.keys import Secret
from ringfence.link.seal import Sealer
from ringfence.session.session import Session

TIMES = 12


class SlowSealer(Sealer):
    """Seals every frame several times into a scratch buffer, under another key, before it seals it for the link."""

    def __init__(self, secret: Secret, alive: Any) -> None:
        super().__init__(secret, alive)
        self._extra = Sealer(Secret(bytes(32)), alive)
        self._scratch = memoryview(bytearray(1 << 20))

    def seal_into(self, header: Any, plaintext: Any, target: memoryview) -> None:
        for _ in range(TIMES):
            self._extra.seal_into(header, plaintext, self._scratch[: len(target)])
        super().seal_into(header, plaintext, target)


class OneSlotSession(Session):
    """A session in a process whose devices have one slot: no copy hides behind another pass."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        slots.SLOTS = 1  # type: ignore[misc]
        super().__init__(*arguments, **keywords)
