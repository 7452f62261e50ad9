"""Hooks for the documentation site (mkdocs.yml): files outside docs/ that pages link to become pages of the site.

Pages link to files in the repository with relative paths, so that the links work in an editor and on a code host. On
the site, a linked Markdown file becomes a page, and a linked source file becomes a page of highlighted code, in which
`#L120` leads to line 120.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
LINK = re.compile(r"(?<=\])\(([^)#:\s]+)(#[^)\s]*)?\)")
LANGUAGES = {".py": "python", ".pyi": "python", ".toml": "toml", ".cu": "cuda", ".cuh": "cuda", ".h": "cpp"}


def on_files(files: Files, config: Any) -> Files:
    """Add a page for each file outside docs/ that a page links to."""
    waiting = [DOCS / file.src_uri for file in files.documentation_pages()]
    added: set[Path] = set()
    while waiting:
        page = waiting.pop()
        for target in _outside(page):
            if target not in added:
                added.add(target)
                page_of = File.generated(
                    config, _uri(target), content=_content(target), inclusion=InclusionLevel.NOT_IN_NAV
                )
                files.append(page_of)
                if target.suffix == ".md":
                    waiting.append(target)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Redirect links that leave docs/ to the pages that `on_files` added."""
    uri = page.file.src_uri
    source = ROOT / uri.removeprefix("repository/") if uri.startswith("repository/") else DOCS / uri
    if source.suffix == ".md" and source.exists():
        return _led(markdown, source, uri)
    return markdown


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Make links to lines of code lead to the lines' anchors.

    The highlighter makes these anchors after mkdocs has collected a page's anchors. Therefore, mkdocs would report a
    link in Markdown that has such an anchor as broken.
    """
    return re.sub(r'href="([^"]+)" title="line (\d+)"', r'href="\1#line-0-\2"', html)


def _led(text: str, source: Path, uri: str) -> str:
    def led(match: re.Match[str]) -> str:
        target = Path(os.path.normpath(source.parent / match[1]))
        if not target.exists():
            return match[0]  # mkdocs reports the broken link
        anchor = match[2] or ""
        if anchor.startswith("#L") and target.suffix in LANGUAGES:
            anchor = f' "line {anchor[2:]}"'  # see on_page_content
        return f"({os.path.relpath(_uri(target), Path(uri).parent)}{anchor})"

    return LINK.sub(led, text)


def _outside(page: Path) -> list[Path]:
    targets = (Path(os.path.normpath(page.parent / target)) for target, _ in LINK.findall(page.read_text("utf-8")))
    return [target for target in targets if target.exists() and not target.is_relative_to(DOCS)]


def _uri(target: Path) -> str:
    """Return the path that a file in the repository has on the site."""
    if target.is_relative_to(DOCS):
        return target.relative_to(DOCS).as_posix()
    relative = target.relative_to(ROOT).as_posix()
    return f"repository/{relative}" if target.suffix == ".md" else f"repository/{relative or 'root'}.md"


def _content(target: Path) -> str:
    name = target.relative_to(ROOT).as_posix()
    if target.suffix == ".md":
        return target.read_text("utf-8")
    if target.is_dir():
        names = sorted(entry.name for entry in target.iterdir() if entry.name[0] not in "_.")
        return f"# {name}/\n\n" + "\n".join(f"- `{name}`" for name in names)
    language = LANGUAGES.get(target.suffix, "text")
    return f'# {name}\n\n````{{.{language} linenums="1"}}\n{target.read_text("utf-8")}\n````\n'
