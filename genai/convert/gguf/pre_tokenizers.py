"""llama.cpp's pre-tokenizers, which split texts before byte-level BPE, by their names in GGUF files.

The expressions are from the corresponding tokenizer.json files and agree with the expressions in llama.cpp (MIT,
src/llama-vocab.cpp). Each expression is applied to the pieces that the preceding expression produced.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...text.sources.expressions import GPT2, GPT4O, KIMI, LLAMA3, QWEN2, SPACES, TEKKEN, modern

_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
    + SPACES,
)

# The letters with case that DeepSeek LLM lists.
_CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώ"
    "ᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏"
    "𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_DEEPSEEK_LLM = (
    r"[\r\n]", rf"\s?[{_CASED}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}+"
)  # fmt: skip
_YOUTU = ("[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+", GPT4O.replace("{1,3}", ""))
# Runs of words with single spaces between them are one piece.
_WORDS = r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+"
_EXAONE_MOE = (
    modern(r"\p{N}").replace(r"[\p{L}]+", _WORDS).replace(r"+[\r\n]*|", r"+[\r\n/]?|").replace(r"[\r\n]+|", r"[\r\n]|")
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
    "deepseek-llm": PreTokenizer(_DEEPSEEK_LLM),
    "exaone-moe": PreTokenizer((_EXAONE_MOE,)),
    "kimi-k2": PreTokenizer((KIMI,)),
    "youtu": PreTokenizer(_YOUTU, True),
    "tekken": PreTokenizer((TEKKEN,), True, True),
    "gpt-4o llama4 kanana2 minimax-m2": PreTokenizer((GPT4O,)),
    "poro-chat bloom gpt3-finnish": PreTokenizer((_BLOOM,)),
    "viking": PreTokenizer((_BLOOM, r"\p{N}")),
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", modern(r"\p{N}+")), True),
    "seed-coder": PreTokenizer((modern(r"\p{N}").replace(r"]+[\r\n]*|", r"\r\n]+|"),)),
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}
PRE_TOKENIZERS = {name: kind for names, kind in _KINDS.items() for name in names.split()}
