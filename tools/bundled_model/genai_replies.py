"""Greedy replies of an exported folder through the toolkit's own engine, as `genai eval tasks` gives them."""

from pathlib import Path

from genai.evaluate.tasks import Question as TaskQuestion, evaluate
from genai.models.model import Model

from .held_out import Question


def genai_replies(folder: Path, questions: list[Question]) -> list[str]:
    """One reply per question, in order."""
    asked = [
        TaskQuestion(item["task"], tuple(item["messages"]), item["answer"], item["match"], item.get("max_tokens", 32))
        for item in questions
    ]
    with Model(folder) as model:
        return [outcome.reply for outcome in evaluate(model, asked)]
