"""Write tests/convert/gguf_goldens: llama.cpp's results for the files that tools/gguf_models.py writes.

usage: python -m tools.make_gguf_goldens [--work FOLDER], after `python -m tools.compare_peers setup --engine llama.cpp`
with the same folder (default ~/.cache/genai/peers).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from genai.quant.ggml import GGML_TYPES
from tools import gguf_models
from tools.gguf_models import SHAPES, TOKENS, VOCABULARIES, add_value, close, write_model
from tools.peers.engines.base import WORKERS
from tools.peers.engines.llama_cpp import LlamaCpp
from tools.peers.processes import run_logged

TARGET = Path(__file__).resolve().parent.parent / "tests" / "convert" / "gguf_goldens"
TEXTS = VOCABULARIES.with_name("texts.json")
# Every STEP-th logit is stored.
STEP = 3
KINDS = ("F32", "F16", "BF16", *(kind.name for kind in GGML_TYPES.values()))
# One pre-tokenizer for each set of regular expressions.
PRE_TOKENIZERS = (
    "llama-bpe", "qwen2", "qwen35", "gpt-2", "starcoder", "falcon", "deepseek-v3", "deepseek-coder", "tekken", "gpt-4o",
    "bloom", "viking", "minicpm5", "seed-coder", "deepseek-llm", "kimi-k2", "youtu", "exaone-moe", "default",
)  # fmt: skip
MORE_TEXTS = (
    "<s>Hi <|im_start|>user\nHello<|im_end|>\n", "a <defined> b<defined>c",
    "Don't DON'T HelloWorld camelCase ABCdef x'S 'tis it's 12345678 3,000.50", "  \n\n  x \t\n y  ",
    "if(a&&b){c+=1;}//…«»", "日本語テスト 한국어 Привет мир",
)  # fmt: skip
_SPECIAL = ("<|im_start|>", "<|im_end|>", "<s>", "</s>")


def texts() -> list[str]:
    """Return the texts to tokenise."""
    return [*json.loads(TEXTS.read_text(encoding="utf-8"))["torture"], *MORE_TEXTS]


@dataclass(frozen=True)
class Typed:
    """A vocabulary whose token types disagree with the texts of its tokens.

    Attributes:
        kind: the vocabulary without changes; see `write_vocabulary`.
        types: types of tokens by text. A text that the vocabulary lacks becomes a new token.
        others: the type of all other tokens; 0 = unchanged, None = the file has no types.
        roles: texts of the tokens of other keys, such as "eot_token_id".
        keys: other metadata of the tokenizer.
        name: general.name.
    """

    kind: str
    types: Mapping[str, int] = field(default_factory=dict)
    others: int | None = 0
    roles: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""

    def changed(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return the metadata of the tokenizer with these changes."""
        types = {
            token: self.others or type_ for token, type_ in zip(values["tokens"], values["token_type"], strict=True)
        } | dict(self.types)
        tokens = list(types)
        changes: dict[str, Any] = {"tokens": tokens, "token_type": [*types.values()]}
        if self.others is None:
            changes["token_type"] = None
        if "scores" in values:
            changes["scores"] = [*values["scores"], *[-1e3] * (len(tokens) - len(values["tokens"]))]
        return values | changes | {key: tokens.index(text) for key, text in self.roles.items()} | dict(self.keys)


_ENDS = """<|eot_id|> <|im_end|> <|end|> <end_of_turn> <|endoftext|> </s> <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <eos>
    <|end_of_text|> <end_of_utterance> <turn|> [e~[ <｜end▁of▁sentence｜>""".split()
_MIDDLE = "<|fim_prefix|> <SUF> <|code_middle|> <fim_pad> <|repo_name|> <|file_sep|>".split()
_OSS = "<|start|> <|channel|> <|message|> <|constrain|> <|end|> <|return|> <|call|>".split()
_PHI3 = "<|user|> <|end|> <|assistant|> <|endoftext|> <mask> [MASK]".split()
_COMMON = ("\u2581the", "the", "he", "th", "er")
TYPED: dict[str, Typed] = {
    **{f"ends of type {type_}": Typed("qwen2", dict.fromkeys(_ENDS, type_)) for type_ in (1, 4, 5)},
    "ends of type 1, pieces": Typed("llama", dict.fromkeys(_ENDS, 1)),
    "ends of type 1, unigram": Typed("t5", dict.fromkeys(_ENDS, 1)),
    "ends without types": Typed("qwen2", dict.fromkeys(_ENDS, 1), others=None),
    "roles of other texts": Typed(
        "qwen2", {"<|x|>": 1, "<|y|>": 3, "<|z|>": 1}, roles={"eot_token_id": "<|x|>", "eom_token_id": "<|y|>"}
    ),
    "middle": Typed("qwen2", dict.fromkeys(_MIDDLE, 1)),
    "middle, pieces": Typed("llama", dict.fromkeys(_MIDDLE, 1)),
    "middle by keys": Typed(
        "qwen2", dict.fromkeys([*_MIDDLE, "<|x|>"], 1), roles={"fim_pad_token_id": "<|x|>", "prefix_token_id": "<|x|>"}
    ),
    "gpt-oss": Typed("qwen2", dict.fromkeys(_OSS, 3)),
    "gpt-oss of type 1": Typed("qwen2", dict.fromkeys(_OSS, 1)),
    "solar": Typed("qwen2", dict.fromkeys(("<|end|>", "<|calls|>", "<|flush|>"), 1)),
    "end without call": Typed("qwen2", dict.fromkeys(("<|end|>", "<|return|>", "<|flush|>"), 3)),
    "gemma 4": Typed("qwen2", dict.fromkeys(("<eos>", "<turn|>", "<|tool_response>", "</s>"), 3)),
    "bytes of type 1": Typed("llama", {f"<0x{byte:02X}>": 1 for byte in range(256)}),
    "pieces without types": Typed("llama", {}, others=None),
    "pieces of type 1": Typed("llama", {}, others=1),
    **{f"common pieces of type {type_}": Typed("llama", dict.fromkeys(_COMMON, type_)) for type_ in (5, 4, 3)},
    "common pieces of type 5, unigram": Typed("t5", dict.fromkeys(_COMMON, 5)),
    **{f"phi-3 of type {type_}": Typed("llama", dict.fromkeys(_PHI3, type_), name="Phi-3-mini") for type_ in (3, 4, 1)},
    "phi3, no prefix": Typed("llama-no-prefix", dict.fromkeys(_PHI3, 3), name="my PHI3 merge"),
    "phi3, bytes": Typed("qwen2", dict.fromkeys(("<unk>", "<s>", "</s>", *_PHI3), 3), name="phi3"),
    "phi 3": Typed("llama", dict.fromkeys(_PHI3, 3), name="Phi 3"),
    "modern-bert": Typed("qwen2", dict.fromkeys(_PHI3, 3), name="Modern-BERT-base"),
    "jina": Typed("llama", dict.fromkeys(_PHI3, 3), name="phi3", keys={"pre": "jina-v2-de"}),
}  # fmt: skip


def typed_texts(typed: Typed) -> list[str]:
    """Return the texts to tokenise with a vocabulary."""
    marks = list(typed.types)[:20]
    return [
        *(f"a {mark}\n  b{mark}{mark} \t {mark} c" for mark in marks), "".join(marks), "hi there the  other\nΩ 龍",
        "</s>\n <|im_start|> x <defined>  y<|im_end|>\n",
    ]  # fmt: skip


def write_vocabulary(path: Path, kind: str | Typed) -> Path:
    """Write a file with only a tokenizer; `kind` is a pre-tokenizer's name, or a kind such as "llama" or "t5"."""
    known = json.loads(VOCABULARIES.read_text(encoding="utf-8"))
    typed = kind if isinstance(kind, Typed) else Typed(kind)
    kind = typed.kind
    values = typed.changed((_byte_level if kind in PRE_TOKENIZERS else _pieces)(known, kind))
    writer = gguf.GGUFWriter(str(path), "llama")
    if typed.name:
        writer.add_name(typed.name)
    shape = {
        "context_length": 64, "embedding_length": 32, "block_count": 1, "feed_forward_length": 32,
        "attention.head_count": 1, "attention.layer_norm_rms_epsilon": 1e-5,
    }  # fmt: skip
    for key, value in shape.items():
        add_value(writer, f"llama.{key}", value)
    for key, value in values.items():
        add_value(writer, f"tokenizer.ggml.{key}", value)
    writer.add_tensor("token_embd.weight", np.zeros((len(values["tokens"]), 32), np.float32))
    close(writer)
    return path


def _byte_level(known: dict[str, Any], pre: str) -> dict[str, Any]:
    listed = known["byte_level"]
    tokens = sorted(listed["vocab"], key=listed["vocab"].get)
    added = [token for token in _SPECIAL if token not in tokens]
    return {
        "model": "gpt2", "pre": pre, "tokens": [*tokens, *added, "<defined>"],
        "token_type": [1] * len(tokens) + [3] * len(added) + [4],
        "merges": [" ".join(merge) for merge in listed["merges"]],
        "bos_token_id": len(tokens) + added.index("<s>"), "eos_token_id": len(tokens) + added.index("<|im_end|>"),
    }  # fmt: skip


def _pieces(known: dict[str, Any], kind: str) -> dict[str, Any]:
    if kind == "t5":
        listed = known["unigram"]["vocab"]
        return {
            "model": "t5", "tokens": [token for token, _ in listed], "scores": [float(score) for _, score in listed],
            "token_type": [3, 3, 2] + [1] * (len(listed) - 3), "eos_token_id": 1, "unknown_token_id": 2,
            "padding_token_id": 0, "add_space_prefix": True, "remove_extra_whitespaces": True,
        }  # fmt: skip
    listed = known["sentencepiece_bpe"]
    tokens = sorted(listed["vocab"], key=listed["vocab"].get)
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(listed["merges"]):
        ranks.setdefault("".join(merge), rank)
    scores = [-float(ranks.get(token, len(ranks) + id_) + 1) for id_, token in enumerate(tokens)]
    kinds = {"<unk>": 2, "<s>": 3, "</s>": 3}
    if kind == "gemma4":
        more = ["\n", "\n\n", "<|im_start|>", "<defined>"]
        return {
            "model": "gemma4", "tokens": [*tokens, *more], "scores": [0.0] * (len(tokens) + len(more)),
            "token_type": [*(kinds.get(token, 6 if token.startswith("<0x") else 1) for token in tokens), 1, 1, 3, 4],
            "merges": [*(" ".join(merge) for merge in listed["merges"]), "\n \n"],
            "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, "add_bos_token": True,
        }  # fmt: skip
    types = [kinds.get(token, 6 if token.startswith("<0x") else 1) for token in tokens]
    more = ["<|im_start|>", "<defined>", "[PAD1]"]
    roles = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return {
        "model": "llama", "tokens": [*tokens, *more], "scores": [*scores, -1e3, -1e3, -1e3],
        "token_type": [*types, 3, 4, 5], "add_space_prefix": kind != "llama-no-prefix",
        **({} if kind == "llama-no-roles" else roles),
    }  # fmt: skip


VOCABULARY_KINDS = (*PRE_TOKENIZERS, "gemma4", "llama", "llama-no-prefix", "llama-no-roles", "t5")


def main() -> None:
    """Write the files, run llama.cpp on them, and store its results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("~/.cache/genai/peers"))
    work = parser.parse_args().work.expanduser()
    engine = LlamaCpp()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        models = {f"shape/{name}": write_model(place / f"{name}.gguf", shape) for name, shape in SHAPES.items()}
        for kind in KINDS[1:]:
            models[f"type/{kind}"] = write_model(place / f"type-{kind}.gguf", SHAPES["llama"], kind)
        adapter = gguf_models.write_adapter(place / "adapter.gguf", SHAPES["llama"])
        logits = {name: [str(path), None] for name, path in models.items()}
        logits["adapter/llama"] = [str(models["shape/llama"]), str(adapter)]
        vocabularies = {kind: str(write_vocabulary(place / f"v-{kind}.gguf", kind)) for kind in VOCABULARY_KINDS}
        ids: dict[str, Any] = {kind: [path, texts()] for kind, path in vocabularies.items()}
        for number, (name, typed) in enumerate(TYPED.items()):
            path = write_vocabulary(place / f"t-{number}.gguf", typed)
            ids[f"typed/{name}"] = [str(path), typed_texts(typed)]
        job = {"logits": logits, "tokens": TOKENS, "ids": ids}
        (place / "job.json").write_text(json.dumps(job), encoding="utf-8")
        worker = [engine.venv(work).python, str(WORKERS / "llama_goldens.py"), str(place / "job.json")]
        environment = {**os.environ, **engine.environment(work)}
        run_logged([*worker, str(place / "result.json")], engine.venv(work).log, environment)
        result = json.loads((place / "result.json").read_text(encoding="utf-8"))
    TARGET.mkdir(exist_ok=True)
    arrays = {name: np.array(rows, np.float32)[:, ::STEP] for name, rows in result["logits"].items()}
    np.savez_compressed(TARGET / "logits.npz", **arrays)
    plain = {kind: result["ids"][kind]["ids"] for kind in VOCABULARY_KINDS}
    (TARGET / "ids.json").write_text(json.dumps(plain) + "\n", encoding="utf-8")
    types = {name: result["ids"][f"typed/{name}"] for name in TYPED}
    (TARGET / "token_types.json").write_text(json.dumps(types) + "\n", encoding="utf-8")
    print(f"{len(arrays)} models, {len(result['ids'])} vocabularies: {TARGET}", file=sys.stderr)


if __name__ == "__main__":
    main()
