"""What `ringfence policy check` prints about revocation: how old lists are, and what cannot be revoked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from ringfence.errors import AdmissionError

if TYPE_CHECKING:
    from ringfence.admission.policy_file.policy_file import PolicyFile
    from ringfence.admission.proofs import certificate, crl
    from ringfence.admission.proofs.freshness import Validity

T = TypeVar("T")

_HOW = {
    "secret": "a shared secret: replace it on all workers (`ringfence secret rotate`)",
    "certificate": "certificates: they admit until they expire; name lists of revoked ones (crl, crl_max_age)",
    "snp": "the keys that sign SEV-SNP's VCEKs and VLEKs: name AMD's lists (crl)",
    "chips": "single SEV-SNP chips: AMD's lists do not name them; list the admitted ones (chip_id)",
    "vlek": "keys that AMD issued to a cloud provider (VLEK): they do not name a chip",
    "nvidia": "certificates of GPUs, but for the serial numbers in revoked: name NVIDIA's responses (ocsp, ocsp_max_age)",
    "token": "tokens: they admit until they expire; remove the key of their service from keys",
}


class ListStatus(NamedTuple):
    """The age of a list or of responses."""

    what: str
    issued: str
    age: str
    valid_until: str | None

    def __str__(self) -> str:
        end = "" if self.valid_until is None else f", valid until {self.valid_until}"
        return f"{self.what}: issued {self.age}, at {self.issued}{end}"


def statuses(policy: PolicyFile, now: float) -> tuple[list[ListStatus], list[str]]:
    """Return the newest list of each issuer and the oldest of the OCSP responses, and which of them are not current."""
    from ringfence.admission.proofs import certificate, crl, nvidia, ocsp_status

    found, stale = [], []
    for lists in _once(rules.shared for rules in _rules_of(policy, certificate.Rules)):
        newest: dict[bytes, crl.Crl] = {}
        for each in lists.lists:
            known = newest.get(each.issuer)
            newest[each.issuer] = each if known is None or each.validity.order >= known.validity.order else known
        for one in newest.values():
            found.append(_status(one.describe(), one.validity, now))
            if (objection := one.validity.objection(lists.max_age, now, crl.KEY)) is not None:
                stale.append(f"{one.describe()}: it {objection}")
    for responses in _once(rules.shared for rules in _rules_of(policy, nvidia.Rules)):
        latest: dict[object, Validity] = {}
        for response in responses.responses:
            for said in response.statuses:
                about = (said.issuer_name, said.issuer_key, said.serial)
                latest[about] = max(latest.get(about, said.validity), said.validity, key=lambda each: each.order)
        oldest = min(latest.values(), key=lambda each: each.order)
        what = f"OCSP responses for {len(latest)} certificates of GPUs, the oldest"
        found.append(_status(what, oldest, now))
        late = [each.objection(responses.max_age, now, ocsp_status.KEY) for each in latest.values()]
        if any(late):
            stale.append(f"{sum(each is not None for each in late)} of {len(latest)} OCSP responses (ocsp)")
    return found, stale


def _status(what: str, validity: Validity, now: float) -> ListStatus:
    from ringfence.admission.proofs.freshness import age_text

    end = None if validity.end is None else f"{validity.end:%Y-%m-%d %H:%M} UTC"
    return ListStatus(what, f"{validity.start:%Y-%m-%d %H:%M} UTC", age_text(validity, now), end)


def unusable(policy: PolicyFile) -> tuple[list[str], list[str]]:
    """Return lists that their authorities did not sign, and authorities without a list where the policy needs one."""
    from ringfence.admission.proofs import authorities, certificate

    forged, missing = [], []
    for rules in _rules_of(policy, certificate.Rules):
        if rules.revocation is None:
            continue
        for authority in rules.authorities:
            try:
                if rules.revocation.newest_of(authority) is None:
                    missing.append(f"a list of revoked certificates (crl) of {authorities.describe(authority)}")
            except AdmissionError as error:
                forged.append(str(error))
    return list(dict.fromkeys(forged)), list(dict.fromkeys(missing))


def not_revocable(policy: PolicyFile) -> list[str]:
    """Return which credentials stay good until they expire, whatever is published about them."""
    from ringfence.admission.proofs import certificate, nvidia, snp

    keys: list[str] = []
    for rule in policy.rules:
        for kind, rules in rule.proofs:
            if isinstance(rules, certificate.Rules):
                keys += [] if _is_listed(rules) else [kind]
            elif isinstance(rules, nvidia.Rules):
                keys += [] if rules.shared else [kind]
            elif isinstance(rules, snp.Rules):
                keys += [] if rules.revoked else ["snp"]
                keys += [] if rules.chip_ids else ["chips"]
                keys += ["vlek"] if rules.vlek_providers else []
            elif kind in _HOW:
                keys.append(kind)
    return [_HOW[key] for key in dict.fromkeys(keys)]


def _is_listed(rules: certificate.Rules) -> bool:
    """Whether every certificate under the rule's authorities needs a list."""
    from cryptography import x509

    from ringfence.admission.proofs import crl

    loaded = (x509.load_der_x509_certificate(each) for each in rules.authorities)
    return rules.shared is not None and {crl.identity(each) for each in loaded} <= rules.shared.authorities


def _rules_of(policy: PolicyFile, kind: type[T]) -> list[T]:
    return [each for rule in policy.rules for _, each in rule.proofs if isinstance(each, kind)]


def _once(shared: Iterable[T | None]) -> list[T]:
    """Return what all rules share, if any has it."""
    return [each for each in shared if each is not None][:1]
