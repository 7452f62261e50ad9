"""Greedy replies of an exported folder, computed by the toolkit's own engine, identical to `genai eval tasks`."""

from pathlib import Path

from genai.evaluate.tasks import Question as TaskQuestion, evaluate
from genai.models.model import Model

from .held_out import Question


def genai_replies(folder: Path, questions: list[Question]) -> list[str]:
    """Return one reply per question, in order."""
    asked = [
        TaskQuestion(item["task"], tuple(item["messages"]), item["answer"], item["match"], item.get("max_tokens", 32))
        for item in questions
    ]
    with Model(folder) as model:
        return [outcome.reply for outcome in evaluate(model, asked)]
