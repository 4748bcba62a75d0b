"""Run `ringfence demo` and draw what it prints, line by line as it came, as docs/figures/demo.svg.

    python -m scripts.demo_recording    # as root, so that Gloo's traffic can be recorded too

Each line lights up when the command printed it; pauses are shortened. A viewer that does not animate shows all lines.
"""

from __future__ import annotations

import subprocess
import sys
import time
from html import escape
from pathlib import Path
from typing import Final

PICTURE: Final = Path(__file__).parents[1] / "docs" / "figures" / "demo.svg"
COLUMNS: Final = 80
WIDE, HIGH, MARGIN = 8.4, 17, 16  # pixels of a character of 14 px, of a line, and around all
LONGEST_PAUSE: Final = 1.2  # seconds
STYLE: Final = """\
text { font: 14px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; fill: #d6deeb; white-space: pre }
.command, .heading { fill: #ffffff; font-weight: bold } .yes { fill: #7ee787 } .error { fill: #ff9f80 } .bytes { fill: #9fb3c8 }
@keyframes appear { from { opacity: 0.2 } }
@media (prefers-reduced-motion: no-preference) { .line { animation: appear 0.01s backwards } }"""


def recorded() -> list[tuple[float, str]]:
    """The command's lines, each with the seconds at which it came."""
    command = [str(Path(sys.executable).with_name("ringfence")), "demo"]
    lines = [(0.0, "$ ringfence demo")]
    began = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as demo:  # noqa: S603
        assert demo.stdout is not None
        lines += [(time.monotonic() - began, line.rstrip("\n")) for line in demo.stdout]
    if demo.returncode:
        raise SystemExit(f"ringfence demo ended with {demo.returncode}")
    return lines


def kind(line: str) -> str:
    """How a line is coloured."""
    words = line.split()
    if line.startswith("$"):
        return "command"
    if line[:1].isdigit() or line.startswith("All checks"):
        return "heading"
    if words[:1] == ["yes"]:
        return "yes"
    if words and len(words[0]) == 8 and line.rstrip().endswith("|"):
        return "bytes"
    return "error" if words and not line.startswith("   (") else "plain"


def drawn(lines: list[tuple[float, str]]) -> str:
    """The picture of a terminal in which these lines appear."""
    width, height = int(COLUMNS * WIDE + 2 * MARGIN), HIGH * len(lines) + 2 * MARGIN
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="ringfence demo">']
    parts += [f"<style>\n{STYLE}\n</style>", '<rect width="100%" height="100%" rx="8" fill="#0d1b2a"/>']
    shown, before = 0.5, 0.0
    for number, (seconds, line) in enumerate(lines):
        shown, before = shown + min(seconds - before, LONGEST_PAUSE), seconds
        place = f'x="{MARGIN}" y="{MARGIN + HIGH * (number + 0.75):.0f}"'
        text = escape(line, quote=False)
        if text:
            look = f'class="line {kind(line)}" style="animation-delay: {shown:.2f}s"'
            parts.append(f'<text {place} {look} xml:space="preserve">{text}</text>')
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(drawn(recorded()))
    print(f"wrote {PICTURE}")
