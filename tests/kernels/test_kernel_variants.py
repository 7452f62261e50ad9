"""Variants of kernels that several threads ask for at once are made once, and have one name."""

from __future__ import annotations

import ast
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import genai.kernels.cpu
from genai.kernels.cpu.jit.native import Library
from genai.kernels.cpu.jit.variants import once

THREADS = 8


@pytest.fixture(autouse=True)
def threads_change_often() -> Any:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def at_once(call: Callable[[], object]) -> list[object]:
    """What a function returns, or raises, in many threads that begin together."""
    found, together = list[object](), threading.Barrier(THREADS)

    def run() -> None:
        together.wait()
        try:
            found.append(call())
        except ValueError as error:
            found.append(error)

    threads = [threading.Thread(target=run) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_what_is_made_once() -> None:
    made: list[int] = []

    @once
    def part(number: int) -> object:
        made.append(number)
        time.sleep(0.05)
        return object()

    @once
    def whole(number: int, *, more: int = 0) -> object:
        return part(number), part(number + 1), more

    assert len({id(one) for one in at_once(lambda: whole(1))}) == 1
    assert whole(1, more=2) is not whole(1) and whole(1, more=2) is whole(1, more=2)
    assert made == [1, 2] and whole.__name__ == "whole"


def test_what_fails_is_tried_again() -> None:
    failing = iter([ValueError("at first"), None])

    @once
    def made() -> str:
        if (error := next(failing)) is not None:
            raise error
        return "made"

    with pytest.raises(ValueError, match="at first"):
        made()
    assert made() == made() == "made"


class Slow(set[str]):
    """Names, of which others may be entered before an answer comes."""

    def __contains__(self, name: object) -> bool:
        found = super().__contains__(name)
        time.sleep(0.01)
        return found


def test_one_kernel_has_a_name(tmp_path: Path) -> None:
    library = Library(tmp_path)
    library._names = Slow()

    def same(begin: int, end: int) -> int:
        return 0

    found = at_once(lambda: library.kernel(same))
    refused = [str(one) for one in found if isinstance(one, ValueError)]
    assert refused == ["a kernel named 'same' already exists; each variant needs a unique name"] * (THREADS - 1)


def test_models_that_threads_load_at_once(tmp_path: Path) -> None:
    """In a process that knows no variant yet, where others come in between before a name is entered."""
    code = f"""
        import sys, threading, time
        import genai
        from genai.kernels.cpu.jit.native import Library
        from genai.models.folders import bundled_model

        named, failed, together = Library._named, [], threading.Barrier({THREADS})

        def slowly(self, function, name):
            time.sleep(0.005)
            return named(self, function, name)

        def load():
            together.wait()
            try:
                genai.Model(bundled_model(), threads=1, quiet=True).close()
            except Exception as error:
                failed.append(repr(error))

        Library._named = slowly
        sys.setswitchinterval(1e-6)
        threads = [threading.Thread(target=load) for _ in range({THREADS})]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(failed)
    """
    command = [sys.executable, "-c", "if 1:" + code]
    assert subprocess.run(command, capture_output=True, text=True, check=True, timeout=500).stdout == "[]\n"


def test_nothing_else_keeps_variants() -> None:
    """functools.cache would let two threads make one at the same time, and the second would find its name taken."""
    (folder,) = genai.kernels.cpu.__path__
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in Path(folder).rglob("*.py")}
    wrong = [
        f"{path.name}: {node.name}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        if any("cache" in ast.unparse(one) for one in node.decorator_list)
        if {"native_op", "kernel", "micro_kernel", "inline"} & {ast.unparse(one) for one in _called(node)}
    ]
    assert not wrong


def _called(function: ast.FunctionDef) -> list[ast.expr]:
    found = [one.func for one in ast.walk(function) if isinstance(one, ast.Call)]
    inner = (one for one in ast.walk(function) if isinstance(one, ast.FunctionDef) and one is not function)
    return [*found, *(decorator for one in inner for decorator in one.decorator_list)]


def test_omitted_and_named_arguments_are_the_same_variant() -> None:
    @once
    def make(size: int, kind: str = "plain", *, wide: bool = False) -> list[Any]:
        return [size, kind, wide]

    first = make(1)
    assert first is make(size=1) is make(1, "plain") is make(1, wide=False)
    assert make(1, wide=True) is not first
