"""The policy file: parsing, digest and explanation."""

from __future__ import annotations

import errno
import inspect
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfence import keys
from ringfence.admission.policy import PrivateSumTerms
from ringfence.admission.policy_file.policy_file import PolicyFile, explain
from ringfence.admission.proofs import kinds
from ringfence.admission.proofs.secret import SharedSecret
from ringfence.config.settings import Settings
from ringfence.errors import ConfigurationError, PolicyError
from tests.certificates import Authority, now
from tests.unit.admission_samples import SECRET, worker
from tests.unit.policy_readers import readers

ONE, TWO = Authority("one"), Authority("two")
FILES = {"ca.pem": ONE.pem, "copy.pem": b"\n" + ONE.pem, "two.pem": TWO.pem}
SHARED = SharedSecret(SECRET, "run-7")

SECRET_RULE = "[[admit]]\n[admit.secret]\n"
CERTIFICATE_RULE = (
    '[[admit]]\n[admit.certificate]\nca = "ca.pem"\ntrust_domain = "example.org"\nids = "spiffe://example.org/*"\n'
)
BOTH_RULE = CERTIFICATE_RULE + "[admit.secret]\n"


def files(path: str, limit: int) -> bytes:
    if path not in FILES:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")
    return FILES[path][:limit]


def read(text: str) -> PolicyFile:
    return kinds.read(text.encode(), files)


def policy(rules: str, head: str = "version = 1\n") -> PolicyFile:
    return read(head + rules)


def test_any_rule_admits_and_inside_a_rule_all_proofs_are_needed() -> None:
    file = policy(BOTH_RULE + SECRET_RULE, 'version = 1\nmin_workers = 8\nmax_session_age = "24h"\n')
    assert [[kind for kind, _ in rule.proofs] for rule in file.rules] == [["secret", "certificate"], ["secret"]]
    assert (file.min_workers, file.max_session_age, file.kinds) == (8, 86400, ("secret", "certificate"))
    verifies = kinds.policy_of(file, now, SHARED)
    assert [verifier.name for verifier in verifies.verifiers] == ["shared secret and certificate", "shared secret"]
    assert verifies.kinds == (1, 7)
    assert (verifies.min_workers, verifies.max_session_age) == (8, 86400)


def test_the_order_of_proofs_in_a_rule_is_that_of_their_numbers() -> None:
    """Cheap proofs are verified before expensive ones, regardless of the order in the file."""
    numbers = [kind.number for kind in kinds.KINDS.values()]
    assert numbers == sorted(numbers)
    assert len(set(numbers)) == len(numbers)


def test_a_secret_only_policy_equals_the_policy_without_a_file() -> None:
    assert kinds.digest_of(policy(SECRET_RULE)) == worker(0).policy.digest


@pytest.mark.parametrize("rules", [SECRET_RULE, CERTIFICATE_RULE, BOTH_RULE, BOTH_RULE + SECRET_RULE])
def test_the_digest_needs_no_secret_and_equals_the_verifiers(rules: str) -> None:
    file = policy(rules, 'version = 1\nmin_workers = 3\nmax_session_age = "7d"\n')
    assert kinds.digest_of(file) == kinds.policy_of(file, now, SHARED).digest


@pytest.mark.parametrize(
    "same",
    [
        CERTIFICATE_RULE + SECRET_RULE,
        CERTIFICATE_RULE.replace("ca.pem", "copy.pem") + SECRET_RULE,
        SECRET_RULE + SECRET_RULE + CERTIFICATE_RULE,
        "# a comment\n" + SECRET_RULE + '[[admit]]\nnote = "those with certificates"\n' + CERTIFICATE_RULE[10:],
        SECRET_RULE + CERTIFICATE_RULE.replace('"spiffe://example.org/*"', '["spiffe://example.org/*"]'),
    ],
    ids=["order", "file name", "twice", "comments and notes", "list"],
)
def test_equivalent_policies_have_the_same_digest(same: str) -> None:
    assert kinds.digest_of(policy(same)) == kinds.digest_of(policy(SECRET_RULE + CERTIFICATE_RULE))


@pytest.mark.parametrize(
    "other",
    [
        "version = 1\n" + SECRET_RULE,
        "version = 1\n" + BOTH_RULE,
        "version = 1\nmin_workers = 2\n" + SECRET_RULE + CERTIFICATE_RULE,
        'version = 1\nmax_session_age = "1s"\n' + SECRET_RULE + CERTIFICATE_RULE,
        'version = 1\ninside_machine = "gloo"\n' + SECRET_RULE + CERTIFICATE_RULE,
        'version = 1\nsame_host = "sealed"\n' + SECRET_RULE + CERTIFICATE_RULE,
        'version = 1\nrecord = "required"\n' + SECRET_RULE + CERTIFICATE_RULE,
        'version = 1\nforwarded = "every_hop"\n' + SECRET_RULE + CERTIFICATE_RULE,
        'version = 1\nverify_every = "10m"\n' + SECRET_RULE + CERTIFICATE_RULE,
        "version = 1\n" + SECRET_RULE + CERTIFICATE_RULE.replace("ca.pem", "two.pem"),
        "version = 1\n" + SECRET_RULE + CERTIFICATE_RULE.replace("example.org/*", "example.org/**"),
        "version = 1\n" + SECRET_RULE + CERTIFICATE_RULE.replace("example.org", "example.com"),
        "version = 1\n" + SECRET_RULE + CERTIFICATE_RULE.replace('"ca.pem"', '["ca.pem", "two.pem"]'),
    ],
)
def test_different_policies_have_different_digests(other: str) -> None:
    assert kinds.digest_of(read(other)) != kinds.digest_of(policy(SECRET_RULE + CERTIFICATE_RULE))


def test_backends_inside_a_machine_are_read_and_covered_by_the_digest() -> None:
    heads = (
        'inside_machine = ["nccl", "gloo"]\n',
        'inside_machine = ["gloo", "nccl"]\n',
        'inside_machine = "nccl"\n',
        "",
    )
    files = [policy(SECRET_RULE, "version = 1\n" + head) for head in heads]
    assert [file.inside_machine for file in files] == [("nccl", "gloo"), ("gloo", "nccl"), ("nccl",), ()]
    for file in files:
        assert kinds.policy_of(file, now, SHARED).inside_machine == file.inside_machine
        assert kinds.policy_of(file, now, SHARED).digest == kinds.digest_of(file)
    digests = [kinds.digest_of(file) for file in files]
    assert digests[0] == digests[1] and len(set(digests)) == 3


def test_the_interval_of_verification_is_read_and_covered_by_the_digest() -> None:
    heads = ("", 'verify_every = "10m"\n', 'verify_every = "20m"\n')
    files = [policy(CERTIFICATE_RULE + SECRET_RULE, "version = 1\n" + head) for head in heads]
    assert [file.verify_every for file in files] == [None, 600, 1200]
    digests = [kinds.digest_of(file) for file in files]
    assert len(set(digests)) == 3
    for file, digest in zip(files, digests, strict=True):
        assert kinds.policy_of(file, now, SHARED).verify_every == file.verify_every
        assert kinds.policy_of(file, now, SHARED).digest == digest
    assert "Every 10 minutes each worker proves itself again" in " ".join(explain(files[1]))


def test_how_workers_of_one_machine_exchange_tensors_is_covered_by_the_digest() -> None:
    heads = ("", 'same_host = "shared"\n', 'same_host = "sealed"\n')
    files = [policy(SECRET_RULE, "version = 1\n" + head) for head in heads]
    assert [file.same_host for file in files] == ["shared", "shared", "sealed"]
    for file in files:
        assert kinds.policy_of(file, now, SHARED).same_host == file.same_host
        assert kinds.policy_of(file, now, SHARED).digest == kinds.digest_of(file)
    digests = [kinds.digest_of(file) for file in files]
    assert digests[0] == digests[1] != digests[2]


def test_what_authenticates_forwarded_data_is_covered_by_the_digest() -> None:
    heads = ("", 'forwarded = "origin"\n', 'forwarded = "every_hop"\n')
    files = [policy(SECRET_RULE, "version = 1\n" + head) for head in heads]
    assert [file.forwarded for file in files] == ["origin", "origin", "every_hop"]
    for file in files:
        assert kinds.policy_of(file, now, SHARED).forwarded == file.forwarded
        assert kinds.policy_of(file, now, SHARED).digest == kinds.digest_of(file)
    digests = [kinds.digest_of(file) for file in files]
    assert digests[0] == digests[1] != digests[2]


def test_whether_a_record_is_required_is_covered_by_the_digest() -> None:
    heads = ("", 'record = "optional"\n', 'record = "required"\n')
    files = [policy(SECRET_RULE, "version = 1\n" + head) for head in heads]
    assert [file.record for file in files] == ["optional", "optional", "required"]
    assert [Settings(policy=file).record_required for file in files] == [False, False, True]
    for file in files:
        assert kinds.policy_of(file, now, SHARED).digest == kinds.digest_of(file)
    digests = [kinds.digest_of(file) for file in files]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "the policy: version is missing"),
        ("version = 2\n" + SECRET_RULE, "version must be a whole number from 1 to 1; it is 2"),
        ("version = 1", "admit is missing"),
        ("version = 1\nadmit = []", "admit must be one or more tables"),
        ("version = 1\n[admit]\n[admit.secret]", "admit must be one or more tables"),
        ("version = 1\n[[admit]]", "admit 1: a rule without a proof would admit every worker"),
        ('version = 1\n[[admit]]\nnote = "x"', "would admit every worker"),
        ("version = 1\n[[admit]]\n[admit.secrets]", "admit 1: unknown key 'secrets'; known here: note, member, secret"),
        ('version = 1\n[[admit]]\n[admit.secret]\nfile = "x"', "admit 1, secret: unknown key 'file'; known here: none"),
        ("version = 1\nmin_worker = 2\n" + SECRET_RULE, "unknown key 'min_worker'; known here: version, min_workers"),
        ("version = 1\nmin_workers = 0\n" + SECRET_RULE, "from 1 to"),
        (
            'version = 1\ninside_machine = "mpi"\n' + SECRET_RULE,
            "inside_machine must be one of nccl, gloo; it is 'mpi'",
        ),
        ("version = 1\ninside_machine = []\n" + SECRET_RULE, "inside_machine must be a list of at least one text"),
        ("version = 1\ninside_machine = true\n" + SECRET_RULE, "inside_machine must be a text"),
        ('version = 1\nsame_host = "plain"\n' + SECRET_RULE, "same_host must be one of shared, sealed; it is 'plain'"),
        ('version = 1\nforwarded = "no"\n' + SECRET_RULE, "forwarded must be one of origin, every_hop; it is 'no'"),
        ('version = 1\nrecord = "no"\n' + SECRET_RULE, "record must be one of optional, required; it is 'no'"),
        ("version = 1\nmax_session_age = 60\n" + SECRET_RULE, "a duration such as"),
        ('version = 1\nverify_every = "1h"\n' + SECRET_RULE, "verify_every: a shared secret cannot be revoked"),
        ('version = 1\nverify_every = "0s"\n' + CERTIFICATE_RULE, "a duration such as"),
        ("version = 1\n" + SECRET_RULE * 65, "65 rules, where at most 64 are allowed"),
        (
            "version = 1\n" + CERTIFICATE_RULE.replace("ca.pem", "no.pem"),
            "admit 1, certificate: ca: cannot read no.pem",
        ),
    ],
)
def test_what_is_refused(text: str, says: str) -> None:
    with pytest.raises(PolicyError, match=says):
        read(text)


def test_a_policy_with_a_secret_rule_needs_the_secret() -> None:
    with pytest.raises(ConfigurationError, match="set RINGFENCE_SECRET_FILE on every worker"):
        kinds.policy_of(policy(BOTH_RULE), now, None)
    assert kinds.policy_of(policy(CERTIFICATE_RULE), now, None).kinds == (2,)


def test_the_policy_digest_does_not_depend_on_the_secret() -> None:
    other = SharedSecret(keys.Secret(bytes(range(50, 82))), "run-7")
    file = policy(BOTH_RULE)
    assert kinds.policy_of(file, now, SHARED).digest == kinds.policy_of(file, now, other).digest


@settings(deadline=None)
@given(st.text(max_size=120))
def test_any_text_is_a_policy_or_a_policy_error(text: str) -> None:
    for head in ("", "version = 1\n", "version = 1\n" + CERTIFICATE_RULE):
        try:
            assert isinstance(kinds.read((head + text).encode("utf-8", "surrogatepass"), files), PolicyFile)
        except PolicyError:
            continue


# -- roots ----------------------------------------------------------------------------------------------------------


@pytest.mark.promise("A policy cannot name a root of trust for hardware.")
def test_a_policy_passes_only_rules_and_a_clock_to_a_verifier(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verifiers of hardware take other roots as keyword arguments, for tests. A policy passes none."""
    for name, kind in kinds.KINDS.items():
        if kind.verifier is None:
            continue
        parameters = list(inspect.signature(kind.verifier).parameters.values())
        assert [each.name for each in parameters[:2]] == ["rules", "clock"]
        for each in parameters[2:]:
            assert each.kind is inspect.Parameter.KEYWORD_ONLY, f"{name}: {each.name}"
            assert each.default is None, f"{name}: {each.name}"
    passed: list[tuple[tuple[object, ...], dict[str, object]]] = []

    def record(*positional: object, **named: object) -> SharedSecret:
        passed.append((positional, named))
        return SHARED

    monkeypatch.setitem(kinds.KINDS, "certificate", replace(kinds.KINDS["certificate"], verifier=record))
    file = policy(CERTIFICATE_RULE)
    kinds.policy_of(file, now, None)
    assert passed == [((file.rules[0].proofs[0][1], now), {})]


@pytest.mark.promise("A policy cannot name a root of trust for hardware.")
def test_no_table_of_hardware_takes_an_authority_from_a_file() -> None:
    """All files that a policy can name, by kind. For hardware: reference values, and what Intel and AMD have signed."""
    taken = {
        name: set(re.findall(r"table\.files?\(\"(\w+)\"", "".join(map(inspect.getsource, readers(name)))))
        for name in kinds.KINDS
    }
    assert taken == {
        "secret": set(),
        "certificate": {"ca"},
        "tdx": {"collateral"},
        "snp": {"crl"},
        "nvidia": {"reference_values"},
        "token": {"keys"},
        "azure_snp": {"crl"},
        "azure_tdx": {"collateral"},
    }


# -- members of private sums --------------------------------------------------------------------------------------------


def rule_of(member: str, pattern: str = "worker/{rank}", ca: str = "ca.pem") -> str:
    named = f'member = "{member}"\n' if member else ""
    domain = f"{member or 'none'}.test"
    return (
        f'[[admit]]\n{named}[admit.certificate]\nca = "{ca}"\ntrust_domain = "{domain}"\n'
        f'ids = "spiffe://{domain}/{pattern}"\n'
    )


MEMBERS = "".join(map(rule_of, "abc"))
PRIVATE = "version = 1\n[private_sum]\n"


def test_members_of_private_sums_are_those_that_rules_name() -> None:
    file = read(PRIVATE + rule_of("c") + rule_of("a") + rule_of("b") + rule_of("a", "other/{rank}") + rule_of(""))
    assert file.members == ("a", "b", "c")
    assert file.private_sum == PrivateSumTerms(colluding=1, min_members=3)
    assert kinds.policy_of(file, now, None).members == ("c", "a", "b", "a", "")
    assert kinds.policy_of(file, now, None).digest == kinds.digest_of(file)
    (line,) = [line for line in explain(file) if "private_sum" in line]
    assert "over all of the members a, b, c, which learn the sum: up to 1 of them together learn nothing else" in line
    (line,) = [line for line in explain(read(PRIVATE + MEMBERS + rule_of("d"))) if "private_sum" in line]
    assert "over all of the members a, b, c, d" in line
    file = read(PRIVATE + "colluding = 2\nmin_members = 4\n" + MEMBERS + rule_of("d") + rule_of("e"))
    assert "over 4 or more of the members" in " ".join(explain(file))


def test_the_digest_covers_members() -> None:
    texts = [
        PRIVATE + MEMBERS,
        PRIVATE + "min_members = 3\n" + MEMBERS + rule_of("d"),
        PRIVATE + "colluding = 2\n" + MEMBERS + rule_of("d"),
        PRIVATE + "colluding = 1\n" + MEMBERS + rule_of("d"),
        PRIVATE + MEMBERS + rule_of("d").replace('"d"', '"x"'),
        PRIVATE + MEMBERS + rule_of("d").replace('member = "d"\n', ""),
        "version = 1\n"
        + MEMBERS.replace('member = "a"\n', "").replace('member = "b"\n', "").replace('member = "c"\n', ""),
    ]
    assert len({kinds.digest_of(read(text)) for text in texts}) == len(texts)
    backwards = PRIVATE + rule_of("c") + rule_of("b") + rule_of("a")
    assert kinds.digest_of(read(backwards)) == kinds.digest_of(read(texts[0]))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (PRIVATE + rule_of("a") + rule_of("b"), "the rules name 2 members, and with 1 colluding at least 3 are needed"),
        (PRIVATE + "colluding = 2\n" + MEMBERS, "the rules name 3 members, and with 2 colluding at least 4 are needed"),
        (PRIVATE + "colluding = 0\n" + MEMBERS, "colluding must be a whole number from 1 to 32"),
        (PRIVATE + "min_members = 2\n" + MEMBERS, "min_members must be a whole number from 3 to 3"),
        (PRIVATE + "min_members = 4\n" + MEMBERS, "min_members must be a whole number from 3 to 3"),
        (PRIVATE + "scale = 1\n" + MEMBERS, "unknown key 'scale'; known here: colluding, min_members"),
        ("version = 1\n" + MEMBERS, r"a rule has a member, and there is no \[private_sum\]"),
        (PRIVATE + MEMBERS.replace('"a"', '"a b"'), "member must be 1 to 64 of"),
        (
            PRIVATE + MEMBERS + rule_of("d", "worker/*"),
            "ask for a certificate in every rule, and bind its name to one rank",
        ),
        (PRIVATE + MEMBERS + rule_of("d", "worker/{rank/2}"), "bind its name to one rank"),
        (PRIVATE + MEMBERS + rule_of("", "worker/*"), "bind its name to one rank"),
        (PRIVATE + MEMBERS + SECRET_RULE, "ask for a certificate in every rule"),
        (PRIVATE + MEMBERS + '[[admit]]\nmember = "d"\n[admit.secret]\n', "ask for a certificate in every rule"),
    ],
)
def test_what_private_sums_refuse(text: str, says: str) -> None:
    with pytest.raises(PolicyError, match=says):
        read(text)
