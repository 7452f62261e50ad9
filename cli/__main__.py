"""Entry point. Imports the rest of the package only after Ctrl-C is handled and the terminal shows a first sign."""

from __future__ import annotations

import _thread
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

_PAUSE = 0.01  # seconds between two signals


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
    """Raise KeyboardInterrupt, but only after an import that is in progress, and outside Python's hooks.

    Extension modules that import NumPy's API convert an interrupt to an ImportError, or crash the process. Python drops
    an exception of the hook below.
    """
    inner = frame
    while inner is not None:
        code = inner.f_code
        if code.co_filename.startswith("<frozen importlib") or code is _interrupt_again.__code__:
            _repetition.begin()
            return
        inner = inner.f_back
    _repetition.end()
    signal.default_int_handler(number, frame)


def _interrupt_again(dropped: Any) -> None:
    """Raise an interrupt again if it was lost in a callback that ignores exceptions, such as a weak reference's."""
    if issubclass(dropped.exc_type, KeyboardInterrupt):
        _repetition.begin()
    else:
        sys.__unraisablehook__(dropped)


class _Repetition:
    """Sends the signal of Ctrl-C: once, or repeatedly until `_interrupt_outside_imports` can raise it."""

    def __init__(self) -> None:
        self._is_wanted = False

    def begin(self) -> None:
        """Start to send the signal."""
        if not self._is_wanted:
            self._is_wanted = True
            threading.Thread(target=self._run, args=(threading.main_thread().ident,), daemon=True).start()

    def end(self) -> None:
        """Stop."""
        self._is_wanted = False

    def _run(self, main_thread: int) -> None:
        time.sleep(_PAUSE)
        while self._is_wanted:
            if hasattr(signal, "pthread_kill"):  # not on Windows; the signal wakes a waiting thread
                signal.pthread_kill(main_thread, signal.SIGINT)
            else:
                _thread.interrupt_main()
            if signal.getsignal(signal.SIGINT) is not _interrupt_outside_imports:
                self._is_wanted = False
            time.sleep(_PAUSE)


_repetition = _Repetition()


if __name__ == "__main__":
    main()
