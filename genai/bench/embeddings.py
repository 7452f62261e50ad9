"""The measurements of `genai bench embed`: texts per second of an encoder, optionally compared with onnxruntime."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..convert.encoders.build import built_encoder, is_encoder_checkpoint
from ..devices import open_executor
from ..embed.embedder import TOKEN_OUTPUTS
from ..embed.folder import find_graph, has_graph, read_encoder_folder
from ..models.encoder import Encoder, TokenSequence
from ..session.arrays import Peer

# A measurement stops after this number of seconds, even if runs remain.
MAX_SECONDS = 60.0
PAUSE_SECONDS = 0.05
# Texts in a padded batch of the other runtime, which are sorted by length first.
PEER_BATCH = 32
# Token ids are below this number, or below the size of the vocabulary if it is smaller.
_IDS = 1000


@dataclass(frozen=True)
class Case:
    """A number of texts and their lengths in tokens."""

    name: str
    lengths: tuple[int, ...]


def cases(max_tokens: int) -> list[Case]:
    """Return the cases: one text, batches of one length, and texts of mixed lengths (log-normal, median 55)."""
    mixed = np.clip(np.random.default_rng(0).lognormal(4.0, 0.8, 256), 4, min(max_tokens, 400)).astype(int)
    found = [
        Case("1 text of 16", (16,)),
        Case("1 text of 128", (128,)),
        Case("32 texts of 16", (16,) * 32),
        Case("32 texts of 128", (128,) * 32),
        Case("256 texts of 4 to 400", tuple(mixed.tolist())),
        Case("4 texts of 512", (512,) * 4),
        Case("1 text of 8192", (8192,)),
    ]
    return [case for case in found if max(case.lengths) <= max_tokens]


def bench_embed(
    model: Path, *, repeat: int = 5, threads: int | None = None, precision: str = "fp32", compare: bool = False
) -> Iterator[dict[str, Any]]:
    """Yield the figures of each case: median milliseconds, texts and tokens per second.

    Args:
        model: folder of an encoder, or a checkpoint.
        repeat: measured runs of a case, after a warm-up run.
        threads: CPU threads; None = the physical cores.
        precision: storage format of a checkpoint's weights.
        compare: True to also measure onnxruntime on the same graph, with padded batches of texts sorted by length; runs
            alternate, and the ratio is ours over theirs.

    Raises:
        GenaiError: the model cannot be loaded.
    """
    description = read_encoder_folder(model)
    folder = built_encoder(model, precision) if not has_graph(model) and is_encoder_checkpoint(model) else model
    graph = find_graph(folder)
    encoder = Encoder(graph, open_executor("cpu", threads), TOKEN_OUTPUTS, description.longest)
    peer = Peer(str(graph), encoder.executor.threads) if compare else None
    generator = np.random.default_rng(1)
    vocabulary = min(int(description.config.get("vocab_size") or _IDS), _IDS)
    try:
        for case in cases(description.longest):
            texts = [
                TokenSequence(generator.integers(min(5, vocabulary - 1), vocabulary, length)) for length in case.lengths
            ]
            runs: list[Callable[[], object]] = [lambda texts=texts: _run(encoder, texts)]  # type: ignore[misc]
            if peer is not None:
                runs.append(lambda texts=texts: _run_padded(peer, encoder, texts))  # type: ignore[misc]
            ours, *theirs = _alternating(runs, repeat)
            seconds, tokens = ours / 1e3, sum(case.lengths)
            row: dict[str, Any] = {
                "case": case.name, "ms": ours, "texts/s": len(texts) / seconds, "tok/s": tokens / seconds,
            }  # fmt: skip
            if theirs:
                row |= {"onnxruntime ms": theirs[0], "ratio": ours / theirs[0]}
            yield row
    finally:
        encoder.close()


def _run(encoder: Encoder, texts: Sequence[TokenSequence]) -> None:
    for step in encoder.steps(texts):
        encoder.run(texts[step.start : step.stop])


def _run_padded(peer: Peer, encoder: Encoder, texts: Sequence[TokenSequence]) -> None:
    ordered = sorted(texts, key=len)
    for first in range(0, len(ordered), PEER_BATCH):
        part = ordered[first : first + PEER_BATCH]
        ids = np.zeros((len(part), max(map(len, part))), np.int64)
        mask = np.zeros_like(ids)
        for row, text in enumerate(part):
            ids[row, : len(text)], mask[row, : len(text)] = text.ids, 1
        known = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        peer.run({name: known[name] for name in encoder.input_names if name in known})


def _alternating(runs: list[Callable[[], object]], repeat: int) -> list[float]:
    """Return the median milliseconds of each run; a pause and an unmeasured run precede each run of two sides."""
    times: list[list[float]] = [[] for _ in runs]
    deadline = time.perf_counter() + MAX_SECONDS
    for run in runs:
        run()
    for _ in range(repeat):
        for run, milliseconds in zip(runs, times, strict=True):
            if len(runs) > 1:
                time.sleep(PAUSE_SECONDS)
            began = time.perf_counter()
            run()
            milliseconds.append((time.perf_counter() - began) * 1e3)
        if time.perf_counter() > deadline:
            break
    return [statistics.median(milliseconds) for milliseconds in times]
