"""Collateral: Intel's signed statements about its platforms (TCB levels, the quoting enclave's identity, revocations).

It comes from files that the policy names; `ringfence evidence collateral` fetches them. It is signed by Intel, so it need not
be fetched from Intel; it is part of the policy, so it is the same for all workers, and a peer cannot present an older one.

A file has four parts, and files share some: the quoting enclave's identity and the root's list of revoked certificates are
the same for all platforms. Of each part the newest in any file of the policy is used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.x509.oid import NameOID

from ringfence.admission.proofs.certificate_path import extension_of

KEYS: Final = frozenset(
    {
        "pck_crl_issuer_chain",
        "root_ca_crl",
        "pck_crl",
        "tcb_info_issuer_chain",
        "tcb_info",
        "tcb_info_signature",
        "qe_identity_issuer_chain",
        "qe_identity",
        "qe_identity_signature",
    }
)
_AUTHORITIES: Final = {"Intel SGX PCK Platform CA": "platform", "Intel SGX PCK Processor CA": "processor"}
_MESSAGE_CHARACTERS: Final = 500  # libraries quote malformed input, however long it is


@dataclass(frozen=True)
class Part:
    """One signed statement of a collateral file, with its signature and the certificates of its signer."""

    name: str
    about: str  #                             its FMSPC or authority; empty: all platforms
    order: tuple[int, datetime, int]  #       greater is newer: number, issue date, number of revocations
    end: datetime
    texts: tuple[tuple[str, str], ...]  #     keys and values of the file
    said: str = ""  #                         the signed text; empty for revocation lists
    revoked: frozenset[int] = frozenset()  #  serial numbers


@dataclass(frozen=True)
class Collateral:
    """The collateral of one platform type (FMSPC) with PCK certificates of one authority."""

    text: str
    fmspc: str  #       12 hexadecimal digits, lower case
    ca: str  #          "platform" or "processor"
    parts: tuple[Part, ...]
    source: str = field(default="this collateral", compare=False)  # the file's name, for messages

    @classmethod
    def parse(cls, content: bytes, source: str = "this collateral") -> Collateral:
        """Parse a collateral file. Its signatures are checked when a quote is verified. Raises ValueError."""
        text = content.decode("utf-8")
        try:
            found = json.loads(text)
            if not isinstance(found, dict) or set(found) != KEYS or not all(isinstance(v, str) for v in found.values()):
                raise ValueError("it must have " + ", ".join(sorted(KEYS)))
            info, identity = json.loads(found["tcb_info"]), json.loads(found["qe_identity"])
            if info["id"] != "TDX" or not isinstance(info["fmspc"], str):
                raise ValueError("the collateral is not for TDX")
            fmspc, ca = info["fmspc"].lower(), _authority(found["pck_crl"])
            parts = (
                _statement(found, "tcb_info", fmspc, info),
                _statement(found, "qe_identity", "", identity),
                _revocations(found, "root_ca_crl", ""),
                _revocations(found, "pck_crl", ca),
            )
            min(each.end for each in parts)  # TypeError: a time without a zone
            return cls(text, fmspc, ca, parts, source)
        except (ValueError, KeyError, TypeError, RecursionError, UnsupportedAlgorithm, x509.InvalidVersion) as error:
            name = "" if type(error) is ValueError else f"{type(error).__name__} "
            raise ValueError(f"not a collateral file: {name}{error}"[:_MESSAGE_CHARACTERS]) from None

    @property
    def next_update(self) -> str:
        """When the first of its parts expires."""
        return f"{min(each.end for each in self.parts):%Y-%m-%dT%H:%M:%SZ}"

    @cached_property
    def digest(self) -> bytes:
        return hashlib.sha256(self.text.encode()).digest()


def check_agreement(listed: Iterable[Collateral]) -> None:
    """Check that the files do not contradict each other. Raises ValueError, which names two files and says what to do.

    Each platform has one file, so that an older one cannot admit what a newer one refuses. The newest list of revoked
    certificates must include the older ones, so that using it applies the revocations of all files.
    """
    platforms: dict[tuple[str, str], Collateral] = {}
    newest: dict[tuple[str, str], tuple[Part, Collateral]] = {}
    for each in listed:
        other = platforms.setdefault((each.fmspc, each.ca), each)
        if other != each:
            keep, drop = (each, other) if each.parts[0].order > other.parts[0].order else (other, each)
            raise ValueError(
                f"{other.source} and {each.source} are both for FMSPC {each.fmspc} and the {each.ca} CA: "
                f"keep {keep.source}, which is newer, and list {drop.source} no longer"
            )
        for part in each.parts:
            known = newest.setdefault((part.name, part.about), (part, each))
            (old, old_file), (new, new_file) = sorted((known, (part, each)), key=lambda one: one[0].order)
            if not old.revoked <= new.revoked:
                raise ValueError(
                    f"{part.name} of {old_file.source} revokes certificates that {new_file.source} does not: "
                    "fetch both again"
                )
            if old.order == new.order and old.said != new.said:
                raise ValueError(
                    f"{part.name} differs between {old_file.source} and {new_file.source} with the same number and date: "
                    "fetch both again"
                )
            newest[part.name, part.about] = (new, new_file)


def assemble(own: Collateral, listed: Iterable[Collateral]) -> str:
    """Return the collateral for the platform of `own`, with the newest listed version of each part, valid or not."""
    parts = [part for each in listed for part in each.parts]
    texts: dict[str, str] = {}
    for mine in own.parts:
        fitting = (each for each in parts if (each.name, each.about) == (mine.name, mine.about))
        texts |= max((mine, *fitting), key=lambda part: part.order).texts
    return json.dumps(texts)


# -- reading --------------------------------------------------------------------------------------------------------


def _authority(digits: str) -> str:
    """Return the authority whose PCK certificates a list revokes."""
    names = x509.load_der_x509_crl(bytes.fromhex(digits)).issuer.get_attributes_for_oid(NameOID.COMMON_NAME)
    found = _AUTHORITIES.get(str(names[0].value)) if len(names) == 1 else None
    if found is None:
        raise ValueError("pck_crl was not issued by an authority for PCK certificates")
    return found


def _statement(found: dict[str, str], name: str, about: str, said: Any) -> Part:
    number = said["tcbEvaluationDataNumber"]
    if type(number) is not int:
        raise ValueError(f"tcbEvaluationDataNumber of {name} is not a number")
    begin, end = (datetime.fromisoformat(said[key]) for key in ("issueDate", "nextUpdate"))
    if begin.tzinfo is None:
        raise ValueError(f"issueDate of {name} has no time zone")
    keys = (name, f"{name}_signature", f"{name}_issuer_chain")
    return Part(name, about, (number, begin, 0), end, tuple((key, found[key]) for key in keys), said=found[name])


def _revocations(found: dict[str, str], name: str, about: str) -> Part:
    revoked = x509.load_der_x509_crl(bytes.fromhex(found[name]))
    number = extension_of(revoked, x509.CRLNumber)
    serials = frozenset(each.serial_number for each in revoked)
    keys = (name,) if name == "root_ca_crl" else (name, f"{name}_issuer_chain")
    end = revoked.next_update_utc or datetime.max.replace(tzinfo=UTC)
    order = (0 if number is None else number.crl_number, revoked.last_update_utc, len(serials))
    return Part(name, about, order, end, tuple((key, found[key]) for key in keys), revoked=serials)
