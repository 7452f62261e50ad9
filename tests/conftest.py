"""Fixtures that several test packages share: the bundled model, and teacher forcing against onnxruntime-genai."""

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

# Hypothesis runs the same examples in every run, so that a failure appears in the run of the change that caused it.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")

# In the background of a shell, this process would ignore Ctrl-C, and so would every process that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Variables of the caller would change what the tests see: offline hubs, other caches, options. Tests set the ones that
# they need. huggingface_hub reads its variables at import, and subprocesses inherit them.
_KEPT = {"GENAI_CUDA_DEVICE"}  # the GPU to test (tests/on_gpu.py)
for _name in list(os.environ):
    if _name.startswith(("HF_", "HUGGING", "GENAI_", "XDG_")) and _name not in _KEPT:
        del os.environ[_name]
# The local hub is not behind a proxy. pip, in slow tests, may need the proxy.
os.environ["NO_PROXY"] = os.environ["no_proxy"] = "localhost,127.0.0.1,::1"
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


@pytest.fixture(scope="module", autouse=True)
def what_stays_is_passed_over() -> None:
    """Exclude objects that exist before a module's tests from garbage collection: imports, tests, kernels, fixtures.

    Some tests collect garbage hundreds of times.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def kernels_are_compiled_here() -> Iterator[Callable[[], bool]]:
    """Without parallel tests, allow processes that compile kernels; in parallel runs, compile in this process.

    In parallel runs, all cores are busy, and such a process would repeat the work of reading the kernels' common
    functions. Tests of these processes request the yielded function, which is the replaced `can_fork`. Processes that
    run the command line still use them.
    """
    from genai.kernels.cpu.jit import workers

    can_fork = workers.can_fork
    with pytest.MonkeyPatch.context() as patch:
        if "PYTEST_XDIST_WORKER" in os.environ:
            patch.setattr(workers, "can_fork", lambda: False)
        yield can_fork


@pytest.fixture(scope="session", autouse=True)
def kernels_of_a_made_up_gpu_go_with_the_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep kernels that tests compile for simulated GPUs out of the user's cache, where a real GPU would find them.

    All processes of a test run share one folder, which is yielded. A test that sets a cache folder uses that folder.
    """
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
    """Return a function that returns the messages logged since its last call. Messages of new tasks end in "..."."""
    caplog.set_level(logging.INFO, "genai")

    def messages() -> list[str]:
        found = [record.getMessage() for record in caplog.records if record.name.startswith("genai.")]
        caplog.clear()
        return found

    return messages


@pytest.fixture
def interrupted() -> Callable[[Callable[[], object], int], bool]:
    """Return a function interrupted(call, place): True if Ctrl-C at the given place interrupts the call."""
    return _interrupted


def _interrupted(call: Callable[[], object], place: int) -> bool:
    """Count the places where CPython checks for signals: after calls.

    Garbage collection is disabled, because exceptions that its callbacks raise are dropped.
    """
    count = 0
    before: dict[int, int] = {}  # by id of the frame, so that no frame is kept alive

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
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # an earlier test may have set another one
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
    """Return True if an exception before the next instruction has the same handler as an exception in the call."""
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
    """The logits after each step when both libraries are fed the same tokens: a prompt, then one token at a time.

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
    """Make the same calls for either library, which have the same API."""
    params = og.GeneratorParams(model)  # type: ignore[attr-defined]
    params.set_search_options(max_length=len(prompt) + len(forced) + 1)
    generator = og.Generator(model, params)  # type: ignore[attr-defined]
    generator.append_tokens(np.asarray(prompt, np.int32))
    rows = [np.array(generator.get_logits()).reshape(-1)]
    for token in forced:
        generator.append_tokens(np.asarray([token], np.int32))
        rows.append(np.array(generator.get_logits()).reshape(-1))
    return np.stack(rows)
