"""Entry point: imports the rest where Ctrl-C is already understood."""

from __future__ import annotations

import signal
import sys


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; never returns normally."""
    try:
        from .app import run
        from .streams import prepare_streams

        prepare_streams()
        code = run(arguments)
    except KeyboardInterrupt:
        code = 130
    # What is left is to leave: Ctrl-C only makes it quicker, without an exception out of somebody's farewell.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(code)


if __name__ == "__main__":
    main()
