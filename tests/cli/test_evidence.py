"""`ringfence evidence`: recorded evidence is verified as the verifier would, and what is measured from it admits it."""

from __future__ import annotations

import base64
import http.server
import json
import re
import socket
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509 import ocsp

from ringfence.admission.proofs import kinds, nvidia, reference_values, snp, tdx
from ringfence.admission.proofs.tdx_collateral import Collateral
from ringfence.cli import main
from ringfence.cli.evidence import collect
from ringfence.errors import ConfigurationError
from ringfence.evidence import collateral
from ringfence.evidence.evidence_file import FILE_BYTES, StoredEvidence, read
from ringfence.keys import PROOF_LIMIT_BYTES
from tests.cli.command import ringfence
from tests.fake_tsm import Kernel
from tests.limits import HANG
from tests.unit import nvidia_records, snp_records, tdx_records
from tests.unit.tdx_mint import foundry
from tests.unit.test_collect import DATA, snp_kernel, tdx_kernel

SNP, TDX = snp_records.FOLDER, tdx_records.FOLDER
TURIN = (f"{SNP}/oak-turin_report.bin", "--certificate", f"{SNP}/oak-turin_vcek.der", "--at", "2026-01-01")
QUOTE = (f"{TDX}/phala-tdx_quote", "--at", "2025-06-20T12:00:00Z")
COLLATERAL = ("--collateral", f"{TDX}/phala-tdx_quote_collateral.json")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(["evidence", *arguments])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


# -- verify ---------------------------------------------------------------------------------------------------------


def test_recorded_evidence_is_genuine_at_its_time() -> None:
    done = ringfence("evidence", "verify", *TURIN)
    assert (done.returncode, done.stderr) == (0, "")
    assert "SEV-SNP report from Turin: genuine" in done.stdout
    done = ringfence("evidence", "verify", *QUOTE, *COLLATERAL, "--json")
    assert done.returncode == 0
    found = json.loads(done.stdout)
    assert found["good"] is True
    assert found["claims"]["tcb status"] == "UpToDate"


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ((*TURIN[:3], "--at", "2040-01-01"), 1, "and it is 2040-01-01"),
        ((TURIN[0], "--certificate", f"{SNP}/oak-genoa_vcek.der", "--at", "2026-01-01"), 1, "VCEK is of another chip"),
        ((TURIN[0],), 1, "its endorsement certificate is malformed"),
        ((QUOTE[0], *COLLATERAL), 1, "its collateral must be current: `ringfence evidence collateral`"),
        (QUOTE, 2, "name it with --collateral"),
        ((*QUOTE, "--collateral", f"{TDX}/phala-near_quote_collateral.json"), 1, "no collateral for its platform"),
        ((*QUOTE, "--collateral", QUOTE[0]), 2, "--collateral"),
        ((*QUOTE, *COLLATERAL, "--report-data", "00" * 64), 1, "signs other report data than expected"),
        ((*QUOTE, *COLLATERAL, "--report-data", "00"), 2, "128 hexadecimal digits"),
        ((QUOTE[0], "--at", "yesterday"), 2, "write a time such as"),
        ((f"{TDX}/phala-sgx_quote",), 2, "of an SGX enclave"),
        ((f"{TDX}/none",), 2, "No such file"),
        ((TURIN[0], "--certificate", f"{TDX}/none"), 2, "No such file"),
    ],
)
def test_invalid_evidence_is_refused_with_its_reason(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, text: str
) -> None:
    found, output = run(capsys, "verify", *arguments)
    assert text in output
    assert found == code


# -- measure, and a policy from it ----------------------------------------------------------------------------------


def policy_from(measured: str, folder: Path) -> Path:
    """What a user does: the head of a policy, a rule, and the table that was printed."""
    path = folder / "policy.toml"
    path.write_text(f"version = 1\n[[admit]]\n{measured}")
    path.chmod(0o644)
    return path


@pytest.mark.parametrize("name", [each for each in snp_records.RECORDS if each != snp_records.DEBUGGED])
def test_what_is_measured_from_a_report_admits_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    record = snp_records.RECORDS[name]
    (tmp_path / "report").write_bytes(record.report)
    (tmp_path / "leaf").write_bytes(record.certificate)
    arguments = (str(tmp_path / "report"), "--certificate", str(tmp_path / "leaf"), "--at", record.day)
    code, measured = run(capsys, "measure", *arguments)
    assert code == 0
    assert measured.startswith(f"# SEV-SNP report from {record.product.capitalize()}, verified\n")
    policy = policy_from(measured, tmp_path)
    assert run(capsys, "verify", *arguments, "--policy", str(policy))[0] == 0
    code, output = run(capsys, "verify", *TURIN, "--policy", str(policy))
    assert code == (0 if name == "oak turin" else 1), output


@pytest.mark.parametrize("record", tdx_records.RECORDS.values(), ids=tdx_records.RECORDS)
def test_what_is_measured_from_a_quote_admits_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, record: tdx_records.Record
) -> None:
    terms = tmp_path / f"{record.collateral[0].fmspc}.json"
    terms.write_text(record.collateral[0].text)
    arguments = (f"{TDX}/{record.file}", "--at", record.day + "T12:00:00")
    code, measured = run(capsys, "measure", *arguments, "--collateral", str(terms))
    assert code == 0
    assert measured.startswith("# TDX quote, verified\n")
    policy = policy_from(measured, tmp_path)
    code, output = run(capsys, "verify", *arguments, "--policy", str(policy), "--json")
    assert code == 0, output
    assert json.loads(output)["verdict"] == f"genuine, and rule 1 of {policy} is met as far as tdx goes"
    policy_from(re.sub('mrtd = "[0-9a-f]+"', f'mrtd = "{bytes(48).hex()}"', measured), tmp_path)
    code, output = run(capsys, "verify", *arguments, "--policy", str(policy))
    assert code == 1
    assert "rule 1: its mrtd is" in output


@pytest.mark.parametrize("file", ["hopper_evidence.json", "evidence_hopper_590_12.json", "multi_gpu_hopper.json"])
def test_measuring_gpus_gives_a_file_of_reference_values(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, file: str
) -> None:
    """Evidence of real GPUs, as NVIDIA's tools wrote it, under NVIDIA's root."""
    path = str(nvidia_records.FOLDER / file)
    code, measured = run(capsys, "measure", path)
    assert code == 0
    assert re.match(r"# evidence of \d NVIDIA devices?, verified\n", measured)
    values = reference_values.read(measured.encode(), "measured")
    claims = nvidia.verify_report(
        nvidia_records.serialized(file)[0].gpu, read_held(path).other_nonce, nvidia_records.NOW
    )
    values.compare(claims.firmware_id, claims.measurements)
    assert run(capsys, "verify", path)[0] == 0
    (tmp_path / "reference_values.toml").write_text(measured)
    policy = policy_from('[admit.nvidia]\nreference_values = "reference_values.toml"\n', tmp_path)
    code, output = run(capsys, "verify", path, "--policy", str(policy))
    assert (code, "no worker could present it" in output) == (2, True)


def read_held(path: str) -> StoredEvidence:
    return read(Path(path).read_bytes())


def test_gpu_evidence_that_was_changed_is_not_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    gpus = json.loads((nvidia_records.FOLDER / "hopper_evidence.json").read_text())
    report = bytearray(base64.b64decode(gpus[0]["evidence"]))
    report[200] ^= 1
    gpus[0]["evidence"] = base64.b64encode(report).decode()
    (tmp_path / "gpus.json").write_text(json.dumps(gpus))
    code, output = run(capsys, "measure", str(tmp_path / "gpus.json"))
    assert (code, "not signed by its attestation key" in output) == (1, True)


def test_unverified_evidence_is_measured_and_marked(capsys: pytest.CaptureFixture[str]) -> None:
    code, output = run(capsys, "measure", f"{SNP}/virtee-report_milan.hex")
    assert code == 0
    assert output.startswith("# SEV-SNP report from Milan or Genoa, NOT VERIFIED: no --certificate was given")
    code, output = run(capsys, "measure", f"{TDX}/phala-near_quote_hex.txt", "--json")
    assert code == 0
    assert json.loads(output)["verified"] is False


def test_what_does_not_verify_is_not_measured(capsys: pytest.CaptureFixture[str]) -> None:
    code, output = run(capsys, "measure", TURIN[0], "--certificate", f"{SNP}/oak-genoa_vcek.der")
    assert code == 1
    assert "measurement" not in output
    code, output = run(capsys, "measure", QUOTE[0], *COLLATERAL, "--at", "2026-01-01")
    assert code == 1
    assert "mrtd" not in output


def test_a_guest_that_no_policy_admits_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no policy admits it" in run(capsys, "measure", f"{SNP}/google-attestation.bin")[1]
    assert "no policy admits it" in run(capsys, "measure", f"{TDX}/trustee-tdx_quote_4.dat")[1]


def test_a_policy_that_asks_for_something_else_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    policy = policy_from("[admit.secret]\n", tmp_path)
    code, output = run(capsys, "verify", *TURIN, "--policy", str(policy))
    assert (code, "no rule of the policy requires snp" in output) == (1, True)


# -- collect --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kernel", "kind"), [(tdx_kernel, "tdx"), (snp_kernel, "snp")])
def test_evidence_is_of_the_kind_that_this_machine_is(kernel: Callable[[], Kernel], kind: str) -> None:
    held = collect(None, DATA, kernel(), None, None)
    assert (held.kind, held.report_data) == (kind, DATA)
    assert read(held.text().encode()) == held


def test_a_machine_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="neither tdx_guest nor sev_guest"):
        collect(None, DATA, Kernel("arm_cca_guest", lambda data, level: data), None, None)


def test_collect_names_what_is_missing_and_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "here").write_text("mine")
    done = ringfence("evidence", "collect", "--kind", "tdx", "--out", str(tmp_path / "here"))
    assert done.returncode == 2
    assert "exists: name a new file" in done.stderr
    assert (tmp_path / "here").read_text() == "mine"


# -- the file -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"{",
        b"[" * 100_000,
        b"[]",
        b"[{}]",
        b'[{"nonce": "00", "evidence": "", "certificate": ""}]',
        b"[1]",
        b"0x0",
        b"00ff",
        bytes(FILE_BYTES + 1),
        StoredEvidence("tdx", b"", bytes(63)).text().encode(),
        StoredEvidence("tdx", bytes(PROOF_LIMIT_BYTES + 1), bytes(64)).text().encode(),
        StoredEvidence("token", b"", bytes(64)).text().encode(),
        StoredEvidence("tdx", b"", bytes(64)).text().replace('"kind"', '"more": 1, "kind"').encode(),
        StoredEvidence("tdx", b"", bytes(64)).text().replace('"proof": ""', '"proof": "*"').encode(),
        StoredEvidence("tdx", b"", bytes(64)).text().replace('"proof": ""', '"proof": 1').encode(),
    ],
)
def test_what_is_no_evidence_is_an_error_of_the_user(content: bytes) -> None:
    with pytest.raises(ConfigurationError):
        read(content)


def test_hexadecimal_and_binary_forms_are_the_same_evidence() -> None:
    quote = tdx_records.load("phala-near_quote_hex.txt")
    assert read((TDX / "phala-near_quote_hex.txt").read_bytes()) == read(quote)
    assert read(b"0x" + quote.hex().encode() + b"\n").kind == "tdx"


# -- collateral -----------------------------------------------------------------------------------------------------


@contextmanager
def service(text: str, status: int = 200) -> Iterator[str]:
    """A cache of Intel's service on loopback, which serves one platform's collateral in Intel's form."""
    parts = json.loads(text)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answers = {
                "tcb": (
                    ("TCB-Info-Issuer-Chain", parts["tcb_info_issuer_chain"]),
                    f'{{"tcbInfo":{parts["tcb_info"]},"signature":"{parts["tcb_info_signature"]}"}}'.encode(),
                ),
                "identity": (
                    ("SGX-Enclave-Identity-Issuer-Chain", parts["qe_identity_issuer_chain"]),
                    f'{{"enclaveIdentity":{parts["qe_identity"]},"signature":"{parts["qe_identity_signature"]}"}}'.encode(),
                ),
                "pckcrl": (
                    ("SGX-PCK-CRL-Issuer-Chain", parts["pck_crl_issuer_chain"]),
                    bytes.fromhex(parts["pck_crl"]),
                ),
                "rootcacrl": (("X", ""), parts["root_ca_crl"].encode()),
            }
            (name, chain), body = answers[urllib.parse.urlparse(self.path).path.rpartition("/")[2]]
            self.send_response(status)
            self.send_header(name, urllib.parse.quote(chain))
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(HANG)


def test_collateral_is_fetched_from_the_service_that_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    record = tdx_records.RECORDS["dstack"]
    out = str(tmp_path / "platform.json")
    with service(record.collateral[0].text) as address:
        code, output = run(capsys, "collateral", QUOTE[0], "--service", address, "--out", out)
    assert code == 0, output
    assert "FMSPC b0c06f000000, valid until 2025-07-19" in output
    assert run(capsys, "verify", *QUOTE, "--collateral", out)[0] == 0


def test_older_collateral_never_replaces_newer(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A month later the same command replaces the file; the policy that lists it goes on."""
    mint = foundry()
    quote, out = tmp_path / "quote", tmp_path / "b0c06f000000.json"
    quote.write_bytes(mint.quote(DATA))
    old, new = mint.collateral(age=29, days=1), mint.collateral(number=18)

    def fetch(found: Collateral) -> tuple[int, str]:
        with service(found.text) as address:
            return run(capsys, "collateral", str(quote), "--service", address, "--out", str(out))

    for each in (old, new, new):
        assert fetch(each)[0] == 0
        assert Collateral.parse(out.read_bytes()).next_update == each.next_update
    _, measured = run(capsys, "measure", str(quote))
    assert ringfence("policy", "check", str(policy_from(measured, tmp_path))).returncode == 0
    code, output = fetch(old)
    assert (code, "older tcb_info and qe_identity and root_ca_crl and pck_crl" in output) == (2, True)
    assert Collateral.parse(out.read_bytes()).next_update == new.next_update


@pytest.mark.parametrize(
    ("held", "reason"),
    [
        (foundry().collateral(fmspc="00a06d080000").text, "is for FMSPC 00a06d080000 of the platform CA, and what was"),
        (foundry().collateral(ca="processor").text, "is for FMSPC b0c06f000000 of the processor CA, and what was"),
        ("my notes", "exists and is not a collateral file: name another file"),
    ],
)
def test_collateral_replaces_nothing_else(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, held: str, reason: str
) -> None:
    mint = foundry()
    quote, out = tmp_path / "quote", tmp_path / "out.json"
    quote.write_bytes(mint.quote(DATA))
    out.write_text(held)
    with service(mint.collateral().text) as address:
        code, output = run(capsys, "collateral", str(quote), "--service", address, "--out", str(out))
    assert (code, reason in output) == (2, True)
    assert out.read_text() == held


def test_two_files_for_one_platform_are_refused_by_name(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    mint = foundry()
    quote, new, old = (tmp_path / name for name in ("quote", "new.json", "old.json"))
    quote.write_bytes(mint.quote(DATA))
    new.write_text(mint.collateral(number=18, is_revoked=True).text)
    old.write_text(mint.collateral(age=28).text)
    for pair in ((new, old), (old, new)):
        code, output = run(capsys, "verify", str(quote), "--collateral", str(pair[0]), "--collateral", str(pair[1]))
        assert (code, f"keep {new}, which is newer, and list {old} no longer" in output) == (2, True)
    _, measured = run(capsys, "measure", str(quote))
    policy = policy_from(measured.replace('"b0c06f000000.json"', '["old.json", "new.json"]'), tmp_path)
    done = ringfence("policy", "check", str(policy))
    assert done.returncode == 2
    assert "keep new.json, which is newer, and list old.json no longer" in done.stderr


def test_a_service_that_is_not_intels_cannot_make_collateral() -> None:
    """Signed by a test root: it is fetched, and then no quote verifies with it."""
    mint = foundry()
    with service(mint.collateral().text) as address:
        found = collateral.fetch(mint.quote(DATA), address)
    record = tdx_records.RECORDS["dstack"]
    with pytest.raises(Exception, match="does not verify"):
        tdx.authenticate(record.quote, (found,), record.now)


@pytest.mark.parametrize("address", ["http://127.0.0.1:9", "ftp://x", "x"])
def test_a_service_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path, address: str) -> None:
    code, output = run(capsys, "collateral", QUOTE[0], "--service", address, "--out", str(tmp_path / "x"))
    assert code == 2
    assert address in output
    assert not (tmp_path / "x").exists()


def test_the_threads_of_a_fetch_are_not_in_the_commands_process(tmp_path: Path) -> None:
    """They still run when it has failed, and would crash an interpreter that ends: one time in five."""
    for _ in range(5):
        with pytest.raises(ConfigurationError, match="error sending request"):
            collateral.fetch(Path(QUOTE[0]).read_bytes(), "http://127.0.0.1:9")
    names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
    assert [name for name in names if name.startswith("tokio")] == []
    command = ("evidence", "collateral", QUOTE[0], "--service", "http://127.0.0.1:9", "--out", str(tmp_path / "x"))
    assert ringfence(*command).returncode == 2


def test_a_service_that_never_answers_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ConfigurationError, match=f"{address} returned no collateral within 2 s"):
            collateral.fetch(Path(QUOTE[0]).read_bytes(), address, seconds=2)


def test_a_service_that_fails_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with service(tdx_records.RECORDS["dstack"].collateral[0].text, status=500) as address:
        code, output = run(capsys, "collateral", QUOTE[0], "--service", address, "--out", str(tmp_path / "x"))
    assert (code, address in output) == (2, True)


def test_only_tdx_needs_collateral(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, output = run(capsys, "collateral", TURIN[0], "--service", "http://127.0.0.1:9", "--out", str(tmp_path / "x"))
    assert (code, "only TDX needs collateral" in output) == (2, True)


# -- no policy reaches a test root ----------------------------------------------------------------------------------


def test_a_verify_made_from_a_policy_has_the_pinned_roots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The policy is right in every value, and the evidence minted under a test root is refused all the same."""
    mint = foundry()
    (tmp_path / "quote").write_bytes(mint.quote(DATA))
    terms = mint.collateral()
    (tmp_path / f"{terms.fmspc}.json").write_text(terms.text)
    _, measured = run(capsys, "measure", str(tmp_path / "quote"))
    policy = policy_from(measured, tmp_path)
    code, output = run(capsys, "verify", str(tmp_path / "quote"), "--policy", str(policy))
    assert (code, "does not verify" in output) == (1, True)
    assert kinds.KINDS["tdx"].verifier is tdx.verifier
    assert kinds.KINDS["snp"].verifier is snp.verifier


# -- ocsp -----------------------------------------------------------------------------------------------------------


def test_ocsp_asks_for_the_certificates_of_recorded_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The service of this test cannot sign for NVIDIA: it is asked, and its answer is refused."""
    asked: list[ocsp.OCSPRequest] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(ocsp.load_der_ocsp_request(self.rfile.read(int(self.headers["Content-Length"]))))
            refused = ocsp.OCSPResponseBuilder.build_unsuccessful(ocsp.OCSPResponseStatus.UNAUTHORIZED)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(refused.public_bytes(Encoding.DER))

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    evidence = str(nvidia_records.FOLDER / "hopper_evidence.json")
    try:
        code, text = run(capsys, "ocsp", evidence, "--out", str(tmp_path), "--service", url)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert code == 2 and "the responder refused the request (unauthorized)" in " ".join(text.split())
    serials = [each.serial_number for each in chain_of(nvidia_records.record("hopper_evidence.json[0]"))]
    assert [each.serial_number for each in asked] == serials[1:2] and not list(tmp_path.iterdir())
    code, text = run(capsys, "ocsp", str(SNP / "oak-turin_report.bin"), "--out", str(tmp_path), "--service", url)
    assert code == 2


def chain_of(record: nvidia_records.Record) -> list[x509.Certificate]:
    return x509.load_pem_x509_certificates(record.pem)
