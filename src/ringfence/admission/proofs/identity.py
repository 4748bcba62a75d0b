"""The name in a certificate, and the patterns of a policy that it must match.

A SPIFFE identity is the only URI of its certificate. Without a trust domain the name is the only URI or, if there is none,
the only DNS name. The subject's common name is not used.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final

from cryptography import x509

from ringfence.admission import encoding
from ringfence.errors import AdmissionError

ID_CHARACTERS: Final = 2048

_TRUST_DOMAIN: Final = re.compile(r"[a-z0-9._-]{1,255}")
_SEGMENT: Final = re.compile(r"[a-zA-Z0-9._-]+")
_URI: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^/*%?#]+/([^%?#]+)")
_START: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^/*]+/.")
_NO_NAME: Final = "has a part that is empty, '.' or '..', or one of % ? #: such names are not admitted"
_HOST: Final = re.compile(r"[a-z0-9._-]+")
_RANK: Final = re.compile(r"\{rank(?:/([1-9][0-9]{0,6}))?\}")  # in a pattern: the rank, or the rank divided by a number
_NUMBER: Final = re.compile(r"(?<![0-9])(?:0|[1-9][0-9]{0,6})(?![0-9])")  # in a name


def is_trust_domain(value: str) -> bool:
    return _TRUST_DOMAIN.fullmatch(value) is not None


def name_of(extensions: x509.Extensions, trust_domain: str | None) -> str:
    """Return the only name of a certificate: with two names, verifiers could disagree. Raises AdmissionError."""
    try:
        names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
        hosts = names.get_values_for_type(x509.DNSName)
    except x509.ExtensionNotFound:
        raise AdmissionError("the certificate has no subject alternative name") from None
    if len(uris) > 1:
        raise AdmissionError(f"the certificate has {len(uris)} URIs, and exactly one is allowed")
    if trust_domain is not None:
        return _spiffe_id(uris, trust_domain)
    found = uris or [host.lower() for host in hosts]
    if len(found) != 1:
        raise AdmissionError("the certificate must have exactly one URI, or no URI and exactly one DNS name")
    if not 1 <= len(found[0]) <= ID_CHARACTERS or not encoding.is_printable(found[0]) or "*" in found[0]:
        raise AdmissionError("the name in the certificate has characters or parts that are not allowed")
    if found[0].startswith("spiffe:"):
        raise AdmissionError("the certificate is a SPIFFE identity, and this rule has no trust_domain")
    if not (_is_plain_uri(found[0]) if uris else _HOST.fullmatch(found[0])):
        raise AdmissionError("the name in the certificate has characters or parts that are not allowed")
    return found[0]


def _is_plain_uri(value: str) -> bool:
    """Whether a URI has an unambiguous path: no empty part, no '.' or '..', no escapes."""
    match = _URI.fullmatch(value)
    return match is not None and all(part not in ("", ".", "..") for part in match[1].split("/"))


def _spiffe_id(uris: list[str], trust_domain: str) -> str:
    if not uris:
        raise AdmissionError("the certificate has no URI, so it is not a SPIFFE identity")
    found = uris[0]
    scheme, _, rest = found.partition("://")
    domain, slash, path = rest.partition("/")
    segments = path.split("/")
    well_formed = scheme == "spiffe" and slash and len(found) <= ID_CHARACTERS and is_trust_domain(domain)
    if not well_formed or not all(_SEGMENT.fullmatch(each) and each not in (".", "..") for each in segments):
        raise AdmissionError(f"the certificate's URI {found[:80]!a} is not a SPIFFE identity")
    if domain != trust_domain:
        raise AdmissionError(
            f"{found} is of trust domain {domain}, and this rule is for {trust_domain}",
            to_peer=f"{found} is of trust domain {domain}, and the policy asks for another",
        )
    return found


# -- patterns -------------------------------------------------------------------------------------------------------


def binds_rank(pattern: str) -> bool:
    """Return whether names that match a pattern have the worker's rank, or its rank divided by a number, in them."""
    return _RANK.search(pattern) is not None


def stand_for_one_rank(patterns: Iterable[str]) -> bool:
    """Return whether no name stands for two ranks: each pattern has `{rank}` and no `*`, and a name that fits two patterns has
    its rank in the same place of both. So some policies are not recognised that would do."""
    starts = set()
    for pattern in patterns:
        start, rank, _ = pattern.partition("{rank}")
        if not rank or "*" in pattern:
            return False
        starts.add(start)
    return not any(one != two and one.startswith(two) for one in starts for two in starts)


def pattern_error(pattern: str, trust_domain: str | None) -> str | None:
    """Return what is wrong with a pattern of the policy, or None."""
    bare = _RANK.sub("0", pattern, count=1)
    if "{" in bare or "}" in bare:
        return "may have one {rank} or {rank/N}, and no other braces"
    match = _RANK.search(pattern)
    if match is not None and re.search(r"[0-9*]", pattern[: match.start()][-1:] + pattern[match.end() :][:1]):
        return "has a digit or a * beside {rank}: names could be read in two ways"
    return _bare_pattern_error(bare, trust_domain)


def _bare_pattern_error(pattern: str, trust_domain: str | None) -> str | None:
    if not encoding.is_printable(pattern) or " " in pattern or len(pattern) > ID_CHARACTERS:
        return "must be printable ASCII without spaces"
    if "**" in pattern.removesuffix("/**"):
        return "has ** in a place other than its end, after a slash"
    if trust_domain is not None:
        start = f"spiffe://{trust_domain}/"
        if not pattern.startswith(start) or pattern == start:
            return f"must begin with {start} and continue"
        return None if _is_plain_uri(pattern) else _NO_NAME
    if pattern.startswith("spiffe:"):
        return "is a SPIFFE identity: set trust_domain to that of this rule's authorities"
    if "/" in pattern or ":" in pattern:
        if not _START.match(pattern):
            return "must be a URI with a plain scheme and host, or a DNS name"
        return None if _is_plain_uri(pattern) else _NO_NAME
    if pattern != pattern.lower():
        return "must be in lower case, as DNS names are compared"
    return (
        None
        if _HOST.fullmatch(pattern.replace("*", "x"))
        else "must be a URI, or a DNS name of a-z, 0-9, '.', '_', '-'"
    )


def matches(name: str, patterns: Iterable[str], rank: int | None = None) -> bool:
    """Whether a name matches any of the patterns. URIs match patterns with "://", DNS names the others.

    `*` matches one or more characters within one part of a URI's path, or within one label of a DNS name. `/**` at the end of a
    URI matches everything below. `{rank}` is the worker's rank and `{rank/N}` its rank divided by N, rounded down, in decimal
    digits; with `rank` None, that of any worker.
    """
    return any(_matches(name, plain) for pattern in patterns for plain in _with_rank(name, pattern, rank))


def _with_rank(name: str, pattern: str, rank: int | None) -> Iterator[str]:
    """Yield the pattern with a number in the place of its rank."""
    match = _RANK.search(pattern)
    if match is None:
        yield pattern
        return
    numbers = set(_NUMBER.findall(name)) if rank is None else {str(rank // int(match[1] or 1))}
    for number in numbers:
        yield pattern[: match.start()] + number + pattern[match.end() :]


def _matches(name: str, pattern: str) -> bool:
    """Compare part by part in one pass: the peer chose the name, and must not choose how long this takes."""
    if ("://" in name) != ("://" in pattern):
        return False
    stop = "/" if "://" in pattern else "."
    found, wanted = name.split(stop), pattern.split(stop)
    if pattern.endswith("/**"):
        wanted.pop()
        if len(found) <= len(wanted) or found[len(wanted) :] == [""]:
            return False
    elif len(found) != len(wanted):
        return False
    return all(map(_fits, found, wanted))  # as long as the shorter one


def _fits(part: str, pattern: str) -> bool:
    """Match one part. Taking the first occurrence of each literal is enough: it leaves the most for what follows."""
    first, *others = pattern.split("*")
    if not others:
        return part == pattern
    if not part.startswith(first):
        return False
    at, last = len(first), others.pop()
    for literal in others:
        place = part.find(literal, at + 1)
        if place < 0:
            return False
        at = place + len(literal)
    return len(part) - len(last) > at and part.endswith(last)
