"""Collecting evidence from a simulated kernel: interference and errors are detected."""

from __future__ import annotations

import errno
import os
import uuid
from pathlib import Path

import pytest

from ringfence.admission.proofs.snp_report import SnpReport
from ringfence.errors import ConfigurationError
from ringfence.evidence import guest, tsm
from tests.fake_tsm import Instance, Kernel, failure
from tests.unit.snp_mint import foundry as snp_foundry
from tests.unit.snp_records import RECORDS as SNP_RECORDS
from tests.unit.snp_records import content
from tests.unit.tdx_mint import foundry as tdx_foundry

DATA = bytes(range(64))
PADDING = bytes(3065)  # as in a recorded quote of 8,000 bytes
VCEK = uuid.UUID("63da758d-e664-4564-adc5-f4b93be8accd").bytes
VLEK = uuid.UUID("a8074bc2-a25a-483e-aae6-39c045a0b8a1").bytes


def table(*certificates: tuple[bytes, bytes]) -> bytes:
    """A host's certificate table, in the form of AMD's hypervisor interface."""
    entries, blob = b"", b""
    start = 24 * (len(certificates) + 1)
    for name, certificate in certificates:
        place = start + len(blob)
        entries += name + place.to_bytes(4, "little") + len(certificate).to_bytes(4, "little")
        blob += certificate
    return entries + bytes(24) + blob


def tdx_kernel(**changes: object) -> Kernel:
    return Kernel(tsm.TDX, lambda data, level: tdx_foundry().quote(data) + PADDING, **changes)  # type: ignore[arg-type]


def snp_kernel(**changes: object) -> Kernel:
    def report(data: bytes, level: int) -> bytes:
        return snp_foundry().report(data, changes={0x30: level.to_bytes(4, "little")})

    values = {"auxblob": table((VCEK, b"the host's VCEK")), "level_floor": 0, **changes}
    return Kernel(tsm.SNP, report, **values)  # type: ignore[arg-type]


def test_a_td_returns_a_quote_without_padding() -> None:
    kernel = tdx_kernel()
    quote = guest.tdx(DATA, kernel)
    assert quote[568:632] == DATA
    assert not quote.endswith(bytes(100))
    assert not kernel.instances, "the folder was left behind"


def test_an_snp_guest_returns_a_report_and_the_hosts_certificate() -> None:
    kernel = snp_kernel()
    report, certificate = guest.snp(DATA, kernel)
    assert SnpReport.decode(report).report_data == DATA
    assert certificate == b"the host's VCEK"
    assert not kernel.instances


def test_a_given_certificate_takes_precedence_over_the_hosts() -> None:
    assert guest.snp(DATA, snp_kernel(), certificate=b"own")[1] == b"own"


def test_without_a_certificate_the_error_names_amds_url() -> None:
    for auxblob in (None, b"", bytes(24), b"\1" * 23):
        with pytest.raises(ConfigurationError, match="RINGFENCE_VCEK_FILE") as caught:
            guest.snp(DATA, snp_kernel(auxblob=auxblob))
        assert "/vcek/v1/Milan/0102" in str(caught.value)
        assert "?blSPL=4&teeSPL=0&snpSPL=24&ucodeSPL=219" in str(caught.value)


def test_the_address_of_a_recorded_chip() -> None:
    turin = guest.vcek_urls(SnpReport.decode(SNP_RECORDS["oak turin"].report))
    assert turin == [
        f"{guest.AMD_KEY_SERVICE}/vcek/v1/Turin/3b42092f69c656d3?fmcSPL=0&blSPL=1&teeSPL=0&snpSPL=2&ucodeSPL=71"
    ]
    old = guest.vcek_urls(SnpReport.decode(SNP_RECORDS["trustee"].report))
    assert [url.split("/")[5] for url in old] == ["Milan", "Genoa"]


# -- the privilege level --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("floor", "level", "expected"), [(0, None, 0), (0, 2, 2), (2, None, 2), (2, 3, 3)])
def test_a_report_is_requested_at_the_wanted_level(floor: int, level: int | None, expected: int) -> None:
    report, _ = guest.snp(DATA, snp_kernel(level_floor=floor), level=level)
    assert SnpReport.decode(report).vmpl == expected


def test_an_unavailable_level_is_refused_before_a_request() -> None:
    with pytest.raises(ConfigurationError, match="runs at VMPL 2 and cannot request a report of VMPL 0"):
        guest.snp(DATA, snp_kernel(level_floor=2), level=0)


# -- what goes wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attribute", "code"),
    [
        ("inblob", errno.EBUSY),  # at the close: nobody hears of it
        ("inblob", errno.ENOMEM),
        ("outblob", errno.EINTR),
        ("outblob", errno.EBUSY),
        ("auxblob", errno.EINTR),
        ("generation", errno.EINTR),
        ("privlevel_floor", errno.EINTR),
        ("make", errno.EEXIST),
        ("make", errno.EINTR),
    ],
)
def test_a_transient_error_is_retried(attribute: str, code: int) -> None:
    kernel = snp_kernel(faults={attribute: [code, code]})
    report, _ = guest.snp(DATA, kernel)
    assert SnpReport.decode(report).report_data == DATA
    assert not kernel.instances
    assert len(set(kernel.made)) == len(kernel.made), "an attempt has a folder of its own"


@pytest.mark.parametrize(
    ("attribute", "code", "reason"),
    [
        ("make", errno.ENOENT, "not a confidential VM"),
        ("make", errno.ENXIO, "modprobe"),
        ("make", errno.EACCES, "only root"),
        ("outblob", errno.ETIMEDOUT, "quoting service runs"),
        ("outblob", errno.EIO, "quoting service"),
        ("outblob", errno.EINVAL, "privilege level"),
        ("outblob", errno.ENXIO, "modprobe"),
        ("outblob", errno.EFBIG, "kernel's log"),
    ],
)
def test_a_permanent_error_says_what_to_do(attribute: str, code: int, reason: str) -> None:
    kernel = tdx_kernel(faults={attribute: [code]})
    with pytest.raises(ConfigurationError, match=f"{os.strerror(code)}; .*{reason}"):
        guest.tdx(DATA, kernel)
    assert not kernel.instances


@pytest.mark.parametrize("attribute", ["inblob", "outblob"])
def test_retries_are_limited(attribute: str) -> None:
    kernel = tdx_kernel(faults={attribute: [errno.EBUSY] * 100})
    with pytest.raises(ConfigurationError, match=f"in {tsm.ATTEMPTS} attempts"):
        guest.tdx(DATA, kernel)
    assert len(kernel.made) == tsm.ATTEMPTS


def test_a_stale_report_is_not_accepted() -> None:
    """A provider that returns the report of another request."""
    kernel = Kernel(tsm.TDX, lambda data, level: tdx_foundry().quote(bytes(64)))
    with pytest.raises(ConfigurationError, match="has other report data than requested"):
        guest.tdx(DATA, kernel)


@pytest.mark.parametrize("moment", ["generation", "outblob", "auxblob", "provider"])
def test_a_concurrent_write_is_detected(moment: str) -> None:
    intrusions = [bytes(64)]

    def intrude(kernel: Kernel, instance: Instance, name: str) -> None:
        if name == moment and instance.inblob and intrusions:
            instance.inblob = intrusions.pop()
            instance.written += 1

    kernel = snp_kernel(before_read=intrude)
    report, _ = guest.snp(DATA, kernel)
    assert not intrusions, "nobody intruded"
    assert SnpReport.decode(report).report_data == DATA
    assert len(kernel.made) == 2


def test_a_concurrent_write_of_the_same_bytes_is_detected() -> None:
    def intrude(kernel: Kernel, instance: Instance, name: str) -> None:
        if name == "provider":
            instance.written += 1

    with pytest.raises(ConfigurationError, match="another process wrote while the report was read"):
        guest.tdx(DATA, tdx_kernel(before_read=intrude))


def test_a_folder_that_cannot_be_removed_is_ignored() -> None:
    class Stuck(Kernel):
        def remove(self, folder: str) -> None:
            raise failure(errno.EBUSY)

    quote = guest.tdx(DATA, Stuck(tsm.TDX, lambda data, level: tdx_foundry().quote(data)))
    assert quote[568:632] == DATA


@pytest.mark.parametrize("length", [0, 63, 65])
def test_a_report_is_about_64_bytes(length: int) -> None:
    kernel = tdx_kernel()
    with pytest.raises(ValueError, match="64 bytes"):
        tsm.collect(bytes(length), kernel)
    assert not kernel.made


def test_a_guest_of_another_kind_says_so() -> None:
    with pytest.raises(ConfigurationError, match="a SEV-SNP guest, not a TDX guest"):
        guest.tdx(DATA, snp_kernel())
    with pytest.raises(ConfigurationError, match="a TDX guest, not a SEV-SNP guest"):
        guest.snp(DATA, tdx_kernel())
    with pytest.raises(ConfigurationError, match="'arm_cca_guest' is neither"):
        guest.tdx(DATA, Kernel("arm_cca_guest", lambda data, level: data))


@pytest.mark.parametrize("blob", [b"", bytes(100), bytes(1184), b"\xff" * 5000, bytes(40_000)])
def test_a_malformed_answer_of_the_kernel_is_a_configuration_error(blob: bytes) -> None:
    with pytest.raises(ConfigurationError):
        guest.tdx(DATA, Kernel(tsm.TDX, lambda data, level: blob))
    with pytest.raises(ConfigurationError):
        guest.snp(DATA, Kernel(tsm.SNP, lambda data, level: blob[:0x50] + data + blob[0x90:]))


def test_the_provider_is_known_without_a_report() -> None:
    kernel = tdx_kernel(faults={"outblob": [errno.EIO]})
    assert tsm.provider(kernel) == tsm.TDX
    assert not kernel.instances
    with pytest.raises(ConfigurationError, match="modprobe"):
        tsm.provider(tdx_kernel(faults={"make": [errno.ENXIO]}))


# -- the certificate table ------------------------------------------------------------------------------------------


def test_the_leaf_is_found_by_the_kind_of_key_that_signed() -> None:
    both = table((b"\7" * 16, b"other"), (VCEK, b"vcek"), (VLEK, b"vlek"))
    assert guest.leaf_of(both, 0) == b"vcek"
    assert guest.leaf_of(both, 1) == b"vlek"
    assert guest.leaf_of(both, 7) is None
    assert guest.leaf_of(table((VLEK, b"vlek")), 0) is None


@pytest.mark.parametrize("wrong", [(0, 0), (24, 1 << 31), (1 << 31, 4), (47, 4)])
def test_a_table_that_points_outside_itself_holds_nothing(wrong: tuple[int, int]) -> None:
    offset, length = wrong
    entry = VCEK + offset.to_bytes(4, "little") + length.to_bytes(4, "little")
    assert guest.leaf_of(entry + bytes(24), 0) is None


def test_a_certificate_file_may_be_pem_or_der() -> None:
    der = guest.read_certificate(content("trustee-az-vcek.pem"))
    assert der == SNP_RECORDS["azure"].certificate
    assert guest.read_certificate(der) == der


# -- the real file system -------------------------------------------------------------------------------------------


def test_kernel_files_read_and_write_what_is_there(tmp_path: Path) -> None:
    files, folder = tsm.KernelFiles(), str(tmp_path / "instance")
    files.make(folder)
    assert files.exists(folder)
    path = f"{folder}/inblob"
    Path(path).touch()
    files.write(path, DATA)
    assert files.read(path, 64) == DATA
    assert files.read(path, 10) == DATA[:11], "one byte more than allowed shows that there is more"
    with pytest.raises(OSError, match="No such file"):
        files.write(f"{folder}/none", b"")
    Path(path).unlink()
    files.remove(folder)
    assert not files.exists(folder)


def test_a_machine_without_a_tee_says_so() -> None:
    if tsm.KernelFiles().exists(tsm.FOLDER):
        assert tsm.provider(tsm.KernelFiles()) in (tsm.TDX, tsm.SNP)
        return
    with pytest.raises(ConfigurationError, match="not a confidential VM"):
        guest.tdx(DATA, tsm.KernelFiles())
