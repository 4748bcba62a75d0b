"""Policy and credentials used during a join; wiped in forked children."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ringfence.admission.policy import Policy, Prover
from ringfence.admission.proofs import kinds
from ringfence.admission.proofs.secret import SharedSecret
from ringfence.config.settings import Settings
from ringfence.errors import ConfigurationError
from ringfence.session.join.background import run_with_timeout
from ringfence.session.join.provers import Machine, admission_of, effective_policy, prover_of, shared_of
from ringfence.transport.fork import register_fork_cleanup, unregister_fork_cleanup


class JoinCredentials:
    """A worker's settings and the key derived from its secret. A certificate's prover uses the settings' own key."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._shared: SharedSecret | None = None
        register_fork_cleanup(self)
        self._shared = shared_of(settings)

    def admission(self, *, timeout: float, warn_after: float, warn: Callable[[], None]) -> tuple[Policy, Prover]:
        """Return the policy, and the prover of the first rule for which this worker has all credentials.

        That may query the kernel or a driver, which can block: see `run_with_timeout` for the parameters. Raises TimeoutError,
        or ConfigurationError if this worker has no credential that its own policy admits.
        """
        if self.settings.policy is None:
            return self.query()  # needs neither kernel nor driver
        return run_with_timeout(
            self.query, name="ringfence asks its machine", timeout=timeout, warn_after=warn_after, warn=warn
        )

    def query(self) -> tuple[Policy, Prover]:
        """Like `admission`, in the calling thread, for as long as that takes."""
        return admission_of(self.settings, self._shared, Machine())

    @property
    def reads_lists(self) -> bool:
        """Whether the policy names files about revoked certificates, which are renewed while it stays the same."""
        return self.settings.policy is not None and kinds.reads_lists(self.settings.policy)

    def read_policy_again(self, policy: Policy) -> Policy:
        """Return the policy with the files of now; `policy` itself if none has changed. Raises PolicyError.

        If the result has another digest, it is not the policy of this run, and must not be used.
        """
        file = self.settings.read_policy_again()
        if file is None or file == self.settings.policy:
            return policy
        found = effective_policy(self.settings, file, self._shared, Machine())
        if found.digest == policy.digest:
            self.settings = replace(self.settings, policy=file)
        return found

    def read_certificate_again(self, kind: int) -> Prover | None:
        """Return the prover with the certificate of now, or None if it has not changed.

        Raises ConfigurationError, and keeps the certificate of before, also if the policy would have this worker present
        another kind of proof.
        """
        before = self.settings
        if before.certificate is None or before.certificate_source is None or before.policy is None:
            return None
        certificate = before.certificate_source()
        if certificate.chain == before.certificate.chain:
            return None
        settings = replace(before, certificate=certificate)
        prover = prover_of(settings, self._shared, before.policy, Machine())
        if prover.kind != kind:
            raise ConfigurationError("with the certificate of now, this worker would present another kind of proof")
        self.settings = settings
        before.certificate.forget()
        return prover

    def close(self) -> None:
        """Wipe the derived key at the end of the join, even if an exception's frames or a thread still refer to it.

        The settings belong to the caller.
        """
        if self._shared is not None:
            self._shared.forget()
        unregister_fork_cleanup(self)

    def forget(self) -> None:
        """Wipe all keys in a forked child, those of the caller's settings included."""
        self.settings.forget()
        if self._shared is not None:
            self._shared.forget()
