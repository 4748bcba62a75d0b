"""`ringfence evidence collect | verify | measure | collateral | ocsp`: collect and verify evidence before a run needs it."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringfence.cli.terminal import Commands, columns, say
from ringfence.errors import AdmissionError, ConfigurationError

if TYPE_CHECKING:
    from ringfence.cli.evidence_views import View
    from ringfence.evidence.azure_guest import AzureGuest
    from ringfence.evidence.evidence_file import StoredEvidence

KINDS = ("tdx", "snp", "nvidia", "azure_snp", "azure_tdx")

COLLECT = """\
Collect attestation evidence from this machine, as a worker does when it joins, and write it to a file.

Without --kind, the command collects what the machine supports: TDX or SEV-SNP, on Azure through the vTPM. Evidence signs 64
bytes of report data; they are random without --report-data. {root}a confidential VM with Linux 6.7 or later, or on
Azure; GPUs need nvidia-ml-py.
"""

COLLECT_EXAMPLES = """\
examples:
  ringfence evidence collect --out here.json
  ringfence evidence measure here.json   print the reference values
  ringfence evidence collect --kind nvidia --out gpus.json
"""

VERIFY = """\
Verify evidence: check the signatures of Intel, AMD or NVIDIA, and evaluate a policy if one is given.

FILE is a file that `collect` wrote, a bare TDX quote or SEV-SNP report (binary or hexadecimal), or an evidence file of
NVIDIA's tools. A TDX quote needs Intel's collateral, from the policy or from --collateral; a bare SEV-SNP report needs the
certificate of the key that signed it.
"""

VERIFY_EXAMPLES = """\
examples:
  ringfence evidence verify here.json --policy policy.toml
  ringfence evidence verify quote.bin --collateral platform.json
  ringfence evidence verify report.bin --certificate vcek.der --at 2025-06-20T12:00:00Z

exit codes:
  0  the evidence is genuine, and the policy, if given, admits it
  1  it is not genuine, or the policy does not admit it
  2  it could not be verified: wrong arguments or files
"""

MEASURE = """\
Print the reference values with which a policy admits the guest or the GPUs of some evidence: a table of the policy for
TDX and SEV-SNP, a file of reference values for GPUs.

Evidence that does not verify is refused. A TDX quote cannot be verified without --collateral, nor a bare SEV-SNP report
without --certificate; their values are printed and marked as NOT VERIFIED. Measure only machines whose software you know:
the policy will admit exactly what they run now.
"""

MEASURE_EXAMPLES = """\
examples:
  ringfence evidence measure here.json >> policy.toml
  ringfence evidence measure gpus.json > h100-550.90.07.toml
"""

COLLATERAL = """\
Fetch Intel's collateral for the platform of a TDX quote and write it to a file for the policy's [admit.tdx].

Collateral lists which firmware is up to date and what is revoked. Intel signs it, and it is valid for about 30 days. Fetch
it again into the same file before it expires (`ringfence policy explain` prints when), and copy the file to every worker. A
policy names one file for each platform; an older one never replaces a newer one. The service is Intel's or your own cache
(PCCS); it need not be trusted.
"""

COLLATERAL_EXAMPLES = """\
examples:
  ringfence evidence collateral here.json --out platform.json --service https://api.trustedservices.intel.com
"""

OCSP = """\
Fetch the status of the certificates of GPUs, as OCSP responses, into a folder for the policy's [admit.nvidia].

Every certificate of a GPU but its first, which the GPU itself issues, has a status: good, revoked or unknown. NVIDIA signs the
responses. Fetch them again into the same folder within `ocsp_max_age` of the policy, and copy the folder to every worker. The
service is NVIDIA's or your own cache; it need not be trusted.

exit codes:
  0  all are good
  1  one is revoked or unknown: the policy would refuse its GPU
  2  the service did not answer, or its answer is not from NVIDIA
"""

OCSP_EXAMPLES = """\
examples:
  ringfence evidence ocsp gpus.json --out status --service https://ocsp.ndis.nvidia.com
"""


def add_to(commands: Commands) -> None:
    """Add `evidence collect`, `verify`, `measure`, `collateral` and `ocsp` to the command line."""
    evidence = commands.add_parser("evidence", help="collect and verify attestation evidence")
    actions = evidence.add_subparsers(title="actions", metavar="ACTION", required=True)

    def action(name: str, text: str, description: str, examples: str) -> argparse.ArgumentParser:
        made = actions.add_parser(name, help=text, description=description, epilog=examples)
        made.add_argument("--json", action="store_true", help="print the result as JSON")
        return made

    needs = "Needs " if os.geteuid() == 0 else "Needs root and "
    collect = action("collect", "collect evidence from this machine", COLLECT.format(root=needs), COLLECT_EXAMPLES)
    collect.add_argument("--kind", choices=KINDS, help="default: what this machine supports")
    collect.add_argument("--report-data", metavar="HEX", help="the 64 bytes to be signed (default: random)")
    collect.add_argument(
        "--certificate",
        type=Path,
        metavar="FILE",
        help="SEV-SNP: the VCEK, if the host does not provide it",
    )
    collect.add_argument("--vmpl", type=int, choices=range(4), help="SEV-SNP: the privilege level of the report")
    collect.add_argument("--out", type=Path, metavar="FILE", required=True, help="the file to write; must not exist")
    collect.set_defaults(run=run_collect)

    verify = action("verify", "verify evidence", VERIFY, VERIFY_EXAMPLES)
    _add_evidence(verify)
    verify.add_argument("--policy", type=Path, metavar="FILE", help="also check that this policy admits it")
    verify.add_argument("--report-data", metavar="HEX", help="the 64 bytes that must have been signed")
    verify.set_defaults(run=run_verify)

    measure = action("measure", "print reference values for a policy", MEASURE, MEASURE_EXAMPLES)
    _add_evidence(measure)
    measure.set_defaults(run=run_measure)

    collateral = action("collateral", "fetch the collateral that a TDX policy needs", COLLATERAL, COLLATERAL_EXAMPLES)
    collateral.add_argument("file", type=Path, metavar="FILE", help="evidence of a TDX guest, or a bare quote")
    collateral.add_argument("--service", required=True, metavar="URL", help="Intel's service, or your own cache")
    collateral.add_argument(
        "--out", type=Path, metavar="FILE", required=True, help="the file to write; replaces older collateral"
    )
    collateral.set_defaults(run=run_collateral)

    status = action("ocsp", "fetch the OCSP responses that a GPU policy needs", OCSP, OCSP_EXAMPLES)
    status.add_argument("file", type=Path, metavar="FILE", help="evidence of GPUs")
    status.add_argument("--service", required=True, metavar="URL", help="NVIDIA's service, or your own cache")
    status.add_argument("--out", type=Path, metavar="FOLDER", required=True, help="the folder to write to; must exist")
    status.set_defaults(run=run_ocsp)


def _add_evidence(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="evidence")
    parser.add_argument("--certificate", type=Path, metavar="FILE", help="SEV-SNP: VCEK or VLEK of a bare report")
    parser.add_argument(
        "--collateral",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="TDX: Intel's collateral; may be repeated",
    )
    parser.add_argument(
        "--at", metavar="TIME", help="verify as of this time, such as 2025-06-20T12:00:00Z (default: now)"
    )


# -- the actions ----------------------------------------------------------------------------------------------------


def run_collect(options: argparse.Namespace) -> int:
    from ringfence.config.private_files import replace_file
    from ringfence.evidence.tsm import KernelFiles

    if options.out.exists():
        raise ConfigurationError(f"{options.out} exists: name a new file")
    report_data = _report_data(options.report_data) or secrets.token_bytes(64)
    held = collect(options.kind, report_data, KernelFiles(), _certificate(options.certificate), options.vmpl)
    replace_file(options.out, held.text().encode(), 0o644)
    if options.json:
        print(json.dumps({"file": str(options.out), "kind": held.kind, "report_data": held.report_data.hex()}))
    else:
        say(f"Wrote evidence of kind {held.kind} ({len(held.proof)} bytes) to {options.out}. To print its values:")
        print(f"  ringfence evidence measure {options.out}")
    return 0


def collect(
    kind: str | None,
    report_data: bytes,
    files: Any,
    certificate: bytes | None,
    vmpl: int | None,
    vm: AzureGuest | None = None,
) -> StoredEvidence:
    """Collect evidence from this machine. `files` and `vm` are interfaces to the kernel; tests pass their own."""
    from ringfence.admission.proofs import azure, nvidia, snp
    from ringfence.evidence import guest, nvml
    from ringfence.evidence.azure_guest import AzureGuest
    from ringfence.evidence.evidence_file import StoredEvidence

    vm = vm or AzureGuest()
    kind = kind or _kind_of_machine(files, vm)
    if kind == "tdx":
        return StoredEvidence(kind, guest.tdx(report_data, files), report_data)
    if kind == "snp":
        shown = guest.snp(report_data, files, certificate=certificate, level=vmpl)
        return StoredEvidence(kind, snp.encode(*shown), report_data)
    if kind in ("azure_snp", "azure_tdx"):
        nonce = azure.nonce_of(report_data)
        proof = vm.snp(nonce, certificate) if kind == "azure_snp" else vm.tdx(nonce)
        return StoredEvidence(kind, proof, report_data)
    gpus = nvml.collect(nvidia.nonce_of(report_data), nvml.load())
    return StoredEvidence(kind, nvidia.encode(gpus), report_data)


def _kind_of_machine(files: Any, vm: AzureGuest) -> str:
    """Return what this machine supports: by the kernel, or else by a vTPM of Azure."""
    from ringfence.admission.proofs import hcl_report
    from ringfence.evidence import tsm

    try:
        found = tsm.provider(files)
    except ConfigurationError as error:
        try:
            return {hcl_report.SNP: "azure_snp", hcl_report.TDX: "azure_tdx"}[vm.kind()]
        except ConfigurationError:
            raise error from None
    kind = {tsm.TDX: "tdx", tsm.SNP: "snp"}.get(found)
    if kind is None:
        raise ConfigurationError(f"the kernel's provider {found!a} is neither {tsm.TDX} nor {tsm.SNP}")
    return kind


def run_verify(options: argparse.Namespace) -> int:
    from ringfence.cli.evidence_views import look, verify
    from ringfence.config.settings import load_policy

    held = _held(options)
    wanted = _report_data(options.report_data) or held.report_data
    policy = load_policy(options.policy) if options.policy else None
    collateral = {str(path): _content(path) for path in options.collateral}
    now = _moment(options.at)
    try:
        if policy is None:
            view = look(held, wanted, collateral, now)
            verdict = "genuine"
        else:
            view, rule = verify(held, wanted, policy, now)
            verdict = f"genuine, and rule {rule} of {options.policy} is met as far as {held.kind} goes"
    except AdmissionError as error:
        return _refused(options, held, str(error))
    if options.json:
        print(json.dumps({"good": True, "kind": held.kind, "verdict": verdict, "claims": view.claims}))
    else:
        say(f"{view.title}: {verdict}", "ok  ")
        _print_claims(view)
    return 0


def run_measure(options: argparse.Namespace) -> int:
    from ringfence.cli.evidence_views import look, look_unverified

    held = _held(options)
    collateral = {str(path): _content(path) for path in options.collateral}
    try:
        view = look_unverified(held, collateral) or look(held, held.report_data, collateral, _moment(options.at))
    except AdmissionError as error:
        return _refused(options, held, str(error))
    why_not = view.why_not_verified
    if options.json:
        print(json.dumps({"kind": held.kind, "verified": not why_not, "claims": view.claims, "toml": view.toml}))
    else:
        say(f"{view.title}, " + (f"NOT VERIFIED: {why_not}" if why_not else "verified"), "# ", "# ")
        print(view.toml, end="")
    return 0


def run_collateral(options: argparse.Namespace) -> int:
    from ringfence.admission.proofs import azure
    from ringfence.config.private_files import replace_file
    from ringfence.evidence import collateral
    from ringfence.evidence.evidence_file import read

    held = read(_content(options.file))
    if held.kind not in ("tdx", "azure_tdx"):
        raise ConfigurationError(f"{options.file} is evidence of kind {held.kind}; only TDX needs collateral")
    try:
        quote = held.proof if held.kind == "tdx" else azure.decode_tdx(held.proof)[0]
    except AdmissionError as error:
        raise ConfigurationError(f"{options.file}: {error}") from None
    found = collateral.fetch(quote, options.service)
    if options.out.exists():
        collateral.check_refresh(found, _content(options.out), str(options.out))
    replace_file(options.out, found.text.encode(), 0o644)
    if options.json:
        said = {"file": str(options.out), "fmspc": found.fmspc, "ca": found.ca, "next_update": found.next_update}
        print(json.dumps(said))
    else:
        say(f"Wrote the collateral for FMSPC {found.fmspc}, valid until {found.next_update}, to {options.out}.")
    return 0


def run_ocsp(options: argparse.Namespace) -> int:
    from cryptography.x509.ocsp import OCSPCertStatus

    from ringfence.config.private_files import replace_file
    from ringfence.evidence import ocsp_fetch
    from ringfence.evidence.evidence_file import read

    held = read(_content(options.file))
    if held.kind != "nvidia":
        raise ConfigurationError(f"{options.file} is evidence of kind {held.kind}; only GPUs need OCSP responses")
    try:
        found = ocsp_fetch.fetch(held.proof, options.service, time.time())
    except AdmissionError as error:
        raise ConfigurationError(str(error)) from None
    for name, (response, status) in found.items():
        path = options.out / name
        if path.exists():
            ocsp_fetch.check_refresh(status, _content(path), str(path))
        replace_file(path, response.raw, 0o644)
    said = {name: status.status.name.lower() for name, (_, status) in found.items()}
    if options.json:
        print(json.dumps({"folder": str(options.out), "statuses": said}))
    else:
        for name, text in said.items():
            print(f"  {text:8} {name}")
        say(f"Wrote {len(said)} OCSP responses to {options.out}.")
    return 0 if all(status.status is OCSPCertStatus.GOOD for _, status in found.values()) else 1


# -- parts ----------------------------------------------------------------------------------------------------------


def _refused(options: argparse.Namespace, held: StoredEvidence, reason: str) -> int:
    if options.json:
        print(json.dumps({"good": False, "kind": held.kind, "verdict": reason}))
    else:
        say(f"refused: {reason}", "!!  ")
    return 1


def _print_claims(view: View) -> None:
    width = max(len(name) for name in view.claims)
    for name, value in view.claims.items():
        text = ", ".join(value) if isinstance(value, list) else value
        if " " not in text and width + 6 + len(text) > columns():
            print(f"    {name}\n      {text}")  # a hash stays in one piece, on a line of its own
        else:
            say(text, f"    {name:{width}}  ")


def _held(options: argparse.Namespace) -> StoredEvidence:
    from ringfence.evidence.evidence_file import read

    return read(_content(options.file), _certificate(options.certificate))


def _certificate(path: Path | None) -> bytes | None:
    from ringfence.evidence.guest import read_certificate

    if path is None:
        return None
    try:
        return read_certificate(_content(path))
    except ValueError as error:
        raise ConfigurationError(f"{path} is not a certificate: {error}") from None


def _content(path: Path) -> bytes:
    from ringfence.config.private_files import read_content
    from ringfence.evidence.evidence_file import FILE_BYTES

    return read_content(path, FILE_BYTES + 1)


def _report_data(text: str | None) -> bytes | None:
    if text is None:
        return None
    try:
        value = bytes.fromhex(text)
    except ValueError:
        value = b""
    if len(value) != 64:
        raise ConfigurationError("--report-data must be 128 hexadecimal digits")
    return value


def _moment(text: str | None) -> float:
    if text is None:
        return time.time()
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigurationError(f"--at {text}: write a time such as 2025-06-20T12:00:00Z") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
