"""The operators that a program is going to need are known before any of them is compiled."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from genai.convert import DecoderSpec, ExportOptions, write_model_folder
from genai.convert.spec import ExpertsSpec
from genai.kernels.cpu import executor
from genai.kernels.cpu.jit.native import LIBRARY, Compiled
from genai.kernels.cpu.linear.packing import fits_half, fits_half_on
from genai.kernels.cpu.program.thread_pool import Threads
from genai.models.config import Config
from genai.models.loading import load_decoder
from tests.decoder.conftest import SMALL
from tools.random_weights import RandomWeights

Seen = tuple[set[Compiled], set[Compiled]]


def foreseen_and_needed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Seen, Seen, set[Compiled]]:
    """Load a decoder; return the operators that were foreseen, those that loading asked for, and those ready before."""
    foreseen: list[Seen] = []
    known: set[Compiled] = set()
    needed: Seen = set(), set()
    prepare, compiled = LIBRARY.prepare, executor.CpuExecutor.compile

    def note(wanted: Collection[Compiled], *arguments: Any, later: Collection[Compiled] = ()) -> Any:
        needed[0].update(wanted)
        needed[1].update(later)
        return prepare(wanted, *arguments, later=later)

    def compile_(self: Any, program: Any, layers: Any = ()) -> Any:
        now, later = executor.operators_of(program, layers, self.host_threads)
        foreseen.append((set(now), set(later)))
        known.update(kernel for kernel in (*now, *later) if kernel.ready)
        LIBRARY.take_expected()
        with monkeypatch.context() as patch:
            patch.setattr(LIBRARY, "prepare", note)
            return compiled(self, program, layers)

    monkeypatch.setattr(executor.CpuExecutor, "compile", compile_)
    options: dict[str, Any] = {"kv_dtype": "auto", "accuracy": "auto", "cache_bytes": None, "context_size": 64}
    load_decoder(Config(folder), threads=2, quiet=True, **options)
    (one,) = foreseen
    return one, needed, known


def names(kernels: Collection[Compiled]) -> list[str]:
    return sorted(kernel.name for kernel in kernels)


def assert_foreseen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    foreseen, needed, known = foreseen_and_needed(folder, monkeypatch)
    for one, other in zip(foreseen, needed, strict=True):
        assert other <= one
        assert names(one - known) == names(other - known)  # kernels of earlier tests need not be asked for again
    assert len(foreseen[0]) > 5


@pytest.mark.drawn(3)
def test_every_form_of_graph(form: str, form_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    assert_foreseen(form_folder(form), monkeypatch)


@pytest.mark.parametrize("precision", ["int4", "fp32"])
def test_experts(precision: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = ExpertsSpec(count=4, per_token=2, intermediate_size=64)
    spec = DecoderSpec(**{**SMALL, "model_type": "mixtral", "experts": experts})
    folder = write_model_folder(
        tmp_path / "model", spec, ExportOptions(precision=precision), RandomWeights(spec, seed=1)
    )
    assert_foreseen(folder, monkeypatch)


def test_the_numbers_that_decide_the_layout() -> None:
    """The layout of a matrix depends on whether float16 holds its scales, with and without the kernel."""
    exact, threads = np.float32([0.5, -0.25, 0.0, 65504.0, 2.0**-24]), Threads(2)
    for value in (exact, *(np.float32([*exact, odd]) for odd in (1e-9, 65536.0, 1 / 3, np.inf, -np.inf, np.nan))):
        assert fits_half(value) == fits_half_on(threads, value) == (value is exact)
