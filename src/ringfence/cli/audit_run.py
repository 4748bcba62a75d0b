"""`ringfence audit FOLDER`: what the logs of a run show, printed, as JSON, or as a page."""

from __future__ import annotations

import argparse
import html
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from ringfence.cli import terminal
from ringfence.cli.terminal import printable
from ringfence.config.private_files import read_content, replace_file
from ringfence.errors import ConfigurationError, RecordError
from ringfence.record import claims
from ringfence.record.claims import Claims, Record, Verdict
from ringfence.record.evidence import Shown
from ringfence.record.folder import LogState

# What is said first, wherever a verdict is shown.
LIMITS: Final = (
    "A log shows that the process that was admitted as its worker wrote these entries in this order, and that nobody has "
    "changed them since. What they say is that worker's word: it is worth what its evidence says of the code that ran.",
    "A holder of all workers' keys, or an owner of all machines who presents no evidence of them, can write any record.",
    "A worker is verified by its parent in the tree of the join. A parent that lies may have shown its own hardware.",
    "That both ends of a connection agree says how much passed, in which order and between whom, not what it was.",
    "The last session of all could be left out unseen, unless a checkpoint that it wrote is among the claims. Times are those "
    "of the workers' clocks.",
)
WITHOUT_EVIDENCE: Final = (
    "Workers were admitted by a shared secret. That convinces nobody else: any member could have signed as any other."
)


def run(options: argparse.Namespace) -> int:
    """Verify the logs of a folder, evaluate the claims, and print what was found."""
    found = _read(options.record)
    asked = Claims() if options.claims is None else claims.read(read_content(options.claims), str(options.claims))
    verdicts = claims.evaluate(found, asked)
    passed = all(each.is_met for each in verdicts)
    limits = limits_of(found)
    logs = [_log_facts(each, found) for each in found.states]
    facts = {"passed": passed, "limits": limits, "verdicts": [each._asdict() for each in verdicts], "logs": logs}
    if options.page is not None:
        replace_file(options.page, page(facts).encode("utf-8"), 0o644)
    if options.json:
        print(json.dumps(facts))
        return 0 if passed else 1
    print("What no record can show:")
    for each in limits:
        terminal.say(each, "  - ")
    for verdict in verdicts:
        _print_verdict(verdict)
    for state in logs:
        print()
        terminal.say(printable(f"{state['name']}: {state['state']}{': ' if state['reason'] else ''}{state['reason']}"))
        for name, value in state.items():
            if name not in ("name", "state", "reason") and value != "":
                terminal.say(printable(value), f"  {name:12}  ")
    return 0 if passed else 1


def _print_verdict(verdict: Verdict) -> None:
    print()
    terminal.say(f"{verdict.state.upper()}: {printable(verdict.claim)}")
    for each in verdict.reasons:
        terminal.say(printable(each), "  ")


def _read(path: Path) -> Record:
    try:
        return Record.read(path)
    except RecordError as error:
        raise ConfigurationError(str(error)) from None
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from error


def limits_of(found: Record) -> list[str]:
    """Return what this record cannot show to anybody."""
    by_secret = any(each.kind == "secret" for shown in found.shown.values() for each in shown)
    return [*([WITHOUT_EVIDENCE] if by_secret else []), *LIMITS]


def _log_facts(state: LogState, record: Record) -> dict[str, Any]:
    found: dict[str, Any] = {"name": state.name, "state": state.state, "reason": state.reason}
    if state.log is not None:
        said, last = state.log.begin.fields, state.log.entries[-1]
        found |= {name: said[name] for name in ("run", "generation", "rank", "roster", "policy")}
        found |= {"began": _time(state.log.begin.at), "last": _time(last.at), "ended": last.fields.get("how", "")}
        shown = record.shown[said["roster"], said["rank"]]
        found |= {"presented": "; ".join(_presented(each) for each in shown) or "nothing: it is alone"}
        found |= {"entries": len(state.log.entries), "head": state.log.head.hex()}
    return found


def _presented(each: Shown) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in each.facts.items())
    return f"{each.kind}, {each.verdict}{': ' if facts else ''}{facts}"


def _time(milliseconds: int) -> str:
    return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(" ", "seconds")


# -- the page ---------------------------------------------------------------------------------------------------------

_STYLE: Final = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1d2530; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; } li { margin: .2rem 0; }
.limits { background: #fff7e0; border-left: 4px solid #c98a00; padding: .5rem 1rem; } .limits h2 { margin-top: .5rem; }
.verdict { border-left: 4px solid; padding: .1rem 1rem; margin: .8rem 0; background: #f6f7f9; overflow-wrap: anywhere; }
.verdict p { margin: .2rem 0; }
.state { font-weight: 600; }
.shown { border-color: #1a7f45; } .shown .state { color: #1a7f45; }
.refuted { border-color: #b3261e; } .refuted .state { color: #b3261e; }
.not { border-color: #c98a00; } .not .state { color: #8a5f00; }
dl { display: grid; grid-template-columns: 8rem 1fr; gap: .1rem 1rem; font-size: .85rem; }
dt { color: #5a6472; } dd { margin: 0; overflow-wrap: anywhere; font-family: ui-monospace, monospace; }
"""


def page(facts: dict[str, Any]) -> str:
    """Return the result of an audit as a page that needs no other file."""
    return "\n".join(_page(facts)) + "\n"


def _page(facts: dict[str, Any]) -> Iterator[str]:
    passed = "All claims are shown" if facts["passed"] else "Not all claims are shown"
    if not any(each["is_claimed"] for each in facts["verdicts"]):
        passed = "Nothing in the record is refuted" if facts["passed"] else "The record is refuted"
    yield f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Audit: {passed}</title>'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<style>{_STYLE}</style></head><body><h1>{passed}</h1>"
    yield '<div class="limits"><h2>What no record can show</h2><ul>'
    yield from (f"<li>{html.escape(each)}</li>" for each in facts["limits"])
    yield "</ul></div><h2>Verdicts</h2>"
    for each in facts["verdicts"]:
        yield f'<div class="verdict {each["state"]}"><p><span class="state">{each["state"]}</span>: {_text(each["claim"])}</p>'
        yield from (f"<p>{_text(reason)}</p>" for reason in each["reasons"])
        yield "</div>"
    yield "<h2>Logs</h2>"
    for log in facts["logs"]:
        yield f"<h3>{_text(log['name'])}</h3><dl>"
        yield from (
            f"<dt>{name}</dt><dd>{_text(value)}</dd>" for name, value in log.items() if name != "name" and value != ""
        )
        yield "</dl>"
    yield "</body></html>"


def _text(value: Any) -> str:
    return html.escape(printable(value))
