"""Calls in the middle of a decoder's steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def inside_steps(decoder: Any, call: Callable[[], object]) -> Iterator[None]:
    """Call a function in each step of a decoder, before the step is computed."""
    function = decoder.run
    run = function.run

    def replaced(*arguments: Any) -> Any:
        call()
        return run(*arguments)

    function.run = replaced
    try:
        yield
    finally:
        del function.run
