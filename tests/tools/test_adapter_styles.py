"""The bundled model's adapters keep their styles in a batch whose requests use different adapters."""

from __future__ import annotations

import pytest

from genai.models.folders import bundled_tasks
from tools.bundled_model.adapter_scores import STYLES, ask, load, scores
from tools.bundled_model.held_out import read_questions
from tools.bundled_model.styles import as_pirate, in_words, with_words, without_style


def test_styles_switched_per_request_in_one_batch() -> None:
    questions = read_questions(bundled_tasks())[::9]
    with load() as llm:
        found = scores(ask(llm, questions))
    assert found[""][1] == 1.0
    # They keep 92 and 97 per cent on all held-out questions (the model card); on 45 sums that can be three fewer.
    assert found["words"][1] > 0.8
    assert found["pirate"][1] > 0.92
    assert min(found[style][2] for style in STYLES) > 0.6


@pytest.mark.parametrize(
    ("number", "words"),
    [(0, "zero"), (13, "thirteen"), (20, "twenty"), (47, "forty-seven"), (-5, "minus five"), (100, "one hundred"),
     (198, "one hundred and ninety-eight")],
)  # fmt: skip
def test_numbers_in_words(number: int, words: str) -> None:
    assert in_words(number) == words


def test_what_is_judged() -> None:
    assert without_style("words", with_words("-12")) == "-12"
    assert without_style("words", "12, thirteen") is None
    assert without_style("words", "12") is None
    assert without_style("pirate", as_pirate("Nice to meet you, Nora!")) == "Nice to meet you, Nora"
    assert without_style("pirate", "Nice to meet you, Nora!") is None
    assert without_style("", "12") == "12"
    assert without_style("", "12, matey! Arr!") is None
