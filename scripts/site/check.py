"""Check the built site: no page loads anything from another host. `python -m scripts.site.check DIR`"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

# Attributes that load what they name, of any element but a link, which loads nothing until somebody follows it.
LOADS: Final = ("src", "srcset", "href", "xlink:href", "data", "poster", "action")
# Hosts whose names stand in licences, error messages and namespaces of the scripts, and are never asked. A new one is a
# reason to look at what the new version of the theme, or of Mermaid, does with it.
MENTIONED: Final = {
    "bit.ly",
    "blog.izs.me",
    "chevrotain.io",
    "clipboardjs.com",
    "engelschall.com",
    "en.wikipedia.org",
    "feross.org",
    "fontawesome.com",
    "github.com",
    "jquery.org",
    "js.foundation",
    "langium.org",
    "lodash.com",
    "lunrjs.com",
    "npms.io",
    "openjsf.org",
    "opensource.org",
    "tartarus.org",
    "tldrlegal.com",
    "underscorejs.org",
    "unpkg.com",  # "https://unpkg.com/resize-observer-polyfill", in a warning to developers
    "www.w3.org",
}

_URL: Final = re.compile(r"https?://([A-Za-z0-9.-]+)")
_CSS_LOAD: Final = re.compile(r"(?:@import\s+|url\(\s*)[\"']?((?:https?:)?//[^\"')\s]+)", re.IGNORECASE)


class PageParser(HTMLParser):
    """What one page loads."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.styles: list[str] = []
        self._style = False

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attributes}
        self._style = tag == "style"
        if tag == "link" and {"canonical", "next", "prev", "alternate"} & set(values.get("rel", "").split()):
            return
        self.loads += [values[name] for name in LOADS if tag != "a" and values.get(name)]
        self.styles += [values["style"]] if values.get("style") else []

    def handle_data(self, data: str) -> None:
        if self._style:
            self.styles.append(data)


def problems(site: Path) -> Iterator[str]:
    """Every load from another host, a line each."""
    for path in sorted(site.rglob("*.html")):
        page, name = PageParser(), path.relative_to(site)
        page.feed(path.read_text())
        for each in page.loads:
            if urlsplit(each).netloc:
                yield f"{name} loads {each}"
        for text in page.styles:
            for each in _CSS_LOAD.findall(text):
                yield f"{name} loads {each}"
    for path in sorted(site.rglob("*.css")):
        for each in _CSS_LOAD.findall(path.read_text()):
            yield f"{path.relative_to(site)} loads {each}"
    for path in sorted(site.rglob("*.js")):
        for host in sorted(set(_URL.findall(path.read_text())) - MENTIONED):
            yield f"{path.relative_to(site)} names the host {host}: see MENTIONED in scripts/site/check.py"


def main() -> int:
    site = Path(sys.argv[1]).resolve()
    found = list(problems(site))
    print("\n".join(found) or f"{len(list(site.rglob('*.html')))} pages: nothing loaded from another host")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
