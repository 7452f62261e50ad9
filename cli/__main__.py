"""Entry point: imports the rest where Ctrl-C is already understood."""

from __future__ import annotations

import sys


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; never returns normally."""
    try:
        from .app import run

        code = run(arguments)
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    main()
