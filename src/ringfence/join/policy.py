"""From a worker's settings: what admits to this run, and what this worker shows."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from ringfence.admission.policy import Clock, Policy, Prover
from ringfence.admission.proofs import bundle, catalogue, certificate, nvidia, token
from ringfence.admission.proofs.secret import SharedSecret
from ringfence.errors import AdmissionError, ConfigurationError
from ringfence.evidence import nvml
from ringfence.evidence.token_command import fetch_with
from ringfence.policy.file import PolicyFile, Rule
from ringfence.settings import Settings

Maker = Callable[
    [Settings, Any, Clock], Prover
]  # of a proof, for a worker, to these rules; ConfigurationError: it cannot


def policy_of(settings: Settings, clock: Clock = time.time) -> tuple[Policy, Prover]:
    """The judge and the prover of one worker. ConfigurationError if it has nothing that its own policy would admit."""
    shared = None if settings.secret is None else SharedSecret(settings.secret, settings.run_id)
    if settings.policy is not None:
        policy = catalogue.policy_of(settings.policy, clock, shared)
        return policy, _prover(settings, settings.policy, clock)
    if shared is None:
        raise ConfigurationError("neither a policy nor a secret: set RINGFENCE_POLICY or RINGFENCE_SECRET_FILE")
    return Policy((shared,)), shared


def _prover(settings: Settings, policy: PolicyFile, clock: Clock) -> Prover:
    """For the first rule that this worker has everything for."""
    missing = []
    for number, rule in enumerate(policy.rules, 1):
        try:
            return bundle.together(_provers(settings, rule, clock))
        except ConfigurationError as error:
            missing.append(f"rule {number}: {error}")
    raise ConfigurationError("this worker has nothing that its own policy admits. " + "; ".join(missing))


def _provers(settings: Settings, rule: Rule, clock: Clock) -> list[Prover]:
    return [MAKERS[kind](settings, rules, clock) for kind, rules in rule.proofs]


def _secret(settings: Settings, rules: object, clock: Clock) -> Prover:
    if settings.secret is None:
        raise ConfigurationError("set RINGFENCE_SECRET_FILE")
    return SharedSecret(settings.secret, settings.run_id)


def _certificate(settings: Settings, rules: certificate.Rules, clock: Clock) -> Prover:
    if settings.certificate is None:
        raise ConfigurationError("set RINGFENCE_CERTIFICATE_FILE and RINGFENCE_KEY_FILE")
    try:
        certificate.verify_chain(rules, settings.certificate.chain, clock())
    except AdmissionError as error:
        raise ConfigurationError(f"this worker's own certificate would be refused: {error}") from error
    return certificate.CertificateProver(settings.certificate)


def _nvidia(settings: Settings, rules: nvidia.Rules, clock: Clock) -> Prover:
    library = nvml.load()
    found = nvml.count(library)
    if found not in nvidia.GPUS:
        raise ConfigurationError(f"this machine has {found} GPUs; a worker shows {nvidia.GPUS[0]} to {nvidia.GPUS[-1]}")
    return nvidia.NvidiaProver(lambda nonce: nvml.collect(nonce, library))


def _token(settings: Settings, rules: token.Rules, clock: Clock) -> Prover:
    if not settings.token_command:
        raise ConfigurationError("set RINGFENCE_TOKEN_COMMAND to a command that prints a token for a nonce")
    return token.TokenProver(fetch_with(settings.token_command))


MAKERS: Final[dict[str, Maker]] = {
    "secret": _secret,
    "certificate": _certificate,
    "nvidia": _nvidia,
    "token": _token,
}
