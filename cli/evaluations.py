"""`genai eval`: the group of the commands that measure quality."""

from __future__ import annotations

from .commands import App
from .evaluate import kld, ppl, tasks
from .evaluate_diff import diff

app = App(help="Measure quality: perplexity, KL divergence and accuracy on tasks.", no_args_is_help=True)
for _command in (ppl, kld, diff, tasks):
    app.command()(_command)
