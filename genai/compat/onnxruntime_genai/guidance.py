"""Guidance in onnxruntime-genai's API: a type and a string that define a grammar."""

from __future__ import annotations

from ...engine.sampling.grammar import Grammar, expression, schema_text, source_text
from ...errors import OptionError, did_you_mean

# Types of guidance, and the names of the corresponding sampling options.
_TYPES = {"json_schema": "json_schema", "regex": "regex", "lark_grammar": "grammar"}


def guidance_grammar(type: str, data: str) -> Grammar | None:
    """Return the grammar; None if type and data are empty.

    Args:
        type: "json_schema", "regex" or "lark_grammar".
        data: the schema as JSON text, the expression, or the grammar. Generated JSON may contain whitespace.

    Raises:
        OptionError: the type is unknown, or only one of type and data is given.
    """
    if type and type not in _TYPES:
        raise OptionError(
            f"Unsupported guidance type: {type!r:.80}",
            "only json_schema, regex, and lark_grammar are supported",
            did_you_mean(type, _TYPES, "use one of these types"),
        )
    if bool(type) != bool(data):
        raise OptionError(
            "Guidance type and data must be provided together.",
            f"type = {type!r:.40}, data = {data!r:.40}",
            "pass both, or two empty strings",
        )
    if not type:
        return None
    option = _TYPES[type]
    read = {"json_schema": schema_text, "regex": expression}.get(option, source_text)
    text = read(type, data)
    return Grammar(option, text or "", blanks=True)
