"""Proof by Intel TDX: Intel's hardware attests that the worker runs in a TD with the measurements of the policy.

proof = the quote, without padding. Its REPORTDATA is the binding. `dcap-qvl` verifies signatures, TCB levels and revocations
under the pinned root of Intel; this module verifies the encoding of the quote and the rules of the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from ringfence import keys
from ringfence.admission import roots
from ringfence.admission.policy import Clock
from ringfence.admission.policy_file.toml_table import TomlTable
from ringfence.admission.proofs import tdx_quote
from ringfence.admission.proofs.attestation import MEASURE, AttestationVerifier, encode_lists
from ringfence.admission.proofs.tdx_collateral import Collateral, assemble, check_agreement
from ringfence.errors import AdmissionError, ConfigurationError

KIND: Final = 3
NAME: Final = "TDX"
FETCH: Final = "`ringfence evidence collateral` fetches it"

REGISTERS: Final = ("rtmr0", "rtmr1", "rtmr2", "rtmr3")
UP_TO_DATE: Final = "UpToDate"
RELAUNCH: Final = "TDRelaunchAdvised"  # prefix of statuses that no policy accepts: the host was updated, the TD was not
STATUSES: Final = (
    UP_TO_DATE,
    "SWHardeningNeeded",
    "ConfigurationNeeded",
    "ConfigurationAndSWHardeningNeeded",
    "OutOfDate",
    "OutOfDateConfigurationNeeded",
)  # a revoked platform is never accepted, so its status is not listed


@dataclass(frozen=True)
class Rules:
    """The table [admit.tdx]."""

    mrtd: tuple[bytes, ...]
    rtmrs: tuple[tuple[bytes, ...], ...]  #   four; empty: any value, as the policy states explicitly
    collateral: tuple[Collateral, ...]
    statuses: tuple[str, ...] = (UP_TO_DATE,)
    advisories: tuple[str, ...] = ()  #       accepted of a platform that is not up to date
    mr_config_id: tuple[bytes, ...] = ()  #   empty: any
    mr_owner: tuple[bytes, ...] = ()  #       empty: any
    mr_owner_config: tuple[bytes, ...] = ()  # empty: any
    listed: tuple[
        Collateral, ...
    ] = ()  #    by other rules of the policy: it admits no platform here, and may refuse one

    def content(self) -> bytes:
        """Return a canonical encoding, independent of the order of lists in the policy."""
        lists = [self.mrtd, *self.rtmrs, self.mr_config_id, self.mr_owner, self.mr_owner_config]
        lists += [tuple(each.encode() for each in names) for names in (self.statuses, self.advisories)]
        lists.append(tuple(each.digest for each in self.collateral))
        return encode_lists(lists)

    def explain(self) -> list[str]:
        """Describe what it admits, one line each."""
        lines = ["an Intel TDX guest, never one that its host may debug or migrate"]
        lines.append("with firmware of MRTD " + " or ".join(each.hex() for each in self.mrtd))
        for name, values in zip(REGISTERS, self.rtmrs, strict=True):
            text = " or ".join(each.hex() for each in values)
            lines.append(f"{name.upper()} {text}" if values else f"any {name.upper()}: the policy does not pin it")
        named = (
            ("MRCONFIGID", self.mr_config_id),
            ("MROWNER", self.mr_owner),
            ("MROWNERCONFIG", self.mr_owner_config),
        )
        lines += [f"{name} {' or '.join(each.hex() for each in values)}" for name, values in named if values]
        lines.append("on a platform whose TCB is " + " or ".join(self.statuses))
        if self.advisories:
            lines.append("and which, if it is not up to date, has no other advisory than " + ", ".join(self.advisories))
        for each in self.collateral:
            platform = f"FMSPC {each.fmspc} of the {each.ca} CA"
            lines.append(f"verified with Intel's collateral for {platform}, valid until {each.next_update}")
        return lines


def read_rules(table: TomlTable) -> Rules:
    """Read the keys of a table about a TDX guest. No key can set another root than Intel's. Raises PolicyError."""
    size = tdx_quote.REGISTER_BYTES
    unpinned = table.texts("unpinned", (), allowed=REGISTERS)
    pinned = {name: table.hexes(name, size, None) for name in REGISTERS}
    for name, values in pinned.items():
        if (values is None) != (name in unpinned):
            raise table.error(f"{name} must be pinned, or named in `unpinned`, and not both; {MEASURE}")
    return Rules(
        mrtd=table.hexes("mrtd", size),
        rtmrs=tuple(values or () for values in pinned.values()),
        collateral=_collateral(table, table.texts("collateral"), table.files("collateral")),
        statuses=table.texts("tcb_status", (UP_TO_DATE,), allowed=STATUSES),
        advisories=table.texts("advisories", ()),
        mr_config_id=table.hexes("mr_config_id", size, ()),
        mr_owner=table.hexes("mr_owner", size, ()),
        mr_owner_config=table.hexes("mr_owner_config", size, ()),
    )


def _collateral(table: TomlTable, names: Sequence[str], contents: Sequence[bytes]) -> tuple[Collateral, ...]:
    try:
        return tuple(Collateral.parse(content, name) for name, content in zip(names, contents, strict=True))
    except ValueError as error:
        raise table.error(f"collateral: {error}; {FETCH}") from None


# -- verification ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Claims:
    """The claims of a verified quote."""

    body: tdx_quote.Body
    fmspc: str
    status: str
    advisories: tuple[str, ...]


@cache
def pinned_root() -> bytes:
    """Return Intel's root from the package, in DER. A policy cannot set another."""
    return x509.load_pem_x509_certificate(roots.read("intel-sgx-root.pem")).public_bytes(Encoding.DER)


def authenticate(
    quote: bytes,
    collateral: tuple[Collateral, ...],
    now: float,
    *,
    listed: tuple[Collateral, ...] = (),
    root: bytes | None = None,
) -> Claims:
    """Verify that Intel's hardware signed the quote, whatever its values and the platform's status. Raises AdmissionError.

    The platform must have a file in `collateral`. Of each part, the newest in `collateral` and `listed` is used.
    """
    library = load_library()
    body = tdx_quote.read(quote)
    _check_attributes(body)
    try:
        check_agreement((*collateral, *listed))
    except ValueError as error:  # cannot happen with a policy file, which is checked when it is read
        raise AdmissionError(
            f"collateral: {error}", to_peer="the policy's collateral files contradict each other"
        ) from None
    try:
        parsed = asked(library.parse_quote, quote)
        fmspc, ca = parsed.fmspc().lower(), parsed.ca()
    except ValueError as error:
        raise AdmissionError(f"the quote is malformed: {_short(error)}") from None
    own = next((each for each in collateral if (each.fmspc, each.ca) == (fmspc, ca)), None)
    if own is None:
        known = ", ".join(f"{each.fmspc} of the {each.ca} CA" for each in collateral) or "none"
        to_peer = f"there is no collateral for its platform, FMSPC {fmspc} of the {ca} CA"
        raise AdmissionError(f"{to_peer} (there is: {known}); {FETCH}", to_peer=to_peer)
    try:
        terms = asked(library.QuoteCollateralV3.from_json, assemble(own, (*collateral, *listed)))
        verified = asked(library.verify_with_root_ca, quote, terms, root or pinned_root(), int(now))
    except ValueError as error:
        reason = _short(error)
        hint = f"; its collateral must be current: {FETCH}" if "expired" in reason.lower() else ""
        raise AdmissionError(f"the quote does not verify: {reason}{hint}") from None
    return Claims(body, fmspc, verified.status, tuple(verified.advisory_ids))


def _check_attributes(body: tdx_quote.Body) -> None:
    """Refuse what no policy can allow. dcap-qvl refuses most of it too, without advice."""
    if body.is_debug:
        raise AdmissionError("its host may debug the TD and read its memory: launch it without the debug attribute")
    if not body.has_sept_ve_disabled:
        raise AdmissionError("its host can inject faults into the TD: launch it with SEPT_VE_DISABLE")
    if body.is_migratable or any(body.mr_service_td):
        raise AdmissionError("its host may migrate the TD: launch it without that attribute and without a service TD")
    if body.has_older_module:  # dcap-qvl takes the status from the launch
        raise AdmissionError("its TDX module is older than at the TD's launch (TEE_TCB_SVN2): update the host")


def check(claims: Claims, rules: Rules) -> None:
    """Check the claims against the policy. Raises AdmissionError, which says what to do."""
    body = claims.body
    if claims.status.startswith(RELAUNCH):
        raise AdmissionError(
            f"its TDX module was out of date when the TD was launched ({claims.status}): launch it again"
        )
    if claims.status not in rules.statuses:
        named = ", ".join(claims.advisories) or "no advisory named"
        raise AdmissionError(
            f"its platform's TCB is {claims.status} ({named}): update the host, or accept it in tcb_status"
        )
    unknown = [each for each in claims.advisories if each not in rules.advisories]
    if claims.status != UP_TO_DATE and unknown:
        raise AdmissionError(
            f"its platform's TCB is {claims.status}, with {', '.join(unknown)}: update the host, or name them in advisories"
        )
    values = [
        ("mrtd", body.mrtd, rules.mrtd),
        *zip(REGISTERS, body.rtmrs, rules.rtmrs, strict=True),
        ("mr_config_id", body.mr_config_id, rules.mr_config_id),
        ("mr_owner", body.mr_owner, rules.mr_owner),
        ("mr_owner_config", body.mr_owner_config, rules.mr_owner_config),
    ]
    for name, value, allowed in values:
        if allowed and value not in allowed:
            raise AdmissionError(f"its {name} is {value.hex()}, which the policy does not list; {MEASURE}")


def verify(proof: bytes, report_data: bytes, rules: Rules, now: float, *, root: bytes | None = None) -> Claims:
    """Verify a proof over `report_data`. `root` is for tests; a policy cannot set it. Raises AdmissionError."""
    _check_report_data(tdx_quote.read(proof), report_data)  # cheap and not authenticated: stops replayed quotes early
    claims = authenticate(proof, rules.collateral, now, listed=rules.listed, root=root)
    check(claims, rules)
    _check_report_data(claims.body, report_data)  # the check that counts, on the verified quote
    return claims


def _check_report_data(body: tdx_quote.Body, report_data: bytes) -> None:
    if not keys.same(body.report_data, report_data):
        raise AdmissionError("the quote was made for another connection or another worker (REPORTDATA differs)")


def load_library() -> Any:
    """Import dcap-qvl, which is needed only to verify TDX guests. Raises ConfigurationError if it is missing."""
    try:
        import dcap_qvl
    except ImportError as error:
        raise ConfigurationError(
            f'to verify TDX quotes, dcap-qvl is needed ({error}): python -m pip install "dcap-qvl>=0.7,<0.8"'
        ) from None
    return dcap_qvl


def asked(call: Callable[..., Any], *arguments: object) -> Any:
    """Call the library. A panic inside it, which is not an Exception in Python, raises ValueError."""
    try:
        return call(*arguments)
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"dcap-qvl failed: {error}") from None


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200].removeprefix("Verification failed: ")


def verifier(rules: Rules, clock: Clock, *, root: bytes | None = None) -> AttestationVerifier[Rules]:
    """Return the verifier of TDX quotes by the rules of one table. `root` is for tests."""
    load_library()  # fails at the start, not when the first peer connects
    return AttestationVerifier(KIND, NAME, rules, clock, partial(verify, root=root), roots=root or b"")
