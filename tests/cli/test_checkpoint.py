"""`ringfence checkpoint`: verify, show, rewrap and convert, with nothing unpickled unless it is asked for."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ringfence import checkpoint
from ringfence.checkpoint import LocalStorage
from ringfence.cli import main
from ringfence.cli.terminal import Progress
from tests.limits import HANG
from tests.unit.checkpoint_samples import is_same, key_file, small_state

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a checkpoint of step 100 in `run` and two keys, which the commands run in."""
    monkeypatch.chdir(tmp_path)
    for name in ("key", "other"):
        key_file(tmp_path, name)
    checkpoint.save(small_state(), "run", key="key", step=100, metadata={"model": "gpt2", "bad": "\x1b[31m"})
    return tmp_path


@pytest.fixture
def command(folder: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run `ringfence checkpoint` in the folder; the exit code and what it prints."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(["checkpoint", *arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def masked(text: str) -> str:
    """Replace the digits of digests and ids by their count."""
    return re.sub(r"[0-9a-f]{16,64}", lambda found: f"<{len(found[0])}>", text)


# -- verify -----------------------------------------------------------------------------------------------------------

VERIFIED = """\
run: every byte is authentic (9 items, 1 shard, 1.6 MiB).
  step    100
  anchor  <64>
  key     file:<16>
  save    <32>
"""
NEWEST = "\nWhether this is the newest checkpoint, only --anchor tells: give what save() returned, or the step.\n"


def test_verify_prints_step_and_anchor(command: Command) -> None:
    code, out, err = command("verify", "run", "--key", "key")
    assert (code, masked(out), err) == (0, VERIFIED + NEWEST, "")
    assert checkpoint.inspect("run", key="key").info.anchor in out


def test_verify_with_an_anchor_has_no_open_question(command: Command) -> None:
    for anchor in ("100", checkpoint.inspect("run", key="key").info.anchor):
        code, out, _ = command("verify", "run", "--key", "key", "--anchor", anchor)
        assert (code, masked(out)) == (0, VERIFIED)


@pytest.mark.parametrize("anchor", ["99", "0" * 64])
def test_verify_refuses_another_checkpoint_than_the_anchors(command: Command, anchor: str) -> None:
    code, out, err = command("verify", "run", "--key", "key", "--anchor", anchor)
    assert (code, out) == (1, "")
    assert "is expected: the folder was replaced" in err


def test_verify_refuses_a_changed_byte(command: Command, folder: Path) -> None:
    shard = next((folder / "run").glob("*.shard"))
    content = bytearray(shard.read_bytes())
    content[-100] ^= 1
    shard.write_bytes(content)
    code, out, err = command("verify", "run", "--key", "key", "--json")
    assert code == 1
    assert "does not authenticate" in json.loads(out)["refused"]
    assert shard.name in err


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("verify", "nowhere", "--key", "key"), 1, "there is no checkpoint at nowhere"),
        (("verify", "run", "--key", "other"), 1, "was given"),
        (("verify", "run", "--key", "nowhere"), 2, "nowhere"),
        (("show", "nowhere"), 1, "there is no checkpoint at nowhere"),
        (("show", "."), 1, "has no index"),
        (("show", "run", "--anchor", "1"), 2, "--anchor needs --key"),
        (("verify", "run", "--key", "python:no_such_module:key"), 2, "ModuleNotFoundError"),
        (("verify", "run", "--key", "python:os:getcwd"), 2, "returns a str: it needs name, wrap() and unwrap()"),
        (("convert", "run", "new", "--to", "dcp"), 2, "run is sealed: give its key with --key"),
        (("convert", "nowhere", "new", "--to", "dcp"), 1, "nowhere is no checkpoint"),
        (("convert", "run", "new", "--to", "dcp", "--key", "key", "--step", "1"), 2, "--step applies to --to sealed"),
        (("convert", "run", "key", "--to", "torch", "--key", "key"), 2, "key exists, and is not overwritten"),
        (("convert", "run", "run", "--to", "sealed", "--key", "key"), 1, "exists and is a checkpoint"),
        (("convert", "run", "no/folder/x", "--to", "torch", "--key", "key"), 2, "cannot write no/folder/x"),
        (("convert", "key", "new", "--to", "sealed", "--new-key", "key"), 1, "key is no file of torch.save"),
        (("convert", "run", "s3://a/b", "--to", "torch", "--key", "key"), 2, "written to local paths only"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_errors_say_what_to_do(command: Command, arguments: tuple[str, ...], code: int, said: str) -> None:
    found, out, err = command(*arguments)
    assert (found, out) == (code, "")
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("verify", "run"),
        ("verify", "run", "--key", "key", "--anchor", "x"),
        ("verify", "run", "--key", "key", "--threads", "0"),
        ("rewrap", "run", "--key", "key"),
        ("convert", "run", "new", "--key", "key"),
        ("convert", "run", "new", "--to", "sealed", "--key", "key", "--step", "-1"),
    ],
    ids=" ".join,
)
def test_wrong_arguments_are_exit_code_2(folder: Path, arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as error:
        main(["checkpoint", *arguments])
    assert error.value.code == 2


# -- show -------------------------------------------------------------------------------------------------------------

SHOWN = r"""run: a sealed checkpoint (9 items, 1 shard, 1.6 MiB). Its index is authentic.
  step    100
  anchor  <64>
  key     file:<16>
  save    <32>

metadata  value
model     'gpt2'
bad       '\x1b[31m'

item          dtype     shape            size
group.betas   value                      23 B
group.lr      value                       9 B
group.name    value                       9 B
group.none    value                       1 B
group.raw     value                       7 B
model.bias    bfloat16  [5]              10 B
model.weight  float32   [700, 300]  820.3 KiB
moments.0     float32   [300, 700]  820.3 KiB
moments.1     float32   []                4 B

shard                                      size
<32>.shard  1.6 MiB
"""
CLEAR = """\
run: a sealed checkpoint
  key     file:<16>
  save    <32>

file                                    sealed size
<32>.shard      1.6 MiB
index                                         NUMBER

Nothing of this is verified. Give --key to verify the index and to print what it contains.
"""


def test_show_lists_items_and_shards(command: Command) -> None:
    code, out, err = command("show", "run", "--key", "key")
    assert (code, masked(out), err) == (0, SHOWN, "")


def test_show_without_a_key_prints_what_is_in_clear(command: Command) -> None:
    code, out, err = command("show", "run")
    assert (code, re.sub(r"\d+ B", "NUMBER", masked(out)), err) == (0, CLEAR, "")


def test_show_as_json(command: Command) -> None:
    clear = json.loads(command("show", "run", "--json")[1])
    assert clear["verified"] is False
    assert set(clear) == {"path", "verified", "key", "save_id", "files"}
    found = json.loads(command("show", "run", "--key", "key", "--json")[1])
    assert (found["verified"], found["step"], found["metadata"]["model"]) == (True, 100, "gpt2")
    weight = next(item for item in found["items"] if item["name"] == "model.weight")
    assert weight == {"name": "model.weight", "dtype": "float32", "shape": [700, 300], "bytes": 840000, "chunks": 1}
    assert sum(shard["bytes"] for shard in found["shards"]) == found["bytes"]
    assert json.loads(command("verify", "run", "--key", "key", "--json")[1])["anchor"] == found["anchor"]


@pytest.mark.processes
def test_verify_and_show_need_no_torch(folder: Path) -> None:
    program = (
        "import sys; from ringfence.cli import main\n"
        "codes = [main(['checkpoint', name, 'run', '--key', 'key']) for name in ('verify', 'show')]\n"
        "sys.exit('torch' in sys.modules or any(codes))"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=HANG, stdout=subprocess.DEVNULL).returncode == 0


# -- rewrap -----------------------------------------------------------------------------------------------------------


def test_rewrap_replaces_the_key_and_keeps_the_anchor(command: Command) -> None:
    before = checkpoint.inspect("run", key="key").info
    code, out, _ = command("rewrap", "run", "--key", "key", "--new-key", "other", "--json")
    after = checkpoint.verify("run", key="other")
    assert code == 0
    assert json.loads(out) == {
        "path": "run", "key": after.key_name, "replaced": before.key_name, "anchor": before.anchor,
    }  # fmt: skip
    assert command("verify", "run", "--key", "key")[0] == 1


def test_rewrap_opens_the_checkpoint_once_before_it_writes(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compared with the anchor is what is written: see tests/attack/test_checkpoint.py."""
    calls: list[str] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: (calls.append(name), function(*arguments))[1]

    for name in ("open", "replace"):
        monkeypatch.setattr(LocalStorage, name, noted(name, getattr(LocalStorage, name)))
    anchor = checkpoint.inspect("run", key="key").info.anchor
    calls.clear()
    assert command("rewrap", "run", "--key", "key", "--new-key", "other", "--anchor", anchor)[0] == 0
    assert calls == ["open", "replace", "open"], "the last one verifies the result"


def test_rewrap_to_a_key_of_a_module(command: Command, folder: Path) -> None:
    (folder / "my_kms.py").write_text("from ringfence.checkpoint import KeyFile\ndef key(): return KeyFile('other')\n")
    code, out, _ = command("rewrap", "run", "--key", "key", "--new-key", "python:my_kms:key")
    assert code == 0
    assert "still open with the old key" in out
    assert command("verify", "run", "--key", "other")[0] == 0
    assert str(folder) not in sys.path


# -- convert ----------------------------------------------------------------------------------------------------------


def test_torch_save_to_sealed_and_back(command: Command) -> None:
    torch.save(small_state(2.0), "model.pt")
    code, out, _ = command("convert", "model.pt", "new", "--to", "sealed", "--new-key", "key", "--step", "7", "--json")
    done = json.loads(out)
    assert (code, done["from"], done["to"]) == (0, "torch.save", "sealed")
    assert checkpoint.verify("new", key="key", anchor=done["anchor"]).step == 7
    code, out, _ = command("convert", "new", "back.pt", "--to", "torch", "--key", "key")
    assert (code, "It is not protected" in out) == (0, True)
    assert is_same(torch.load("back.pt", weights_only=True), small_state(2.0))
    assert stat.S_IMODE(os.stat("back.pt").st_mode) == 0o600


def test_integer_keys_and_empty_dicts_survive(command: Command) -> None:
    """DCP's names lose both: an optimizer's own state dict has the former."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    state = {"optimizer": optimizer.state_dict(), "empty": {}, "nested": {7: {8: {}, "9": [{10: 1}]}}}
    torch.save(state, "model.pt")
    assert command("convert", "model.pt", "new", "--to", "sealed", "--new-key", "key")[0] == 0
    assert command("convert", "new", "again", "--to", "sealed", "--key", "key")[0] == 0
    assert command("convert", "again", "back.pt", "--to", "torch", "--key", "key")[0] == 0
    assert is_same(torch.load("back.pt", weights_only=True), state)


@pytest.mark.parametrize("bad", [{1: 2, "1": 3}, {0.5: 1}, {(1, 2): torch.ones(2)}], ids=str)
def test_keys_that_cannot_be_kept_are_refused(command: Command, bad: dict[Any, Any]) -> None:
    torch.save({"weights": torch.ones(2), "bad": bad}, "model.pt")
    code, _, err = command("convert", "model.pt", "new", "--to", "sealed", "--new-key", "key")
    assert (code, "bad has " in err) == (1, True)


def test_plain_dcp_to_sealed_and_back(command: Command) -> None:
    dcp.save(small_state(2.0), checkpoint_id="plain", no_dist=True)
    assert command("convert", "plain", "new", "--to", "sealed", "--new-key", "key", "--trust-pickle")[0] == 0
    assert is_same(checkpoint.load_all("new", key="key")[0], small_state(2.0))
    assert command("convert", "new", "back", "--to", "dcp", "--key", "key")[0] == 0
    assert stat.S_IMODE(os.stat("back").st_mode) == 0o700
    state = small_state(0.0)
    dcp.load(state, checkpoint_id="back", no_dist=True)
    assert is_same(state, small_state(2.0))
    assert not [name for name in os.listdir() if "partial" in name]


def test_sealed_to_sealed_has_a_new_data_key_and_keeps_step_and_metadata(command: Command) -> None:
    assert command("convert", "run", "new", "--to", "sealed", "--key", "key", "--new-key", "other")[0] == 0
    before, after = checkpoint.inspect("run", key="key"), checkpoint.inspect("new", key="other")
    assert (after.info.step, after.info.metadata) == (100, before.info.metadata)
    assert after.data_key.reveal() != before.data_key.reveal()
    assert is_same(checkpoint.load_all("new", key="other")[0], small_state())


def test_convert_refuses_a_damaged_source_and_writes_nothing(command: Command, folder: Path) -> None:
    shard = next((folder / "run").glob("*.shard"))
    shard.write_bytes(shard.read_bytes()[:-1])
    for form in ("sealed", "dcp", "torch"):
        assert command("convert", "run", "new", "--to", form, "--key", "key")[0] == 1
        assert not [name for name in os.listdir() if name.startswith("new")]


@pytest.mark.promise("`ringfence checkpoint convert --key` takes a sealed checkpoint and nothing else.")
@pytest.mark.parametrize("form", ["torch", "dcp"])
@pytest.mark.parametrize("to", ["sealed", "torch"])
def test_a_plain_source_in_place_of_a_sealed_one_is_refused(command: Command, folder: Path, form: str, to: str) -> None:
    """Otherwise the storage's owner would have its own weights sealed with the victim's key."""
    shutil.rmtree("run")
    state = {"weight": torch.full((4,), 666.0)}
    torch.save(state, "run") if form == "torch" else dcp.save(state, checkpoint_id="run", no_dist=True)
    code, out, err = command(
        "convert", "run", "new", "--to", to, "--key", "key", "--new-key", "other", "--trust-pickle"
    )
    assert (code, out, "and not sealed, as --key says" in err) == (1, "", True), err
    assert not Path("new").exists()


def test_a_file_that_torch_did_not_write_is_refused(command: Command, folder: Path) -> None:
    """The unpickler raises many types of exceptions for these."""
    for first in "0123456789abcdef(]}.\0\x80\xff":
        (folder / "file").write_text(first + "0a1c" * 16, encoding="latin-1")
        code, out, err = command("convert", "file", "new", "--to", "sealed", "--new-key", "key")
        assert (code, out, "file is no file of torch.save" in err) == (1, "", True), err


class Evil:
    """Leaves a file when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path("ran").touch, ()


@pytest.mark.promise("`ringfence checkpoint convert` runs no code from a checkpoint unless it is told to.")
@pytest.mark.parametrize("trusts", [False, True])
def test_a_torch_file_runs_no_code_even_if_pickle_is_trusted(command: Command, folder: Path, trusts: bool) -> None:
    torch.save({"weights": torch.ones(3), "evil": Evil()}, "model.pt")
    flags = ["--trust-pickle"] if trusts else []
    code, _, err = command("convert", "model.pt", "new", "--to", "sealed", "--new-key", "key", *flags)
    assert (code, "nothing else is read" in err) == (1, True)
    assert not Path("ran").exists() and not Path("new").exists()


@pytest.mark.promise("`ringfence checkpoint convert` runs no code from a checkpoint unless it is told to.")
@pytest.mark.parametrize("place", ["metadata", "item"])
def test_plain_dcp_runs_no_code_unless_pickle_is_trusted(command: Command, folder: Path, place: str) -> None:
    dcp.save({"weights": torch.ones(3), "n": Evil() if place == "item" else 1}, checkpoint_id="plain", no_dist=True)
    if place == "metadata":
        (folder / "plain" / ".metadata").write_bytes(pickle.dumps(Evil()))
    arguments = ("convert", "plain", "new", "--to", "sealed", "--new-key", "key")
    code, _, err = command(*arguments)
    assert (code, "reading it runs whatever code is in it. Give --trust-pickle" in err) == (2, True)
    assert not Path("ran").exists()
    assert command(*arguments, "--trust-pickle")[0] == (1 if place == "metadata" else 0)
    assert Path("ran").exists()  # the flag means what its help says


# -- progress ---------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_shown_on_a_terminal_and_wiped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with Progress("verifying", 4 << 20) as progress:
        for _ in range(4):
            progress.add(1 << 20)
    assert "verifying [####################] 100%  4.0 MiB of 4.0 MiB, " in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_verify_and_convert_show_progress(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    assert main(["checkpoint", "verify", "run", "--key", "key"]) == 0
    assert main(["checkpoint", "convert", "run", "new", "--to", "sealed", "--key", "key"]) == 0
    assert all(f"{what} [" in terminal.getvalue() for what in ("verifying", "opening", "sealing"))
