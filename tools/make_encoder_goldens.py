"""Write tests/embed/models: tiny encoders, exported by torch.onnx, and the results of sentence-transformers.

    python3 -m venv oracle
    oracle/bin/pip install torch==2.13.0 transformers sentence-transformers onnxscript
    oracle/bin/python tools/make_encoder_goldens.py [NAME ...]

Each folder has the checkpoint, the tokenizer, the files of sentence-transformers, onnx/model.onnx, and golden.json with
texts and their vectors, or with a query, documents and their scores.
"""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.base.modules.dense import Dense
from sentence_transformers.base.modules.transformer import Transformer
from sentence_transformers.cross_encoder.modules.logit_score import LogitScore
from sentence_transformers.sentence_transformer.modules.normalize import Normalize
from sentence_transformers.sentence_transformer.modules.pooling import Pooling
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "embed" / "models"
WORDS = "the cat sits on a mat dog runs fast in park red blue green one two three four is was and or not very".split()
LETTERS = [chr(code) for code in range(ord("a"), ord("z") + 1)]
TEXTS = [
    "the cat sits on a mat",
    "a dog",
    "",
    "one two three four and the very fast red dog runs in the blue park or is not on the green mat and was fast",
    "zebra and x, unknown 9",
    "the <pad> cat [PAD] and [MASK] dog",
    "the " * 70,
]
QUERY, DOCUMENTS = "the cat", ["a cat sits on the mat", "dog runs", "", "blue " * 70, "not the cat and not a dog"]
SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40,
    "max_position_embeddings": 60,
}  # fmt: skip
DISTIL = {"vocab_size": 96, "dim": 24, "n_layers": 2, "n_heads": 3, "hidden_dim": 40, "max_position_embeddings": 60}
T5 = {"vocab_size": 96, "d_model": 24, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 3}
GROUPED = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
DEBERTA = {
    **SIZES, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8,
    "norm_rel_ebd": "layer_norm", "share_att_key": True, "position_biased_input": False, "type_vocab_size": 0,
}  # fmt: skip
MODERN = {**SIZES, "local_attention": 8, "global_attn_every_n_layers": 2, "pad_token_id": 0}
# name -> model type, changes of the configuration, special tokens ("bert", "roberta", "t5", "plain"), pooling, modules,
# options: "dynamo" for the newer exporter, max_seq_length, prompts.
EMBEDDERS: dict[str, tuple[str, dict[str, Any], str, Any, list[Any], dict[str, Any]]] = {
    "bert": ("bert", SIZES, "bert", "mean", ["normalize"], {"max_seq_length": 16}),
    "roberta": ("roberta", SIZES, "roberta", "cls", ["normalize"], {}),
    "xlm_roberta": (
        "xlm-roberta", SIZES, "roberta", "mean", [],
        {"dynamo": True, "prompts": {"query": "the query ", "document": ""}},
    ),
    "distilbert": ("distilbert", DISTIL, "bert", "max", [], {"dynamo": True}),
    "mpnet": ("mpnet", SIZES, "roberta", "mean", [(24, 10, True, "Tanh")], {}),
    "electra": ("electra", {**SIZES, "embedding_size": 16}, "bert", "weightedmean", [], {}),
    "deberta_v2": ("deberta-v2", DEBERTA, "bert", "mean", ["normalize"], {}),
    "modernbert": ("modernbert", MODERN, "bert", "cls", ["normalize"], {"dynamo": True}),
    "nomic_bert": ("nomic_bert", SIZES, "bert", "mean", ["normalize"], {"prompts": {"query": "one query "}}),
    "t5": ("t5", T5, "t5", "mean", [(24, 12, False, "Identity"), "normalize"], {}),
    "albert": ("albert", {**SIZES, "embedding_size": 16}, "bert", ("cls", "mean"), [], {}),
    "camembert": ("camembert", SIZES, "roberta", "mean_sqrt_len_tokens", [], {"dynamo": True}),
    "gte": (
        "gte",
        {**SIZES, "type_vocab_size": 0, "rope_parameters": {"rope_type": "linear", "rope_theta": 4e4, "factor": 1.2}},
        "roberta", "cls", ["normalize"], {"dynamo": True},
    ),
    "jina_v3": ("jina_embeddings_v3", SIZES, "roberta", "mean", ["normalize"], {"dynamo": True}),
    "eurobert": ("eurobert", GROUPED, "bert", "mean", ["normalize"], {"dynamo": True}),
    "qwen3": ("qwen3", GROUPED, "t5", "lasttoken", ["normalize"], {"dynamo": True, "prompts": {"query": "one query "}}),
    "gemma3": (
        "gemma3_text",
        {**GROUPED, "use_bidirectional_attention": True, "sliding_window": 9,
         "layer_types": ["sliding_attention", "full_attention"]},
        "bert", "mean", [(24, 30, False, "Identity"), (30, 24, False, "Identity"), "normalize"], {"dynamo": True},
    ),
    "excluded_prompt": ("bert", SIZES, "bert", "mean", [], {"prompts": {"query": "the one "}, "include_prompt": False}),
}  # fmt: skip
RERANKERS: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "bert_reranker": ("bert", {**SIZES, "num_labels": 1}, "bert", {}),
    "xlm_roberta_reranker": ("xlm-roberta", {**SIZES, "num_labels": 1}, "roberta", {"dynamo": True}),
    "modernbert_reranker": ("modernbert", {**MODERN, "num_labels": 1}, "bert", {"dynamo": True}),
    "deberta_v2_reranker": ("deberta-v2", {**DEBERTA, "num_labels": 3}, "bert", {}),
    "distilbert_reranker": ("distilbert", {**DISTIL, "num_labels": 2}, "bert", {}),
    "electra_reranker": ("electra", {**SIZES, "embedding_size": 16, "num_labels": 1}, "bert", {}),
    "gte_reranker": ("gte", {**SIZES, "num_labels": 1, "type_vocab_size": 2}, "bert", {"dynamo": True}),
    "qwen3_reranker": ("qwen3", {**GROUPED, "num_labels": 1}, "t5", {"dynamo": True}),
    "llama_reranker": ("llama", {**GROUPED, "num_labels": 2}, "t5", {"dynamo": True}),
}
# Rerankers that generate: the score is the logit of one token less that of another. name -> model type, sizes, options:
# the tokens, the limit, prompts, arguments of the chat template, the template.
PAIRS = (
    "{% if messages[0].role == 'system' %}the one {{ messages[0].content }}{% endif %} is query "
    "{{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }} is "
    "{{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }} not"
    "{% if add_generation_prompt %} very red{% endif %}"
)
GENERATORS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3_generator": (
        "qwen3", {**GROUPED, "tie_word_embeddings": True},
        {"true": "red", "false": "blue", "prompts": {"web": "cat and dog"}, "default": "web",
         "chat_template": {"add_generation_prompt": True}},
    ),
    "llama_generator": ("llama", {**GROUPED, "tie_word_embeddings": False}, {"true": "one", "limit": 30}),
}  # fmt: skip


def make_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of words and letters with the special tokens of a family."""
    special = {
        "bert": ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"],
        "roberta": ["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
        "t5": ["<pad>", "</s>", "<unk>"],
    }[kind]
    words = [*special, *LETTERS, *(f"##{letter}" for letter in LETTERS), *WORDS, ",", "9"]
    unknown = next(token for token in special if "unk" in token.lower())
    made = Tokenizer(models.WordPiece({word: id_ for id_, word in enumerate(words)}, unk_token=unknown))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    roles: dict[str, str] = {"unk_token": unknown}
    if kind == "bert":
        made.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
        roles |= {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    elif kind == "roberta":
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
        )
        roles |= {"pad_token": "<pad>", "cls_token": "<s>", "sep_token": "</s>", "mask_token": "<mask>"}
    else:
        made.post_processor = processors.TemplateProcessing(
            single="$A </s>", pair="$A $B </s>", special_tokens=[("</s>", 1)]
        )
        roles |= {"pad_token": "<pad>", "eos_token": "</s>"}
    inputs = ["input_ids", "attention_mask"] + (["token_type_ids"] if kind == "bert" else [])
    return PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=56, model_input_names=inputs, **roles)


def randomise(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 1.2 * parameter.shape[-1] ** -0.5, generator=generator)
            else:
                centre = 1.0 if float(parameter.mean()) > 0.5 else 0.0
                parameter.normal_(centre, 0.2, generator=generator)


class Wrapped(torch.nn.Module):
    """A model with positional inputs and one output."""

    def __init__(self, model: Any, types: bool) -> None:
        super().__init__()
        self.model, self.types = model, types

    def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any = None) -> Any:
        named = {"token_type_ids": token_type_ids} if self.types else {}
        if hasattr(self.model.config, "use_cache"):
            self.model.config.use_cache = False
        out = self.model(input_ids=input_ids, attention_mask=attention_mask, **named)
        return out.logits if hasattr(out, "logits") else out.last_hidden_state


def export(model: Any, folder: Path, *, dynamo: bool, types: bool) -> None:
    wrapped = Wrapped(model, types).eval()
    ids = torch.randint(5, 90, (2, 11))
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    names = ["input_ids", "attention_mask", *(["token_type_ids"] if types else [])]
    arguments = (ids, mask, *([torch.zeros_like(ids)] if types else []))
    output = (
        "logits"
        if hasattr(model.config, "num_labels") and "Classification" in type(model).__name__
        else "last_hidden_state"
    )
    path = folder / "onnx" / "model.onnx"
    path.parent.mkdir()
    common: dict[str, Any] = {"input_names": names, "output_names": [output]}
    if dynamo:
        axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence")}
        shapes = tuple(axes for _ in names)
        torch.onnx.export(
            wrapped, arguments, str(path), opset_version=18, dynamo=True, dynamic_shapes=shapes, external_data=False,
            verbose=False, **common,
        )  # fmt: skip
    else:
        dynamic = {name: {0: "batch", 1: "sequence"} for name in names}
        torch.onnx.export(wrapped, arguments, str(path), opset_version=17, dynamo=False, dynamic_axes=dynamic, **common)


def begin(name: str, model: Any, tokenizer: PreTrainedTokenizerFast, kind: str) -> tuple[Path, bool]:
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    randomise(model)
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder, kind == "bert" and getattr(model.config, "type_vocab_size", 0) > 0


def special_ids(kind: str) -> dict[str, int]:
    return {"bert": {"pad_token_id": 0}, "roberta": {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2},
            "t5": {"pad_token_id": 0, "eos_token_id": 1}}[kind]  # fmt: skip


def make_embedder(name: str) -> None:
    model_type, sizes, kind, pooling, modules, options = EMBEDDERS[name]
    config = AutoConfig.for_model(model_type, **{**special_ids(kind), **sizes})
    if model_type == "t5":
        from transformers import T5EncoderModel

        model: Any = T5EncoderModel(config)
    else:
        model = AutoModel.from_config(config)
    folder, types = begin(name, model, make_tokenizer(kind), kind)
    width = getattr(config, "hidden_size", 24)
    length = {"max_seq_length": options["max_seq_length"]} if "max_seq_length" in options else {}
    made: list[Any] = [
        Transformer(str(folder), **length),
        Pooling(width, pooling, include_prompt=options.get("include_prompt", True)),
    ]
    for module in modules:
        if module == "normalize":
            made.append(Normalize())
            continue
        inputs, outputs, bias, activation = module
        dense = Dense(inputs, outputs, bias, getattr(torch.nn, activation)())
        randomise(dense)
        made.append(dense)
    whole = SentenceTransformer(modules=made, prompts=options.get("prompts"), device="cpu").eval()
    shutil.rmtree(folder)
    whole.save(str(folder), create_model_card=False)
    vectors = {"": whole.encode(TEXTS, batch_size=1)}
    for prompt in options.get("prompts", {}):
        vectors[prompt] = whole.encode(TEXTS, batch_size=1, prompt_name=prompt)
    golden = {
        "texts": TEXTS,
        "vectors": {key: np.asarray(value, np.float64).round(8).tolist() for key, value in vectors.items()},
    }
    (folder / "golden.json").write_text(json.dumps(golden))
    export(whole[0].model, folder, dynamo=options.get("dynamo", False), types=types)


def make_reranker(name: str) -> None:
    model_type, sizes, kind, options = RERANKERS[name]
    config = AutoConfig.for_model(model_type, **{**special_ids(kind), **sizes})
    model = AutoModelForSequenceClassification.from_config(config)
    folder, types = begin(name, model, make_tokenizer(kind), kind)
    encoder = CrossEncoder(str(folder), device="cpu")
    scores = encoder.predict([(QUERY, document) for document in DOCUMENTS], batch_size=1)
    golden = {"query": QUERY, "documents": DOCUMENTS, "scores": np.asarray(scores, np.float64).round(8).tolist()}
    (folder / "golden.json").write_text(json.dumps(golden))
    export(model.eval(), folder, dynamo=options.get("dynamo", False), types=types)


def make_generator(name: str) -> None:
    model_type, sizes, options = GENERATORS[name]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**special_ids("t5"), **sizes}))
    tokenizer = make_tokenizer("t5")
    tokenizer.chat_template, tokenizer.padding_side = PAIRS, "left"
    if "limit" in options:
        tokenizer.model_max_length = options["limit"]
    folder, _ = begin(name, model, tokenizer, "t5")
    kwargs = {"processing_kwargs": {"chat_template": options["chat_template"]}} if "chat_template" in options else {}
    transformer = Transformer(str(folder), transformer_task="text-generation", **kwargs)
    ids = [tokenizer.convert_tokens_to_ids(options[key]) if key in options else None for key in ("true", "false")]
    whole = CrossEncoder(
        modules=[transformer, LogitScore(*ids)], prompts=options.get("prompts"),
        default_prompt_name=options.get("default"), device="cpu",
    )  # fmt: skip
    shutil.rmtree(folder)
    whole.save_pretrained(str(folder), create_model_card=False)
    scores = whole.predict([(QUERY, document) for document in DOCUMENTS], batch_size=1)
    golden = {"query": QUERY, "documents": DOCUMENTS, "scores": np.asarray(scores, np.float64).round(8).tolist()}
    (folder / "golden.json").write_text(json.dumps(golden))


def make_heads(name: str) -> None:
    """A dense model with the two further heads of BGE-M3, whose results are computed here."""
    config = AutoConfig.for_model("xlm-roberta", **{**special_ids("roberta"), **SIZES})
    model, tokenizer = AutoModel.from_config(config), make_tokenizer("roberta")
    folder, _ = begin(name, model, tokenizer, "roberta")
    whole = SentenceTransformer(
        modules=[Transformer(str(folder)), Pooling(24, "cls"), Normalize()], device="cpu"
    ).eval()
    shutil.rmtree(folder)
    whole.save(str(folder), create_model_card=False)
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    sparse, multi = torch.nn.Linear(24, 1), torch.nn.Linear(24, 16)
    for layer, file in ((sparse, "sparse_linear.pt"), (multi, "colbert_linear.pt")):
        randomise(layer)
        layer.bias.data += 0.7
        torch.save(layer.state_dict(), folder / file)
    weights, vectors = [], []
    for text in TEXTS:
        encoded = tokenizer([text], truncation=True, return_tensors="pt")
        with torch.no_grad():
            rows = model(**encoded).last_hidden_state[0]
            tokens: dict[str, float] = {}
            for id_, weight in zip(
                encoded["input_ids"][0].tolist(), torch.relu(sparse(rows))[:, 0].tolist(), strict=True
            ):
                if id_ not in tokenizer.all_special_ids and weight > 0:
                    tokens[str(id_)] = max(weight, tokens.get(str(id_), 0.0))
            weights.append(tokens)
            vectors.append(torch.nn.functional.normalize(multi(rows[1:]), dim=-1).tolist())
    dense = np.asarray(whole.encode(TEXTS, batch_size=1), np.float64).round(8).tolist()
    golden = {"texts": TEXTS, "vectors": {"": dense}, "sparse": weights, "multi": vectors}
    (folder / "golden.json").write_text(json.dumps(golden))


def main(names: list[str]) -> None:
    """Write the folders of some cases, or of all."""
    warnings.filterwarnings("ignore")
    makers = {**dict.fromkeys(EMBEDDERS, make_embedder), **dict.fromkeys(RERANKERS, make_reranker)}
    makers |= {**dict.fromkeys(GENERATORS, make_generator), "bge_m3": make_heads}
    for name in names or makers:
        try:
            makers[name](name)
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {error}"[:400], file=sys.stderr)
            continue
        for extra in ("README.md", "training_args.bin"):
            (FOLDER / name / extra).unlink(missing_ok=True)
        print(name, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
