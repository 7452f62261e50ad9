"""Entry point: imports the rest where Ctrl-C is already understood."""

from __future__ import annotations

import _thread
import signal
import sys
import threading
from functools import partial
from typing import Any


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; never returns normally."""
    sys.unraisablehook = _interrupt_again
    try:
        handler = signal.getsignal(signal.SIGINT)
        if handler is signal.default_int_handler:
            # Nothing is at stake before the first line of a command: the signal itself may end the process.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        from .app import run
        from .streams import prepare_streams

        signal.signal(signal.SIGINT, handler)
        prepare_streams()
        code = run(arguments)
    except KeyboardInterrupt:
        code = 130
    # What is left is to leave: Ctrl-C only makes it quicker, without an exception out of somebody's farewell.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(code)


def _interrupt_again(dropped: Any) -> None:
    """Deliver again an interrupt that fell into a callback (of a weak reference, say): no exception leaves those."""
    if issubclass(dropped.exc_type, KeyboardInterrupt):
        again = _thread.interrupt_main
        if hasattr(signal, "pthread_kill"):  # not on Windows; it wakes a thread that waits
            again = partial(signal.pthread_kill, threading.main_thread().ident or 0, signal.SIGINT)
        later = threading.Timer(0.01, again)
        later.daemon = True
        later.start()
    else:
        sys.__unraisablehook__(dropped)


if __name__ == "__main__":
    main()
