"""`ringfence evidence collect | verify | measure | collateral`: a machine's evidence, before a run depends on it."""

from __future__ import annotations

import argparse
import json
import secrets
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringfence.errors import AdmissionError, ConfigurationError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from ringfence.cli.evidence_views import View
    from ringfence.evidence.evidence_file import Held

COLLECT = """\
Ask this machine for evidence, as a worker does when it is admitted, and write it to a file.

Without --kind it is what this machine is: a TDX or an SEV-SNP guest. The evidence is about 64 bytes; without
--report-data they are random. Needs root, a confidential VM and Linux 6.7 or later; for GPUs nvidia-ml-py.
"""

COLLECT_EXAMPLES = """\
examples:
  ringfence evidence collect --out here.json
  ringfence evidence measure here.json                  what a policy must say to admit this machine
  ringfence evidence collect --kind nvidia --out gpus.json
"""

VERIFY = """\
Verify evidence: is it what Intel, AMD or NVIDIA signed, and does a policy admit it?

FILE is what `collect` wrote; or a bare TDX quote or SEV-SNP report, in binary or hexadecimal form; or the evidence file
of NVIDIA's tools. A TDX quote needs Intel's collateral, from the policy or by --collateral; a bare SEV-SNP report needs
the certificate of its key.
"""

VERIFY_EXAMPLES = """\
examples:
  ringfence evidence verify here.json --policy policy.toml
  ringfence evidence verify quote.bin --collateral platform.json
  ringfence evidence verify report.bin --certificate vcek.der --at 2025-06-20T12:00:00Z

exit codes: 0 if it is genuine and the policy admits it, 1 if not, 2 if it could not be looked at
"""

MEASURE = """\
Print what a policy must say to admit the guest or the GPUs that evidence is about: a table of the policy for TDX and
SEV-SNP, a file of reference values for GPUs.

Evidence that does not verify is refused. A TDX quote cannot be verified without --collateral and a bare SEV-SNP report
not without --certificate: the values are printed all the same, and the first line says so. Measure only machines whose
software you know: whatever runs on them now is what the policy will admit.
"""

MEASURE_EXAMPLES = """\
examples:
  ringfence evidence measure here.json >> policy.toml
  ringfence evidence measure gpus.json > h100-550.90.07.toml
"""

COLLATERAL = """\
Fetch Intel's collateral for the platform of a TDX quote and write it to a file for the policy's [admit.tdx].

It says which firmware is up to date and what is revoked, is signed by Intel, and is good for about 30 days: fetch it
anew into the same file, and give that to every worker, before it expires (`ringfence policy explain` says when). A policy
lists one file for each platform, which is never replaced by an older one. The service may be Intel's or a cache of your
own (PCCS); it need not be trusted.
"""

COLLATERAL_EXAMPLES = """\
examples:
  ringfence evidence collateral here.json --service https://api.trustedservices.intel.com --out platform.json
"""


def add_to(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `evidence collect`, `verify`, `measure` and `collateral` to the command line."""
    evidence = commands.add_parser("evidence", help="what this machine's hardware says of it")
    actions = evidence.add_subparsers(title="actions", metavar="ACTION", required=True)
    form = argparse.RawDescriptionHelpFormatter

    def action(name: str, text: str, description: str, examples: str) -> argparse.ArgumentParser:
        made = actions.add_parser(name, help=text, description=description, epilog=examples, formatter_class=form)
        made.add_argument("--json", action="store_true", help="print the result as JSON")
        return made

    collect = action("collect", "ask this machine for evidence", COLLECT, COLLECT_EXAMPLES)
    collect.add_argument("--kind", choices=("tdx", "snp", "nvidia"), help="default: what this machine is")
    collect.add_argument("--report-data", metavar="HEX", help="the 64 bytes that it is about (default: random)")
    collect.add_argument("--certificate", type=Path, metavar="FILE", help="SEV-SNP: the VCEK, if the host has none")
    collect.add_argument("--vmpl", type=int, choices=range(4), help="SEV-SNP: the level to ask for")
    collect.add_argument("--out", type=Path, metavar="FILE", required=True, help="where to write it; must not exist")
    collect.set_defaults(run=run_collect)

    verify = action("verify", "verify evidence", VERIFY, VERIFY_EXAMPLES)
    _add_evidence(verify)
    verify.add_argument("--policy", type=Path, metavar="FILE", help="whether this policy admits it")
    verify.add_argument("--report-data", metavar="HEX", help="the 64 bytes that it must be about")
    verify.set_defaults(run=run_verify)

    measure = action("measure", "print what a policy wants", MEASURE, MEASURE_EXAMPLES)
    _add_evidence(measure)
    measure.set_defaults(run=run_measure)

    collateral = action("collateral", "fetch what a TDX policy needs", COLLATERAL, COLLATERAL_EXAMPLES)
    collateral.add_argument("file", type=Path, metavar="FILE", help="evidence of a TDX guest, or a bare quote")
    collateral.add_argument("--service", required=True, metavar="URL", help="Intel's, or a cache of your own")
    collateral.add_argument(
        "--out", type=Path, metavar="FILE", required=True, help="where to write it; replaces an older one"
    )
    collateral.set_defaults(run=run_collateral)


def _add_evidence(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="evidence")
    parser.add_argument("--certificate", type=Path, metavar="FILE", help="SEV-SNP: the VCEK or VLEK of a bare report")
    parser.add_argument(
        "--collateral", type=Path, action="append", default=[], metavar="FILE", help="TDX: Intel's; may be repeated"
    )
    parser.add_argument("--at", metavar="TIME", help="as of when, such as 2025-06-20T12:00:00Z (default: now)")


# -- the actions ----------------------------------------------------------------------------------------------------


def run_collect(options: argparse.Namespace) -> int:
    from ringfence.evidence.tsm import KernelFiles

    if options.out.exists():
        raise ConfigurationError(f"{options.out} exists: name a new file")
    report_data = _report_data(options.report_data) or secrets.token_bytes(64)
    held = collect(options.kind, report_data, KernelFiles(), _certificate(options.certificate), options.vmpl)
    _write(options.out, held.text())
    if options.json:
        print(json.dumps({"file": str(options.out), "kind": held.kind, "report_data": held.report_data.hex()}))
    else:
        print(f"Wrote evidence of kind {held.kind} ({len(held.proof)} bytes) to {options.out}. To see what it says:")
        print(f"  ringfence evidence measure {options.out}")
    return 0


def collect(kind: str | None, report_data: bytes, files: Any, certificate: bytes | None, vmpl: int | None) -> Held:
    """Evidence of this machine. `files` is the kernel's, but in tests."""
    from ringfence.admission.proofs import nvidia, snp
    from ringfence.evidence import guest, nvml, tsm
    from ringfence.evidence.evidence_file import Held

    if kind is None:
        found = tsm.provider(files)
        kind = {tsm.TDX: "tdx", tsm.SNP: "snp"}.get(found)
        if kind is None:
            raise ConfigurationError(f"the kernel's provider {found!a} is neither {tsm.TDX} nor {tsm.SNP}")
    if kind == "tdx":
        return Held(kind, guest.tdx(report_data, files), report_data)
    if kind == "snp":
        shown = guest.snp(report_data, files, certificate=certificate, level=vmpl)
        return Held(kind, snp.encode(*shown), report_data)
    gpus = nvml.collect(nvidia.nonce_of(report_data), nvml.load())
    return Held(kind, nvidia.encode(gpus), report_data)


def run_verify(options: argparse.Namespace) -> int:
    from ringfence.cli.evidence_views import look, verify
    from ringfence.settings import load_policy

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
        print(f"ok  {view.title}: {verdict}")
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
    if options.json:
        print(json.dumps({"kind": held.kind, "verified": view.is_verified, "claims": view.claims, "toml": view.toml}))
    else:
        print(f"# {view.title}, " + ("verified" if view.is_verified else f"NOT VERIFIED: {view.why_not}"))
        print(view.toml, end="")
    return 0


def run_collateral(options: argparse.Namespace) -> int:
    from ringfence.evidence import collateral
    from ringfence.evidence.evidence_file import read

    held = read(_content(options.file))
    if held.kind != "tdx":
        raise ConfigurationError(f"{options.file} is evidence of kind {held.kind}; only TDX needs collateral")
    found = collateral.fetch(held.proof, options.service)
    if options.out.exists():
        collateral.check_refresh(found, _content(options.out), str(options.out))
    _write(options.out, found.text)
    if options.json:
        print(
            json.dumps(
                {"file": str(options.out), "fmspc": found.fmspc, "ca": found.ca, "next_update": found.next_update}
            )
        )
    else:
        print(f"Wrote the collateral for FMSPC {found.fmspc}, good until {found.next_update}, to {options.out}.")
    return 0


# -- parts ----------------------------------------------------------------------------------------------------------


def _refused(options: argparse.Namespace, held: Held, reason: str) -> int:
    if options.json:
        print(json.dumps({"good": False, "kind": held.kind, "verdict": reason}))
    else:
        print(f"!!  refused: {reason}")
    return 1


def _print_claims(view: View) -> None:
    width = max(len(name) for name in view.claims)
    for name, value in view.claims.items():
        print(f"    {name:{width}}  {', '.join(value) if isinstance(value, list) else value}")


def _held(options: argparse.Namespace) -> Held:
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
    from ringfence.evidence.evidence_file import FILE_BYTES

    try:
        with open(path, "rb") as file:
            return file.read(FILE_BYTES + 1)
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from error


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"cannot write {path}: {error.strerror}") from error


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
