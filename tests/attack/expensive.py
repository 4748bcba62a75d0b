"""Inputs that cost a verifier CPU time, made without any credential, and how to measure them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import cache

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding

from ringfence.admission.proofs import certificate_signature
from tests.certificates import ISSUES, SIGNS, Authority, spiffe

ID = "trainer/7"


@cache
def large_exponent_key(bits: int = 3072) -> rsa.RSAPrivateKey:
    """An RSA key whose public exponent is as long as its modulus: cheap to sign with, expensive to verify with."""
    base = rsa.generate_private_key(65537, bits).private_numbers()
    p, q = base.p, base.q
    order, private = (p - 1) * (q - 1), 65537
    while math.gcd(private, order) != 1:
        private += 2
    public = rsa.RSAPublicNumbers(pow(private, -1, order), p * q)
    numbers = rsa.RSAPrivateNumbers(p, q, private, private % (p - 1), private % (q - 1), pow(q, -1, p), public)
    return numbers.private_key(unsafe_skip_rsa_key_validation=True)


def same_name_issuers(key: certificate_signature.PrivateKey, name: str = "x") -> tuple[bytes, ...]:
    """A leaf and three issuers of one name that sign each other: a path builder tries every order of them."""
    issuer = Authority(name, key=key)
    leaf = issuer.sign("leaf", ec.generate_private_key(ec.SECP256R1()), [spiffe(ID)])
    between = [issuer.sign(name, key, (), ca=True, usage=ISSUES, extra=[_number(count)]) for count in range(3)]
    return tuple(each.public_bytes(Encoding.DER) for each in (leaf, *between))


def long_chain(key: certificate_signature.PrivateKey, top: str) -> tuple[bytes, ...]:
    """A linear chain whose last issuer claims the name of an authority, and whose keys are all the sender's."""
    names = ["leaf", "one", "two", "three", top]
    subjects = [ec.generate_private_key(ec.SECP256R1()), key, key, key]
    made = [
        Authority(names[place + 1], key=key).sign(
            names[place],
            subject,
            [spiffe(ID)] if place == 0 else (),
            ca=place > 0,
            usage=ISSUES if place else SIGNS,
        )
        for place, subject in enumerate(subjects)
    ]
    return tuple(each.public_bytes(Encoding.DER) for each in made)


def many_names(issuer: str) -> tuple[bytes, ...]:
    """A leaf with thousands of empty names, under an authority's name."""
    names = b"\x86\x1e" + b"spiffe://example.org/trainer/7" + b"\x82\x00" * 1600
    content = b"\x30\x82" + len(names).to_bytes(2, "big") + names
    extra = [x509.UnrecognizedExtension(x509.SubjectAlternativeName.oid, content)]
    leaf = Authority(issuer).sign("leaf", ec.generate_private_key(ec.SECP256R1()), (), extra=extra)
    return (leaf.public_bytes(Encoding.DER),)


@cache
def large_rsa_key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(65537, 4096)


CHAINS = (
    "three issuers of one name, large exponents",
    "the same under the authority's name",
    "a long chain with large exponents",
    "a long chain of RSA-4096",
    "thousands of names",
)


@cache
def chains(authority: str) -> dict[str, tuple[bytes, ...]]:
    """Certificate chains for a policy whose authority has this name."""
    odd = large_exponent_key()
    made = (
        same_name_issuers(odd),
        same_name_issuers(odd, authority),
        long_chain(odd, authority),
        long_chain(large_rsa_key(), authority),
        many_names(authority),
    )
    return dict(zip(CHAINS, made, strict=True))


def _number(count: int) -> x509.UnrecognizedExtension:
    return x509.UnrecognizedExtension(x509.ObjectIdentifier("1.2.3"), bytes([count]))


# -- measuring ------------------------------------------------------------------------------------------------------


def cpu_seconds(work: Callable[[], object], times: int = 5) -> float:
    """Return the least CPU time of this thread that `work` takes."""
    least = math.inf
    for _ in range(times):
        before = time.thread_time()
        work()
        least = min(least, time.thread_time() - before)
    return least


@cache
def reference_seconds() -> float:
    """One ECDSA verification on P-256, which every honest handshake needs: costs are given as multiples of it."""
    key = ec.generate_private_key(ec.SECP256R1())
    signature, public = key.sign(b"message", ec.ECDSA(hashes.SHA256())), key.public_key()

    def hundred() -> None:
        for _ in range(100):
            public.verify(signature, b"message", ec.ECDSA(hashes.SHA256()))

    return cpu_seconds(hundred, 10) / 100
