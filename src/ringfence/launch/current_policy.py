"""The policy of an agent, which outlives sessions: files about revoked certificates are read again for new connections."""

from __future__ import annotations

import time
from typing import Final

from ringfence.admission.policy import Policy
from ringfence.errors import AdmissionError, PolicyError
from ringfence.join.credentials import JoinCredentials

_SECONDS: Final = 1.0  # between two readings: unauthenticated peers must not cause many


class CurrentPolicy:
    """Returns the policy with the files of now. Used by one thread at a time."""

    def __init__(self, credentials: JoinCredentials, policy: Policy) -> None:
        self._credentials = credentials
        self._policy = policy
        self._digest = policy.digest
        self._read_at = time.monotonic()

    def __call__(self) -> Policy:
        """Return the policy. Raises AdmissionError if it cannot be read, or admits other workers than it did."""
        now = time.monotonic()
        if now - self._read_at < _SECONDS:
            return self._policy
        try:
            policy = self._credentials.read_policy_again(self._policy)
        except PolicyError as error:
            raise AdmissionError(
                f"the policy cannot be read again: {error}", to_peer="the other agent cannot read its policy"
            ) from error
        if policy.digest != self._digest:
            raise AdmissionError(
                "the policy file was changed while this agent ran: start the run again",
                to_peer="the policy of the other agent was changed while it ran",
            )
        if policy is not self._policy:
            self._policy = policy.for_agents()
        self._read_at = now
        return self._policy
