"""MkDocs hooks: generated parts, pages that lie outside of docs/, links that lead there, and Mermaid from this site.

The documents link to each other as files of the repository, so that they also work there. On the site, a link to another
page becomes a link to that page, and a link to any other file of the repository leads to the repository.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

ROOT: Final = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # mkdocs loads this file by its path

from scripts.site import reference  # noqa: E402

REPOSITORY: Final = "https://github.com/ringfence/ringfence"
MERMAID: Final = "assets/mermaid.min.js"
OUTSIDE: Final = {  # a file of the repository, and the page it becomes
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security/reporting.md",
    "formal/README.md": "security/formal.md",
    **{f"spec/{path.name}": f"spec/{path.name}" for path in (ROOT / "spec").glob("*.md")},
}

_LINK: Final = re.compile(r"(\]\()([^)\s]+)(\))")
_FENCE: Final = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)

_DIAGRAM: Final = re.compile(r'(<pre class="mermaid">.*?</pre>)', re.DOTALL)

# Mermaid comes from this site, and no page shows the stars of the repository.
_HOSTS_IN_THE_THEME: Final = re.compile(r"https://(?:unpkg\.com/mermaid@[^\"'`]*|api\.github\.com)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie outside of docs/, and Mermaid's script, which `scripts/docs` has fetched."""
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    files.append(File.generated(config, MERMAID, abs_src_path=os.environ["MERMAID"]))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make the generated parts; lead every relative link to a page of the site, or else to the repository."""
    source = Path(page.file.abs_src_path or "").resolve().relative_to(ROOT)

    def led(match: re.Match[str]) -> str:
        return match[1] + target(match[2], source, page.file.src_uri, files) + match[3]

    parts = _FENCE.split(reference.filled(markdown))
    return "".join(part if part.startswith("```") else _LINK.sub(led, part) for part in parts)


def target(link: str, source: Path, page: str, files: Files) -> str:
    """Where a link in the file `source`, shown as `page`, leads on the site."""
    path, mark, anchor = link.partition("#")
    if not path or "://" in path or path.startswith("mailto:"):
        return link
    goal = os.path.normpath(source.parent / path)
    shown = OUTSIDE.get(goal, goal.removeprefix("docs/") if goal.startswith("docs/") else None)
    if goal == "spec":
        shown = "spec/README.md"
    found = files.get_file_from_path(shown) if shown else None
    if found is not None and not found.inclusion.is_excluded():
        return os.path.relpath(found.src_uri, os.path.dirname(page)) + mark + anchor
    if (ROOT / goal).exists():
        return f"{REPOSITORY}/{'tree' if (ROOT / goal).is_dir() else 'blob'}/main/{goal}{mark}{anchor}"
    return link  # leads nowhere, and the build says so


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put each diagram into a box that can scroll."""
    return _DIAGRAM.sub(r'<div class="diagram">\1</div>', html)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Give a page with a diagram the script that draws it, before the theme looks for it."""
    if 'class="mermaid"' not in output:
        return output
    script = f'<script src="{get_relative_url(MERMAID, page.url)}"></script>'
    return output.replace("</head>", f"{script}</head>", 1)


def on_post_build(config: MkDocsConfig) -> None:
    """Take the addresses of other hosts out of the theme's script."""
    for script in Path(config.site_dir).glob("assets/javascripts/*.js"):
        script.write_text(_HOSTS_IN_THE_THEME.sub("about:blank", script.read_text()))
    for source_map in Path(config.site_dir).rglob("*.map"):
        source_map.unlink()
    # The search in languages that the site does not have.
    shutil.rmtree(Path(config.site_dir) / "assets/javascripts/lunr")
