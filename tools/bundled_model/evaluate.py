"""Measure the held-out accuracy of the float32 model and of the exported folder; write both into the model card.

float32 is the PyTorch model of the float checkpoint. INT4 is the shipped folder, run by this toolkit.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from .checkpoint import CHECKPOINT, load_checkpoint
from .genai_replies import genai_replies
from .held_out import accuracy_by_task, is_right, read_questions
from .torch_replies import torch_replies

FOLDER = Path("configs/models/pebble")
QUESTIONS = Path("configs/tasks/pebble.jsonl")
TABLE_START, TABLE_END = "<!-- accuracy: written by tools/bundled_model/evaluate.py -->", "<!-- end of accuracy -->"


def measure(checkpoint: Path, folder: Path, questions_file: Path) -> dict[str, dict[str, float]]:
    """Return accuracies in per cent: {"fp32": {task: ...}, "rounded": {...}, "int4": {...}}, each also with "all".

    "rounded" is the PyTorch model with all weights rounded as in the folder, but with float32 activations.
    """
    questions = read_questions(questions_file)
    model, tokenizer = load_checkpoint(checkpoint)
    replies = {"fp32": torch_replies(model, tokenizer, questions)}
    model.round_weights()
    replies["rounded"] = torch_replies(model, tokenizer, questions)
    replies["int4"] = genai_replies(folder, questions)
    for question, reply in zip(questions, replies["int4"], strict=True):
        if not is_right(question, reply):
            print(
                "wrong:", question["task"], repr(question["messages"][-1]["content"]), question["answer"], repr(reply)
            )
    return {name: _with_total(accuracy_by_task(questions, texts), questions) for name, texts in replies.items()}


def _with_total(scores: dict[str, float], questions: list[dict[str, Any]]) -> dict[str, float]:
    counts = {task: sum(question["task"] == task for question in questions) for task in scores}
    total = sum(scores[task] * counts[task] for task in scores) / len(questions)
    return {task: round(score, 1) for task, score in (scores | {"all": total}).items()}


def table(scores: dict[str, dict[str, float]], questions_file: Path) -> str:
    """Return a Markdown table of the float32 and INT4 columns."""
    tasks = [question["task"] for question in read_questions(questions_file)]
    lines = ["| task | questions | fp32 | INT4 |", "| --- | ---: | ---: | ---: |"]
    for task, fp32 in scores["fp32"].items():
        count = len(tasks) if task == "all" else tasks.count(task)
        lines.append(f"| {task} | {count} | {fp32:.1f} | {scores['int4'][task]:.1f} |")
    return "\n".join(lines)


def update_card(card: Path, text: str) -> None:
    """Write the table between the card's two markers."""
    before, rest = card.read_text(encoding="utf-8").split(TABLE_START)
    after = rest.split(TABLE_END)[1]
    card.write_text(f"{before}{TABLE_START}\n{text}\n{TABLE_END}{after}", encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bundled_model.evaluate", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--questions", type=Path, default=QUESTIONS)
    parser.add_argument("--card", type=Path, default=FOLDER / "MODEL_CARD.md", help="model card to write to")
    parser.add_argument("--out", type=Path, default=Path("runs/pebble/accuracy.json"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(2)
    scores = measure(options.checkpoint, options.folder, options.questions)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(scores, indent=2) + "\n")
    update_card(options.card, table(scores, options.questions))
    print(table(scores, options.questions))


if __name__ == "__main__":
    main()
