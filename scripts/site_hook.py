"""Hook of mkdocs (mkdocs.yml): the files of the repository's top as pages, and links as a repository has them.

README.md, CONTRIBUTING.md and CHANGELOG.md stand beside references/, which is the site's folder. They become pages of
it, and links are followed as GitHub does: into references/ they stay pages, to a file of the repository they go to it.
Nothing is copied.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = "references"
#: Page of the site -> the file that it is.
TOP = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")
_STYLE = """\
.md-grid { max-width: 80rem; }
.md-typeset table:not([class]) { font-size: .64rem; display: block; overflow-x: auto; }
.md-typeset table:not([class]) th { min-width: 0; padding: .45em .7em; vertical-align: bottom; }
.md-typeset table:not([class]) td { padding: .45em .7em; }
.md-typeset table:not([class]) td:first-child { min-width: 8rem; }
.md-typeset table:not([class]) td code { word-break: normal; }
.md-typeset table:not([class]) th code { white-space: nowrap; padding: 0; background: none; }
.md-typeset pre > code { font-size: .66rem; }
"""


def on_files(files: Files, config: Any) -> Files:
    """Add what stands at the top of the repository."""
    for page, source in TOP.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    files.append(File.generated(config, "site.css", content=_STYLE))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links as the site has them."""
    at = page.file.src_uri
    source = TOP.get(at) or posixpath.join(PAGES, at)
    pages = {of: name for name, of in TOP.items()}

    def link(match: re.Match[str]) -> str:
        target, hash_, anchor = match[2].partition("#")
        if not target or ":" in target:
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if path in pages:
            there = pages[path]
        elif path.startswith(f"{PAGES}/"):
            there = path.removeprefix(f"{PAGES}/")
        elif not (ROOT / path).exists():
            return match[0]  # mkdocs names it
        else:
            return f"{match[1]}{config.repo_url.rstrip('/')}/blob/main/{path}{hash_}{anchor}{match[3]}"
        relative = os.path.relpath(there, posixpath.dirname(at) or ".").replace(os.sep, "/")
        return f"{match[1]}{relative}{hash_}{anchor}{match[3]}"

    return _LINK.sub(link, markdown)
