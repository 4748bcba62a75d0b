"""What an administrator writes, and files that a policy names: read completely and strictly, or refused by a PolicyError."""

from __future__ import annotations

import contextlib
import json
import time
from functools import cache
from typing import Any

from cryptography.hazmat.primitives.serialization import Encoding

from ringfence.admission.proofs import jose, kinds, nvidia, reference_values, snp, tdx, token
from ringfence.admission.proofs.snp_revocation import RevocationList, check, objection
from ringfence.admission.proofs.tdx_collateral import KEYS, Collateral, assemble, check_agreement
from ringfence.errors import AdmissionError, PolicyError
from ringfence.policy.policy_file import explain
from ringfence.policy.toml_table import parse
from tests.certificates import Authority
from tests.fuzz.target import Target
from tests.unit import nvidia_records, snp_mint, tdx_records, token_mint

REFUSED = (PolicyError,)
READERS = {"tdx": tdx.read_rules, "snp": snp.read_rules, "nvidia": nvidia.read_rules, "token": token.read_rules}
WORDS = (
    b"[", b"]", b"[[", b"]]", b"=", b'"', b"'", b'"""', b"\n", b"#", b",", b".", b"{", b"}", b"true", b"false", b"1", b"-1",
    b"0x1", b"1e9", b"inf", b"nan", b"1979-05-27", b"version", b"admit", b"note", b"secret", b"certificate", b"tdx", b"snp",
    b"nvidia", b"token", b"ca", b"ids", b"trust_domain", b"reference_values", b"gpus", b"keys", b"issuer", b"claims", b"mrtd",
    b"measurement", b'"90s"', b'"24h"', b"\\u0000", b"\\ud800",
)  # fmt: skip
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


TARGETS = (
    Target("policy", _policies, _read_policy, REFUSED, bounded=1000, words=WORDS),
    Target("policy-tables", _tables, _read_table, REFUSED, bounded=1000, words=WORDS),
    Target(
        "reference_values", _reference_values, _read_reference_values, REFUSED, bounded=500, longest=16384, words=WORDS
    ),
    Target(
        "key-set", _key_sets, _read_keys, REFUSED, bounded=1000, words=(b'"kty"', b'"oct"', b'"d"', b'"e"', b"null")
    ),
    Target("revoked", _revoked, _read_revoked, (ValueError,), bounded=500),
    Target("collateral", _collaterals, _read_collateral, (ValueError,), bounded=500, longest=32768),
)
