"""Attestation tokens: recorded ones verify, forged ones do not, and each claim of a policy is enforced."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ringfence.admission.binding import Binding
from ringfence.admission.entry import Listing
from ringfence.admission.policy import Evidence, Policy, verify
from ringfence.admission.policy_file.toml_table import parse
from ringfence.admission.proofs import jose, token, token_claims
from ringfence.admission.proofs.token import Rules
from ringfence.errors import AdmissionError, PolicyError
from tests import provers
from tests.unit import token_mint as mint
from tests.unit.admission_samples import worker
from tests.unit.token_mint import ES256, ES384, ISSUER, NONCE, NOW, RS256, claims, rules

FOLDER = Path(__file__).parents[1] / "evidence" / "nvidia"
RECORDED_NONCE = "931d8dd0add203ac3d8b4fbde75e115278eefcdceac5b87671a748f32364dfcb"
RECORDED = {
    "hopperClaimsv3_detached_eat.json": ("https://nras.attestation.nvidia.com", 1749601858, "GPU-0"),
    "switch_detached_eat.json": ("https://nras.attestation-stg.nvidia.com", 1751155060, "SWITCH-0"),
}
KEYS = jose.read_keys((FOLDER / "nras_recovered_jwks.json").read_bytes(), "keys")


def recorded(name: str) -> tuple[bytes, Rules, float]:
    issuer, issued, _ = RECORDED[name]
    proof = token.encode(*token.read_answer((FOLDER / name).read_bytes()))
    wanted: dict[str, token_claims.Expected] = {"x-nvidia-overall-att-result": True}
    inner: dict[str, token_claims.Expected] = {"measres": ("success",), "secboot": True, "dbgstat": ("disabled",)}
    return proof, Rules(issuer, KEYS, wanted, submodules=1, submodule_claims=inner), issued + 5.0


def accepted(signed: str, **changes: object) -> token.Claims:
    return token.verify(token.encode(signed, {}), rules(**changes), NONCE, NOW)


def refused(signed: str, reason: str, **changes: object) -> None:
    with pytest.raises(AdmissionError, match=reason):
        accepted(signed, **changes)


# -- recorded -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_tokens_verify_at_their_time(name: str) -> None:
    proof, wanted, now = recorded(name)
    found = token.verify(proof, wanted, RECORDED_NONCE, now)
    assert list(found.submodules) == [RECORDED[name][2]]
    assert found.claims["x-nvidia-overall-att-result"] is True


@pytest.mark.promise("Expired certificates, collateral and tokens are rejected at admission.")
@pytest.mark.parametrize("name", RECORDED)
def test_recorded_tokens_are_refused_with_other_times_or_rules(name: str) -> None:
    proof, wanted, now = recorded(name)
    cases = [
        (wanted, RECORDED_NONCE, now + 3600 + 60, "expired 65 s ago"),
        (wanted, RECORDED_NONCE, now - 70, "is not valid for another 65 s"),
        (wanted, NONCE, now, "not made for this connection"),
        (replace(wanted, issuer=ISSUER), RECORDED_NONCE, now, "the policy trusts https://verifier.example"),
        (replace(wanted, claims={"x-nvidia-overall-att-result": False}), RECORDED_NONCE, now, "asks for false"),
        (
            replace(wanted, claims={"x-nvidia-overall-att-result": 1}),
            RECORDED_NONCE,
            now,
            "claims True for .* asks for 1",
        ),
        (replace(wanted, submodules=2), RECORDED_NONCE, now, "1 submodules, .* exactly 2"),
        (replace(wanted, submodule_claims={"hwmodel": ("GH200",)}), RECORDED_NONCE, now, "for hwmodel; .* GH200"),
        (replace(wanted, audience="me"), RECORDED_NONCE, now, "asks for me"),
    ]
    for other, nonce, when, reason in cases:
        with pytest.raises(AdmissionError, match=reason):
            token.verify(proof, other, nonce, when)
    foreign = tuple(key for key in KEYS if ("prod" in key.kid) != (name == "hopperClaimsv3_detached_eat.json"))
    with pytest.raises(AdmissionError, match="not in the policy's key set"):
        token.verify(proof, replace(wanted, keys=foreign), RECORDED_NONCE, now)


def test_the_other_services_key_under_the_right_name_is_refused() -> None:
    proof, wanted, now = recorded("hopperClaimsv3_detached_eat.json")
    prod, stg = KEYS
    assert "prod" in prod.kid
    with pytest.raises(AdmissionError, match="signature was not made with the key"):
        token.verify(proof, replace(wanted, keys=(replace(prod, public=stg.public),)), RECORDED_NONCE, now)


@pytest.mark.promise("Signed evidence with a flipped bit is rejected.")
@pytest.mark.parametrize("name", RECORDED)
def test_every_flipped_bit_of_a_recorded_token_is_refused(name: str, exhaustive: bool) -> None:
    proof, wanted, now = recorded(name)
    for bit in range(0, 8 * len(proof), 1 if exhaustive else 37):
        changed = bytearray(proof)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(AdmissionError):
            token.verify(bytes(changed), wanted, RECORDED_NONCE, now)


# -- signatures -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signer", mint.SIGNERS, ids=lambda each: each.algorithm)
def test_each_algorithm(signer: mint.Signer) -> None:
    assert accepted(signer.sign(claims())).claims["measres"] == "success"
    accepted(signer.sign(claims(), typ=None))
    accepted(signer.sign(claims(), typ="eat+jwt", jku="https://elsewhere.example/keys"))
    changed = signer.sign(claims(ready=False)).rsplit(".", 1)[0] + "." + signer.sign(claims()).rsplit(".", 1)[1]
    refused(changed, "signature was not made with the key")


def test_a_token_without_a_signature_is_refused_however_it_says_so() -> None:
    for name in ("none", "None", "NONE", "", None, 0, ["ES256"]):
        header, body, _ = ES256.sign(claims(), alg=name or None).split(".")
        refused(f"{header}.{body}.", "says algorithm")
        refused(ES256.sign(claims(), alg=name), "says algorithm" if name else "says algorithm|key is for")
    header, body, _ = ES256.sign(claims()).split(".")
    refused(f"{header}.{body}.", "signature was not made with the key")
    refused(f"{header}.{body}", "does not have the form")
    refused(f"{header}.{body}..", "does not have the form")


def test_the_header_does_not_choose_the_algorithm() -> None:
    for signer in mint.SIGNERS:
        for algorithm in ("HS256", "ES256", "ES384", "RS256", "PS256"):
            if algorithm != signer.algorithm:
                refused(signer.sign(claims(), alg=algorithm), f"its key is for {signer.algorithm}")


def test_the_header_does_not_choose_the_key() -> None:
    refused(ES256.sign(claims(), kid="p384", alg="ES384"), "signature was not made with the key 'p384'")
    refused(ES256.sign(claims(), kid="unknown"), "names key 'unknown', which is not in the policy's key set")
    refused(ES256.sign(claims(), kid=None), "names key None")
    refused(ES256.sign(claims(), kid=["p256"]), "names key a list")
    unauthenticated_peer = replace(ES256, private=mint.ec.generate_private_key(mint.ec.SECP256R1()))
    refused(unauthenticated_peer.sign(claims(), jwk=unauthenticated_peer.jwk()), "signature was not made with the key")
    refused(
        unauthenticated_peer.sign(claims(), kid="mine", jwk=replace(unauthenticated_peer, kid="mine").jwk()),
        "not in the policy's key set",
    )


def test_headers_that_ask_for_more_are_refused() -> None:
    refused(ES256.sign(claims(), crit=["exp"]), "asks for crit")
    refused(ES256.sign(claims(), b64=False), "asks for b64")
    refused(ES256.sign(claims(), zip="DEF"), "asks for zip")
    refused(ES256.sign(claims(), typ="at+jwt"), "not a JWT or an EAT")
    refused(ES256.sign(claims(), typ=3), "not a JWT or an EAT")


def test_there_is_one_spelling() -> None:
    good = ES256.sign(claims())
    head, signature = good.rsplit(".", 1)
    assert len(signature) == 86  # four bits of the last character carry nothing
    for last in "ABCDEFGHIJKLMNOP":
        if last != signature[-1]:
            refused(f"{head}.{signature[:-1]}{last}", "not base64url|signature was not made with the key")
    refused(good + "==", "not base64url")
    refused(
        good.replace(".", ".\n", 1), "signature was not made with the key"
    )  # which covers the text, not what it stands for
    refused(good + "A", "not base64url|signature was not made with")
    refused(RS256.sign(claims()).replace("-", "+").replace("_", "/"), "not base64url")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"ready": false, "ready": true}', "a duplicate name"),
        (b"[]", "claims is not a JSON object"),
        (b'{"exp": NaN}', "NaN is not JSON"),
        (b'{"exp": -Infinity}', "is not JSON"),
        (b"[" * 6_000, "nested too deeply"),
        (b'{"exp": ' + b"9" * 5_000 + b"}", "is malformed"),
        (b"\xff", "is malformed"),
        (b"", "is malformed"),
    ],
)
def test_claims_that_are_not_strict_json_are_refused(body: bytes, reason: str) -> None:
    header = json.dumps({"alg": "ES256", "kid": "p256"}).encode()
    refused(ES256.sign_bytes(header, body), reason)
    if reason != "claims is not a JSON object":
        refused(ES256.sign_bytes(body, b"{}"), "header is malformed: ")


def test_a_header_and_a_signature_are_short() -> None:
    """They are parsed before the signature is verified. The claims are not: they may be as long as a proof."""
    long = json.dumps({"alg": "ES256", "kid": "p256", "x5c": "A" * 7000}).encode()
    refused(ES256.sign_bytes(long, b"{}"), "a header or a signature that is too long")
    header, body, _ = ES256.sign(claims()).split(".")
    refused(f"{header}.{body}.{'A' * 2000}", "a header or a signature that is too long")
    assert accepted(ES256.sign(claims(note="A" * 50_000), x5c="A" * 5000))


# -- claims ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"iss": "https://verifier.example.evil"}, "the policy trusts"),
        ({"iss": None}, "the token was issued by None"),
        ({"iss": [ISSUER]}, "the token was issued by a list"),
        ({"exp": None}, "no expiry"),
        ({"exp": int(NOW) - 60}, "expired 60 s ago"),
        ({"exp": True}, "exp is not a time"),
        ({"exp": 1e18}, "exp is not a time"),
        ({"exp": "9999999999"}, "exp is not a time"),
        ({"exp": -1}, "exp is not a time"),
        ({"nbf": int(NOW) + 61}, r"another 61 s \(nbf\)"),
        ({"iat": int(NOW) + 61}, r"another 61 s \(iat\)"),
        ({"nbf": "0"}, "nbf is not a time"),
        ({"aud": "somebody"}, "audience is 'somebody': set audience"),
        ({"eat_nonce": None}, "another nonce"),
        ({"eat_nonce": NONCE.upper()}, "another nonce"),
        ({"eat_nonce": NONCE[:-1]}, "another nonce"),
        ({"eat_nonce": [NONCE, "0" * 64]}, "another nonce"),
        ({"eat_nonce": "\u00e9" * 64}, "another nonce"),
        ({"eat_nonce": None, "nonce": NONCE}, "another nonce"),
        ({"dbgstat": "enabled"}, "debug status is 'enabled'"),
        ({"dbgstat": 4}, "debug status is 4"),
        ({"ready": None}, "claims nothing for ready; the policy asks for true"),
        ({"ready": 1}, "claims 1 for ready"),
        ({"ready": "true"}, "claims 'true' for ready"),
        ({"submods": []}, "not an object with at most 64 members"),
        ({"submods": {"GPU-0": "x"}}, "'GPU-0' is missing"),
        ({"submods": {"GPU-0": {"dbgstat": "enabled"}}}, "debug status is 'enabled'"),
        ({"submods": {"GPU-0": {"submods": {"NVLink": {}}}}}, "'GPU-0' has submodules of its own"),
        ({"submods": {"GPU-0": {"submods": {}}}}, "'GPU-0' has submodules of its own"),
        ({"submods": {str(each): {} for each in range(65)}}, "not an object with at most 64 members"),
    ],
)
def test_claims_that_do_not_admit(changes: dict[str, object], reason: str) -> None:
    refused(ES384.sign(claims(**changes)), reason)


def test_claims_that_admit() -> None:
    accepted(ES384.sign(claims(exp=int(NOW) - 59, nbf=int(NOW) + 60)))  # clocks differ
    accepted(ES384.sign(claims(nbf=None, iat=None)))
    accepted(ES384.sign(claims(eat_nonce=[NONCE])))
    accepted(ES384.sign(claims(dbgstat="disabled-since-boot")))
    accepted(ES384.sign(claims(aud=["other", "me"])), audience="me")
    accepted(ES384.sign(claims(aud="me")), audience="me")
    refused(ES384.sign(claims(aud=["other"])), "asks for me", audience="me")
    refused(ES384.sign(claims()), "asks for me", audience="me")
    inner = {"tee": {"type": "snp", "level": 3}}
    accepted(ES384.sign(claims(x=inner)), claims={"x": {"tee": {"type": ("tdx", "snp"), "level": 3}}})
    refused(ES384.sign(claims(x=inner)), "in x, in tee claims 3 for level", claims={"x": {"tee": {"level": 4}}})
    refused(ES384.sign(claims(x="tee")), "in x, in tee claims nothing for level", claims={"x": {"tee": {"level": 4}}})
    refused(ES384.sign(claims(x=3)), "claims 3 for x", claims={"x": ("3",)})


def test_submodules_inside_the_token() -> None:
    signed = ES384.sign(claims(submods={"cpu0": {"ear.status": "affirming"}, "gpu0": {"ear.status": "warning"}}))
    accepted(signed, submodules=2)
    refused(signed, "submodule 'gpu0' claims 'warning'", submodule_claims={"ear.status": ("affirming",)})
    refused(ES384.sign(claims()), "no submodules", submodule_claims={"ear.status": ("affirming",)})


def test_detached_submodules_must_match_the_token() -> None:
    inner = {f"GPU-{each}": ES384.sign(claims(jti=str(each))) for each in range(2)}
    outer = ES384.sign(claims(submods=mint.detached(inner)))

    def check(detached: dict[str, str], signed: str = outer) -> None:
        token.verify(token.encode(signed, detached), rules(), NONCE, NOW)

    check(inner)
    swapped = dict(zip(inner, reversed(inner.values()), strict=True))
    cases: list[tuple[dict[str, str], str]] = [
        ({}, "'GPU-0' is missing"),
        ({"GPU-0": inner["GPU-0"]}, "'GPU-1' is missing"),
        (swapped, "submodule 'GPU-0' differs"),
        (inner | {"GPU-2": inner["GPU-0"]}, "'GPU-2' was presented, and the token does not list it"),
    ]
    for detached, reason in cases:
        with pytest.raises(AdmissionError, match=reason):
            check(detached)
    for bad, reason in (
        (ES384.sign(claims(eat_nonce="0" * 64)), "another nonce"),
        (ES384.sign(claims(exp=1)), "expired"),
        (ES384.sign(claims(dbgstat="enabled")), "debug status"),
        (ES384.sign(claims(submods={"NVLink": {}})), "'GPU-0' has submodules of its own"),
        (ES384.sign(claims(), kid="p256", alg="ES256"), "signature"),
    ):
        tokens = {"GPU-0": bad}
        with pytest.raises(AdmissionError, match=reason):
            check(tokens, ES384.sign(claims(submods=mint.detached(tokens))))


# -- the key set ----------------------------------------------------------------------------------------------------


def changed_key(**changes: object) -> bytes:
    return json.dumps({"keys": [ES256.jwk() | changes]}).encode()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not a JSON key set"),
        (b"{}", "1 to 64 keys"),
        (b"[]", "1 to 64 keys"),
        (b'{"keys": []}', "1 to 64 keys"),
        (b'{"keys": [3]}', "is not a key"),
        (b'{"keys": [], "keys": []}', "duplicate name"),
        (mint.key_set(ES256, ES256), "two keys with one name"),
        (mint.key_set(ES256, replace(ES384, kid="p256")), "two keys with one name"),
        (changed_key(kid=""), "has no name"),
        (changed_key(kid=3), "has no name"),
        (changed_key(d="AA"), "private or a symmetric key"),
        (json.dumps({"keys": [{"kty": "oct", "kid": "x", "k": "AAAA"}]}).encode(), "private or a symmetric key"),
        (changed_key(use="enc"), "not for signatures"),
        (changed_key(key_ops=["encrypt"]), "not for signatures"),
        (changed_key(alg="ES384"), "used with ES256"),
        (changed_key(alg="none"), "used with ES256"),
        (changed_key(kty="OKP"), "not an EC key"),
        (changed_key(crv="P-521"), "not an EC key"),
        (changed_key(crv=["P-256"]), "not an EC key"),
        (changed_key(x="AAAA"), "not an EC key"),
        (changed_key(x=mint.number(1, 32)), "not an EC key"),
        (changed_key(x=str(ES256.jwk()["x"]) + "="), "not an EC key"),
        (json.dumps({"keys": [RS256.jwk() | {"e": "AQ"}]}).encode(), "not an EC key"),
        (json.dumps({"keys": [RS256.jwk() | {"n": mint.number((1 << 1023) + 1)}]}).encode(), "2048 bits"),
        (json.dumps({"keys": [RS256.jwk() | {"alg": "PS256"}]}).encode(), "used with RS256"),
    ],
)
def test_key_sets_that_are_refused(content: bytes, reason: str) -> None:
    with pytest.raises(PolicyError, match=reason):
        jose.read_keys(content, "the keys")


# -- the policy -----------------------------------------------------------------------------------------------------


def rules_from(text: str, keys: bytes = mint.key_set(ES384)) -> Rules:
    return token.read_rules(parse(text.encode(), lambda path, limit: {"keys.json": keys}[path]))


TABLE = f"""
issuer = "{ISSUER}"
keys = "keys.json"
audience = "me"
submodules = 8
[claims]
"x-nvidia-overall-att-result" = true
"x-nvidia-ver" = ["2.0", "3.0"]
[claims.tee]
level = 3
[submodule_claims]
measres = "success"
"""


def test_a_table_of_the_policy_is_read() -> None:
    found = rules_from(TABLE)
    assert found.claims == {
        "x-nvidia-overall-att-result": True,
        "x-nvidia-ver": ("2.0", "3.0"),
        "tee": {"level": 3},
    }
    assert (found.audience, found.submodules, found.submodule_claims) == ("me", 8, {"measres": ("success",)})
    lines = found.explain()
    assert "the token claims tee.level is 3" in lines
    assert "the token claims x-nvidia-ver is 2.0 or 3.0" in lines
    assert "of every submodule it claims measres is success" in lines


def test_everything_in_the_table_is_in_the_content() -> None:
    base = rules_from(TABLE).content()
    assert base == rules_from(TABLE.replace('"2.0", "3.0"', '"3.0", "2.0"')).content()
    changes = [
        ("verifier.example", "verifier.sample"),
        ('audience = "me"', ""),
        ("submodules = 8", ""),
        ("= true", "= false"),
        ("= true", "= 1"),
        ('"3.0"', '"4.0"'),
        ("level", "levels"),
        ("level = 3", "level = 4"),
        ('"success"', '"failure"'),
    ]
    others = [rules_from(TABLE.replace(*change)).content() for change in changes]
    others.append(rules_from(TABLE, mint.key_set(replace(ES384, kid="other"))).content())
    others.append(rules_from(TABLE, mint.key_set(ES256, ES384)).content())
    assert len({base, *others}) == 1 + len(others)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (TABLE.replace("issuer", "isuer"), "issuer is missing"),
        (TABLE.replace("keys =", "jwks ="), "keys is missing"),
        (f'issuer = "{ISSUER}"\nkeys = "keys.json"\n[claims]\n', "a signed token can also say"),
        (f'issuer = "{ISSUER}"\nkeys = "keys.json"\n', "claims is missing"),
        (TABLE.replace("level = 3", ""), "names no claim"),
        (TABLE.replace("level = 3", "level = 3.5"), "level must be a text, a list of texts"),
        (TABLE.replace("level", '"lev\\u001bel"'), "must be the name of a claim"),
        (TABLE.replace("level", '""'), "must be the name of a claim"),
        (TABLE.replace("level", "l" * 129), "must be the name of a claim"),
        (TABLE.replace("level = 3", "level = []"), "level must be a text, a list of texts"),
        (TABLE.replace("submodules = 8", "submodules = 0"), "from 1 to 64"),
        (TABLE.split("[submodule_claims]")[0] + "[submodule_claims]\n", "leave the table out"),
        (TABLE.replace("submodules = 8", "algorithms = ['none']"), "unknown key 'algorithms'"),
    ],
)
def test_what_a_policy_may_not_say(text: str, reason: str) -> None:
    with pytest.raises(PolicyError, match=reason):
        rules_from(text)


# -- the seam -------------------------------------------------------------------------------------------------------


@pytest.mark.promise("A proof is valid on one connection only.")
def test_a_fresh_token_admits_on_its_own_connection_only() -> None:
    prover = provers.of_token(lambda nonce: ES384.sign(claims(eat_nonce=nonce)).encode() + b"\n")
    policy = Policy((token.verifier(rules(), lambda: NOW),))
    binding = Binding(b"one connection")
    shown = Evidence(worker(1).entry, prover.kind, prover.prove(binding), binding)
    assert verify(policy, shown).proof_name == "attestation token"
    with pytest.raises(AdmissionError, match=r"rank 1: .*not made for this connection"):
        verify(policy, replace(shown, binding=Binding(b"another")))
    late = Policy((token.verifier(rules(), lambda: NOW + 3661),))
    with pytest.raises(AdmissionError, match="expired 61 s ago"):
        verify(late, shown)


def test_a_listing_without_endorsement_relies_on_the_parent() -> None:
    verifier = token.verifier(rules(), lambda: NOW)
    listing = Listing(worker(1).entry, token.KIND, bytes(32), b"")
    assert verify(Policy((verifier,)), listing).entry == worker(1).entry
    with pytest.raises(AdmissionError, match="tokens have none"):
        verify(Policy((verifier,)), replace(listing, endorsement=b"x"))


def test_answers_of_a_service() -> None:
    assert token.read_answer(b" a.b.c\n") == ("a.b.c", {})
    assert token.read_answer(b'[["JWT", "a.b.c"], {"GPU-0": "d.e.f"}]') == ("a.b.c", {"GPU-0": "d.e.f"})
    for answer in (
        b"[",
        b"[]",
        b'[["JWT", "a"]]',
        b'[["CWT", "a"], {}]',
        b'[["JWT", "a"], {"x": 3}]',
        b"\xff",
        b"[" * 9999,
    ):
        with pytest.raises(AdmissionError):
            token.read_answer(answer)


def test_a_proof_has_one_form() -> None:
    good = token.encode("a.b.c", {"A": "x", "B": "y"})
    assert token.decode(good) == ("a.b.c", {"A": "x", "B": "y"})
    start = 4 + 5 + 1
    one, two = good[start : start + 8], good[start + 8 :]
    for bad in (good + b"\0", good[:-1], good[:start] + two + one, good[:start] + one + one, b"", b"\0\0\0\1\xff\0"):
        with pytest.raises(AdmissionError):
            token.decode(bad)
    for name in ("", "a" * 129, "\n", "\u00e9"):
        with pytest.raises(AdmissionError):
            token.encode("a", {name: "b"})
    with pytest.raises(AdmissionError):
        token.encode("\u00e9", {})


@pytest.mark.promise("A refusal does not tell the peer which values the policy asks for.")
@pytest.mark.parametrize(
    ("changes", "secret"),
    [
        ({"iss": "https://evil.example"}, ISSUER),
        ({"aud": "you"}, "audience-1"),
        ({"ready": False}, "true"),
        ({"ready": None}, "ready"),
    ],
)
def test_an_unauthenticated_peer_learns_nothing_of_the_policy(changes: dict[str, object], secret: str) -> None:
    prover = provers.of_token(
        lambda nonce: ES384.sign(claims(**{"eat_nonce": nonce, "aud": "audience-1"} | changes)).encode()
    )
    policy = Policy((token.verifier(replace(rules(), audience="audience-1"), lambda: NOW),))
    binding = Binding(b"one connection")
    with pytest.raises(AdmissionError) as caught:
        verify(policy, Evidence(worker(1).entry, prover.kind, prover.prove(binding), binding))
    assert secret in str(caught.value)
    assert secret not in caught.value.to_peer


@pytest.mark.promise("A refusal does not tell the peer which values the policy asks for.")
def test_an_unauthenticated_peer_does_not_learn_a_keys_algorithm() -> None:
    """The name of a key is guessed or public; what the policy holds for it is not told."""
    with pytest.raises(AdmissionError, match="its key is for ES384") as caught:
        accepted(ES256.sign(claims(), kid=ES384.kid))
    assert caught.value.to_peer == "the token's header says algorithm 'ES256'; its key is for another"
