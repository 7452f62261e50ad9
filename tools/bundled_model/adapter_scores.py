"""python -m tools.bundled_model.adapter_scores: measure how well the bundled model's adapters keep style and accuracy.

Every held-out question is asked up to three times in one batch: without an adapter, with `words` (sums only), and with
`pirate`. A reply keeps its style if it has the form of that style, and is correct if the rest of the reply is the
answer. The table is written into the model card.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from genai.llm.llm import LLM
from genai.models.folders import bundled_adapter, bundled_model, bundled_tasks

from ..arguments import positive
from .held_out import is_right, read_questions
from .styles import without_style

STYLES = ("", "words", "pirate")
SUMS = ("add", "subtract")
# The style may replace the final mark of an exact answer.
_MARKS = ".!"
_MORE_TOKENS = 16
START, END = "<!-- adapters: written by tools/bundled_model/adapter_scores.py -->", "<!-- end of adapters -->"


def ask(llm: LLM, questions: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], str, str]]:
    """Ask each question in each of its styles, all in one batch; return question, style and reply."""
    asked = [(q, style) for q in questions for style in STYLES if style != "words" or q["task"] in SUMS]
    prompts = [llm.render(q["messages"]) for q, _ in asked]
    params = [llm.params(max_tokens=q.get("max_tokens", 32) + _MORE_TOKENS, temperature=0.0) for q, _ in asked]
    completions = llm.generate(prompts, params, adapter=[style or None for _, style in asked])
    return [(q, style, c.text.strip()) for (q, style), c in zip(asked, completions, strict=True)]


def scores(replies: Sequence[tuple[dict[str, Any], str, str]]) -> dict[str, tuple[int, float, float]]:
    """Return for each style: questions asked, share of replies in the style, and share in the style and correct."""
    table = {}
    for style in STYLES:
        own = [(question, without_style(style, reply)) for question, of, reply in replies if of == style]
        kept = [(question, text) for question, text in own if text is not None]
        right = [_is_right(question, text) for question, text in kept]
        table[style] = len(own), len(kept) / len(own), sum(right) / len(own)
    return table


def _is_right(question: dict[str, Any], text: str) -> bool:
    return is_right({**question, "answer": question["answer"].rstrip(_MARKS)}, text.rstrip(_MARKS))


def table_of(found: dict[str, tuple[int, float, float]]) -> str:
    """Return the scores as a Markdown table."""
    lines = ["| adapter | questions | keeps its style | and is right |", "| --- | ---: | ---: | ---: |"]
    for style, (asked, kept, right) in found.items():
        lines.append(f"| {style or 'none'} | {asked} | {100 * kept:.1f} | {100 * right:.1f} |")
    return "\n".join(lines)


def load() -> LLM:
    """Load the bundled model with its adapters."""
    llm = LLM(bundled_model(), lora=True)
    for style in STYLES[1:]:
        llm.load_adapter(bundled_adapter(style), style)
    return llm


def main() -> None:
    """Measure, print the table, and write it into the model card."""
    parser = argparse.ArgumentParser(prog="python -m tools.bundled_model.adapter_scores", description=__doc__)
    parser.add_argument("--every", type=positive, default=1, help="ask only every n-th question")
    parser.add_argument("--card", type=Path, help="model card to write the table into")
    options = parser.parse_args()
    with load() as llm:
        text = table_of(scores(ask(llm, read_questions(bundled_tasks())[:: options.every])))
    print(text)
    if options.card:
        before, rest = options.card.read_text(encoding="utf-8").split(START)
        after = rest.split(END)[1]
        options.card.write_text(f"{before}{START}\n{text}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
