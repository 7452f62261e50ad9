"""Fixtures that several rooms share: the bundled model, and teacher forcing against onnxruntime-genai."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

# The same examples in every run: what a change breaks shows in the change's own run.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")

# Started in the background of a shell, this process ignores Ctrl-C, and so would every process that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


@pytest.fixture(scope="session")
def bundled_folder() -> Path:
    from genai.bundled import bundled_model

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
