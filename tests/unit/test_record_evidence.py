"""What a record keeps of workers' evidence, verified as of the time of the run, and attacks on it."""

from __future__ import annotations

import datetime
import hashlib
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringfence.admission.binding import Binding
from ringfence.admission.proofs import snp, token
from ringfence.errors import RecordError
from ringfence.record.evidence import NOT_KEPT, REFUSED, VERIFIED, Shown, verify_shown
from ringfence.record.log import LogEntry
from ringfence.record.log_file import Blobs, open_folder
from tests.unit import azure_mint, nvidia_mint, ocsp_mint, snp_mint, tdx_mint, token_mint
from tests.unit.evidence_samples import (
    BY_CERTIFICATE,
    GPU,
    HEAD,
    LISTED,
    LONG_AGO,
    NOW,
    SECRET,
    TOP,
    Run,
    Site,
    azure_run,
    bundle_run,
    nvidia_run,
    snp_run,
    tdx_run,
    test_roots,
)

assert test_roots  # a fixture, used by name
DAY = 86400
RANKS = range(3)
SITE = Site()


@pytest.fixture
def blobs(tmp_path: Path) -> Blobs:
    open_folder(tmp_path / "record")
    return Blobs(tmp_path / "record")


def verified(run: Run, blobs: Blobs, rank: int = 1, **changes: Any) -> dict[str, str]:
    """The facts of the one proof of a worker, which is verified."""
    (found,) = verify_shown(run.begin(rank, blobs, **changes), blobs)
    assert found.verdict == VERIFIED, found
    return found.facts


def refused(begin: LogEntry, blobs: Blobs) -> str:
    """Why the one proof of a worker is refused."""
    (found,) = verify_shown(begin, blobs)
    assert found.verdict == REFUSED and not found.facts
    return found.reason


RUNS: dict[str, Callable[[], Run]] = {
    "certificate": SITE.run,
    "tdx": tdx_run,
    "snp": snp_run,
    "nvidia": nvidia_run,
    "azure_snp": lambda: azure_run("azure_snp"),
    "azure_tdx": lambda: azure_run("azure_tdx"),
}
OTHER_WORKER = {
    "certificate": "not over this connection",
    "tdx": "REPORTDATA differs",
    "snp": "REPORT_DATA differs",
    "nvidia": "another nonce",
    "azure_snp": "extra data differs",
    "azure_tdx": "extra data differs",
}


@pytest.mark.usefixtures("test_roots")
@pytest.mark.parametrize("name", RUNS)
class TestEachKind:
    @pytest.mark.parametrize("rank", RANKS)
    def test_what_an_honest_worker_keeps_is_verified(self, blobs: Blobs, name: str, rank: int) -> None:
        (found,) = verify_shown(RUNS[name]().begin(rank, blobs), blobs)
        assert (found.kind, found.verdict, found.reason) == (name, VERIFIED, "")
        assert all(isinstance(value, str) for value in found.facts.values())

    @pytest.mark.parametrize("rank", RANKS)
    def test_a_proof_of_another_worker_is_refused(self, blobs: Blobs, name: str, rank: int) -> None:
        """Its file has the digest that the line names, and the line is signed by the worker that lies."""
        run = RUNS[name]()
        other = run.proofs[(rank + 1) % 3]
        digest = blobs.put(other)
        part = {"kind": run.kind, "digest": digest, "claims": [], "proof": digest}
        said = refused(run.begin(rank, blobs, parts=[part], digest=digest), blobs)
        assert said.endswith("is not the one in the roster") if rank else OTHER_WORKER[name] in said
        assert "not the one in the roster" in refused(run.begin(rank, blobs, parts=[part]), blobs)

    def test_a_proof_of_another_worker_is_refused_though_the_roster_lists_it(self, blobs: Blobs, name: str) -> None:
        """The parent lies as well: it listed the child by evidence that was made for another entry."""
        honest = RUNS[name]()
        lent = honest.proofs[2]
        lying = replace(honest, make=lambda rank, binding: lent if rank == 1 else honest.proofs[rank])
        assert OTHER_WORKER[name] in refused(lying.begin(1, blobs), blobs)

    def test_another_binding_is_refused(self, blobs: Blobs, name: str) -> None:
        run = RUNS[name]()
        right = run.binding(1).preimage
        for rank, why in ((0, "by rank 0 as a parent"), (2, "by rank 2 as a child")):
            assert why in refused(run.begin(1, blobs, preimage=run.binding(rank).preimage.hex()), blobs)
        place = len(right) - 6 * 32  # of the entry's digest; then the keys, the hellos and the exporter
        for field, why in enumerate(("another entry", "another entry", "another worker than rank 0")):
            changed = bytearray(right)
            changed[place + 32 * field] ^= 1
            assert why in refused(run.begin(1, blobs, preimage=changed.hex()), blobs)
        for field in (3, 4, 5):
            changed = bytearray(right)
            changed[place + 32 * field] ^= 1
            assert "not the one in the roster" in refused(run.begin(1, blobs, preimage=changed.hex()), blobs)
            changed_by_0 = bytearray(run.binding(0).preimage)
            changed_by_0[place + 32 * field] ^= 1
            assert OTHER_WORKER[name] in refused(run.begin(0, blobs, preimage=changed_by_0.hex()), blobs)
        assert "truncated" in refused(run.begin(1, blobs, preimage=right[:-1].hex()), blobs)
        for text in ("zz", right.hex().upper(), right.hex() + " "):
            assert "hexadecimal" in refused(run.begin(1, blobs, preimage=text), blobs)

    def test_evidence_outside_of_its_validity_is_refused(self, blobs: Blobs, name: str) -> None:
        """The worker moves the time of its presentation, and that of its whole log."""
        for days in (-4000, 4000):
            moved = replace(RUNS[name](), at=RUNS[name]().at + days * DAY)
            assert re.search(r"valid from|expired|Expired|in the future", refused(moved.begin(1, blobs), blobs))

    @pytest.mark.parametrize("at", [-(10**15), 10**15])
    def test_a_time_that_no_clock_has_is_refused(self, blobs: Blobs, name: str, at: int) -> None:
        assert refused(replace(RUNS[name](), at=at).begin(1, blobs), blobs)

    def test_a_time_that_is_not_that_of_the_log_is_refused(self, blobs: Blobs, name: str) -> None:
        run = RUNS[name]()
        for at in (run.at + 600, run.at - 2 * DAY, 0, -(1 << 62), (1 << 62)):
            assert "their times differ" in refused(run.begin(1, blobs, at=at), blobs)

    def test_another_policy_is_refused(self, blobs: Blobs, name: str) -> None:
        run = RUNS[name]()
        assert run.policy is not None and run.text is not None
        wider = run.text.replace("version = 1\n", "version = 1\nmin_workers = 2\n")
        contents = {**run.policy.contents, "policy.toml": wider.encode()}
        other = replace(run.policy, contents=contents)
        assert "it has another digest" in refused(run.begin(1, blobs, policy=other), blobs)

    def test_a_test_root_is_not_trusted(self, blobs: Blobs, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        begin = RUNS[name]().begin(1, blobs)
        monkeypatch.undo()
        (found,) = verify_shown(begin, blobs)
        assert found.verdict == (VERIFIED if name == "certificate" else REFUSED)


class TestFacts:
    def test_of_a_certificate(self, blobs: Blobs) -> None:
        assert verified(SITE.run(), blobs) == {"identity": "spiffe://example.org/worker/1"}

    @pytest.mark.usefixtures("test_roots")
    def test_of_hardware(self, blobs: Blobs) -> None:
        td, vm = verified(tdx_run(), blobs), verified(snp_run(), blobs)
        assert td["mrtd"] == tdx_mint.foundry().rules.mrtd[0].hex()
        assert td["rtmr3"] == tdx_mint.foundry().rules.rtmrs[3][0].hex()
        assert (td["tcb_status"], td["advisories"], td["debug"]) == ("UpToDate", "", "no")
        assert (vm["measurement"], vm["product"], vm["debug"]) == (snp_mint.MEASUREMENT.hex(), "milan", "no")
        assert vm["tcb"] == "bootloader 4, tee 0, snp 24, microcode 219"
        assert vm["chip_id"] == snp_mint.foundry().chip.hex()

    @pytest.mark.usefixtures("test_roots")
    def test_of_a_gpu(self, blobs: Blobs) -> None:
        firmware = GPU.firmware_id.hex()
        versions = f"GH100, driver {nvidia_mint.DRIVER}, VBIOS {nvidia_mint.VBIOS}, firmware {firmware}"
        assert verified(nvidia_run(), blobs) == {GPU.name: versions}

    @pytest.mark.usefixtures("test_roots")
    def test_of_a_vm_on_azure(self, blobs: Blobs) -> None:
        for name, register in (("azure_snp", "measurement"), ("azure_tdx", "mrtd")):
            facts = verified(azure_run(name), blobs)
            assert (facts["vm_id"], facts["secure_boot"]) == (azure_mint.VM_ID, "yes")
            assert facts["pcr23"] == azure_mint.PCRS[23].hex()
            assert len(facts[register]) == 96


class TestAsOfTheRun:
    """Nothing is verified as of now: what has expired since was valid, and what was revoked then was revoked."""

    def test_a_certificate_that_has_expired_since(self, blobs: Blobs) -> None:
        assert datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=365) > LONG_AGO
        assert verified(SITE.run(HEAD + LISTED, first=SITE.revoked(7)), blobs)

    @pytest.mark.usefixtures("test_roots")
    def test_collateral_that_has_expired_since(self, blobs: Blobs) -> None:
        assert verified(tdx_run(NOW - 10 * DAY, age=30, days=-5), blobs)
        assert "Expired" in refused(tdx_run(NOW - 4 * DAY, age=30, days=-5).begin(1, blobs), blobs)
        assert "future" in refused(tdx_run(NOW - 31 * DAY, age=30, days=-5).begin(1, blobs), blobs)

    @pytest.mark.usefixtures("test_roots")
    def test_a_platform_that_was_revoked_or_out_of_date(self, blobs: Blobs) -> None:
        assert "revoked" in refused(tdx_run(is_revoked=True).begin(1, blobs), blobs).lower()
        assert "TCB is OutOfDate" in refused(tdx_run(status="OutOfDate").begin(1, blobs), blobs)

    @pytest.mark.usefixtures("test_roots")
    def test_a_vcek_that_has_expired_since(self, blobs: Blobs) -> None:
        half_a_day_ago = NOW - DAY // 2
        assert verified(snp_run(half_a_day_ago, (-0.75, -0.25)), blobs)
        assert "is valid" in refused(snp_run(NOW, (-0.75, -0.25)).begin(1, blobs), blobs)

    @pytest.mark.usefixtures("test_roots")
    def test_a_signer_of_amd_that_was_revoked(self, blobs: Blobs) -> None:
        vm = snp_mint.foundry()
        assert verified(snp_run(revoked=vm.revoked(2).raw), blobs)
        assert "AMD has revoked" in refused(snp_run(revoked=vm.revoked(1).raw).begin(1, blobs), blobs)
        assert "fetch a new one" in refused(snp_run(revoked=vm.revoked(2, days=(-2, -1)).raw).begin(1, blobs), blobs)

    @pytest.mark.usefixtures("test_roots")
    def test_a_gpu_that_was_revoked(self, blobs: Blobs) -> None:
        good, bad = (ocsp_mint.responses(GPU, TOP, status=each) for each in (ocsp_mint.GOOD, ocsp_mint.REVOKED))
        assert verified(nvidia_run(*good), blobs)
        assert "NVIDIA has revoked" in refused(nvidia_run(*bad).begin(1, blobs), blobs)

    def test_a_certificate_that_was_revoked(self, blobs: Blobs) -> None:
        run = SITE.run(HEAD + LISTED, first=SITE.revoked(7), second=SITE.revoked(101, number=2))
        assert "was revoked by 'CN=test authority' on 2024-05-01" in refused(run.begin(1, blobs), blobs)
        assert verified(run, blobs, rank=2)

    def test_logs_are_verified_in_any_order(self, blobs: Blobs) -> None:
        """The lists of an older session are no lists that were rolled back."""
        for number in (3, 1, 2):
            assert verified(SITE.run(HEAD + LISTED, only=SITE.revoked(7, number=number)), blobs)


class TestLists:
    """Workers of a session can have different lists. The worker that verifies the proof has its own."""

    def test_those_of_the_parent_count(self, blobs: Blobs) -> None:
        run = SITE.run(HEAD + LISTED, only=SITE.revoked(7))
        newer = SITE.run(HEAD + LISTED, only=SITE.revoked(101, number=2)).policy
        child, parent, other = run.begin(1, blobs), run.begin(0, blobs, policy=newer), run.begin(2, blobs)
        (found,) = verify_shown(child, blobs)
        assert found.verdict == VERIFIED
        assert found.reason.endswith("the log of worker 0, which admitted it, is not here")
        (found,) = verify_shown(child, blobs, {0: parent, 1: child, 2: other})
        assert found.verdict == REFUSED and "was revoked by" in found.reason
        (found,) = verify_shown(child, blobs, {0: run.begin(0, blobs)})
        assert (found.verdict, found.reason) == (VERIFIED, "")

    def test_those_of_another_session_do_not_count(self, blobs: Blobs) -> None:
        run = SITE.run(HEAD + LISTED, only=SITE.revoked(7))
        other = replace(run, same_host="sealed").begin(0, blobs)
        (found,) = verify_shown(run.begin(1, blobs), blobs, {0: other})
        assert found.verdict == VERIFIED and "is not here" in found.reason

    def test_a_parent_with_another_policy_is_named(self, blobs: Blobs) -> None:
        run = SITE.run()
        (found,) = verify_shown(run.begin(1, blobs), blobs, {0: run.begin(0, blobs, policy=snp_run().policy)})
        assert found.verdict == REFUSED and "the policy in the log of worker 0" in found.reason


class TestPolicy:
    def test_a_file_that_was_replaced_is_refused(self, blobs: Blobs) -> None:
        """With a certificate of another authority in its place, its own worker would be admitted."""
        run, other = SITE.run(), Site()
        assert run.policy is not None
        contents = {**run.policy.contents, "ca.pem": other.authority.pem}
        begin = run.begin(1, blobs, policy=replace(run.policy, contents=contents))
        assert "it has another digest" in refused(begin, blobs)

    def test_a_file_that_is_not_kept_is_named(self, blobs: Blobs) -> None:
        run = SITE.run()
        assert run.policy is not None
        contents = {"policy.toml": run.policy.contents["policy.toml"]}
        begin = run.begin(1, blobs, policy=replace(run.policy, contents=contents))
        assert "ca: cannot read ca.pem: it is not in the record" in refused(begin, blobs)

    def test_a_folder_of_lists_may_have_others_in_it(self, blobs: Blobs) -> None:
        """A file that the policy names is no list because it is below the folder of the lists."""
        run = SITE.run((HEAD + LISTED).replace("ca.pem", "lists/more/ca.pem"), only=SITE.revoked(7))
        contents = {name.replace("ca.pem", "lists/more/ca.pem"): content for name, content in run.files.items()}
        assert verified(replace(run, files=contents), blobs)

    @pytest.mark.parametrize("change", [{"policy_file": ""}, {"policy_file": "gone.toml"}, {"same_host": "sealed"}])
    def test_other_settings_are_refused(self, blobs: Blobs, change: dict[str, str]) -> None:
        begin = SITE.run().begin(1, blobs)
        begin.fields.update(change)
        assert "it has another digest" in refused(begin, blobs)

    def test_a_value_that_no_setting_has_is_refused(self, blobs: Blobs) -> None:
        begin = SITE.run().begin(1, blobs)
        begin.fields["same_host"] = "\N{SNOWMAN}"
        assert "it has another digest" in refused(begin, blobs)

    @pytest.mark.parametrize("same_host", ["shared", "sealed"])
    def test_workers_on_one_machine_may_seal_by_a_setting(self, blobs: Blobs, same_host: str) -> None:
        assert verified(replace(SITE.run(), same_host=same_host), blobs)

    def test_any_one_rule_admits(self, blobs: Blobs) -> None:
        others = BY_CERTIFICATE.replace("worker", "other")
        assert verified(SITE.run(f"{HEAD}{others}[[admit]]\n{BY_CERTIFICATE}"), blobs)
        assert "the policy admits" in refused(SITE.run(HEAD + others).begin(1, blobs), blobs)

    def test_a_certificate_of_another_rank_is_refused(self, blobs: Blobs) -> None:
        bound = SITE.run(HEAD + BY_CERTIFICATE.replace("*", "{rank}"))
        assert verified(bound, blobs)
        run = replace(bound, make=lambda rank, binding: SITE.prove(rank + 1, binding))
        assert "presented as rank 1" in refused(run.begin(1, blobs), blobs)

    def test_proofs_that_no_rule_asks_for_are_refused(self, blobs: Blobs) -> None:
        run = replace(SITE.run(), kind=snp.KIND)
        assert "no rule of the policy" in refused(run.begin(1, blobs), blobs)


class TestNotKept:
    @pytest.mark.parametrize("text", [None, f"{HEAD}[admit.secret]\n"])
    @pytest.mark.parametrize("same_host", ["shared", "sealed"])
    def test_a_secret_convinces_nobody_outside(self, blobs: Blobs, text: str | None, same_host: str) -> None:
        run = Run(1, text, lambda rank, binding: SECRET, same_host=same_host)
        reason = "any member could have made it: it convinces nobody outside"
        assert verify_shown(run.begin(1, blobs), blobs) == [Shown("secret", NOT_KEPT, reason, {})]

    def test_a_secret_of_another_entry_is_refused(self, blobs: Blobs) -> None:
        run = Run(1, None, lambda rank, binding: SECRET)
        assert "by rank 2" in refused(run.begin(1, blobs, preimage=run.binding(2).preimage.hex()), blobs)

    def test_of_a_token_the_claims_are_facts(self, blobs: Blobs) -> None:
        def make(rank: int, binding: Binding) -> bytes:
            return token.encode(token_mint.ES384.sign(token_mint.claims(name="\x1b\N{SNOWMAN}")), {})

        keys = token_mint.key_set(token_mint.ES384)
        text = f'{HEAD}[admit.token]\nissuer = "x"\nkeys = "keys.json"\nclaims = {{ secure = true }}\n'
        run = Run(token.KIND, text, make, files={"keys.json": keys})
        (found,) = verify_shown(run.begin(1, blobs), blobs)
        assert (found.kind, found.verdict) == ("token", NOT_KEPT)
        assert "a token is a credential" in found.reason
        assert '"iss"' in found.facts["claims 0"]
        assert found.facts["claims 0"].isascii() and found.facts["claims 0"].isprintable()

    @pytest.mark.usefixtures("test_roots")
    def test_each_part_of_a_bundle_has_a_verdict(self, blobs: Blobs) -> None:
        now = Site(datetime.datetime.fromtimestamp(NOW, datetime.UTC))
        run = bundle_run(now)
        found = verify_shown(run.begin(1, blobs), blobs)
        assert [(each.kind, each.verdict) for each in found] == [
            ("secret", NOT_KEPT),
            ("certificate", VERIFIED),
            ("tdx", VERIFIED),
        ]
        parts = run.begin(1, blobs).fields["presentation"]["parts"]
        lent = run.begin(2, blobs).fields["presentation"]["parts"][2]
        found = verify_shown(run.begin(1, blobs, parts=[*parts[:2], lent]), blobs)
        assert [each.verdict for each in found] == [NOT_KEPT, VERIFIED, REFUSED]
        for wrong in (parts[:2], parts[::-1], [*parts, parts[2]], parts[1:]):
            found = verify_shown(run.begin(1, blobs, parts=wrong), blobs)
            assert {each.verdict for each in found} == {REFUSED}
        without = [parts[0], {**parts[1], "proof": ""}, parts[2]]
        found = verify_shown(run.begin(1, blobs, parts=without), blobs)
        assert [each.verdict for each in found] == [NOT_KEPT, REFUSED, VERIFIED]

    def test_a_worker_alone_has_presented_nothing(self, blobs: Blobs) -> None:
        alone = Run(1, None, lambda rank, binding: SECRET, size=1)
        assert verify_shown(alone.begin(0, blobs), blobs) == []


class TestMalformed:
    def test_a_worker_that_keeps_nothing_is_refused(self, blobs: Blobs) -> None:
        begin = SITE.run().begin(1, blobs)
        assert "does not have what this worker presented" in refused(SITE.run().begin(1, blobs, parts=[]), blobs)
        begin.fields["presentation"] = {}
        assert "does not have what this worker presented" in refused(begin, blobs)

    def test_another_kind_than_the_roster_says_is_refused(self, blobs: Blobs) -> None:
        assert "where the roster says 2" in refused(SITE.run().begin(1, blobs, kind=3), blobs)

    @pytest.mark.parametrize("kind", [-1, 7, 300, 1 << 40])
    def test_a_kind_that_does_not_exist_is_refused(self, blobs: Blobs, kind: int) -> None:
        run = SITE.run()
        (part,) = run.begin(1, blobs).fields["presentation"]["parts"]
        assert "no rule" in refused(run.begin(1, blobs, kind=kind, parts=[{**part, "kind": kind}]), blobs)

    @pytest.mark.parametrize("content", [b"", b"\0", b"nonsense" * 100])
    @pytest.mark.usefixtures("test_roots")
    def test_nonsense_in_the_place_of_a_proof_is_refused(self, blobs: Blobs, content: bytes) -> None:
        for name, run in RUNS.items():
            made = replace(run(), make=lambda rank, binding: content)
            assert refused(made.begin(1, blobs), blobs), name

    def test_a_log_of_another_key_is_an_error(self, blobs: Blobs) -> None:
        """The chain from the evidence to the log: the TLS key that the binding covers has signed the log's key."""
        begin = SITE.run().begin(1, blobs)
        begin.fields["key"] = "00" * 32
        with pytest.raises(RecordError, match="did not sign the key of this log"):
            verify_shown(begin, blobs)

    def test_a_file_that_is_missing_is_an_error(self, blobs: Blobs, tmp_path: Path) -> None:
        begin = SITE.run().begin(1, blobs)
        (tmp_path / "record" / "blobs" / begin.fields["presentation"]["digest"]).unlink()
        with pytest.raises(RecordError, match="cannot be read"):
            verify_shown(begin, blobs)

    def test_a_file_that_was_changed_is_an_error(self, blobs: Blobs, tmp_path: Path) -> None:
        begin = SITE.run().begin(1, blobs)
        name = begin.fields["policy_files"]["ca.pem"]
        (tmp_path / "record" / "blobs" / name).write_bytes(Site().authority.pem)
        assert hashlib.sha256(Site().authority.pem).hexdigest() != name
        with pytest.raises(RecordError, match="it has another digest"):
            verify_shown(begin, blobs)
