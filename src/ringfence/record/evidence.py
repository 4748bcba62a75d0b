"""The evidence that a worker presented at its join, verified from its log, as of that time (spec/record.md, 13).

A proof covers the worker's entry and its TLS key, and that key signed the key of the log: evidence of another worker or run
does not fit. A child presents to its parent, and rank 0 to a child, which alone could check the connection; and the time is the
worker's word. Evidence shows which hardware vouched for the entry: a machine that meets the policy and is controlled by a liar,
such as a parent, can have its hardware vouch for a process elsewhere.
"""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from ringfence import keys
from ringfence.admission.binding import Binding, proof_digest
from ringfence.admission.encoding import escape
from ringfence.admission.entry import Listing
from ringfence.admission.peer_verification import CLOCKS_DIFFER, check_binding
from ringfence.admission.policy import Evidence, ask
from ringfence.admission.policy_file.policy_file import PolicyFile, Rule
from ringfence.admission.proofs import azure, bundle, freshness, kinds, secret, snp, tdx
from ringfence.admission.proofs.attestation import AttestationVerifier
from ringfence.errors import AdmissionError, PolicyError, ProtocolError
from ringfence.record import begin as first_line
from ringfence.record import json_object
from ringfence.record.json_object import Json
from ringfence.record.log import LogEntry
from ringfence.record.log_file import Blobs

VERIFIED, NOT_KEPT, REFUSED = "verified", "not kept", "refused"
_NAMES: Final = {kind.number: name for name, kind in kinds.KINDS.items()} | {bundle.KIND: "bundle"}
_WHY_NOT_KEPT: Final = {
    "secret": "any member could have made it: it convinces nobody outside",
    "token": "the claims are kept and the signature is not, since a token is a credential: they are the worker's word",
}
_CHARACTERS: Final = 16384  # of the claims of a token


class Shown(NamedTuple):
    """What an audit finds of one proof that a worker presented."""

    kind: str  #    as in a policy: "certificate", "tdx", "snp", "nvidia", "azure_snp", "azure_tdx", "token", "secret"
    verdict: str  # VERIFIED; NOT_KEPT: the record has nothing that convinces a third party; REFUSED
    reason: str  #  why it is refused, or what it does not prove
    facts: dict[str, str]  # what was verified: identity, measurements in hexadecimal form, ...; or what a token claims


def verify_shown(begin: LogEntry, blobs: Blobs, session: Mapping[int, LogEntry] | None = None) -> list[Shown]:
    """Verify what a worker presented at its join, by the policy in the record. A worker that was alone presented nothing.

    `begin` is the first line of its log. `session` has those of verified logs of the same session, by rank: lists of revoked
    certificates are taken from the log of the worker that admitted this one, or else from its own, which may be older.

    Raises RecordError if the line is malformed or a file is missing, and ConfigurationError if a library is.
    """
    listings = first_line.verify(begin, blobs)
    first_line.files_of(begin)  # checks the form of the presentation
    said, own = begin.fields["presentation"], listings[begin.fields["rank"]]
    if not said and len(listings) == 1:
        return []
    if not said or not said["parts"]:
        return [Shown(_NAMES.get(own.kind, ""), REFUSED, "the log does not have what this worker presented", {})]
    try:
        return _verify(begin, blobs, listings, session or {})
    except (AdmissionError, PolicyError, ProtocolError) as error:
        return [Shown(_NAMES.get(part["kind"], ""), REFUSED, str(error), {}) for part in said["parts"]]


def _verify(begin: LogEntry, blobs: Blobs, listings: Sequence[Listing], session: Mapping[int, LogEntry]) -> list[Shown]:
    said, own = begin.fields["presentation"], listings[begin.fields["rank"]]
    policy, note = _policy(begin, blobs, begin.fields["policy"]), ""
    if not json_object.HEX.fullmatch(said["preimage"]):
        raise ProtocolError("the preimage of its binding is not in hexadecimal form")
    binding = Binding(bytes.fromhex(said["preimage"]))
    by = check_binding(binding, own.entry.rank, [each.entry for each in listings]).verifier
    if not -CLOCKS_DIFFER <= begin.at / 1000 - said["at"] <= keys.JOIN_RANGE[1] + CLOCKS_DIFFER:
        raise AdmissionError("its proof was not presented at the join that the log begins with: their times differ")
    if by in session and session[by].fields["roster"] == begin.fields["roster"]:
        policy = _policy(session[by], blobs, begin.fields["policy"])
    elif kinds.reads_lists(policy):
        note = f"not revoked by this worker's own lists: the log of worker {by}, which admitted it, is not here"
    proofs = [(part["kind"], blobs.get(part["proof"]) if part["proof"] else b"") for part in said["parts"]]
    claims = [[blobs.get(name) for name in part["claims"]] for part in said["parts"]]
    tables = [{kinds.KINDS[name].number: rules for name, rules in rule.proofs} for rule in policy.rules]
    fitting = [each for each in tables if sorted(each) == [kind for kind, _ in proofs]]
    if not fitting:
        raise AdmissionError("no rule of the policy asks for these proofs")
    _check_listed(own, said, binding, proofs)
    evidence = [Evidence(own.entry, kind, proof, binding, at=said["at"]) for kind, proof in proofs]
    attempts = [
        [_shown(each, rules[each.kind], claimed, note) for each, claimed in zip(evidence, claims, strict=True)]
        for rules in fitting
    ]
    return min(attempts, key=lambda found: sum(each.verdict == REFUSED for each in found))  # one rule must admit all


def _check_listed(own: Listing, said: Json, binding: Binding, proofs: Sequence[tuple[int, bytes]]) -> None:
    """Check that the roster lists this proof, which it does not of rank 0, if all of it is kept. Raises AdmissionError."""
    kind, whole = (bundle.KIND, bundle.encode(proofs)) if len(proofs) > 1 else proofs[0]
    if not said["kind"] == own.kind == kind:
        raise AdmissionError(f"its proof is of kind {said['kind']}, where the roster says {own.kind}")
    if not all(proof for _, proof in proofs):
        return
    is_listed = own.entry.rank == 0 or proof_digest(kind, binding, whole) == own.proof_digest
    if hashlib.sha256(whole).hexdigest() != said["digest"] or not is_listed:
        raise AdmissionError("its proof is not the one in the roster")


def _policy(begin: LogEntry, blobs: Blobs, digest: str) -> PolicyFile:
    """Return the policy that a log keeps. Raises PolicyError if it has another digest."""
    said = begin.fields
    files = {name: blobs.get(file) for name, file in said["policy_files"].items()}

    def read(name: str, limit: int) -> bytes:
        if name not in files:
            raise FileNotFoundError(errno.ENOENT, "it is not in the record")
        return files[name]

    def list_folder(path: str) -> list[str] | None:
        start = path.rstrip("/") + "/"
        names = [name.removeprefix(start) for name in files if name.startswith(start)]
        return [name for name in names if "/" not in name] or None

    where, text = f"the policy in the log of worker {said['rank']}", files.get(said["policy_file"])
    if text is None:
        policy = PolicyFile((Rule((("secret", secret.Rules()),)),))  # of a worker without a policy file
    else:  # with a memory of its own: a log that is verified later may have older lists
        policy = kinds.read(text, read, where, list_folder, freshness.Memory())
    policy = replace(policy, same_host=said["same_host"])
    if policy.same_host not in keys.SAME_HOST or kinds.digest_of(policy).hex() != digest:
        raise PolicyError(f"{where} is not that of the session: it has another digest")
    return policy


def _shown(evidence: Evidence, rules: Any, claims: Sequence[bytes], note: str) -> Shown:
    """Verify one proof by the rules of one table, as admission does, as of the evidence's time."""
    name = _NAMES[evidence.kind]
    make = kinds.KINDS[name].verifier
    if make is None or name == "token":
        texts = [escape(each.decode("utf-8", "replace"), _CHARACTERS) for each in claims]
        return Shown(name, NOT_KEPT, _WHY_NOT_KEPT[name], {f"claims {n}": text for n, text in enumerate(texts)})
    verifier = make(rules, lambda: 0.0)  # the clock, which `evidence.at` replaces
    try:
        found = ask(verifier.claims if isinstance(verifier, AttestationVerifier) else verifier.verify, evidence)
    except AdmissionError as error:
        return Shown(name, REFUSED, str(error), {})
    return Shown(name, VERIFIED, note if name in ("certificate", "nvidia") else "", _facts(found))


def _facts(claims: object) -> dict[str, str]:
    """Return what a verified proof says. The measurements of a GPU are the policy's reference values for its versions."""
    match claims:
        case str():
            return {"identity": claims}
        case tdx.Claims(body, fmspc, status, advisories):
            registers = {name: value.hex() for name, value in zip(tdx.REGISTERS, body.rtmrs, strict=True)}
            said = {
                "tcb_status": status,
                "advisories": ", ".join(advisories),
                "fmspc": fmspc,
                "debug": _yes(body.is_debug),
            }
            return _hex(body, "mrtd", "mr_config_id", "mr_owner", "mr_owner_config") | registers | said
        case snp.Claims(report, product, tcb):
            said = {
                "product": product.name,
                "tcb": str(tcb),
                "vmpl": str(report.vmpl),
                "debug": _yes(report.policy.debug),
            }
            return _hex(report, "measurement", "host_data", "id_key_digest", "chip_id") | said
        case (hardware, azure.Guest(runtime, _, pcrs)):
            said = {"vm_id": runtime.vm_id, "secure_boot": _yes(runtime.has_secure_boot)}
            return _facts(hardware) | said | {f"pcr{index}": value.hex() for index, value in enumerate(pcrs)}
        case tuple():
            return {
                gpu.device: f"{gpu.model}, driver {gpu.driver}, VBIOS {gpu.vbios}, firmware {gpu.firmware_id.hex()}"
                for gpu in claims
            }
    raise TypeError(type(claims))


def _hex(found: object, *names: str) -> dict[str, str]:
    return {name: getattr(found, name).hex() for name in names}


def _yes(value: bool) -> str:
    return "yes" if value else "no"
