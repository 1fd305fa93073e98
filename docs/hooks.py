"""Two steps of the build of the site: links to files outside docs/, and mathematics.

A page links to a file outside docs/ by its path in the repository, so that the link also works there. Each such file
becomes a part of the site, below `repository/`. Mathematics becomes MathML, which needs no script.
"""

from __future__ import annotations

import html
import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def repository_path(page: str) -> str:
    """The path in the repository of a file of the site."""
    return page.removeprefix("repository/") if page.startswith("repository/") else f"docs/{page}"


def site_path(path: str) -> str:
    """The inverse of `repository_path`."""
    return path.removeprefix("docs/") if path.startswith("docs/") else f"repository/{path}"


def linked_path(page: str, link: str) -> str | None:
    """The path in the repository that a link on a page of the site leads to. None: it leads elsewhere, or nowhere."""
    if ":" in link:
        return None
    path = normpath(PurePosixPath(repository_path(page)).parent / link)
    if (ROOT / path).is_dir():
        path += "/README.md"
    return path if (ROOT / path).is_file() else None


def on_files(files: Files, config: Any) -> Files:
    """Add every file outside docs/ that a page links to."""
    unread = [file.src_uri for file in files if file.src_uri.endswith(".md")]
    while unread:
        page = unread.pop()
        for _, link, _ in LINK.findall((ROOT / repository_path(page)).read_text("utf-8")):
            path = linked_path(page, link)
            if path and not path.startswith("docs/") and site_path(path) not in files.src_uris:
                files.append(File.generated(config, site_path(path), abs_src_path=str(ROOT / path)))
                unread += [site_path(path)] if path.endswith(".md") else []
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links at the files of the site."""
    here = page.file.src_uri

    def local(match: re.Match[str]) -> str:
        path = linked_path(here, match[2])
        return match[1] + relpath(site_path(path), PurePosixPath(here).parent) + match[3] if path else match[0]

    return LINK.sub(local, markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Replace formulas by MathML."""

    def mathml(match: re.Match[str]) -> str:
        formula = html.unescape(match[2]).replace(r"\_", "_")  # GitHub needs the backslash, the converter prints it
        return convert(formula, display="inline" if match[1] == "span" else "block")

    return FORMULA.sub(mathml, content)
