"""`pytest -m gpu`: tests of kernels on a GPU, number GENAI_CUDA_DEVICE or else 0, not on the host that emulates one.

A pytest plugin. Where that GPU cannot be used these tests are skipped, and say why.
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
    """Whether an expression of marks wants the tests of a GPU."""
    return bool(re.search(r"(?<!not )\bgpu\b", expression))


def expression_of(arguments: Sequence[str]) -> str:
    """The expression of marks among a command's arguments."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-m", default="")
    return str(parser.parse_known_args(arguments)[0].m)


# At once: other files of fixtures are read before anything of pytest's is called. Processes that it starts inherit it.
if asks_for_a_gpu(expression_of(sys.argv[1:])):
    os.environ.setdefault(VARIABLE, "0")


def pytest_configure() -> None:
    """Refuse what is no number of a GPU, before anything takes it for one."""
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
