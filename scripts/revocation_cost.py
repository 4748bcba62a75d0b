"""Measure the CPU time of checking certificates against a list of revoked ones, and of OCSP responses.

    python -m scripts.revocation_cost [ENTRIES]

The first check of a session reads the list and verifies its signature; later ones look a serial number up.
"""

from __future__ import annotations

import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from ringfence.admission.proofs import crl, ocsp_status
from ringfence.admission.proofs.freshness import Memory
from ringfence_lab.bench.machine import facts, now
from tests.certificates import HOUR, NOW, Authority, spiffe
from tests.unit import nvidia_mint, ocsp_mint

ROUNDS = 5
DEVICES = 200


def cpu(work: Callable[[], object]) -> float:
    """Return the median CPU time of a call in seconds."""
    times = []
    for _ in range(ROUNDS):
        before = time.process_time()
        work()
        times.append(time.process_time() - before)
    return statistics.median(times)


def list_of(authority: Authority, entries: int) -> bytes:
    """Return a list with random serial numbers and a reason for each."""
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(authority.certificate.subject)
        .last_update(NOW - HOUR)
        .next_update(NOW + datetime.timedelta(days=1))
        .add_extension(x509.CRLNumber(1), critical=False)
    )
    reason = x509.CRLReason(x509.ReasonFlags.key_compromise)
    made = [
        x509.RevokedCertificateBuilder()
        .serial_number(x509.random_serial_number())
        .revocation_date(NOW)
        .add_extension(reason, critical=False)
        .build()
        for _ in range(entries)
    ]
    builder._revoked_certificates = made  # one call for each would take quadratic time
    return builder.sign(authority.key, hashes.SHA384()).public_bytes(Encoding.DER)


def crl_times(entries: int) -> dict[str, object]:
    authority = Authority(key=ec.generate_private_key(ec.SECP384R1()))
    content = list_of(authority, entries)
    chain = [
        x509.load_der_x509_certificate(authority.issue(spiffe("worker/1"), serial=11).chain[0]),
        authority.certificate,
    ]
    kept: list[crl.Revocation] = []

    def first() -> None:
        found = crl.Revocation.read([("list", content)], 86400, [authority.der])
        assert found is not None
        found.check("the worker", chain, NOW.timestamp(), Memory())
        kept.append(found)

    first_seconds, memory = cpu(first), Memory()
    again = cpu(lambda: [kept[-1].check("the worker", chain, NOW.timestamp(), memory) for _ in range(1000)]) / 1000
    return {
        "entries": entries,
        "bytes": len(content),
        "first_check_seconds": round(first_seconds, 4),
        "further_check_microseconds": round(again * 1e6, 1),
    }


def ocsp_times(devices: int) -> dict[str, object]:
    top = nvidia_mint.root()
    found = [nvidia_mint.Device.under(top, number) for number in range(1, devices + 1)]
    files = [("file", each) for device in found for each in ocsp_mint.responses(device, top)]
    paths = [[each.certificate for each in ocsp_mint.path_of(device, top)] for device in found]

    def check() -> None:
        rule = ocsp_status.Revocation.read(files, 86400)
        assert rule is not None
        memory = Memory()
        for path in paths:
            rule.check("a device", [path[0], *path], nvidia_mint.NOW, memory)

    return {"responses": len(files), "read_and_check_milliseconds_each": round(1000 * cpu(check) / len(files), 3)}


def main() -> None:
    entries = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    print(
        json.dumps({"at": now(), "machine": facts(), "crl": crl_times(entries), "ocsp": ocsp_times(DEVICES)}, indent=1)
    )


if __name__ == "__main__":
    main()
