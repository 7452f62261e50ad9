"""The files of each model family: pipeline, added tokens and tokenizer_config.json, with tiny vocabularies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]

GPT4_SPLIT = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
QWEN2_SPLIT = GPT4_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True)
class Family:
    """One family.

    Attributes:
        name: name of the family.
        model_type: model_type in config.json.
        vocabulary: name of the shared vocabulary.
        pipeline: normalizer, pre_tokenizer, post_processor and decoder of tokenizer.json.
        added: added tokens in the order of their ids; tokens outside the vocabulary get the ids after its last id.
        config: contents of tokenizer_config.json.
        model: other settings of the model in tokenizer.json.
    """

    name: str
    model_type: str
    vocabulary: str
    pipeline: Json
    added: tuple[Json, ...]
    config: Json
    model: Json = field(default_factory=dict)


def token(content: str, *, special: bool = True, **flags: bool) -> Json:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"content": content, **plain, **flags, "special": special}


def specials(*contents: str, **flags: bool) -> tuple[Json, ...]:
    return tuple(token(content, **flags) for content in contents)


def sequence(kind: str, parts: Sequence[Json]) -> Json:
    return {"type": "Sequence", kind: list(parts)}


def replace(old: str, new: str) -> Json:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def byte_level(*, prefix: bool = False, trim: bool = True, regex: bool = True) -> Json:
    return {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": trim, "use_regex": regex}


def split(pattern: str, behavior: str = "Isolated") -> Json:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": False}


def digits(individual: bool) -> Json:
    return {"type": "Digits", "individual_digits": individual}


def metaspace(scheme: str, do_split: bool = False) -> Json:
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": do_split}


def around(before: str | None, after: str | None = None) -> Json:
    """Return a post-processor that adds special tokens before and after a text; their ids are filled in later."""
    single: list[Json] = [{"Sequence": {"id": "A", "type_id": 0}}]
    if before:
        single.insert(0, {"SpecialToken": {"id": before, "type_id": 0}})
    if after:
        single.append({"SpecialToken": {"id": after, "type_id": 0}})
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    names = [name for name in (before, after) if name]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": dict.fromkeys(names)}


def split_then_bytes(pattern: str) -> Json:
    return sequence("pretokenizers", [split(pattern), byte_level(regex=False)])


LLAMA_DECODER = sequence(
    "decoders",
    [
        replace("▁", " "),
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
)
GEMMA_DECODER = sequence("decoders", [replace("▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"}])
PREPEND_MARK = sequence("normalizers", [{"type": "Prepend", "prepend": "▁"}, replace(" ", "▁")])
SP_MODEL = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
NFC = {"type": "NFC"}
BYTES: Json = {"decoder": byte_level()}
DIGITS_THEN_BYTES = sequence("pretokenizers", [digits(True), byte_level()])


def _fast(**names: Any) -> Json:
    return {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **names}


def _gpt2_like(name: str, **names: Any) -> Json:
    return {"tokenizer_class": name, "add_prefix_space": False, "clean_up_tokenization_spaces": False, **names}


FAMILIES = (
    Family(
        "llama2",
        "llama",
        "sentencepiece_bpe",
        {"normalizer": PREPEND_MARK, "post_processor": around("<s>"), "decoder": LLAMA_DECODER},
        specials("<unk>", "<s>", "</s>"),
        {
            "tokenizer_class": "LlamaTokenizer",
            "legacy": False,
            "add_bos_token": True,
            "add_eos_token": False,
            "clean_up_tokenization_spaces": False,
            "bos_token": {"__type": "AddedToken", **token("<s>")},
            "eos_token": {"__type": "AddedToken", **token("</s>")},
            "unk_token": {"__type": "AddedToken", **token("<unk>")},
            "pad_token": None,
        },
        SP_MODEL,
    ),
    Family(
        "mistral",
        "mistral",
        "sentencepiece_bpe",
        {"pre_tokenizer": metaspace("first"), "post_processor": around("<s>"), "decoder": LLAMA_DECODER},
        specials(
            "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"
        ),
        {
            "tokenizer_class": "LlamaTokenizer",
            "legacy": False,
            "add_bos_token": True,
            "clean_up_tokenization_spaces": False,
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
        },
        SP_MODEL,
    ),
    Family(
        "llama3",
        "llama",
        "byte_level",
        BYTES
        | {
            "pre_tokenizer": split_then_bytes(GPT4_SPLIT),
            "post_processor": sequence("processors", [byte_level(), around("<|begin_of_text|>")]),
        },
        specials("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>")
        + specials("<|eom_id|>", "<|eot_id|>", "<|python_tag|>"),
        _fast(bos_token="<|begin_of_text|>", eos_token="<|eot_id|>") | {"clean_up_tokenization_spaces": True},
        {"ignore_merges": True},
    ),
    Family(
        "qwen2",
        "qwen2",
        "byte_level",
        BYTES
        | {"normalizer": NFC, "pre_tokenizer": split_then_bytes(QWEN2_SPLIT), "post_processor": byte_level(trim=False)},
        specials("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        {
            "tokenizer_class": "Qwen2Tokenizer",
            "add_prefix_space": False,
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "unk_token": None,
            "errors": "replace",
            "split_special_tokens": False,
        },
    ),
    Family(
        "qwen3",
        "qwen3",
        "byte_level",
        BYTES
        | {"normalizer": NFC, "pre_tokenizer": split_then_bytes(QWEN2_SPLIT), "post_processor": byte_level(trim=False)},
        specials("<|endoftext|>", "<|im_start|>", "<|im_end|>")
        + tuple(token(name, special=False) for name in ("<tool_call>", "</tool_call>", "<think>", "</think>")),
        {
            "tokenizer_class": "Qwen2Tokenizer",
            "add_bos_token": False,
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "unk_token": None,
        },
    ),
    Family(
        "phi3",
        "phi3",
        "sentencepiece_bpe",
        {"normalizer": PREPEND_MARK, "post_processor": around(None), "decoder": LLAMA_DECODER},
        specials("<unk>", "<s>")
        + specials("</s>", special=False, rstrip=True)
        + specials("<|endoftext|>")
        + specials("<|assistant|>", "<|system|>", "<|end|>", "<|user|>", rstrip=True),
        {
            "tokenizer_class": "LlamaTokenizer",
            "legacy": False,
            "add_bos_token": False,
            "bos_token": "<s>",
            "eos_token": "<|endoftext|>",
            "pad_token": "<|endoftext|>",
            "unk_token": "<unk>",
            "clean_up_tokenization_spaces": False,
        },
        SP_MODEL,
    ),
    Family(
        "gemma",
        "gemma3_text",
        "sentencepiece_bpe",
        {
            "normalizer": replace(" ", "▁"),
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"String": " "},
                "behavior": "MergedWithPrevious",
                "invert": False,
            },
            "post_processor": around("<s>"),
            "decoder": GEMMA_DECODER,
        },
        specials("<unk>", "<s>", "</s>", "<start_of_turn>", "<end_of_turn>")
        + tuple(token(name, special=False) for name in ("\n\n", "▁▁", "\t")),
        {
            "tokenizer_class": "GemmaTokenizer",
            "add_bos_token": True,
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "pad_token": "</s>",
            "mask_token": "<unk>",
            "clean_up_tokenization_spaces": False,
        },
        SP_MODEL,
    ),
    Family(
        "gpt2",
        "gpt2",
        "byte_level",
        BYTES | {"pre_tokenizer": byte_level(), "post_processor": byte_level(trim=False)},
        (token("<|endoftext|>", normalized=True),),
        _gpt2_like("GPT2Tokenizer", bos_token="<|endoftext|>", eos_token="<|endoftext|>", unk_token="<|endoftext|>"),
    ),
    Family(
        "gpt_neox",
        "gpt_neox",
        "byte_level",
        BYTES | {"normalizer": NFC, "pre_tokenizer": byte_level(), "post_processor": byte_level()},
        specials("<|endoftext|>", "<|padding|>")
        + tuple(token(" " * count, special=False, normalized=True) for count in (8, 4, 2)),
        _gpt2_like("GPTNeoXTokenizer", bos_token="<|endoftext|>", eos_token="<|endoftext|>", unk_token="<|endoftext|>"),
    ),
    Family(
        "falcon",
        "falcon",
        "byte_level",
        BYTES
        | {
            "pre_tokenizer": sequence(
                "pretokenizers",
                [
                    {"type": "Punctuation", "behavior": "Contiguous"},
                    byte_level(),
                    digits(False),
                    split("[0-9][0-9][0-9]"),
                ],
            ),
            "post_processor": byte_level(trim=False),
        },
        specials(">>TITLE<<", ">>ANSWER<<", "<|endoftext|>"),
        _fast(eos_token="<|endoftext|>", add_prefix_space=False),
    ),
    Family(
        "starcoder2",
        "starcoder2",
        "byte_level",
        BYTES | {"pre_tokenizer": DIGITS_THEN_BYTES, "post_processor": byte_level()},
        specials("<|endoftext|>", "<fim_prefix>", "<fim_middle>", "<repo_name>", "<file_sep>"),
        _gpt2_like("GPT2Tokenizer", bos_token="<|endoftext|>", eos_token="<|endoftext|>", unk_token="<|endoftext|>"),
    ),
    Family(
        "cohere",
        "cohere",
        "byte_level",
        BYTES
        | {
            "normalizer": NFC,
            "pre_tokenizer": DIGITS_THEN_BYTES,
            "post_processor": sequence("processors", [byte_level(trim=False), around("<BOS_TOKEN>")]),
        },
        specials("<PAD>", "<UNK>", "<CLS>", "<SEP>", "<MASK_TOKEN>", "<BOS_TOKEN>", "<EOS_TOKEN>")
        + specials("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>")
        + specials("<|SYSTEM_TOKEN|>"),
        {
            "tokenizer_class": "CohereTokenizer",
            "add_bos_token": True,
            "legacy": True,
            "bos_token": "<BOS_TOKEN>",
            "eos_token": "<|END_OF_TURN_TOKEN|>",
            "pad_token": "<PAD>",
            "unk_token": None,
            "clean_up_tokenization_spaces": False,
        },
    ),
    Family(
        "olmo",
        "olmo2",
        "byte_level",
        BYTES | {"pre_tokenizer": split_then_bytes(GPT4_SPLIT), "post_processor": byte_level(prefix=True, trim=False)},
        specials("|||IP_ADDRESS|||", special=False)
        + specials("<|endoftext|>")
        + specials("<|im_start|>", "<|im_end|>", "<|pad|>"),
        _gpt2_like("GPT2Tokenizer", bos_token="<|endoftext|>", eos_token="<|endoftext|>", pad_token="<|pad|>"),
    ),
    Family(
        "smollm3",
        "smollm3",
        "byte_level",
        BYTES
        | {
            "pre_tokenizer": split_then_bytes(GPT4_SPLIT),
            "post_processor": sequence("processors", [byte_level(), around(None)]),
        },
        specials("<|begin_of_text|>", "<|im_start|>", "<|im_end|>")
        + tuple(token(name, special=False) for name in ("<think>", "</think>")),
        _fast(eos_token="<|im_end|>", pad_token="<|im_end|>", bos_token=None),
        {"ignore_merges": True},
    ),
    Family(
        "granite",
        "granite",
        "byte_level",
        BYTES | {"pre_tokenizer": DIGITS_THEN_BYTES, "post_processor": byte_level()},
        specials("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"),
        _gpt2_like(
            "GPT2Tokenizer", bos_token="<|end_of_text|>", eos_token="<|end_of_text|>", unk_token="<|end_of_text|>"
        ),
    ),
    Family(
        "stablelm",
        "stablelm",
        "byte_level",
        BYTES | {"normalizer": NFC, "pre_tokenizer": byte_level(), "post_processor": byte_level()},
        specials("<|endoftext|>", "<|padding|>")
        + specials("  ", special=False, normalized=True)
        + specials("<|user|>", "<|assistant|>"),
        _gpt2_like("GPTNeoXTokenizer", bos_token="<|endoftext|>", eos_token="<|endoftext|>", unk_token="<|endoftext|>"),
    ),
    Family(
        "bert",
        "bert",
        "word_piece",
        {
            "normalizer": {
                "type": "BertNormalizer",
                "clean_text": True,
                "handle_chinese_chars": True,
                "strip_accents": None,
                "lowercase": True,
            },
            "pre_tokenizer": {"type": "BertPreTokenizer"},
            "post_processor": around("[CLS]", "[SEP]"),
            "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        },
        specials("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
        {
            "tokenizer_class": "BertTokenizer",
            "do_lower_case": True,
            "strip_accents": None,
            "tokenize_chinese_chars": True,
            "clean_up_tokenization_spaces": True,
            "cls_token": "[CLS]",
            "sep_token": "[SEP]",
            "pad_token": "[PAD]",
            "unk_token": "[UNK]",
            "mask_token": "[MASK]",
        },
        {"unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100},
    ),
    Family(
        "t5",
        "t5",
        "unigram",
        {
            "pre_tokenizer": sequence(
                "pretokenizers", [{"type": "WhitespaceSplit"}, metaspace("always", do_split=True)]
            ),
            "post_processor": around(None, "</s>"),
            "decoder": metaspace("always", do_split=True),
        },
        specials("<pad>", "</s>", "<unk>", "<extra_id_1>", "<extra_id_0>"),
        {
            "tokenizer_class": "T5Tokenizer",
            "extra_ids": 2,
            "additional_special_tokens": ["<extra_id_0>", "<extra_id_1>"],
            "eos_token": "</s>",
            "pad_token": "<pad>",
            "unk_token": "<unk>",
            "clean_up_tokenization_spaces": True,
        },
        {"unk_id": 2, "byte_fallback": False},
    ),
)
