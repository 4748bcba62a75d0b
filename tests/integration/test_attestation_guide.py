"""The guide to attestation: its commands run as written, on recorded evidence, and its table counts what is there."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from ringfence.admission.proofs import kinds
from tests.integration.test_readme import MARKED, ROOT, environment
from tests.limits import HANG
from tests.unit import nvidia_records, snp_records, tdx_records

GUIDE = (ROOT / "docs" / "guides" / "admit-by-attestation.md").read_text()


def test_the_commands_on_recorded_evidence_do_what_the_guide_says(tmp_path: Path) -> None:
    (commands,) = MARKED.findall(GUIDE)
    used = {**environment(tmp_path), "PYTHON": sys.executable}
    function = 'ringfence() { "$PYTHON" -m ringfence.cli "$@"; }\n'
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", function + commands],
        cwd=ROOT,
        env=used,
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SEV-SNP report from Turin: genuine" in done.stdout
    assert "TDX quote: genuine" in done.stdout
    assert done.stdout.count("refused") == 2
    printed = " ".join(done.stdout.split())
    assert "VCEK is of another chip" in printed
    assert "its collateral must be current" in printed
    measured = done.stdout[done.stdout.index("[admit.snp]") : done.stdout.index("!!")]
    shown = policies()[0]["admit"][0]["snp"]
    assert tomllib.loads(measured)["admit"]["snp"] == shown


def policies() -> list[dict[str, list[dict[str, object]]]]:
    return [tomllib.loads(text) for text in re.findall(r"```toml\n(.*?)```", GUIDE, re.DOTALL)]


def test_the_policy_that_the_guide_shows_is_one() -> None:
    (text,) = re.findall(r"```toml\n(version.*?)```", GUIDE, re.DOTALL)  # the other one is a part of a policy

    def no_file(path: str, limit: int) -> bytes:
        raise FileNotFoundError(2, "No such file", path)

    assert kinds.read(text.encode(), no_file).kinds == ("snp",)


def test_the_status_table_counts_what_is_recorded() -> None:
    rows = {line.split("|")[1].strip(): line for line in GUIDE.splitlines() if line.startswith("| ")}
    assert f"{len(tdx_records.RECORDS)} quotes verify" in rows["Intel TDX"]
    debugged = 1
    assert f"{len(tdx_records.WITHOUT_COLLATERAL) - debugged} more are read" in rows["Intel TDX"]
    assert f"{len(snp_records.RECORDS)} reports verify" in rows["AMD SEV-SNP"]
    assert f"{len(nvidia_records.records())} reports verify" in rows["NVIDIA GPUs"]
    assert f"{len(nvidia_records.TOKENS)} tokens" in rows["token"]
