"""Run a program in which `import onnxruntime` returns this package."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from .shim import install

USAGE = """usage: python -m genai.compat.onnxruntime -- script.py [argument ...]
       python -m genai.compat.onnxruntime -- -m module [argument ...]

Run a Python program that was written for onnxruntime. `import onnxruntime` returns genai.compat.onnxruntime."""


def main() -> None:
    """Run the script or the module that the command line names."""
    given = sys.argv[1:]
    if given[:1] == ["--"]:
        del given[0]
    if given in (["-h"], ["--help"]):
        sys.stdout.write(f"{USAGE}\n")
        return
    is_module = given[:1] == ["-m"]
    if len(given) < 1 + is_module or (given[0].startswith("-") and not is_module):
        sys.stderr.write(f"{USAGE}\n")
        raise SystemExit(2)
    install()
    sys.argv[:] = given[is_module:]
    if is_module:
        sys.path[0] = str(Path.cwd())
        runpy.run_module(given[1], run_name="__main__", alter_sys=True)
    else:
        if not Path(given[0]).exists():
            parts = "the first argument is the path of a Python program", "check the path"
            sys.stderr.write(f"{given[0]!r} does not exist\n  why: {parts[0]}\n  fix: {parts[1]}\n")
            raise SystemExit(2)
        sys.path[0] = str(Path(given[0]).absolute().parent)
        runpy.run_path(given[0], run_name="__main__")


if __name__ == "__main__":
    main()
