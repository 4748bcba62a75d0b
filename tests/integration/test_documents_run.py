"""The commands of the guides work as written, from an empty directory."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tests.integration.test_readme import MARKED, ROOT, shell

GUIDE = (ROOT / "docs" / "guides" / "admit-by-certificate.md").read_text()
COMMANDS = MARKED.findall(GUIDE)[0]


@pytest.mark.nightly
def test_at_most_five_commands_lead_to_a_group_admitted_by_certificates(tmp_path: Path) -> None:
    assert len(COMMANDS.splitlines()) <= 5
    done = shell(COMMANDS, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 workers" in done.stderr
    assert "AES-256-GCM, X25519MLKEM768, admitted by certificate" in done.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert losses[-1] < losses[0] / 2


@pytest.mark.nightly  # attack/test_certificate.py has the same refusal in the gate
def test_the_same_commands_with_a_certificate_of_another_authority_are_refused(tmp_path: Path) -> None:
    other = "ringfence certificate new other node-0\n" + COMMANDS.replace("$PWD/site/node-0", "$PWD/other/node-0")
    done = shell(other, tmp_path)
    assert done.returncode != 0
    assert (
        "this worker's own certificate would be refused: the certificate was not issued under an authority of the policy"
        in done.stderr
    )


@pytest.mark.parametrize("document", ["reference/policy.md", "guides/admit-by-certificate.md"])
def test_every_policy_that_the_guides_show_is_toml(document: str) -> None:
    shown = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / document).read_text(), re.DOTALL)
    policies = [tomllib.loads(text) for text in shown]  # some show a part of one
    assert {policy["version"] for policy in policies if "version" in policy} == {1}
