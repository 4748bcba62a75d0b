"""The checks of the built documentation site find what they are made for."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.site.check import problems

PAGE = '<html><head><link rel="canonical" href="https://example.org/"></head><body><h1 id="top">x</h1>{}</body></html>'


def found_in(folder: Path, body: str = "", files: dict[str, str] | None = None) -> list[str]:
    (folder / "guides").mkdir()
    (folder / "guides" / "one.html").write_text(PAGE.format(body))
    (folder / "index.html").write_text(PAGE.format(""))
    for name, text in (files or {}).items():
        (folder / name).write_text(text)
    return list(problems(folder))


def test_a_site_that_links_and_loads_within_itself_is_clean(tmp_path: Path) -> None:
    links = '<a href="../index.html#top">x</a><a href="https://example.org/">x</a>'
    script = 'const kind = "http://www.w3.org/2000/svg"'
    assert (
        found_in(
            tmp_path,
            links + '<img src="../a.svg">',
            {"a.svg": "<svg/>", "a.js": script, "a.css": "p { background: url(a.svg) }"},
        )
        == []
    )


@pytest.mark.parametrize(
    "body",
    [
        '<script src="https://example.org/x.js"></script>',
        '<link rel="stylesheet" href="//example.org/x.css">',
        '<img src="http://example.org/x.png">',
        '<iframe src="https://example.org/"></iframe>',
        '<style>@import "https://example.org/x.css";</style>',
        '<p style="background: url(https://example.org/x.png)">x</p>',
    ],
)
def test_a_page_that_loads_from_another_host_is_reported(body: str, tmp_path: Path) -> None:
    (report,) = found_in(tmp_path, body)
    assert report.startswith("guides/one.html loads ")


def test_style_sheets_and_scripts_that_name_another_host_are_reported(tmp_path: Path) -> None:
    files = {"a.css": "@import url(https://example.org/x.css);", "a.js": 'fetch("https://example.org/")'}
    style, script = found_in(tmp_path, files=files)
    assert style == "a.css loads https://example.org/x.css"
    assert script.startswith("a.js names the host example.org")
