"""Prompts for the text in a gap between two texts, for models whose tokenizer has tokens for such prompts."""

from __future__ import annotations

from ..errors import RequestError
from ..text.tokenizer import Tokenizer

# The tokens that precede the text before the gap, the text after the gap, and the text in the gap.
FORMS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma, StableCode
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
)


def gap_prompt(tokenizer: Tokenizer, before: str, after: str) -> str:
    """Return the prompt for the text between two texts.

    Raises:
        RequestError: the tokenizer has no tokens for such prompts.
    """
    for first, second, last in FORMS:
        if all(tokenizer.backend.token_to_id(token) is not None for token in (first, second, last)):
            return f"{first}{before}{second}{after}{last}"
    raise RequestError(
        400, "suffix cannot be used with this model", "its tokenizer has no tokens for the gap between two texts",
        "leave suffix out, or serve a model that fills gaps, such as Qwen2.5-Coder", code="unsupported_parameter",
        param="suffix",
    )  # fmt: skip
