"""Policy and credentials used during a join; wiped in forked children."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ringfence.admission.policy import Policy, Prover
from ringfence.admission.proofs.secret import SharedSecret
from ringfence.join.background import within
from ringfence.join.provers import Machine, admission_of, shared_of
from ringfence.settings import Settings
from ringfence.transport.fork import register_fork_cleanup, unregister_fork_cleanup


class JoinCredentials:
    """A worker's settings, and the key that is derived from its secret. A certificate's prover has the settings' own."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._shared: SharedSecret | None = None
        register_fork_cleanup(self)
        self._shared = shared_of(settings)

    def admission(self, seconds: float, patience: float, complain: Callable[[], None]) -> tuple[Policy, Prover]:
        """The verifier, and the prover of the first rule that this worker has everything for.

        To know which that is, a kernel or a driver is asked what it has, and may take its time: as `within` says.
        """
        ask = partial(admission_of, self.settings, self._shared, Machine())
        if self.settings.policy is None:
            return ask()  # nobody is asked
        return within(seconds, "ringfence asks its machine", ask, patience, complain)

    def close(self) -> None:
        """The join is over. Nothing that holds what was made for it, an exception's frames or a thread, holds a key.

        The settings are the caller's, to use again or to forget.
        """
        if self._shared is not None:
            self._shared.forget()
        unregister_fork_cleanup(self)

    def forget(self) -> None:
        """In a forked child. The caller's settings too: they are why this process is here."""
        self.settings.forget()
        if self._shared is not None:
            self._shared.forget()
