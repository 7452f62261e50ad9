"""Run the shell commands of the docs: `python -m tools.run_docs [--marked] [PAGE...]`.

The `sh` blocks of a page run in order in one shell, in a temporary folder with links to the checkout's files and with a
temporary home directory. A block whose first line is a comment such as `# needs a network`, `# needs a GPU`,
`# needs a terminal` or `# takes minutes` is skipped. With `--marked`, the marked blocks that this machine can run also
run: blocks that take minutes, and, on a machine with a GPU, blocks that need a GPU.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REASONS = ("needs a network", "needs a GPU", "needs a terminal", "needs several machines", "takes minutes")
_BLOCK = re.compile(r"^```sh\n(.*?)^```", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """One block of shell commands.

    Attributes:
        text: the commands.
        reason: the reason why tests skip the block; "" if tests run it.
    """

    text: str
    reason: str


def blocks(page: Path) -> list[Block]:
    """Return the shell blocks of a page.

    Raises:
        ValueError: a block begins with a comment that is not one of `REASONS`.
    """
    found = []
    for text in _BLOCK.findall(page.read_text(encoding="utf-8")):
        first = text.split("\n", 1)[0]
        reason = first.removeprefix("# ") if first.startswith("# ") else ""
        if reason and reason not in REASONS:
            raise ValueError(f"{page.name}: a block is marked {reason!r}, which is not one of {', '.join(REASONS)}")
        found.append(Block(text, reason))
    return found


def script(page: Path, allowed: Collection[str] = ()) -> str:
    """Return the commands of a page that can run on this machine, as one shell script.

    Args:
        page: a page of the docs.
        allowed: reasons to ignore: blocks marked with them run.
    """
    return "".join(block.text for block in blocks(page) if not block.reason or block.reason in allowed)


def run(page: Path, allowed: Collection[str] = (), seconds: float = 3600) -> subprocess.CompletedProcess[str]:
    """Run the commands of a page and return the finished process, with stdout and stderr in one string.

    Raises:
        subprocess.TimeoutExpired: the page takes more than `seconds`.
    """
    with tempfile.TemporaryDirectory() as folder:
        work, home = Path(folder, "work"), Path(folder, "home")
        work.mkdir()
        home.mkdir()
        for entry in ROOT.iterdir():
            if entry.name[0] != "." and entry.name not in ("build", "dist"):
                (work / entry.name).symlink_to(entry)
        own = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        environment = {
            **os.environ, "PATH": own, "HOME": str(home), "XDG_STATE_HOME": str(home / "state"),
            "XDG_CACHE_HOME": cache, "NO_COLOR": "1", "HF_HUB_OFFLINE": "1",
        }  # fmt: skip
        return subprocess.run(
            ["sh", "-euc", script(page, allowed)], cwd=work, env=environment, text=True, encoding="utf-8",
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=seconds,
        )  # fmt: skip


def possible() -> list[str]:
    """Return the reasons that do not prevent a block from running on this machine."""
    return ["takes minutes", *(["needs a GPU"] if shutil.which("nvidia-smi") else [])]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path, metavar="PAGE", help="pages [default: all pages with commands]")
    parser.add_argument("--marked", action="store_true", help="also run the marked blocks that this machine can run")
    given = parser.parse_args(arguments)
    allowed = possible() if given.marked else []
    failed = 0
    for page in given.pages or sorted((ROOT / "docs").rglob("*.md")):
        if script(page, allowed):
            done = run(page, allowed)
            print(f"{'ok' if done.returncode == 0 else 'FAILED'}  {page}", flush=True)
            if done.returncode:
                failed += 1
                print(done.stdout)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
