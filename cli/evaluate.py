"""`genai eval`: how well a model does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from . import evaluate_diff, evaluate_text
from . import options as opt
from .flag_groups import flag_groups
from .terminal import emit, say

app = typer.Typer(help="Measure quality.", no_args_is_help=True)
app.command()(evaluate_text.ppl)
app.command()(evaluate_text.kld)
app.command()(evaluate_diff.diff)


@app.callback()
def root() -> None:
    """Measure quality."""


@app.command()
@flag_groups
def tasks(
    model: opt.ModelArgument = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "-f", "--file", help="Questions as JSON lines [default: the bundled model's].", show_default=False
        ),
    ] = None,
    batch: Annotated[int, typer.Option("-b", "--batch", min=1, help="Questions answered together.")] = 16,
    show_wrong: Annotated[int, typer.Option(help="Wrong answers to show per task.", min=0)] = 0,
    *,
    flags: opt.ModelFlags,
    as_json: opt.AsJson = False,
) -> None:
    """Ask held-out questions, greedily, and report the share of right answers per task."""
    from genai.bundled import bundled_tasks
    from genai.evaluation.tasks import evaluate, read_questions, summary

    questions = read_questions(file or bundled_tasks())
    loaded = flags.load(model)
    outcomes = evaluate(loaded, questions, batch_size=batch)
    table = summary(outcomes)
    if as_json:
        emit(json.dumps(table), "\n")
    else:
        for name, row in table.items():
            emit(f"{name:<16} {row['right']:>5} / {row['asked']:<5} {100 * row['accuracy']:6.1f} %", "\n")
    for name in table if show_wrong else ():
        for outcome in [o for o in outcomes if o.question.task == name and not o.right][:show_wrong]:
            asked, expected = outcome.question.messages[-1]["content"], outcome.question.answer
            say(f"{name}: {asked!r} -> {outcome.reply!r}, expected {expected!r}")
