"""The report of a self-test as one HTML page, which loads nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

from ringfence.cli.selftest import text
from ringfence.cli.selftest.catalogue import SECTIONS
from ringfence.cli.selftest.results import FAILED, ISSUES, PASSED, SKIPPED, CheckResult, SelftestReport

STYLE: Final = """
:root { color-scheme: light dark; --ink: #1b1b1b; --soft: #5c6166; --line: #dadde1; --shade: #f4f5f7; --paper: #fff;
  --good: #11703c; --good-shade: #e7f5ec; --bad: #b3261e; --bad-shade: #fcebea; --bar: #0072b2; --bar-host: #9aa5b1; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8ea; --soft: #a3abb3; --line: #3a4047; --shade: #22272c;
  --paper: #171a1e; --good: #6fd39a; --good-shade: #173526; --bad: #ff9d94; --bad-shade: #421f1c; --bar: #4ba6dc;
  --bar-host: #6c7781; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.2rem 4rem; max-width: 54rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 .2rem; }
h2 { font-size: 1.15rem; margin: 2.4rem 0 .6rem; }
p { margin: .5rem 0; }
a { color: var(--bar); }
code { font: .88em/1.4 ui-monospace, "DejaVu Sans Mono", Menlo, monospace; overflow-wrap: anywhere; }
.soft { color: var(--soft); font-size: .92rem; }
.verdict { margin: 1.2rem 0; padding: .9rem 1.1rem; border-left: 5px solid; border-radius: 3px; }
.verdict strong { font-size: 1.25rem; display: block; }
.verdict.passed { background: var(--good-shade); border-color: var(--good); }
.verdict.failed { background: var(--bad-shade); border-color: var(--bad); }
.notice { background: var(--shade); padding: .6rem 1.1rem; border-left: 5px solid var(--soft); border-radius: 3px; }
.problem { margin: 1rem 0; padding: .2rem 1.1rem .6rem; border: 1px solid var(--bad); border-radius: 3px; }
.problem h3 { margin: .6rem 0 .3rem; font-size: 1rem; color: var(--bad); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .32rem .9rem .32rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
thead th { border-bottom: 2px solid var(--soft); color: var(--soft); font-weight: 600; }
tbody th { font-weight: 400; min-width: 17rem; }
.plain th { min-width: 0; width: 9rem; color: var(--soft); }
th[scope="rowgroup"] { font-weight: 600; padding-top: 1.1rem; }
.number { text-align: right; white-space: nowrap; }
.state { white-space: nowrap; font-weight: 600; }
.state.passed { color: var(--good); } .state.failed { color: var(--bad); } .state.skipped { color: var(--soft); }
.bars { min-width: 11rem; width: 45%; }
.bar { display: block; height: .55rem; margin: .16rem 0; border-radius: 2px; background: var(--bar); min-width: 2px; }
.bar.host { background: var(--bar-host); }
.key { display: inline-block; width: .8rem; height: .55rem; margin-right: .35rem; border-radius: 2px; background: var(--bar); }
.key.host { background: var(--bar-host); margin-left: 1rem; }
@media print { body { max-width: none; padding: 0; } tr, .problem { break-inside: avoid; } }
"""

PAGE: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>ringfence self-test: {word}</title>
<style>{style}</style>
</head>
<body>
<h1>ringfence self-test</h1>
<p class="soft">{began}, {seconds:.0f} s{quick}</p>
{body}
</body>
</html>
"""

WORDS: Final = {PASSED: "✓ passed", FAILED: "✗ FAILED", SKIPPED: "– skipped"}


def page(report: SelftestReport) -> str:
    """Return the page."""
    parts = [_verdict(report), *_problems(report), _confidential(report), _checks(report)]
    parts += [_rates(report), _all_reduce(report), _environment(report), _reporting(report)]
    return PAGE.format(
        word=PASSED if report.passed else "FAILED",
        style=STYLE,
        began=escape(report.began),
        seconds=report.seconds,
        quick=", quick: fewer cases and smaller tensors" if report.quick else "",
        body="\n".join(part for part in parts if part),
    )


def _verdict(report: SelftestReport) -> str:
    kind = PASSED if report.passed else FAILED
    said = (
        "Collectives on this device deliver the right numbers, in order, and survive the loss of a worker."
        if report.passed and len({result.section for result in report.results}) == len(SECTIONS)
        else "All checks that were asked for passed."
        if report.passed
        else "See below what each failure means and what to do."
    )
    simulated = (
        '<p class="notice">This is the <strong>simulated</strong> device: the run says nothing about hardware.</p>'
        if report.device.startswith("sim")
        else ""
    )
    return f'<div class="verdict {kind}"><strong>{escape(report.verdict)}</strong>{escape(said)}</div>{simulated}'


def _problems(report: SelftestReport) -> Iterable[str]:
    for result in report.failed:
        yield (
            f'<div class="problem"><h3>{escape(result.name)}: {escape(result.title)}</h3>'
            f"<p>{escape(result.text)}</p><p><strong>Meaning.</strong> {_sentence(result.meaning)}</p>"
            f"<p><strong>What to do.</strong> {escape(result.advice)}</p></div>"
        )


def _sentence(text: str) -> str:
    return escape(text[:1].upper() + text[1:] + ".")


def _confidential(report: SelftestReport) -> str:
    reasons = "".join(f"<li>{_sentence(reason)}</li>" for reason in report.reasons)
    return f"<h2>Confidential mode: {escape(report.confidential)}</h2><ul>{reasons}</ul>"


def _checks(report: SelftestReport) -> str:
    titles = {section.name: section.title for section in SECTIONS}
    rows: list[str] = []
    section = ""
    for result in report.results:
        if result.section != section:
            section = result.section
            rows.append(f'<tr><th scope="rowgroup" colspan="4">{escape(titles[section])}</th></tr>')
        rows.append(_check(result))
    head = '<tr><th>check</th><th>result</th><th>detail</th><th class="number">time</th></tr>'
    return f'<h2>Checks</h2><div class="wide"><table><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table></div>'


def _check(result: CheckResult) -> str:
    detail = "" if result.text == text.NOTHING_TO_REPORT else result.text
    return (
        f'<tr><th scope="row">{escape(result.title)}<br><code class="soft">{escape(result.name)}</code></th>'
        f'<td class="state {result.state}">{WORDS[result.state]}</td><td>{escape(detail)}</td>'
        f'<td class="number">{result.seconds:.1f} s</td></tr>'
    )


def _rates(report: SelftestReport) -> str:
    if not report.rates:
        return ""
    largest = max(report.rates.values())
    rows = [
        [escape(name), f'<span class="bar" style="width: {value / largest:.1%}"></span>', text.rate(value)]
        for name, value in report.rates.items()
    ]
    return "<h2>Copies and sealing</h2>" + _table(["", "", "rate"], rows)


def _all_reduce(report: SelftestReport) -> str:
    if not report.all_reduce:
        return ""
    rows = []
    for each in report.all_reduce:
        longest = max(each["device"], each["host"])
        bars = "".join(
            f'<span class="bar {kind}" style="width: {each[kind] / longest:.1%}"></span>' for kind in ("device", "host")
        )
        times = [text.duration(each["device"]), text.duration(each["host"]), f"{each['ratio']:.2f}"]
        rows.append([escape(each["size"]), bars, *times])
    key = '<span class="key"></span>on the device<span class="key host"></span>on host tensors'
    said = "Each staged all-reduce is compared with the same one on host tensors, in turn, in the same processes."
    head = ["size", key, "device", "host", "ratio"]
    return f'<h2>All-reduce</h2><p class="soft">{said}</p>' + _table(head, rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay out rows whose second column is bars and whose further ones are numbers."""
    kinds = ["", "bars", *["number"] * (len(head) - 2)]

    def line(cells: Sequence[str], tag: str) -> str:
        return "".join(f'<{tag} class="{kind}">{cell}</{tag}>' for kind, cell in zip(kinds, cells, strict=True))

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{line(head, "th")}</tr></thead><tbody>{body}</tbody></table></div>'


def _environment(report: SelftestReport) -> str:
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>'
        for name, value in {"workers": str(report.workers), **report.environment}.items()
    )
    return f'<h2>Environment</h2><div class="wide"><table class="plain"><tbody>{rows}</tbody></table></div>'


def _reporting(report: SelftestReport) -> str:
    wish = "Report that it works, or what failed" if report.passed else "Report what failed"
    return (
        f"<h2>Report it</h2><p>{wish}: run <code>ringfence selftest --report selftest.json</code> and attach the file to "
        f'an issue at <a href="{ISSUES}" rel="noreferrer">{ISSUES}</a>. This page and that file hold no host names, user '
        "names, addresses or keys.</p>"
    )
