"""`ringfence checkpoint verify | show | rewrap | convert`: check, read, re-key and convert sealed checkpoints."""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ringfence.admission.encoding import escape
from ringfence.cli import terminal
from ringfence.cli.terminal import Commands, say
from ringfence.errors import CheckpointError, ConfigurationError

if TYPE_CHECKING:
    from ringfence.checkpoint import Anchor, Key

CODES = """\
exit codes:
  0  success
  1  the checkpoint is refused: missing, damaged, changed, or not the expected one
  2  the command could not run: wrong arguments, key or environment
"""

VERIFY = """\
Verify every byte of a sealed checkpoint, and print its step and anchor.

Nothing is loaded, and neither torch nor an accelerator is needed. A checkpoint that passes is one that a holder of
the key saved, complete and unchanged. Whether it is the newest one, only --anchor can tell: anyone who controls the
storage can put an older one in its place.
"""

SHOW = """\
Print what a sealed checkpoint contains: step, metadata and anchor, the names, types and shapes of its items, and its
shards. The index is verified; the shards are not read.

Without --key it prints what is stored in clear, and is not verified: the name of the key, the id of the save, the
sizes of the files.
"""

REWRAP = """\
Wrap the data key of a sealed checkpoint with another key, and replace the index.

Shards and anchor stay the same, so it takes milliseconds. The old key still opens copies of the old index. If it has
leaked, seal everything anew instead: `ringfence checkpoint convert --to sealed --new-key FILE`.
"""

CONVERT = """\
Convert a checkpoint between three forms: sealed, plain DCP (torch.distributed.checkpoint) and one file of torch.save.
It needs torch, and host memory for the whole state.

--key opens SOURCE, which must then be sealed; --new-key seals DESTINATION (default: --key). Without --key the command
finds out which plain form SOURCE has. DESTINATION must not exist. Only a sealed checkpoint has a step and metadata.
Plain DCP holds keys as texts only, and no empty dicts; both other forms hold integer keys, as those of an optimizer.
Plain ones are written for their owner only (mode 0600 and 0700) and are not protected in any way.

A file of torch.save is read with weights_only=True. To read plain DCP means to run code: its .metadata and all its
items that are not tensors are pickled. Give --trust-pickle only if nobody else could write to that folder.
"""

EXAMPLES = """\
examples:
  ringfence secret new ck.key
  ringfence checkpoint verify run/step-100 --key ck.key --anchor 100
  ringfence checkpoint show run/step-100
  ringfence checkpoint show s3://bucket/run/step-100 --key ck.key
  ringfence checkpoint rewrap run/step-100 --key ck.key --new-key new.key
  ringfence checkpoint convert model.pt run/step-0 --to sealed --new-key ck.key
  ringfence checkpoint convert run/step-100 model.pt --to torch --key ck.key
  ringfence checkpoint convert old-dcp new --to sealed --new-key ck.key --trust-pickle
"""

KEY = "a key file (`ringfence secret new FILE`), or python:MODULE:NAME, a function that returns a KeyWrapper"


def add_to(commands: Commands) -> None:
    """Add `checkpoint verify`, `show`, `rewrap` and `convert` to the command line."""
    summary = "verify, show, re-key or convert sealed checkpoints"
    checkpoint = commands.add_parser("checkpoint", help=summary, epilog=EXAMPLES + "\n" + CODES)
    actions = checkpoint.add_subparsers(title="actions", metavar="ACTION", required=True)
    verify = actions.add_parser("verify", help="verify every byte", description=VERIFY, epilog=CODES)
    show = actions.add_parser("show", help="print what a checkpoint contains", description=SHOW, epilog=CODES)
    rewrap = actions.add_parser("rewrap", help="replace the key that opens it", description=REWRAP, epilog=CODES)
    convert = actions.add_parser(
        "convert", help="from or to plain DCP and torch.save", description=CONVERT, epilog=CODES
    )
    for parser in (verify, show, rewrap):
        parser.add_argument("path", metavar="PATH", help="the folder or URL that was given to save()")
    convert.add_argument("source", metavar="SOURCE", help="a sealed or plain DCP checkpoint, or a file of torch.save")
    convert.add_argument("destination", metavar="DESTINATION", help="where to write; must not exist")
    convert.add_argument("--to", required=True, choices=("sealed", "dcp", "torch"), help="the form to write")
    for parser in (verify, show, rewrap, convert):
        parser.add_argument("--key", required=parser in (verify, rewrap), metavar="KEY", help=KEY)
    for parser in (rewrap, convert):
        what = "the key to wrap with" if parser is rewrap else "the key of DESTINATION (default: --key)"
        parser.add_argument("--new-key", required=parser is rewrap, metavar="KEY", help=what)
    for parser in (verify, show, rewrap, convert):
        parser.add_argument(
            "--anchor", type=_anchor, metavar="DIGEST|STEP", help="refuse any other checkpoint than this one"
        )
    convert.add_argument(
        "--step",
        type=terminal.number(0, (1 << 63) - 1),
        metavar="N",
        help="of DESTINATION, if it is sealed (default: SOURCE's)",
    )
    convert.add_argument("--trust-pickle", action="store_true", help="run the code in a plain DCP checkpoint")
    for parser in (verify, convert):
        parser.add_argument(
            "--threads", type=terminal.number(1, 256), default=2, metavar="N", help="that seal or open (default: 2)"
        )
    for parser, run in ((verify, run_verify), (show, run_show), (rewrap, run_rewrap), (convert, run_convert)):
        parser.add_argument("--json", action="store_true", help="print the result as JSON")
        parser.set_defaults(run=functools.partial(_reported, run))


def _reported(run: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Report a checkpoint that is refused, with exit code 1; with --json also on standard output."""
    try:
        return run(options)
    except CheckpointError as error:
        if options.json:
            print(json.dumps({"refused": str(error)}))
        terminal.complain(str(error))
        return 1


# -- the commands -----------------------------------------------------------------------------------------------------


def run_verify(options: argparse.Namespace) -> int:
    """Verify all shards, with progress."""
    from ringfence import checkpoint
    from ringfence.cli import checkpoint_views

    key = _key(options.key)
    size = checkpoint.inspect(options.path, key=key, anchor=options.anchor).info.size
    with terminal.Progress("verifying", size) as progress:
        info = checkpoint.verify(
            options.path, key=key, anchor=options.anchor, threads=options.threads, progress=progress.add
        )
    if options.json:
        print(json.dumps(checkpoint_views.info_json(info), indent=2))
    else:
        print(checkpoint_views.verified_text(info, options.anchor is not None))
    return 0


def run_show(options: argparse.Namespace) -> int:
    """Print the index, or without a key what is stored in clear."""
    from ringfence import checkpoint
    from ringfence.cli import checkpoint_views

    if options.key is None:
        if options.anchor is not None:
            raise ConfigurationError("--anchor needs --key: what is stored in clear is not verified")
        clear = checkpoint_views.clear_json(options.path)
        print(json.dumps(clear, indent=2) if options.json else checkpoint_views.clear_text(clear))
        return 0
    found = checkpoint.inspect(options.path, key=_key(options.key), anchor=options.anchor)
    print(
        json.dumps(checkpoint_views.index_json(found), indent=2) if options.json else checkpoint_views.index_text(found)
    )
    return 0


def run_rewrap(options: argparse.Namespace) -> int:
    """Replace the index by one that the new key opens."""
    from ringfence import checkpoint
    from ringfence.checkpoint.opening import rewrap_index

    key, new_key = _key(options.key), _key(options.new_key)
    found = checkpoint.inspect(options.path, key=key, anchor=options.anchor)  # opened once: what is verified is written
    before, name = found.info, rewrap_index(found, new_key)
    after = checkpoint.inspect(options.path, key=new_key, anchor=before.anchor).info
    if options.json:
        print(json.dumps({"path": after.path, "key": name, "replaced": before.key_name, "anchor": after.anchor}))
    else:
        say(f"The key {name} opens {after.path} now, and {before.key_name} does not. Its anchor is the same.")
        say("Copies of the old index, in backups for example, still open with the old key.")
    return 0


def run_convert(options: argparse.Namespace) -> int:
    """Load the source as a whole, and write it in the other form."""
    from ringfence.cli import checkpoint_convert, requirements

    requirements.torch_here("convert")
    key = _key(options.key) if options.key is not None else None
    new_key = _key(options.new_key) if options.new_key is not None else key
    done = checkpoint_convert.convert(options, key, new_key)
    if options.json:
        print(json.dumps(done, indent=2))
        return 0
    say(f"Converted {options.source} ({done['from']}) to {options.destination} ({done['to']}).")
    if "anchor" in done:
        say("Its anchor, to keep outside of the storage and to give to load():")
        print(f"  {done['anchor']}")
    else:
        say("It is not protected: anyone who reads it has the state, and anyone who changes it is not noticed.")
    if named := [*done.get("integer_keys", ()), *done.get("empty_dicts", ())]:
        say(
            "Plain DCP holds keys as texts only, and no empty dicts. Load it into a state that has the integer keys and the "
            f"empty dicts, as that of an optimizer: without one they are lost (in {escape(', '.join(named), 200)})."
        )
    return 0


# -- arguments --------------------------------------------------------------------------------------------------------


def _key(text: str) -> Key:
    """Return the key that an argument names. Raises ConfigurationError."""
    from ringfence.checkpoint import KeyFile, KeyWrapper

    if not text.startswith("python:"):
        return KeyFile(text)
    _, module, name = [*text.split(":", 2), "", ""][:3]
    try:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
        try:
            found: Any = getattr(importlib.import_module(module), name)()
        finally:
            sys.path.remove(os.getcwd())
    except Exception as error:
        raise ConfigurationError(f"{text} gives no key: {type(error).__name__}: {error}") from error
    if not isinstance(found, KeyWrapper):
        raise ConfigurationError(f"{text} returns a {type(found).__name__}: it needs name, wrap() and unwrap()")
    return found


def _anchor(text: str) -> Anchor:
    if len(text) == 64 and set(text) <= set("0123456789abcdef"):
        return text
    if text.isascii() and text.isdigit() and len(text) < 20:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is neither the 64 digits that save() returned nor a step")
