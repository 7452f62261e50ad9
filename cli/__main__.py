"""Entry point. Imports the rest of the package only after Ctrl-C is handled and the terminal shows a first sign."""

from __future__ import annotations

import _thread
import signal
import sys
import threading
from functools import partial
from types import FrameType
from typing import Any


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; never returns normally."""
    sys.unraisablehook = _interrupt_again
    try:
        handler = signal.getsignal(signal.SIGINT)
        if handler is signal.default_int_handler:
            # There is nothing to save before a command starts, so the signal may kill the process.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        from .streams import first_sign, prepare_streams

        prepare_streams()
        with first_sign(sys.argv[1:] if arguments is None else arguments):
            from .app import run

            signal.signal(
                signal.SIGINT, _interrupt_outside_imports if handler is signal.default_int_handler else handler
            )
            code = run(arguments)
    except KeyboardInterrupt:
        code = 130
    except RuntimeError as error:
        # While Python before 3.12 creates a class, it converts an interrupt in __set_name__ to this error.
        if not isinstance(error.__cause__, KeyboardInterrupt):
            raise
        code = 130
    # Only cleanup remains. The default handler lets Ctrl-C stop the cleanup without a traceback from an exit handler.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(code)


def _interrupt_outside_imports(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, but only after an import that is in progress.

    Extension modules that import NumPy's API convert an interrupt to an ImportError, or crash the process.
    """
    inner = frame
    while inner is not None:
        if inner.f_code.co_filename.startswith("<frozen importlib"):
            _send_later()
            return
        inner = inner.f_back
    signal.default_int_handler(number, frame)


def _interrupt_again(dropped: Any) -> None:
    """Raise an interrupt again if it was lost in a callback that ignores exceptions, such as a weak reference's."""
    if issubclass(dropped.exc_type, KeyboardInterrupt):
        _send_later()
    else:
        sys.__unraisablehook__(dropped)


def _send_later() -> None:
    """Send the signal of Ctrl-C again in 10 ms."""
    again = _thread.interrupt_main
    if hasattr(signal, "pthread_kill"):  # not on Windows; the signal wakes a waiting thread
        again = partial(signal.pthread_kill, threading.main_thread().ident or 0, signal.SIGINT)
    later = threading.Timer(0.01, again)
    later.daemon = True
    later.start()


if __name__ == "__main__":
    main()
