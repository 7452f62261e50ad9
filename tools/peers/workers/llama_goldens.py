"""Compute llama.cpp's results for GGUF files: the logits of tokens, or the ids of texts.

usage: llama_goldens.py JOB RESULT, with LLAMA_CPP_BINDINGS and LLAMA_CPP_LIB_PATH in the environment. JOB is a JSON
file {"logits": {name: [model, adapter or null]}, "tokens": [...], "ids": {name: [model, texts]}}. RESULT is a JSON file
with the results under "logits" and "ids"; the latter are {"ids": ids of each text, "ends": ids that end a reply}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from llama_bindings import bindings

_CONTEXT = 256


def load(api: Any, path: str, *, vocabulary_only: bool = False) -> Any:
    """Load a model."""
    options = api.llama_model_default_params()
    options.vocab_only = vocabulary_only
    model = api.llama_model_load_from_file(path.encode(), options)
    if not model:
        raise SystemExit(f"llama.cpp cannot load {path}")
    return model


def logits(api: Any, path: str, adapter: str | None, tokens: list[int]) -> list[list[float]]:
    """Return the logits of the last, the middle and the first token, computed with a float32 KV cache."""
    model = load(api, path)
    options = api.llama_context_default_params()
    options.n_ctx, options.type_k, options.type_v, options.swa_full = _CONTEXT, 0, 0, True
    options.n_outputs_max = _CONTEXT
    options.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = api.llama_init_from_model(model, options)
    if adapter:
        loaded = api.llama_adapter_lora_init(model, adapter.encode())
        if not loaded:
            raise SystemExit(f"llama.cpp cannot load {adapter}")
        adapters, scales = (api.llama_adapter_lora_p_ctypes * 1)(loaded), (api.ctypes.c_float * 1)(1.0)
        api.llama_set_adapters_lora(context, adapters, 1, scales)
    batch = api.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for index, token in enumerate(tokens):
        batch.token[index], batch.pos[index], batch.n_seq_id[index] = token, index, 1
        batch.seq_id[index][0], batch.logits[index] = 0, True
    if code := api.llama_decode(context, batch):
        raise SystemExit(f"llama_decode failed with {code}")
    size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
    wanted = (len(tokens) - 1, len(tokens) // 2, 0)
    rows = [np.ctypeslib.as_array(api.llama_get_logits_ith(context, index), (size,)).tolist() for index in wanted]
    api.llama_batch_free(batch)
    api.llama_free(context)
    api.llama_model_free(model)
    return rows


def ids(api: Any, path: str, texts: list[str]) -> dict[str, Any]:
    """Return the token ids of each text, with special tokens parsed and added, and the ids that end a reply."""
    vocabulary = api.llama_model_get_vocab(load(api, path, vocabulary_only=True))
    found = []
    for text in texts:
        raw = text.encode()
        room = (api.llama_token * (len(raw) + 16))()
        count = api.llama_tokenize(vocabulary, raw, len(raw), room, len(room), True, True)
        found.append(list(room[:count]))
    known = range(api.llama_vocab_n_tokens(vocabulary))
    return {"ids": found, "ends": [id_ for id_ in known if api.llama_vocab_is_eog(vocabulary, id_)]}


def main() -> None:
    """Read the job and write the result."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    api = bindings("llama_cpp", "llama_cpp")
    api.llama_backend_init()
    result = {
        "logits": {name: logits(api, *files, job["tokens"]) for name, files in job["logits"].items()},
        "ids": {name: ids(api, *one) for name, one in job["ids"].items()},
    }
    Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
