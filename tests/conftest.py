"""Fixtures that several packages of tests share: the bundled model, and teacher forcing against onnxruntime-genai."""

from __future__ import annotations

import dis
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

pytest_plugins = ["tests.drawing", "tests.on_gpu"]

# The same examples in every run: what a change breaks shows in the change's own run.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")

# Started in the background of a shell, this process ignores Ctrl-C, and so would every process that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


@pytest.fixture(scope="module", autouse=True)
def what_stays_is_passed_over() -> None:
    """What is there before a module's tests (imports, collected tests, kernels, what the session shares) stays:
    no garbage collection looks through it again. Some tests collect hundreds of times."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def kernels_are_compiled_here() -> Iterator[Callable[[], bool]]:
    """Where tests run side by side, none starts processes that compile: cores are busy, and what one of those has read
    of the kernels' common functions would be lost with it. Tests of such processes ask for them; those of the command
    line have them. Gives what was replaced: whether this process can be forked."""
    from genai.kernels.cpu.jit import workers

    can_fork = workers.can_fork
    with pytest.MonkeyPatch.context() as patch:
        if "PYTEST_XDIST_WORKER" in os.environ:
            patch.setattr(workers, "can_fork", lambda: False)
        yield can_fork


@pytest.fixture(scope="session", autouse=True)
def kernels_of_a_made_up_gpu_go_with_the_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What tests have compiled for a GPU that is none never comes into the user's cache, where a GPU would find it.
    Processes of a run share the folder; a test that names a cache of its own has that one. Gives the folder."""
    from genai.kernels.cuda import compiler

    base = tmp_path_factory.getbasetemp()
    kept = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cuda-kernels"
    kept.mkdir(mode=0o700, exist_ok=True)
    usual, named = compiler.cache_root, os.environ.get("GENAI_CACHE_DIR")
    with pytest.MonkeyPatch.context() as patch:
        if not os.environ.get("GENAI_CUDA_DEVICE"):
            patch.setattr(
                compiler, "cache_root", lambda: kept if os.environ.get("GENAI_CACHE_DIR") == named else usual()
            )
        yield kept


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """logged(): the messages that the library has logged since the last call. That tasks begin ends in "..."."""
    caplog.set_level(logging.INFO, "genai")

    def messages() -> list[str]:
        found = [record.getMessage() for record in caplog.records if record.name.startswith("genai.")]
        caplog.clear()
        return found

    return messages


@pytest.fixture
def interrupted() -> Callable[[Callable[[], object], int], bool]:
    """interrupted(call, place): whether Ctrl-C at the given place came before the end of the call."""
    return _interrupted


def _interrupted(call: Callable[[], object], place: int) -> bool:
    """Places are where CPython looks for signals: behind calls. Those of a garbage collection in between do not count:
    what its callbacks raise is dropped."""
    count = 0
    before: dict[int, int] = {}  # by frame, of which none is kept alive

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        if event == "call":
            before.pop(id(frame), None)
        elif event == "opcode":
            previous = before.get(id(frame))
            before[id(frame)] = frame.f_lasti
            if previous is not None and _is_place(frame.f_code, previous, frame.f_lasti):
                count += 1
                if count == place:
                    signal.raise_signal(signal.SIGINT)
        return trace

    outer = sys.gettrace()
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # an earlier test may have left another
    gc.disable()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(outer)
        gc.enable()
        signal.signal(signal.SIGINT, handler)
    return False


def _is_place(code: Any, call: int, following: int) -> bool:
    """Whether an exception before the next instruction is caught where one out of the call would be."""
    return dis.opname[code.co_code[call]].startswith("CALL") and _handler(code, call) == _handler(code, following)


@cache
def _handler(code: Any, offset: int) -> int | None:
    entries = dis._parse_exception_table(code)  # type: ignore[attr-defined]
    return next((entry.target for entry in entries if entry.start <= offset < entry.end), None)


@pytest.fixture(scope="session")
def bundled_folder() -> Path:
    from genai.models.folders import bundled_model

    return bundled_model()


@pytest.fixture(scope="session")
def bundled(bundled_folder: Path) -> Iterator[object]:
    """The bundled model, loaded once."""
    from genai import Model

    with Model(bundled_folder, threads=2) as model:
        yield model


@dataclass(frozen=True)
class TeacherForcing:
    """Logits after each step when the same tokens are fed: a prompt, then one token at a time.

    `ours` and `theirs` return float32 [1 + len(forced), vocab_size].
    """

    ours: Callable[..., np.ndarray]
    theirs: Callable[..., np.ndarray]
    library: object
    other_library: object


@pytest.fixture(scope="session")
def teacher_forcing() -> TeacherForcing:
    import genai

    other = pytest.importorskip("onnxruntime_genai")
    return TeacherForcing(_our_logits, _their_logits, genai, other)


def _our_logits(folder: Path, prompt: Sequence[int], forced: Sequence[int], **options: object) -> np.ndarray:
    import genai as og

    with og.Model(folder, **options) as model:
        return _forced(og, model, prompt, forced)


def _their_logits(folder: Path, prompt: Sequence[int], forced: Sequence[int]) -> np.ndarray:
    import onnxruntime_genai as og

    return _forced(og, og.Model(str(folder)), prompt, forced)


def _forced(og: object, model: object, prompt: Sequence[int], forced: Sequence[int]) -> np.ndarray:
    """The same calls for both libraries: that is the point of sharing an API."""
    params = og.GeneratorParams(model)  # type: ignore[attr-defined]
    params.set_search_options(max_length=len(prompt) + len(forced) + 1)
    generator = og.Generator(model, params)  # type: ignore[attr-defined]
    generator.append_tokens(np.asarray(prompt, np.int32))
    rows = [np.array(generator.get_logits()).reshape(-1)]
    for token in forced:
        generator.append_tokens(np.asarray([token], np.int32))
        rows.append(np.array(generator.get_logits()).reshape(-1))
    return np.stack(rows)
