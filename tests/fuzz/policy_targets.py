"""What an administrator writes, and files that a policy names: read completely and strictly, or refused by a PolicyError."""

from __future__ import annotations

import contextlib
import json
import time
from functools import cache
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509 import ocsp

from ringfence.admission.policy_file.policy_file import explain
from ringfence.admission.policy_file.toml_table import parse
from ringfence.admission.proofs import azure, crl, jose, kinds, nvidia, ocsp_status, reference_values, snp, tdx, token
from ringfence.admission.proofs.freshness import Memory
from ringfence.admission.proofs.snp_revocation import RevocationList, check, objection
from ringfence.admission.proofs.tdx_collateral import KEYS, Collateral, assemble, check_agreement
from ringfence.errors import AdmissionError, PolicyError
from tests import certificates
from tests.certificates import Authority, spiffe
from tests.fuzz.target import Target
from tests.unit import nvidia_mint, nvidia_records, ocsp_mint, snp_mint, tdx_records, token_mint

REFUSED = (PolicyError,)
READERS = {
    "tdx": tdx.read_rules,
    "snp": snp.read_rules,
    "nvidia": nvidia.read_rules,
    "token": token.read_rules,
    "azure_snp": azure.read_snp_rules,
    "azure_tdx": azure.read_tdx_rules,
}
WORDS = (
    b"[", b"]", b"[[", b"]]", b"=", b'"', b"'", b'"""', b"\n", b"#", b",", b".", b"{", b"}", b"true", b"false", b"1", b"-1",
    b"0x1", b"1e9", b"inf", b"nan", b"1979-05-27", b"version", b"admit", b"note", b"secret", b"certificate", b"tdx", b"snp",
    b"nvidia", b"token", b"ca", b"ids", b"trust_domain", b"reference_values", b"gpus", b"keys", b"issuer", b"claims", b"mrtd",
    b"private_sum", b"member", b"colluding", b"min_members", b"measurement", b'"90s"', b'"24h"', b"\\u0000", b"\\ud800",
)  # fmt: skip
PCRS = f'vm_id = "a"\npcrs.4 = "{"00" * 32}"\npcrs.7 = ["{"00" * 32}", "{"01" * 32}"]\n'
SNP_RULES = """vmpl = 0
allow_provisional_firmware = true
require_alias_check = false
mitigations = { milan = 0x5, turin = 1 }
minimum_tcb.milan = { bootloader = 4, tee = 0, snp = 24, microcode = 219 }
minimum_tcb.turin = { fmc = 1, bootloader = 4, tee = 0, snp = 24, microcode = 219 }
"""
TEXT = """version = 1
min_workers = 8
max_session_age = "24h"

[[admit]]
note = "trainers"
[admit.certificate]
ca = "ca.pem"
trust_domain = "example.org"
ids = ["spiffe://example.org/trainer/*"]
[admit.secret]

[[admit]]
[admit.nvidia]
reference_values = ["reference_values.toml"]
gpus = 8
protected_pcie = true
revoked = ["41AD48FF92CDC93D9A"]
[admit.token]
issuer = "https://verifier.example"
keys = "keys.json"
audience = "me"
submodules = 8
claims = { "x-nvidia-overall-att-result" = true, ver = ["2.0", "3.0"], tee = { level = 3 } }
submodule_claims = { measres = "success" }

[[admit]]
[admit.secret]
"""


@cache
def _files() -> dict[str, bytes]:
    return {
        "ca.pem": Authority().pem,
        "reference_values.toml": _reference_values()[0],
        "keys.json": token_mint.key_set(*token_mint.SIGNERS),
        "collateral.json": (tdx_records.FOLDER / tdx_records.RECORDS["dstack"].collateral_file).read_bytes(),
    }


def _read(path: str, limit: int) -> bytes:
    try:
        return _files()[path][:limit]
    except KeyError:
        raise FileNotFoundError(2, "No such file or directory") from None


def _policies() -> list[bytes]:
    tables = [each.partition(b"\n") for each in _tables()]
    hardware = b"".join(b"[[admit]]\n[admit.%s]\n%s" % (kind, text) for kind, _, text in tables[2:])
    return [TEXT.encode(), b"version = 1\n[[admit]]\n[admit.secret]\n", b"version = 1\n" + 2 * hardware]


def _read_policy(data: bytes) -> None:
    file = kinds.read(data, _read)
    assert len(kinds.digest_of(file)) == 32
    assert all(line.isprintable() for line in explain(file))
    assert kinds.digest_of(kinds.read(data, _read)) == kinds.digest_of(file)


@cache
def _tables() -> list[bytes]:
    """A line with the kind, then that kind's table."""
    registers = "\n".join(f'rtmr{place} = "{"00" * 48}"' for place in range(4))
    inner = TEXT.split("[admit.nvidia]")[1].split("[admit.token]")
    return [
        b"nvidia\n" + inner[0].encode(),
        b"token\n" + inner[1].split("[[admit]]")[0].encode(),
        f'tdx\nmrtd = "{"00" * 48}"\n{registers}\ncollateral = "collateral.json"\n'.encode(),
        f'snp\nmeasurement = "{"00" * 48}"\n{SNP_RULES}'.encode(),
        f'azure_snp\nmeasurement = "{"00" * 48}"\n{PCRS}{SNP_RULES}'.encode(),
        f'azure_tdx\nmrtd = "{"00" * 48}"\n{registers}\ncollateral = "collateral.json"\n{PCRS}'.encode(),
    ]


def _read_table(data: bytes) -> None:
    kind, _, text = data.partition(b"\n")
    reader = READERS.get(kind.decode("latin-1"))
    if reader is None:
        raise PolicyError("another kind")
    rules: Any = reader(parse(text, _read))
    assert isinstance(rules.content(), bytes)
    assert all(isinstance(line, str) for line in rules.explain())


@cache
def _reference_values() -> list[bytes]:
    records = (nvidia_records.RECORDED_HOPPER, nvidia_records.RECORDED_BLACKWELL)
    claims = [nvidia.verify_report(one.gpu, one.nonce, nvidia_records.NOW) for one in records]
    return [reference_values.write(each.reference_values()).encode() for each in claims]


def _read_reference_values(data: bytes) -> None:
    found = reference_values.read(data, "the file")
    assert reference_values.read(reference_values.write(found).encode(), "the file") == found


def _key_sets() -> list[bytes]:
    return [token_mint.key_set(*token_mint.SIGNERS), (nvidia_records.FOLDER / "nras_recovered_jwks.json").read_bytes()]


def _read_keys(data: bytes) -> None:
    for key in jose.read_keys(data, "the file"):
        assert key.algorithm in ("ES256", "ES384", "RS256")
        assert key.spki


def _collaterals() -> list[bytes]:
    return [(tdx_records.FOLDER / each.collateral_file).read_bytes() for each in tdx_records.RECORDS.values()]


def _read_collateral(data: bytes) -> None:
    """What was read can be put together with what was recorded, or contradicts it."""
    found, recorded = Collateral.parse(data, "the file"), tdx_records.RECORDS["near"].collateral[0]
    assert found.next_update.isascii() and len(found.digest) == 32
    with contextlib.suppress(ValueError):
        check_agreement((found, recorded))
    for one, other in ((found, recorded), (recorded, found)):
        assert set(json.loads(assemble(one, (other,)))) == KEYS


@cache
def _revoked() -> list[bytes]:
    lists = [snp_mint.foundry(product).revoked(*range(2, 5)) for product in ("milan", "turin")]
    return [each.raw for each in lists] + [lists[0].list.public_bytes(Encoding.PEM)]


def _read_revoked(data: bytes) -> None:
    """Accessing the fields of a list raises nothing unexpected, and a changed list is refused."""
    found, line = RevocationList.parse(data), snp_mint.foundry("milan").roots["milan"]
    assert found.describe().isprintable() and len(found.digest) == 32
    same = found.list.tbs_certlist_bytes == RevocationList(_revoked()[0]).list.tbs_certlist_bytes  # what is signed
    assert same or objection(found, [line.root], time.time()) is not None, "a changed list was believed"
    with contextlib.suppress(AdmissionError):
        check([found], [found], line.root, line.vcek_signer, "Milan", time.time())


@cache
def _authority() -> Authority:
    return Authority()


@cache
def _worker() -> tuple[bytes, ...]:
    return _authority().issue(spiffe("trainer/1"), serial=11).chain


@cache
def _lists() -> list[bytes]:
    point = x509.IssuingDistributionPoint(
        [x509.UniformResourceIdentifier("http://crl.example/1")], None, False, False, None, False, False
    )
    found = [_authority().revoke(12), _authority().revoke(*range(20, 25), number=None, extra=[(point, True)])]
    return [*found, b"".join(x509.load_der_x509_crl(each).public_bytes(Encoding.PEM) for each in found)]


def _read_lists(data: bytes) -> None:
    """A list that admits the worker says what its authority has signed."""
    lists = crl.read("the file", data)
    authority, now = _authority(), certificates.now()
    for each in lists:
        assert each.describe().isprintable() and each.validity.end is not None and isinstance(each.serials, frozenset)
    revocation = crl.CrlRule(86400, tuple(lists), frozenset({crl.identity(authority.certificate)}), Memory())
    try:
        chain = [x509.load_der_x509_certificate(_worker()[0]), authority.certificate]
        revocation.check("the worker", chain, now)
    except AdmissionError:
        return
    signed = {x509.load_der_x509_crl(each).tbs_certlist_bytes for each in _lists()[:2]}
    assert any(each.list.tbs_certlist_bytes in signed for each in lists), "a changed list was believed"


@cache
def _top() -> nvidia_mint.Issuer:
    return nvidia_mint.root()


@cache
def _device() -> nvidia_mint.Device:
    return nvidia_mint.Device.under(_top())


@cache
def _responses() -> list[bytes]:
    rom, provisioner, *_ = ocsp_mint.path_of(_device(), _top())
    responder = ocsp_mint.responder(provisioner)
    return [
        *ocsp_mint.responses(_device(), _top()),
        ocsp_mint.response(rom, provisioner, signer=responder),
        ocsp_mint.response(rom, provisioner, ocsp_mint.REVOKED, by_key=True),
    ]


def _read_response(data: bytes) -> None:
    """A response that admits a device says what its issuer has signed."""
    found = ocsp_status.read("the file", data)
    assert all(isinstance(each.serial, int) for each in found.statuses)
    path = [each.certificate for each in ocsp_mint.path_of(_device(), _top())]
    others = [ocsp_status.read("another", each) for each in _responses()[1:3]]
    try:
        revocation = ocsp_status.OcspRule(86400, (found, *others), Memory())
        revocation.check("the device", [path[0], *path], nvidia_mint.NOW)
    except AdmissionError:
        return
    signed = {ocsp.load_der_ocsp_response(each).tbs_response_bytes for each in _responses()}
    assert found.response.tbs_response_bytes in signed, "a changed response was believed"


TARGETS = (
    Target("policy", _policies, _read_policy, REFUSED, bounded=1000, words=WORDS),
    Target("policy-tables", _tables, _read_table, REFUSED, bounded=1000, words=WORDS),
    Target(
        "reference_values", _reference_values, _read_reference_values, REFUSED, bounded=500, longest=16384, words=WORDS
    ),
    Target(
        "key-set", _key_sets, _read_keys, REFUSED, bounded=1000, words=(b'"kty"', b'"oct"', b'"d"', b'"e"', b"null")
    ),
    Target("crl", _lists, _read_lists, (ValueError,), bounded=500),
    Target("ocsp", _responses, _read_response, (ValueError,), bounded=500),
    Target("revoked", _revoked, _read_revoked, (ValueError,), bounded=500),
    Target("collateral", _collaterals, _read_collateral, (ValueError,), bounded=500, longest=32768),
)
