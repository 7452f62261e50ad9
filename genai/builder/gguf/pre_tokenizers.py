"""How llama.cpp cuts texts before byte-level BPE, by the name that a GGUF file has for it.

The expressions are those of the tokenizer.json files that the names stand for, with which llama.cpp's own (MIT,
src/llama-vocab.cpp) agree. Each is applied to the pieces that the one before it has left.
"""

from __future__ import annotations

from dataclasses import dataclass

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _modern(digits: str, contractions: str = f"{_CONTRACTIONS}|", letters: str = r"\p{L}", others: str = "") -> str:
    """Words with what stands before them, so many digits together, and runs of other characters."""
    return (
        rf"{contractions}[^\r\n\p{{L}}\p{{N}}]?[{letters}]+|{digits}| ?[^\s{letters}\p{{N}}]+[\r\n{others}]*|{_SPACES}"
    )


def _by_case(digits: str, contractions: str = "") -> str:
    """The same, but words end where small letters are followed by large ones."""
    large, small = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    first = r"[^\r\n\p{L}\p{N}]?"
    return (
        f"{first}{large}*{small}+{contractions}|{first}{large}+{small}*{contractions}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


_LLAMA3, _QWEN2 = _modern(r"\p{N}{1,3}"), _modern(r"\p{N}")
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
    + _SPACES,
)


@dataclass(frozen=True)
class PreTokenizer:
    """Expressions; whether a word of the vocabulary is taken whole; whether texts begin with the first token."""

    expressions: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_KINDS = {
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2": PreTokenizer((_LLAMA3,), True, True),
    "dbrx smaug-bpe chatglm-bpe": PreTokenizer((_LLAMA3,)),
    "glm4 glm5": PreTokenizer((_LLAMA3,), True),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 stablelm2 megrez hunyuan solar-open grok-2": PreTokenizer((_QWEN2,)),
    "qwen35": PreTokenizer((_modern(r"\p{N}", letters=r"\p{L}\p{M}"),)),
    "gpt-2 phi-2 mpt olmo jais trillion granite-docling gigachat a.x-4.0 mellum exaone4 modern-bert": PreTokenizer(
        (_GPT2,)
    ),
    "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": PreTokenizer((r"\p{N}", _GPT2)),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": PreTokenizer(_DEEPSEEK3),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")),
    "tekken": PreTokenizer((_by_case(r"\p{N}"),), True, True),
    "gpt-4o llama4 kanana2 minimax-m2": PreTokenizer((_by_case(r"\p{N}{1,3}", f"{_CONTRACTIONS}?"),)),
    "poro-chat bloom gpt3-finnish": PreTokenizer((_BLOOM,)),
    "viking": PreTokenizer((_BLOOM, r"\p{N}")),
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", _modern(r"\p{N}+")), True),
    "seed-coder": PreTokenizer((_modern(r"\p{N}").replace(r"]+[\r\n]*|", r"\r\n]+|"),)),
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}
PRE_TOKENIZERS = {name: kind for names, kind in _KINDS.items() for name in names.split()}
