"""`pytest -m gpu`: run kernel tests on a GPU (number GENAI_CUDA_DEVICE, by default 0) instead of an emulating host.

This is a pytest plugin. If the GPU cannot be used, these tests are skipped and the reason is shown.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence

import pytest

from genai.errors import whole_number

VARIABLE = "GENAI_CUDA_DEVICE"  # tests.kernels.cuda.devices reads it


def asks_for_a_gpu(expression: str) -> bool:
    """Return True if a mark expression selects the tests that need a GPU."""
    return bool(re.search(r"(?<!not )\bgpu\b", expression))


def expression_of(arguments: Sequence[str]) -> str:
    """Return the mark expression among a command's arguments."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-m", default="")
    return str(parser.parse_known_args(arguments)[0].m)


# Set on import: conftest files are read before pytest calls any hook, and processes that pytest starts inherit this.
if asks_for_a_gpu(expression_of(sys.argv[1:])):
    os.environ.setdefault(VARIABLE, "0")


def pytest_configure() -> None:
    """Reject a value that is not the number of a GPU before any code uses it."""
    said = os.environ.get(VARIABLE, "")
    if said and whole_number(said) is None:
        what = f"{VARIABLE} = {said!r:.80}: the number of a GPU is expected"
        raise pytest.UsageError(f"{what}, such as 0; without it kernels are tested on a host that emulates a GPU")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not os.environ.get(VARIABLE):
        return
    from tests.kernels.cuda.devices import why_not

    if reason := why_not():
        for item in items:
            if item.get_closest_marker("gpu") is not None:
                item.add_marker(pytest.mark.skip(reason=f"no GPU can be used: {reason}"))
