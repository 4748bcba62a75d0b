"""Policy and credentials of a worker as they are now, read from where it had them at its join. Nothing is kept in between."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Final

from ringfence.admission.policy import Policy, Prover
from ringfence.config.settings import CREDENTIALS, Settings
from ringfence.errors import ConfigurationError
from ringfence.session.join.credentials import JoinCredentials

_COMMAND: Final = "RINGFENCE_TOKEN_COMMAND"
_READ: Final = (*CREDENTIALS, "RINGFENCE_SAME_HOST")


class PolicyChangedError(ConfigurationError):
    """The policy is not that of this session. Another attempt does not help."""


class FreshCredentials:
    """Reads policy and credentials anew. A script may change its folder and its environment meanwhile."""

    def __init__(self, environ: Mapping[str, str], run_id: str, policy_digest: bytes) -> None:
        self._environ = {
            name: value if name == _COMMAND or not value else _absolute(name, value)
            for name, value in environ.items()
            if name in _READ
        }
        self._run_id = run_id
        self._policy_digest = policy_digest

    @contextmanager
    def read(self) -> Iterator[tuple[Policy, Prover]]:
        """Yield the policy and a prover; their keys are wiped afterwards, and in a child that is forked meanwhile.

        Raises ConfigurationError.
        """
        settings = replace(Settings.from_environment(self._environ), run_id=self._run_id)
        try:
            with closing(JoinCredentials(settings)) as own:
                policy, prover = own.query()
                if policy.digest != self._policy_digest:
                    raise PolicyChangedError(
                        "its policy was changed while the session went on: start the run again, with one policy on all machines"
                    )
                yield policy, prover
        finally:
            settings.forget()


def _absolute(name: str, value: str) -> str:
    """Return the value of a setting that names a file, as an absolute path."""
    if name in ("RINGFENCE_SPIFFE_SOCKET", "RINGFENCE_SAME_HOST"):
        return value
    return os.path.abspath(value)
