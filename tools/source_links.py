"""Update the line numbers in links from pages to source files: `python -m tools.source_links [--check]`.

A link such as [`Engine.step`](../../genai/engine/engine.py#L61) names a definition. This tool finds the definition and
writes its line number into the link, so that a change to the source file needs no manual edit.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\[`([\w.]+)`\]\(([^)#\s]+\.py)#L(\d+)\)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a number is wrong")
    check = parser.parse_args().check
    wrong = []
    for page in sorted((ROOT / "docs").rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        new = with_lines(text, page.parent)
        if new != text:
            wrong.append(page.relative_to(ROOT).as_posix())
            if not check:
                page.write_text(new, encoding="utf-8")
    if check and wrong:
        sys.exit(f"run python -m tools.source_links: line numbers are wrong in {', '.join(wrong)}")


def with_lines(text: str, folder: Path) -> str:
    """Return the text of a page with the current line numbers.

    Raises:
        ValueError: a link names a definition that is not in the linked file.
    """

    def numbered(match: re.Match[str]) -> str:
        name, target = match[1], match[2]
        return f"[`{name}`]({target}#L{line_of(folder / target, name)})"

    return LINK.sub(numbered, text)


def line_of(path: Path, name: str) -> int:
    """Return the line of a definition, such as `Engine.step`, in a Python file."""
    node: ast.AST = ast.parse(path.read_text(encoding="utf-8"))
    for part in name.split("."):
        found = [
            one
            for one in ast.iter_child_nodes(node)
            if isinstance(one, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and one.name == part
        ]
        if not found:
            raise ValueError(f"{path} has no definition of {name}")
        node = found[-1]
    assert isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    return node.lineno


if __name__ == "__main__":
    main()
