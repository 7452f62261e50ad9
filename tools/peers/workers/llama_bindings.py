"""Measure llama.cpp through the ctypes bindings of llama-cpp-python.

usage: llama_bindings.py ENGINE JOB, with LLAMA_CPP_BINDINGS and LLAMA_CPP_LIB_PATH in the environment
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
import time
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
from timing import job, measure

# Cache positions in addition to those of prompt and output.
_SPARE_TOKENS = 64


def bindings(package: str, module: str) -> Any:
    """Import only the low-level bindings; the package's own __init__ would import its chat server's dependencies."""
    hollow = ModuleType(package)
    hollow.__path__ = [os.environ["LLAMA_CPP_BINDINGS"]]
    sys.modules[package] = hollow
    return importlib.import_module(f"{package}.{module}")


class Llama:
    """A model, with a context that is large enough for the case."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.api = api = self.bindings()
        api.llama_backend_init()
        model = api.llama_model_load_from_file(case["model"].encode(), self.model_options())
        options = api.llama_context_default_params()
        options.n_ctx = case["batch"] * (case["prompt"] + case["new"] + _SPARE_TOKENS)
        options.n_seq_max = case["batch"]
        options.n_threads = options.n_threads_batch = case["threads"]
        self.set_more(options, case["batch"])
        self.most = options.n_batch
        self.context = api.llama_init_from_model(model, options) if model else None
        if not self.context:
            raise SystemExit("llama.cpp cannot load the model")
        if case["adapter"]:
            adapter = api.llama_adapter_lora_init(model, case["adapter"].encode())
            kept = (api.llama_adapter_lora_p_ctypes * 1)(adapter)
            if not adapter or api.llama_set_adapters_lora(self.context, kept, 1, (ctypes.c_float * 1)(1.0)):
                raise SystemExit("llama.cpp cannot load the adapter")
        self.vocab_size = case["vocab_size"]

    def bindings(self) -> Any:
        """Return the library's functions."""
        return bindings("llama_cpp", "llama_cpp")

    def model_options(self) -> Any:
        """Return the options for loading the model."""
        return self.api.llama_model_default_params()

    def set_more(self, options: Any, batch: int) -> None:
        """Set the context options that only this library has."""
        options.n_outputs_max = batch
        # On a CPU, llama.cpp's own llama-bench was faster without flash attention, especially with long contexts.
        options.flash_attn_type = self.api.LLAMA_FLASH_ATTN_TYPE_DISABLED

    def clear(self) -> None:
        """Remove all sequences."""
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)

    def batch(self, entries: Sequence[tuple[int, int, int, bool]]) -> Any:
        """Return a llama_batch of items (token, position, sequence, True to compute logits)."""
        batch = self.api.llama_batch_init(len(entries), 0, 1)
        batch.n_tokens = len(entries)
        for index, (token, position, sequence, wanted) in enumerate(entries):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = wanted
        return batch

    def prompt(self, rows: Sequence[Sequence[int]]) -> list[Any]:
        """Return batches of all prompts, one prompt after another; only each prompt's last token has logits."""
        entries = [
            (token, position, sequence, position == len(row) - 1)
            for sequence, row in enumerate(rows)
            for position, token in enumerate(row)
        ]
        return [self.batch(entries[first : first + self.most]) for first in range(0, len(entries), self.most)]

    def decode(self, batch: Any) -> list[int]:
        """Compute a batch; return the most likely next token for each token with logits."""
        if code := self.api.llama_decode(self.context, batch):
            raise SystemExit(f"llama_decode failed with {code}")
        wanted = [index for index in range(batch.n_tokens) if batch.logits[index]]
        rows = (self.api.llama_get_logits_ith(self.context, index) for index in wanted)
        return [int(np.ctypeslib.as_array(row, (self.vocab_size,)).argmax()) for row in rows]


def main(engine: type[Llama] = Llama) -> None:
    """Load the model, measure, and print the result."""
    _, case = job()
    llama = engine(case)

    def generate(rows: Sequence[Sequence[int]], steps: int) -> tuple[float, float]:
        llama.clear()
        prompt = llama.prompt(rows)
        step = llama.batch([(0, 0, sequence, True) for sequence in range(len(rows))])
        begin = time.perf_counter()
        tokens = [token for batch in prompt for token in llama.decode(batch)]
        first = time.perf_counter()
        for position in range(len(rows[0]), len(rows[0]) + steps):
            for index, token in enumerate(tokens):
                step.token[index], step.pos[index] = token, position
            tokens = llama.decode(step)
        end = time.perf_counter()
        for batch in (*prompt, step):
            llama.api.llama_batch_free(batch)
        return first - begin, end - first

    measure(generate, case)


if __name__ == "__main__":
    main()
