"""Collecting evidence of an Azure VM: from a real TPM in software, and from a metadata service over HTTP."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from ringfence import cli
from ringfence.admission.binding import Binding
from ringfence.admission.policy import Evidence, Policy, Prover, Verifier
from ringfence.admission.policy_file.policy_file import PolicyFile, Rule
from ringfence.admission.proofs import azure, hcl_report, kinds, tpm_quote
from ringfence.cli.evidence import collect
from ringfence.cli.evidence_views import look
from ringfence.config.settings import Settings
from ringfence.errors import AdmissionError, ConfigurationError
from ringfence.evidence import evidence_file, tpm
from ringfence.evidence.azure_guest import ATTESTATION_KEY, AzureGuest
from ringfence.evidence.evidence_file import StoredEvidence
from ringfence.evidence.metadata import ANSWER_BYTES, Metadata
from ringfence.evidence.tsm import KernelFiles
from ringfence.session.join.provers import Machine, prover_of
from tests import provers
from tests.integration.join_cluster import Clock, Warnings, World
from tests.limits import FAR
from tests.unit import azure_mint, snp_mint, tdx_mint
from tests.unit.admission_samples import worker
from tests.unit.azure_mint import NONCE, certificate, hcl, td_report
from tests.unit.azure_records import RECORDS, Record
from tests.virtual_tpm import VirtualTpm, running

pytestmark = pytest.mark.processes
DATA = bytes(range(64))
NV_BYTES = 2048  # the most that swtpm stores under one index


class Service:
    """Azure's metadata service as its documentation describes it: VCEK by GET, a quote for a TD report by POST."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.answers: dict[str, bytes] = {}
        self.status = 200
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.metadata = Metadata(f"http://127.0.0.1:{self._server.server_port}", seconds=10)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                good = self.headers["Metadata"] == "true"
                pem = ssl.DER_cert_to_PEM_cert(certificate())
                self.answer(json.dumps({"vcekCert": pem, "tcbm": "0", "certificateChain": ""}) if good else "{}")

            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["report"]
                report = base64.urlsafe_b64decode(asked)
                assert len(report) == 1024
                quote = tdx_mint.foundry().quote(report[128:192]) + bytes(70)
                self.answer(json.dumps({"quote": base64.urlsafe_b64encode(quote).decode().rstrip("=")}))

            def answer(self, text: str) -> None:
                service.requests.append(f"{self.command} {self.path}")
                content = service.answers.get(self.path, text.encode())
                self.send_response(service.status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        return Handler


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    yield made
    made.close()


@contextmanager
def azure_vm(folder: Path, kind: int) -> Iterator[VirtualTpm]:
    """A TPM with an attestation key, and with an HCL report that names it."""
    with running(folder) as device:
        data = azure_mint.runtime_data(device.make_key(), is_short=True)
        covered = hashlib.sha256(data).digest() + bytes(32)
        report = snp_mint.foundry().report(covered) if kind == hcl_report.SNP else td_report(covered)
        device.store(hcl(kind, report, data, padded=NV_BYTES))
        device.extend(4, hashlib.sha256(b"a boot loader").digest())
        yield device


@pytest.fixture(scope="module")
def snp_vm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VirtualTpm]:
    with azure_vm(tmp_path_factory.mktemp("snp"), hcl_report.SNP) as device:
        yield device


@pytest.fixture(scope="module")
def tdx_vm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VirtualTpm]:
    with azure_vm(tmp_path_factory.mktemp("tdx"), hcl_report.TDX) as device:
        yield device


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[VirtualTpm]:
    with running(tmp_path / "tpm") as device:
        yield device


PCR_4 = hashlib.sha256(bytes(32) + hashlib.sha256(b"a boot loader").digest()).digest()


@pytest.mark.promise("Evidence collected from a vTPM is accepted for the connection it was made for only.")
def test_an_snp_guest_presents_evidence_that_verifies(snp_vm: VirtualTpm, service: Service) -> None:
    proof = AzureGuest(snp_vm.opened, service.metadata).snp(NONCE)
    rules = azure.Rules(snp_mint.foundry().rules, ((4, (PCR_4,)), (17, (b"\xff" * 32,))))
    roots = snp_mint.foundry().roots
    claims, guest = azure.verify_snp(proof, NONCE, rules, time.time(), known=roots)
    assert claims.product.name == "milan"
    assert guest.pcrs[4] == PCR_4
    with pytest.raises(AdmissionError, match="another connection"):
        azure.verify_snp(proof, bytes(32), rules, time.time(), known=roots)


def test_a_tdx_guest_presents_evidence_that_verifies(tdx_vm: VirtualTpm, service: Service) -> None:
    proof = AzureGuest(tdx_vm.opened, service.metadata).tdx(NONCE)
    rules = azure.Rules(tdx_mint.foundry().rules, ((4, (PCR_4,)),))
    claims, _ = azure.verify_tdx(proof, NONCE, rules, time.time(), root=tdx_mint.foundry().root)
    assert claims.status == "UpToDate"
    assert service.requests == ["POST /acc/tdquote"]


def test_the_certificate_is_fetched_once_and_not_at_all_if_given(snp_vm: VirtualTpm, service: Service) -> None:
    guest = AzureGuest(snp_vm.opened, service.metadata)
    assert azure.decode_snp(guest.snp(NONCE, b"given"))[1] == b"given"
    assert not service.requests
    proofs = [guest.snp(bytes([number]) * 32) for number in range(3)]
    assert {azure.decode_snp(proof)[1] for proof in proofs} == {certificate()}
    assert service.requests == ["GET /metadata/THIM/amd/certification"]


def test_a_guest_of_the_other_kind_is_an_error(snp_vm: VirtualTpm, tdx_vm: VirtualTpm, service: Service) -> None:
    assert AzureGuest(snp_vm.opened).kind() == hcl_report.SNP
    assert AzureGuest(tdx_vm.opened).kind() == hcl_report.TDX
    with pytest.raises(ConfigurationError, match="this is a SEV-SNP guest, not a TDX guest"):
        AzureGuest(snp_vm.opened, service.metadata).tdx(NONCE)
    with pytest.raises(ConfigurationError, match="this is a TDX guest, not a SEV-SNP guest"):
        AzureGuest(tdx_vm.opened, service.metadata).snp(NONCE)


def test_a_tpm_of_no_azure_vm_is_an_error_that_says_so(bare: VirtualTpm) -> None:
    with pytest.raises(ConfigurationError, match="no such key or NV index; this is not a confidential VM on Azure"):
        AzureGuest(bare.opened).kind()
    bare.store(bytes(NV_BYTES))
    with pytest.raises(ConfigurationError, match="not an HCL report; this is not a confidential VM on Azure"):
        AzureGuest(bare.opened).kind()
    with bare.opened() as device, pytest.raises(ConfigurationError, match="no such key"):
        tpm.quote(device, ATTESTATION_KEY, NONCE)


def test_a_key_that_the_report_does_not_name_is_detected_before_it_is_presented(bare: VirtualTpm) -> None:
    key = azure_mint.machine().key
    other = azure_mint.Machine(key, azure_mint.runtime_data(key.public_key(), is_short=True))
    bare.make_key()
    bare.store(hcl(hcl_report.SNP, other.snp_report, other.runtime, padded=NV_BYTES))
    with pytest.raises(ConfigurationError, match="peers would refuse: the TPM quote was not signed with"):
        AzureGuest(bare.opened).snp(NONCE, b"certificate")


def test_a_report_that_does_not_cover_its_runtime_data_is_an_error(bare: VirtualTpm) -> None:
    data = azure_mint.runtime_data(azure_mint.machine().key.public_key(), is_short=True)
    bare.store(hcl(hcl_report.SNP, snp_mint.foundry().report(bytes(64)), data, padded=NV_BYTES))
    with pytest.raises(ConfigurationError, match="does not cover its runtime data"):
        AzureGuest(bare.opened).kind()


def test_a_password_of_the_owner_is_an_error_that_says_so(bare: VirtualTpm) -> None:
    bare.store(b"content")
    bare.set_owner_password("secret")
    with bare.opened() as device, pytest.raises(ConfigurationError, match="password is set, and must be empty"):
        tpm.nv_read(device, 0x01400001, 4096)


@pytest.mark.parametrize("size", [1, 511, 512, 513, 2048])
def test_an_nv_index_is_read_in_parts(tmp_path: Path, size: int) -> None:
    content = os.urandom(size)
    with running(tmp_path / "tpm") as machine:
        machine.store(content)
        with machine.opened() as device:
            assert tpm.nv_size(device, 0x01400001) == size
            assert tpm.nv_read(device, 0x01400001, size) == content
            with pytest.raises(ConfigurationError, match=f"has {size} bytes, where at most {size - 1} are allowed"):
                tpm.nv_read(device, 0x01400001, size - 1)


def test_quote_and_pcrs_are_those_of_the_tpm(snp_vm: VirtualTpm) -> None:
    with snp_vm.opened() as device:
        pcrs = tpm.read_pcrs(device)
        quote, signature = tpm.quote(device, ATTESTATION_KEY, NONCE)
    found = tpm_quote.read(quote)
    assert (found.extra_data, found.pcr_digest) == (NONCE, tpm_quote.digest_of(pcrs))
    assert len(signature) == 256
    assert pcrs[0] == bytes(32) and pcrs[17] == b"\xff" * 32


def test_a_tpm_that_does_not_respond_is_given_up(tmp_path: Path) -> None:
    """A pipe takes the command, and nobody answers."""
    near, far = os.pipe()
    silent = tpm.TpmDevice(far, seconds=0.05)
    with pytest.raises(ConfigurationError, match="did not respond within 0 s"):
        tpm.nv_size(silent, 0x01400001)
    os.close(near)
    os.close(far)
    with pytest.raises(ConfigurationError, match="this machine has no TPM"), tpm.opened(str(tmp_path / "none")):
        pass


@pytest.mark.parametrize(
    ("answer", "status", "reason"),
    [
        (b"", 200, "returned no vcekCert"),
        (b"[]", 200, "returned no vcekCert"),
        (b'{"vcekCert": 1}', 200, "returned no vcekCert"),
        (b"[" * 20000, 200, "returned no vcekCert"),
        (b'{"vcekCert": "-----BEGIN CERTIFICATE-----"}', 200, "returned no certificate"),
        (b"{}", 404, "with status 404"),
        (bytes(ANSWER_BYTES + 1), 200, "more than 65536 bytes"),
    ],
)
def test_answers_of_the_metadata_service_are_checked(service: Service, answer: bytes, status: int, reason: str) -> None:
    service.answers["/metadata/THIM/amd/certification"] = answer
    service.status = status
    with pytest.raises(ConfigurationError, match=reason):
        service.metadata.vcek()


def test_a_quote_of_another_request_is_an_error(tdx_vm: VirtualTpm, service: Service) -> None:
    other = base64.urlsafe_b64encode(tdx_mint.foundry().quote(bytes(64)))
    for answer, reason in (
        (b'{"quote": "' + other + b'"}', "the quote of another request"),
        (b'{"quote": "AAAA"}', "malformed quote"),
        (b'{"quote": "!"}', "not base64url"),
    ):
        service.answers["/acc/tdquote"] = answer
        with pytest.raises(ConfigurationError, match=reason):
            AzureGuest(tdx_vm.opened, service.metadata).tdx(NONCE)


def test_without_a_metadata_service_the_error_says_what_is_needed(snp_vm: VirtualTpm, service: Service) -> None:
    service.close()
    with pytest.raises(ConfigurationError, match=r"does not answer .* needs access to it"):
        AzureGuest(snp_vm.opened, service.metadata).snp(NONCE)


# -- as a worker does it --------------------------------------------------------------------------------------------


def policy_of(kind: str) -> PolicyFile:
    rules = azure_mint.snp_rules() if kind == "azure_snp" else azure_mint.tdx_rules()
    return PolicyFile((Rule(((kind, replace(rules, pcrs=((4, (PCR_4,)),))),)),))


def test_a_worker_presents_what_its_policy_asks_for(snp_vm: VirtualTpm, tdx_vm: VirtualTpm, service: Service) -> None:
    """From policy to prover to verifier, for one binding; the roots are the tests' own."""
    binding = Binding(b"the preimage of a binding")
    roots, root = snp_mint.foundry().roots, tdx_mint.foundry().root
    for kind, vm in (("azure_snp", snp_vm), ("azure_tdx", tdx_vm)):
        policy = policy_of(kind)
        (_, rules), *_ = policy.rules[0].proofs
        assert isinstance(rules, azure.Rules)
        prover = prover_of(Settings(), None, policy, Machine(open_tpm=vm.opened, metadata=service.metadata))
        verifier: Verifier
        if kind == "azure_snp":
            verifier = azure.snp_verifier(rules, time.time, known=roots)
        else:
            verifier = azure.tdx_verifier(rules, time.time, root=root)
        assert verifier.kind == prover.kind
        entry = worker(1).entry
        verifier.verify(Evidence(entry, prover.kind, prover.prove(binding), binding))
        assert prover.endorse(entry, bytes(32)) == b""
        other = Binding(b"another")
        with pytest.raises(AdmissionError, match="refuses rank 1: the TPM quote was made for another connection"):
            verifier.verify(Evidence(entry, prover.kind, prover.prove(binding), other))


def test_a_worker_without_the_hardware_of_a_rule_says_so(snp_vm: VirtualTpm, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="this VM runs on SEV-SNP, and this rule asks for TDX"):
        prover_of(Settings(), None, policy_of("azure_tdx"), Machine(open_tpm=snp_vm.opened))
    nowhere = partial(tpm.opened, str(tmp_path / "none"))
    with pytest.raises(ConfigurationError, match="this machine has no TPM"):
        prover_of(Settings(), None, policy_of("azure_snp"), Machine(open_tpm=nowhere))


class WithoutTsm(KernelFiles):
    """The kernel of an Azure VM, which has no configfs-tsm."""

    def make(self, folder: str) -> None:
        raise FileNotFoundError(2, "No such file or directory")


def test_the_command_collects_what_an_azure_vm_supports(
    snp_vm: VirtualTpm, tdx_vm: VirtualTpm, service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind, vm in (("azure_snp", snp_vm), ("azure_tdx", tdx_vm)):
        held = collect(None, DATA, WithoutTsm(), None, None, AzureGuest(vm.opened, service.metadata))
        assert (held.kind, held.report_data) == (kind, DATA)
        assert evidence_file.read(held.text().encode()) == held
        file = tmp_path / f"{kind}.json"
        file.write_text(held.text())
        assert cli.main(["evidence", "measure", str(file)]) == (1 if kind == "azure_snp" else 0)
        output = capsys.readouterr().out
        if kind == "azure_snp":
            assert "was not issued under a pinned root of AMD" in " ".join(output.split())
        else:
            assert "NOT VERIFIED" in output and f'4 = "{PCR_4.hex()}"   # boot loader' in output
            assert "[admit.azure_tdx.pcrs]" in output


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_a_policy_made_from_recorded_evidence_admits_it(record: Record) -> None:
    """A recorded VM signed another verifier's nonce."""
    held = StoredEvidence("azure_snp", record.proof, DATA)
    with pytest.raises(AdmissionError, match="another connection"):
        look(held, DATA, {}, record.now)
    view = look(replace(held, other_nonce=record.nonce), DATA, {}, record.now)
    assert view.claims["secure boot"] == "on" and view.claims["pcr 7"] == record.pcrs[7].hex()
    policy = kinds.read(f"version = 1\n[[admit]]\n{view.toml}".encode(), KernelFiles().read)
    (_, rules), *_ = policy.rules[0].proofs
    assert isinstance(rules, azure.Rules)
    assert [index for index, _ in rules.pcrs] == [4, 7, 8, 9, 11, 12, 14]
    azure.verify_snp(record.proof, record.nonce, rules, record.now)


# -- whole admissions -----------------------------------------------------------------------------------------------


def admission(vm: VirtualTpm, kind: str, service: Service, pcr: bytes = PCR_4) -> tuple[Policy, Prover]:
    """Policy and prover of a worker in this VM; the policy accepts both kinds."""
    pcrs = ((4, (pcr,)),)
    verifiers: tuple[Verifier, ...] = (
        azure.snp_verifier(replace(azure_mint.snp_rules(), pcrs=pcrs), time.time, known=snp_mint.foundry().roots),
        azure.tdx_verifier(replace(azure_mint.tdx_rules(), pcrs=pcrs), time.time, root=tdx_mint.foundry().root),
    )
    guest = AzureGuest(vm.opened, service.metadata)
    if kind == "azure_snp":
        return Policy(verifiers), provers.of_azure(azure.SNP_KIND, guest.snp)
    return Policy(verifiers), provers.of_azure(azure.TDX_KIND, guest.tdx)


def test_workers_in_vms_of_both_kinds_form_a_run(snp_vm: VirtualTpm, tdx_vm: VirtualTpm, service: Service) -> None:
    """Six workers over TLS, two levels of the tree: each collects from its TPM for each neighbour."""
    admissions = {
        rank: admission(*((tdx_vm, "azure_tdx") if rank % 2 else (snp_vm, "azure_snp")), service) for rank in range(6)
    }
    with World(6) as world:
        world.start(range(6), admission=admissions)
        members = world.members()
    assert len({member.roster.digest for member in members}) == 1
    assert {each.proof_name for member in members for each in member.roster.admitted} == {
        azure.SNP_NAME,
        azure.TDX_NAME,
    }


def test_a_vm_that_booted_something_else_is_not_admitted(
    snp_vm: VirtualTpm, tmp_path: Path, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    with azure_vm(tmp_path / "other", hcl_report.SNP) as other:
        other.extend(4, hashlib.sha256(b"another boot loader").digest())
        admissions = {0: admission(snp_vm, "azure_snp", service), 1: admission(other, "azure_snp", service)}
        with World(2) as world, Warnings() as warnings:
            world.start(range(2), admission=admissions)
            warnings.wait_for(lambda texts: sum("refuses rank 1" in text for text in texts) == 2)
            clock.advance(FAR)
            text = world.error(1)
            world.error(0)
    assert "SEV-SNP on Azure refuses rank 1: its PCR 4 is" in text
