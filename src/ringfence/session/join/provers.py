"""The policy and the prover of a worker, from its settings."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

from ringfence.admission.policy import Clock, Policy, Prover
from ringfence.admission.policy_file.policy_file import PolicyFile
from ringfence.admission.proofs import (
    authorities,
    azure,
    bundle,
    certificate,
    hcl_report,
    kinds,
    nvidia,
    snp,
    tdx,
    token,
)
from ringfence.admission.proofs.attestation import AttestationProver
from ringfence.admission.proofs.secret import SharedSecret
from ringfence.config.settings import Settings
from ringfence.errors import AdmissionError, ConfigurationError
from ringfence.evidence import guest, nvml, token_command, tpm, tsm
from ringfence.evidence.azure_guest import NAMES, AzureGuest, Open
from ringfence.evidence.metadata import Metadata
from ringfence.keys import SAME_HOST

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Machine:
    """Access to this machine's evidence and clock."""

    clock: Clock = time.time
    files: tsm.KernelFiles = field(default_factory=tsm.KernelFiles)
    gpus: Callable[[], nvml.Library] = nvml.load
    open_tpm: Open = tpm.opened
    metadata: Metadata = field(default_factory=Metadata)


class UnusableCredentialError(ConfigurationError):
    """This worker has a credential for a rule that its own policy would refuse."""


# Returns a prover whose proofs the rules may admit. Raises ConfigurationError if there is none.
Maker = Callable[[Settings, SharedSecret | None, Any, Machine], Prover]


def policy_of(settings: Settings, machine: Machine | None = None) -> tuple[Policy, Prover]:
    """Return the policy and the prover of one worker.

    Raises ConfigurationError if it has no credential that its own policy admits.
    """
    return admission_of(settings, shared_of(settings), machine or Machine())


def shared_of(settings: Settings) -> SharedSecret | None:
    """Return prover and verifier of the shared secret, with a key derived from it, or None without a secret."""
    return None if settings.secret is None else SharedSecret(settings.secret, settings.run_id)


def admission_of(settings: Settings, shared: SharedSecret | None, machine: Machine) -> tuple[Policy, Prover]:
    """Like `policy_of`, with the result of `shared_of`: derives no further key. Kernel and drivers may be slow."""
    if settings.policy is not None:
        policy = effective_policy(settings, settings.policy, shared, machine)
        return policy, prover_of(settings, shared, settings.policy, machine)
    if shared is None:
        raise ConfigurationError("neither a policy nor a secret: set RINGFENCE_POLICY or RINGFENCE_SECRET_FILE")
    return Policy((shared,), same_host=settings.same_host), shared


def effective_policy(settings: Settings, file: PolicyFile, shared: SharedSecret | None, machine: Machine) -> Policy:
    """Return the policy of a file, made stricter by the settings."""
    policy = kinds.policy_of(file, machine.clock, shared)
    return policy if settings.same_host == SAME_HOST[0] else replace(policy, same_host=settings.same_host)


def prover_of(settings: Settings, shared: SharedSecret | None, policy: PolicyFile, machine: Machine) -> Prover:
    """Return the prover for the first rule for which this worker has all credentials. Warns of unusable credentials."""
    missing: list[str] = []
    error_type = ConfigurationError
    for number, rule in enumerate(policy.rules, 1):
        try:
            provers = [MAKERS[kind](settings, shared, rules, machine) for kind, rules in rule.proofs]
            return bundle.prover_for(provers)
        except ConfigurationError as error:
            missing.append(f"rule {number}: {error}")
            if isinstance(error, UnusableCredentialError):
                error_type = UnusableCredentialError
                _log.warning("%s; this worker tries the next rule of its policy", missing[-1])
    raise error_type("this worker has no credential that its own policy admits. " + "; ".join(missing))


# -- one kind each --------------------------------------------------------------------------------------------------


def _secret(settings: Settings, shared: SharedSecret | None, rules: object, machine: Machine) -> Prover:
    if shared is None:
        raise ConfigurationError("set RINGFENCE_SECRET_FILE")
    return shared


def _certificate(settings: Settings, shared: SharedSecret | None, rules: certificate.Rules, machine: Machine) -> Prover:
    if settings.certificate is None:
        raise ConfigurationError("set RINGFENCE_CERTIFICATE_FILE and RINGFENCE_KEY_FILE, or RINGFENCE_SPIFFE_SOCKET")
    try:
        certificate.verify_chain(rules, settings.certificate.chain, machine.clock())
    except AdmissionError as error:
        trusted = " or ".join(map(authorities.describe, rules.authorities))
        own = authorities.describe_issued(settings.certificate.chain[0])
        raise UnusableCredentialError(
            f"this worker's own certificate would be refused: {error}. It is {own}; the policy trusts {trusted}"
        ) from error
    return certificate.CertificateProver(settings.certificate)


def _tdx(settings: Settings, shared: SharedSecret | None, rules: tdx.Rules, machine: Machine) -> Prover:
    _check_guest(machine, tsm.TDX)
    return AttestationProver(tdx.KIND, lambda digest: guest.tdx(digest, machine.files))


def _snp(settings: Settings, shared: SharedSecret | None, rules: snp.Rules, machine: Machine) -> Prover:
    _check_guest(machine, tsm.SNP)
    own = _vcek(settings)

    def collect(digest: bytes) -> bytes:
        return snp.encode(*guest.snp(digest, machine.files, certificate=own, level=rules.vmpl))

    return AttestationProver(snp.KIND, collect)


def _vcek(settings: Settings) -> bytes | None:
    try:
        return None if settings.vcek is None else guest.read_certificate(settings.vcek)
    except ValueError as error:
        raise UnusableCredentialError(f"RINGFENCE_VCEK_FILE is not a certificate: {error}") from error


def _check_guest(machine: Machine, wanted: str) -> None:
    found = tsm.provider(machine.files)
    if found != wanted:
        raise ConfigurationError(f"the kernel provides {found}, and this rule asks for {wanted}")


def _nvidia(settings: Settings, shared: SharedSecret | None, rules: nvidia.Rules, machine: Machine) -> Prover:
    library = machine.gpus()
    nvml.count(library)  # raises if this machine has none
    return AttestationProver(nvidia.KIND, lambda digest: nvidia.encode(nvml.collect(nvidia.nonce_of(digest), library)))


def _token(settings: Settings, shared: SharedSecret | None, rules: token.Rules, machine: Machine) -> Prover:
    command = settings.token_command
    if not command:
        raise ConfigurationError("set RINGFENCE_TOKEN_COMMAND to a command that prints a token for a nonce")

    def collect(digest: bytes) -> bytes:
        answer = token_command.fetch(command, token.nonce_of(digest))
        return token.encode(*token.read_answer(answer))

    return AttestationProver(token.KIND, collect)


def _azure_snp(settings: Settings, shared: SharedSecret | None, rules: azure.Rules, machine: Machine) -> Prover:
    own, vm = _vcek(settings), _azure_guest(machine, hcl_report.SNP)
    return AttestationProver(azure.SNP_KIND, lambda digest: vm.snp(azure.nonce_of(digest), own))


def _azure_tdx(settings: Settings, shared: SharedSecret | None, rules: azure.Rules, machine: Machine) -> Prover:
    vm = _azure_guest(machine, hcl_report.TDX)
    return AttestationProver(azure.TDX_KIND, lambda digest: vm.tdx(azure.nonce_of(digest)))


def _azure_guest(machine: Machine, wanted: int) -> AzureGuest:
    vm = AzureGuest(machine.open_tpm, machine.metadata)
    if vm.kind() != wanted:
        raise ConfigurationError(f"this VM runs on {NAMES[vm.kind()]}, and this rule asks for {NAMES[wanted]}")
    return vm


MAKERS: Final[dict[str, Maker]] = {
    "secret": _secret,
    "certificate": _certificate,
    "tdx": _tdx,
    "snp": _snp,
    "nvidia": _nvidia,
    "token": _token,
    "azure_snp": _azure_snp,
    "azure_tdx": _azure_tdx,
}
