"""llama.cpp's pre-tokenizers, which split texts before byte-level BPE, by their names in GGUF files.

The expressions are from the corresponding tokenizer.json files and agree with the expressions in llama.cpp (MIT,
src/llama-vocab.cpp). Each expression is applied to the pieces that the preceding expression produced.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...text.sources.expressions import GPT2, GPT4O, LLAMA3, QWEN2, SPACES, TEKKEN, modern

_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
    + SPACES,
)


@dataclass(frozen=True)
class PreTokenizer:
    """A pre-tokenizer of llama.cpp.

    Attributes:
        expressions: regular expressions.
        ignore_merges: True if a word in the vocabulary becomes one token without merging.
        add_bos: True if texts start with the beginning-of-sequence token by default.
    """

    expressions: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_KINDS = {
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2": PreTokenizer((LLAMA3,), True, True),
    "dbrx smaug-bpe chatglm-bpe": PreTokenizer((LLAMA3,)),
    "glm4 glm5": PreTokenizer((LLAMA3,), True),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 stablelm2 megrez hunyuan solar-open grok-2": PreTokenizer((QWEN2,)),
    "qwen35": PreTokenizer((modern(r"\p{N}", letters=r"\p{L}\p{M}"),)),
    "gpt-2 phi-2 mpt olmo jais trillion granite-docling gigachat a.x-4.0 mellum exaone4 modern-bert": PreTokenizer(
        (GPT2,)
    ),
    "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": PreTokenizer((r"\p{N}", GPT2)),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": PreTokenizer(_DEEPSEEK3),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")),
    "tekken": PreTokenizer((TEKKEN,), True, True),
    "gpt-4o llama4 kanana2 minimax-m2": PreTokenizer((GPT4O,)),
    "poro-chat bloom gpt3-finnish": PreTokenizer((_BLOOM,)),
    "viking": PreTokenizer((_BLOOM, r"\p{N}")),
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", modern(r"\p{N}+")), True),
    "seed-coder": PreTokenizer((modern(r"\p{N}").replace(r"]+[\r\n]*|", r"\r\n]+|"),)),
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}
PRE_TOKENIZERS = {name: kind for names, kind in _KINDS.items() for name in names.split()}
