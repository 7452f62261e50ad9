"""Pairs of a query and a document as prompts of a decoder, written by its chat template.

The form is that of sentence-transformers: the template receives a message with the role "query" and a message with the
role "document", after a system message with the instruction, if there is one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ChatTemplateError, GenaiError, UnsupportedModelError
from ..models.encoder import TokenSequence
from ..text.chat_template import ChatTemplates
from .tokens import TextEncoder

# Qwen3-Reranker as first published has the chat template of a chat model, which does not know the two roles. This is
# the prompt of its model card.
_QWEN3 = """\
<|im_start|>system
Judge whether the Document meets the requirements based on the Query and the Instruct provided. \
Note that the answer can only be "yes" or "no".<|im_end|>
<|im_start|>user
<Instruct>: {% if messages[0].role == "system" %}{{ messages[0].content }}{% else %}\
Given a web search query, retrieve relevant passages that answer the query{% endif %}
<Query>: {{ messages[-2].content }}
<Document>: {{ messages[-1].content }}<|im_end|>
<|im_start|>assistant
<think>

</think>

"""
_BUILT_IN = {"qwen3": _QWEN3}
# Two texts whose tokens differ from the first token to the last, so that equal tokens at the end of two prompts are
# written by the template.
_FIRST, _SECOND = "0", "1 2 3 4"
_Message = dict[str, Any]


class PairTemplate:
    """Converts pairs to the token ids of prompts.

    Args:
        folder: the folder with the chat template.
        text: the tokenizer.
        variables: variables of the template.
        model_type: the model's type, for models whose prompt is built in.

    Raises:
        UnsupportedModelError: the template does not write a query and a document.
    """

    def __init__(self, folder: Path, text: TextEncoder, variables: Mapping[str, Any], model_type: str) -> None:
        self._text, self._variables = text, dict(variables)
        self._begins_reply = bool(self._variables.pop("add_generation_prompt", False))
        self._templates = ChatTemplates(folder)
        self._template: str | None = None
        self._has_parts = False
        self._suffixes: dict[str, list[int]] = {}
        choices = [(None, False), (None, True), *([(_BUILT_IN[model_type], False)] if model_type in _BUILT_IN else [])]
        for self._template, self._has_parts in choices:
            if self._writes_pairs():
                return
        raise UnsupportedModelError(
            f"{folder}: the chat template does not write a query and a document",
            'a reranker that generates text needs a template for messages with the roles "query" and "document"',
            "add a chat_template.jinja that writes both, or use a reranker with a classification head",
        )

    def encode(
        self, query: str, documents: Sequence[str], instruction: str, *, truncate: bool = True
    ) -> list[TokenSequence]:
        """Return the tokens of a prompt for each document.

        A prompt that is too long is cut at its end, or at its beginning if the tokenizer's files say so. In the first
        case, its last tokens are replaced with the tokens that the template
        writes after the document, because the score is computed from the last token.

        Raises:
            InputError: a text is not valid Unicode, or a pair is too long and `truncate` is False.
            ChatTemplateError, TokenizerError: the template or the tokenizer fails.
        """
        first = self._text.bounded(query, "query")
        kept = [self._text.bounded(document, index) for index, document in enumerate(documents)]
        rendered = self._render([self._messages(first, document, instruction) for document in kept])
        limit, found = self._text.max_length, []
        for index, ids in enumerate(self._text.encode_plain(rendered)):
            self._text.check_length(len(ids), index, truncate)
            if len(ids) > limit and self._text.keeps_end:
                ids = ids[-limit:]
            elif len(ids) > limit:
                suffix = self._suffix(instruction)[-limit:]
                ids = [*ids[: limit - len(suffix)], *suffix]
            found.append(TokenSequence(np.array(ids, np.int64)))
        return found

    def _messages(self, query: str, document: str, instruction: str) -> list[_Message]:
        texts = [("system", instruction)] if instruction else []
        texts += [("query", query), ("document", document)]
        return [
            {"role": role, "content": [{"type": "text", "text": text}] if self._has_parts else text}
            for role, text in texts
        ]

    def _render(self, conversations: Sequence[list[_Message]]) -> list[str]:
        common = {
            "add_generation_prompt": self._begins_reply,
            "variables": self._variables,
            "template_str": self._template,
        }
        found = []
        for text in self._templates.render_all([{"messages": one, **common} for one in conversations]):
            if isinstance(text, GenaiError):
                raise text
            found.append(str(text))
        return found

    def _writes_pairs(self) -> bool:
        query, document = "a0query0b", "a0document0b"
        try:
            (text,) = self._render([self._messages(query, document, "")])
        except ChatTemplateError:
            return False
        return query in text and document in text

    def _suffix(self, instruction: str) -> list[int]:
        """Return the tokens that the template writes after the document."""
        if instruction not in self._suffixes:
            pairs = [self._messages(text, text, instruction) for text in (_FIRST, _SECOND)]
            first, second = self._text.encode_plain(self._render(pairs))
            count = 0
            while count < min(len(first), len(second)) and first[-1 - count] == second[-1 - count]:
                count += 1
            self._suffixes = {instruction: first[len(first) - count :]}
        return self._suffixes[instruction]
