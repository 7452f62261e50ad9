"""Wherever Ctrl-C arrives, everything that was created is removed: files, folders, descriptors, processes."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from genai.bench import speed
from genai.common.interrupts import Task, ThreadsRefused
from genai.compat.onnxruntime_genai.generator import Generator, GeneratorParams
from genai.convert.folder import locked, unfinished_folder
from genai.errors import StateError
from genai.kernels.cpu.arrays.blas import BLAS_THREADS
from genai.kernels.cpu.jit import compiler, workers
from genai.kernels.cpu.jit.kernel_cache import CacheFolder
from genai.kernels.cpu.program import thread_pool
from genai.kernels.cpu.program.calls import CALL_ENTRIES, Program
from genai.kernels.cpu.program.thread_pool import rows_context
from genai.llm.llm import LLM
from genai.models.model import Model
from genai.onnx.external_data import map_file
from genai.onnx.ir import Graph, OnnxModel as GraphModel, OnnxTensor
from genai.onnx.writer import write_model
from genai.text.template_worker import TemplateWorker
from tests.inside_steps import inside_steps
from tests.integrity import check_pool

Interrupted = Callable[[Callable[[], object], int], bool]


def children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def held() -> tuple[int, set[str]]:
    """Return the number of open descriptors, and the child processes."""
    return len(list(Path("/proc/self/fd").iterdir())), children()


class Held:
    """The initial descriptors and processes. Fewer later is fine, because leftovers may be freed at any time."""

    def __init__(self) -> None:
        gc.collect()
        self._descriptors, self._processes = held()

    def check(self, where: str) -> None:
        """Raise AssertionError if more is held than before."""
        if held() != (self._descriptors, self._processes):
            gc.collect()  # frees the exception's frames
        descriptors, processes = held()
        assert descriptors <= self._descriptors, where
        assert processes <= self._processes, where
        self._descriptors, self._processes = descriptors, processes


def build(folder: Path) -> None:
    with unfinished_folder(folder / "kept") as unfinished:
        (unfinished / "model.onnx").write_bytes(b"1")
        unfinished.rename(folder / "kept")


def lock(folder: Path) -> None:
    with locked(folder):
        pass


def write(folder: Path) -> None:
    weights = OnnxTensor.from_array("w", np.zeros(1000))
    write_model(
        GraphModel(Graph("g", initializers={"w": weights}), 10, {"": 20}), folder / "kept", external_data="kept.data"
    )


def look(folder: Path) -> None:
    (folder / "kept").write_bytes(b"1")
    map_file(folder / "kept")


def keep_kernel(folder: Path) -> None:
    CacheFolder(folder / "kept", "key").save("kernel", b"1")


def share(folder: Path) -> None:
    list(workers._share([], 2))


def start_cold(folder: Path) -> None:
    speed._run(folder, 1, 1, "cpu", True)


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    "work", [build, lock, write, look, keep_kernel, share, start_cold], ids=lambda work: work.__name__
)
def test_nothing_is_left(
    interrupted: Interrupted,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    work: Callable[[Path], None],
) -> None:
    monkeypatch.setattr(workers, "_start", lambda worker: None)
    monkeypatch.setattr(compiler, "make_ready", lambda: None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=0, stdout="[1.0]"))
    work(tmp_path)  # the first call imports and caches
    before = Held()
    for place in range(1, 3000):
        shutil.rmtree(tmp_path / "kept", ignore_errors=True)
        came = interrupted(lambda: work(tmp_path), place)
        before.check(f"interrupted at place {place}")
        left = [
            path.name for path in tmp_path.rglob("*") if path.name.startswith((".", "genai-")) or path.suffix == ".tmp"
        ]
        assert not left, f"interrupted at place {place}"
        if not came:
            break
    assert 3 < place < 2999


def test_a_process_that_was_started_is_ended(interrupted: Interrupted) -> None:
    before = Held()
    for place in range(1, 3000, 7):
        worker = TemplateWorker()
        came = interrupted(worker.start, place)
        worker.close()
        before.check(f"interrupted at place {place}")
        if not came:
            break
    assert 30 < place < 2999


def test_asking_for_rows_leaves_the_tokens(bundled: Model, interrupted: Interrupted) -> None:
    """Requesting logits recomputes them without the later tokens, which must then still be there."""
    generator = Generator(bundled, GeneratorParams(bundled))
    generator.append_tokens(list(range(3, 9)))
    generator.generate_next_token()
    tokens, rows = generator.get_sequence(0).tolist(), generator.get_output("logits")
    for place in range(1, 5000, 11):
        came = interrupted(lambda: generator.get_output("logits"), place)
        assert generator.get_sequence(0).tolist() == tokens, f"interrupted at place {place}"
        if not came:
            break
    assert 100 < place < 4999
    np.testing.assert_array_equal(generator.get_output("logits"), rows)


def test_threads_of_blas_come_back(interrupted: Interrupted) -> None:
    def use() -> None:
        with BLAS_THREADS.single():
            assert BLAS_THREADS.library is library

    with BLAS_THREADS.single():
        library = BLAS_THREADS.library
    before = library.get_threads() if library else 1
    for place in range(1, 3000):
        came = interrupted(use, place)
        assert BLAS_THREADS.library is None, f"interrupted at place {place}"
        assert (library.get_threads() if library else 1) == before, f"interrupted at place {place}"
        if not came:
            break
    assert 10 < place < 2999


def test_a_generator_that_is_dropped_swallows_no_interrupt(bundled: Model, interrupted: Interrupted) -> None:
    """This holds anywhere, even while the pool is in use: the garbage collector may run at any time."""
    thread_pool = bundled.decoder.pool  # type: ignore[attr-defined]
    free = thread_pool.num_free

    def dropped() -> list[Generator]:
        generator = Generator(bundled, GeneratorParams(bundled))
        generator.append_tokens(list(range(3, 40)))
        assert thread_pool.num_free < free
        return [generator]

    holder = dropped()
    assert interrupted(lambda: holder.clear(), 1)
    assert thread_pool.num_free == free
    holder = dropped()

    def drop_inside() -> None:
        with thread_pool._lock:
            holder.clear()

    assert Task(drop_inside, "drop").wait(20)
    assert thread_pool.num_free == free
    check_pool(thread_pool)


def test_a_stream_that_is_dropped_swallows_no_interrupt(bundled: Model, interrupted: Interrupted) -> None:
    """Dropping a stream acquires no lock: the garbage collector may run while its thread holds one."""
    with LLM(bundled) as llm:
        streams = [llm.stream("Once", max_tokens=900, ignore_eos=True)]
        generation = streams[0]._generation
        assert interrupted(lambda: streams.clear(), 1)
        assert generation.cancelled
        streams = [llm.stream("Once", max_tokens=900, ignore_eos=True) for _ in range(2)]
        next(streams[1])

        def drop_inside() -> None:
            with llm._worker._inbox.lock, bundled.decoder._running_lock:  # type: ignore[attr-defined]
                streams.clear()

        assert Task(drop_inside, "drop").wait(20)
        assert llm.chat("What is 12 + 7?").text == "19"


def test_a_worker_may_be_dropped_where_its_own_lock_is_held(bundled: Model) -> None:
    llms = [LLM(bundled)]
    llms[0].generate("A", max_tokens=1)
    inbox = llms[0]._worker._inbox

    def drop_inside() -> None:
        with inbox.lock:
            llms.clear()
            gc.collect()

    assert Task(drop_inside, "drop").wait(20)
    assert inbox.stopped


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_who_waits_for_a_thread_that_a_fork_left_behind_is_told() -> None:
    end = threading.Event()
    task = Task(end.wait, "long")
    pid = os.fork()
    if not pid:
        try:
            task.result()
        except ThreadsRefused as error:
            os._exit(0 if "forked" in str(error) else 1)
        finally:
            os._exit(2)
    deadline = time.monotonic() + 30
    while not (ended := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < deadline:
        time.sleep(0.01)
    if not ended[0]:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    end.set()
    assert ended[0] and os.waitstatus_to_exitcode(ended[1]) == 0
    assert task.result()


@pytest.mark.parametrize("threads", [1, 2])
def test_a_signal_handler_that_wants_a_step_inside_a_step_is_told(threads: int, bundled_folder: Path) -> None:
    with Model(bundled_folder, threads=threads) as model:
        compute, inner = _logits(model), list[str]()
        expected = compute()

        def interrupted() -> None:
            with pytest.raises(StateError, match="signal handler") as caught:
                compute()
            inner.append(caught.value.fix)

        with inside_steps(model.decoder, interrupted):
            assert compute() == expected
        assert inner
        assert compute() == expected


def _logits(model: Model) -> Callable[[], list[float]]:
    def compute() -> list[float]:
        generator = Generator(model, GeneratorParams(model))
        generator.append_tokens(list(range(3, 40)))
        logits: list[float] = generator.get_logits().ravel().tolist()
        return logits

    return compute


def test_a_run_inside_a_run_of_the_same_thread_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both would use the same memory, even with a single thread."""
    program, context = Program(np.zeros((0, CALL_ENTRIES), np.int64), (), 0), rows_context(1)
    workspace = thread_pool._Workspace(1)
    run_program, seen = thread_pool.driver.run_program, list[str]()

    def nested(address: int) -> int:
        with pytest.raises(ThreadsRefused, match="signal handler") as caught:
            workspace.run(program, context, 1)
        seen.append(str(caught.value))
        return run_program(address)

    monkeypatch.setattr(thread_pool.driver, "run_program", nested)
    assert workspace.run(program, context, 1) == 0
    assert seen
