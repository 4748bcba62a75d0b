"""The evidence of a confidential VM on Azure, from its vTPM: the paravisor's HCL report and a quote of the vTPM's key.

NV index 0x01400001  ──►  HCL report (hardware report, runtime data)        metadata service  ──►  VCEK, or TDX quote
key 0x81000003       ──►  quote over our nonce and all PCRs, with its signature
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Final

from ringfence.admission.proofs import azure, hcl_report, tdx_quote, tpm_quote
from ringfence.errors import AdmissionError, ConfigurationError
from ringfence.evidence import tpm
from ringfence.evidence.device_lock import exclusive
from ringfence.evidence.metadata import Metadata

HCL_INDEX: Final = 0x01400001
ATTESTATION_KEY: Final = 0x81000003
ATTEMPTS: Final = 5

Open = Callable[[], AbstractContextManager[tpm.Tpm]]

_device_lock = threading.Lock()  # a request that waits here can still be cancelled
NAMES: Final = {hcl_report.SNP: "SEV-SNP", hcl_report.TDX: "TDX"}


class AzureGuest:
    """Collects proofs on this VM. The part that is not about a nonce, VCEK or TDX quote, is fetched once."""

    def __init__(self, open_tpm: Open = tpm.opened, metadata: Metadata | None = None) -> None:
        self._open = open_tpm
        self._metadata = metadata or Metadata()
        self._lock = threading.Lock()
        self._fetched: tuple[bytes, bytes] | None = None  # hardware report, and what was fetched for it

    def kind(self) -> int:
        """Return which hardware this VM runs on: `hcl_report.SNP` or `hcl_report.TDX`. Raises ConfigurationError."""
        with self._open() as device:
            return self._report(device).kind

    def snp(self, nonce: bytes, certificate: bytes | None = None) -> bytes:
        """Return a proof of kind azure_snp over `nonce`. Raises ConfigurationError."""
        report, attestation = self._collect(nonce, hcl_report.SNP)
        leaf = certificate or self._fetch(report.hardware, lambda _: self._metadata.vcek())
        return azure.encode_snp(report.hardware, leaf, attestation)

    def tdx(self, nonce: bytes) -> bytes:
        """Return a proof of kind azure_tdx over `nonce`. Raises ConfigurationError."""
        report, attestation = self._collect(nonce, hcl_report.TDX)
        try:
            quote = tdx_quote.trim(self._fetch(report.hardware, self._metadata.tdx_quote))
            found = tdx_quote.report_data(quote)
        except AdmissionError as error:
            raise ConfigurationError(f"Azure's metadata service returned a malformed quote: {error}") from error
        if found != report.hardware[hcl_report.TD_REPORT_DATA]:
            raise ConfigurationError("Azure's metadata service returned the quote of another request: try again")
        return azure.encode_tdx(quote, attestation)

    def _collect(self, nonce: bytes, kind: int) -> tuple[hcl_report.HclReport, azure.Attestation]:
        with exclusive(_device_lock), self._open() as device:
            report = self._report(device)
            if report.kind != kind:
                raise ConfigurationError(f"this is a {NAMES[report.kind]} guest, not a {NAMES[kind]} guest")
            return report, _attest(device, report, nonce)

    def _report(self, device: tpm.Tpm) -> hcl_report.HclReport:
        """Read the HCL report. The paravisor may replace it while it is read in parts."""
        for _ in range(ATTEMPTS):
            content = tpm.nv_read(device, HCL_INDEX, hcl_report.HCL_BYTES)
            try:
                report = hcl_report.read(content)
            except AdmissionError as error:
                raise ConfigurationError(
                    f"NV index {HCL_INDEX:#010x} of the TPM has no HCL report: {error}; this is not a confidential VM on Azure"
                ) from error
            if report.is_consistent:
                return report
        raise ConfigurationError("the hardware report in the vTPM does not cover its runtime data: restart the VM")

    def _fetch(self, report: bytes, ask: Callable[[bytes], bytes]) -> bytes:
        with self._lock:
            if self._fetched is None or self._fetched[0] != report:
                self._fetched = report, ask(report)
            return self._fetched[1]


def _attest(device: tpm.Tpm, report: hcl_report.HclReport, nonce: bytes) -> azure.Attestation:
    """Return quote and PCR values that belong together: a PCR may be extended between the two commands."""
    for _ in range(ATTEMPTS):
        pcrs = tpm.read_pcrs(device)
        quote, signature = tpm.quote(device, ATTESTATION_KEY, nonce)
        attestation = azure.Attestation(report.runtime_data, quote, signature, pcrs)
        try:
            if tpm_quote.read(quote).pcr_digest == tpm_quote.digest_of(pcrs):
                azure.read_guest(attestation, nonce)
                return attestation
        except AdmissionError as error:
            raise ConfigurationError(f"the vTPM returned a quote that peers would refuse: {error}") from error
    raise ConfigurationError(f"the PCRs of the vTPM changed during each of {ATTEMPTS} quotes: try again")
