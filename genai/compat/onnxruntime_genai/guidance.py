"""Guidance of onnxruntime-genai's API: a type and a text become a grammar."""

from __future__ import annotations

from ...engine.sampling.grammar import Grammar, expression, schema_text, source_text
from ...errors import OptionError, did_you_mean

# The types of guidance, and what they are called here.
_TYPES = {"json_schema": "json_schema", "regex": "regex", "lark_grammar": "grammar"}


def guidance_grammar(type: str, data: str) -> Grammar | None:
    """The grammar; None for two empty texts.

    Args:
        type: "json_schema", "regex" or "lark_grammar".
        data: the schema as JSON text, the expression, or the grammar. JSON may have blanks anywhere.

    Raises:
        OptionError: another type, or only one of the two.
    """
    if type and type not in _TYPES:
        raise OptionError(
            f"Unsupported guidance type: {type!r:.80}",
            "only json_schema, regex, and lark_grammar are supported",
            did_you_mean(type, _TYPES, "use one of these"),
        )
    if bool(type) != bool(data):
        raise OptionError(
            "Guidance type and data must be provided together.",
            f"type = {type!r:.40}, data = {data!r:.40}",
            "give both, or two empty texts",
        )
    if not type:
        return None
    option = _TYPES[type]
    read = {"json_schema": schema_text, "regex": expression}.get(option, source_text)
    text = read(type, data)
    return Grammar(option, text or "", blanks=True)
