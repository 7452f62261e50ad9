"""llama.cpp: token ids of texts sorted by length, side by side in one batch, as `llama-embedding` does.

usage: with_llama_cpp.py FILE THREADS, with LLAMA_CPP_BINDINGS and LLAMA_CPP_LIB_PATH in the environment
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from serving import Embed, serve

sys.path.insert(0, str(Path(__file__).parents[1] / "workers"))
from llama_bindings import bindings  # beside the workers for decoders

# Tokens of a batch. Attention is computed for all pairs of tokens of a batch, so a large one is not always faster: the
# fastest one for a case is found in its first runs, on some of its texts.
BATCHES = (512, 1024, 2048)
_TRIED_TOKENS = 4096
_SEQUENCES = 64


class Llama:
    """A model with one context per size of a batch."""

    def __init__(self, path: str, threads: int) -> None:
        self.api = api = bindings("llama_cpp", "llama_cpp")
        api.llama_backend_init()
        model = api.llama_model_load_from_file(path.encode(), api.llama_model_default_params())
        if not model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        self.width = api.llama_model_n_embd(model)
        self.contexts = {}
        for size in BATCHES:
            options = api.llama_context_default_params()
            options.n_ctx = options.n_batch = options.n_ubatch = size
            options.n_seq_max, options.embeddings, options.kv_unified = _SEQUENCES, True, True
            options.n_threads = options.n_threads_batch = threads
            self.contexts[size] = api.llama_init_from_model(model, options)
            if not self.contexts[size]:
                raise SystemExit("llama.cpp cannot create a context")
        self._fastest: dict[tuple[int, ...], int] = {}

    def embed(self, ids: Sequence[Sequence[int]]) -> list[Any]:
        """Return a vector of length 1 per text."""
        lengths = tuple(map(len, ids))
        if lengths not in self._fastest:
            some = ids[:: -(-sum(lengths) // _TRIED_TOKENS)]
            self._fastest[lengths] = min(BATCHES, key=lambda size: self._seconds(some, size))
        return self._embed(ids, self._fastest[lengths])

    def _seconds(self, ids: Sequence[Sequence[int]], size: int) -> float:
        began = time.perf_counter()
        self._embed(ids, size)
        return time.perf_counter() - began

    def _embed(self, ids: Sequence[Sequence[int]], size: int) -> list[Any]:
        order = sorted(range(len(ids)), key=lambda index: len(ids[index]))
        vectors: list[Any] = [None] * len(ids)
        part: list[int] = []
        for index in order:
            if part and (sum(len(ids[one]) for one in part) + len(ids[index]) > size or len(part) == _SEQUENCES):
                self._compute(ids, part, size, vectors)
                part = []
            part.append(index)
        self._compute(ids, part, size, vectors)
        return vectors

    def _compute(self, ids: Sequence[Sequence[int]], part: Sequence[int], size: int, vectors: list[Any]) -> None:
        api, context = self.api, self.contexts[size]
        tokens = sum(len(ids[index]) for index in part)
        batch = api.llama_batch_init(tokens, 0, 1)
        batch.n_tokens = at = 0
        for sequence, index in enumerate(part):
            for position, token in enumerate(ids[index]):
                batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, position, 1
                batch.seq_id[at][0], batch.logits[at] = sequence, True
                at += 1
        batch.n_tokens = at
        if memory := api.llama_get_memory(context):
            api.llama_memory_clear(memory, True)
        if code := api.llama_decode(context, batch):
            raise SystemExit(f"llama_decode failed with {code}")
        for sequence, index in enumerate(part):
            row = np.ctypeslib.as_array(api.llama_get_embeddings_seq(context, sequence), (self.width,)).copy()
            vectors[index] = row / np.linalg.norm(row)
        api.llama_batch_free(batch)


def load(path: str, threads: int) -> tuple[Embed, dict[str, str]]:
    """Return the function that embeds token ids."""
    llama = Llama(path, threads)
    return lambda texts, ids: llama.embed(ids), {}


if __name__ == "__main__":
    serve(load)
