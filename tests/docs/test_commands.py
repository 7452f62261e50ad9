"""The shell commands in the docs run as written, page by page."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import run_docs

DOCS = run_docs.ROOT / "docs"
PAGES = sorted(page for page in DOCS.rglob("*.md") if run_docs.script(page))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_commands_run(page: Path) -> None:
    done = run_docs.run(page, seconds=600)
    assert done.returncode == 0, done.stdout


def test_a_failing_command_fails_its_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```sh\nls tools/run_docs.py\nfalse\necho unreachable\n```\n")
    done = run_docs.run(page)
    assert done.returncode == 1
    assert done.stdout == "tools/run_docs.py\n"


def test_marked_blocks_run_where_they_can(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```sh\necho plain\n```\n```sh\n# takes minutes\necho slow\n```\n```sh\n# needs a GPU\necho gpu\n```\n"
    )
    assert run_docs.run(page).stdout == "plain\n"
    assert run_docs.run(page, ["takes minutes"]).stdout == "plain\nslow\n"
    assert "takes minutes" in run_docs.possible()


def test_an_unknown_reason_is_an_error(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```sh\n# needs patience\nfalse\n```\n")
    with pytest.raises(ValueError, match=r"page\.md: a block is marked 'needs patience'"):
        run_docs.blocks(page)
