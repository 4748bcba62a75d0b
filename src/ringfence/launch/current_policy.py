"""The policy of an agent, which outlives sessions: files about revoked certificates are read again for new connections."""

from __future__ import annotations

import time
from typing import Final

from ringfence.admission.policy import Policy
from ringfence.errors import AdmissionError, PolicyError
from ringfence.session.join.credentials import JoinCredentials

_SECONDS: Final = 1.0  # between two readings: unauthenticated peers must not cause many


class CurrentPolicy:
    """Returns the policy with the files of now. Used by one thread at a time."""

    def __init__(self, credentials: JoinCredentials, policy: Policy) -> None:
        self._credentials = credentials
        self._policy = policy
        self._digest = policy.digest
        self._read_at = time.monotonic()
        self._refusal: tuple[str, str] | None = None  # why peers are refused: for this agent's log, and for the peer
        self._is_changed = False  # the policy itself, not only the lists; that is final

    def __call__(self) -> Policy:
        """Return the policy. Raises AdmissionError if it cannot be read, or has once been another."""
        now = time.monotonic()
        if now - self._read_at >= _SECONDS and not self._is_changed:
            self._read_at = now
            self._refusal = self._read_again()
        if self._refusal is not None:
            text, to_peer = self._refusal
            raise AdmissionError(text, to_peer=to_peer)
        return self._policy

    def _read_again(self) -> tuple[str, str] | None:
        try:
            policy = self._credentials.read_policy_again(self._policy)
        except PolicyError as error:
            return f"the policy cannot be read again: {error}", "the other agent cannot read its policy"
        if policy.digest != self._digest:
            self._is_changed = True
            return (
                "the policy file was changed while this agent ran: start the run again",
                "the policy of the other agent was changed while it ran",
            )
        if policy is not self._policy:
            self._policy = policy.for_agents()
        return None
