"""`genai eval tasks`, `ppl` and `kld`: measure the quality of a model, or compare it with another model."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from genai.common.progress import Task, task
from genai.common.to_json import to_json
from genai.errors import InputError

from . import options as opt
from .model_names import model_path
from .terminal import PlotFile, emit, emit_figures, read_stdin, say, show_chart

if TYPE_CHECKING:
    from genai.evaluate import ScoringProgress
    from genai.models.model import Model

Bos = Annotated[bool | None, typer.Option("--bos/--no-bos", help="Prepend BOS [default: as the tokenizer does].")]
TextFile = Annotated[str, typer.Option("-f", "--file", help="UTF-8 text file, or - for stdin.")]
WindowOption = Annotated[
    int | None, typer.Option("-w", "--window", help="Tokens per window [default: the context size, at most 2048].")
]
StrideOption = Annotated[
    int | None, typer.Option(help="Tokens between window starts, at most a window [default: half a window].")
]
OtherArgument = Annotated[
    Path | None, typer.Argument(help="The other model, named as BASE [default: BASE].", parser=model_path)
]
OtherAccuracy = Annotated[str | None, opt.model_option(help="--accuracy for OTHER [default: as for BASE].")]
OtherKvType = Annotated[
    str | None, opt.model_option("--other-kv-type", help="--kv-type for OTHER [default: as for BASE].")
]
Side = tuple[Path | None, opt.ModelFlags]
"""A model folder (None = the bundled model) and the options that control its computation."""


@dataclass(frozen=True)
class WindowFlags:
    """Options for splitting text into windows."""

    window: WindowOption = None
    stride: StrideOption = None
    bos: Bos = None


@dataclass(frozen=True)
class PairFlags(opt.ModelFlags):
    """Options of two models to compare: the options of BASE, and the options of OTHER that differ."""

    other_accuracy: OtherAccuracy = None
    other_kv_type: OtherKvType = None

    def sides(self, base: Path | None, other: Path | None) -> tuple[Side, Side]:
        """Return both sides. OTHER uses the value of BASE for each option that it does not set."""
        from genai.models.kv_quality import MEASURED

        # These commands measure the loss from an int4 KV cache, so they must accept such a cache on either side.
        flags = opt.ModelFlags(self.threads, self.accuracy, self.kv_type, self.kv_type == MEASURED, self.device)
        accuracy = self.accuracy if self.other_accuracy is None else self.other_accuracy
        kv_type = self.kv_type if self.other_kv_type is None else self.other_kv_type
        changed: dict[str, Any] = {"accuracy": accuracy, "kv_type": kv_type, "kv_force": kv_type == MEASURED}
        return (base, flags), (other or base, dataclasses.replace(flags, **changed))


@opt.flag_groups
def tasks(
    model: opt.ModelArgument = None,
    file: Annotated[
        Path | None,
        typer.Option("-f", "--file", help="JSONL file of questions [default: the bundled model's questions]."),
    ] = None,
    batch: Annotated[int, typer.Option("-b", "--batch", min=1, help="Number of questions processed together.")] = 16,
    show_wrong: Annotated[int, typer.Option(help="Number of wrong replies to print per task.", min=0)] = 0,
    html: Annotated[Path | None, typer.Option(help="Write all questions and replies to this HTML file.")] = None,
    plot: PlotFile = None,
    *,
    flags: opt.ModelFlags,
    as_json: opt.AsJson = False,
) -> None:
    """Ask held-out questions, decode greedily, and report the accuracy per task with its 95% confidence interval."""
    from genai.common.plots import Chart
    from genai.evaluate.tasks import evaluate, read_questions, summary, task_page, write_page
    from genai.models.folders import bundled_tasks

    questions = read_questions(file or bundled_tasks())
    if html is not None:
        write_page(html, "")  # reports an unwritable path before the long evaluation
    with flags.load(model) as loaded, task("Evaluating") as line:
        outcomes = evaluate(loaded, questions, batch_size=batch, progress=line.show)
        model_name = loaded.folder.name
    table = summary(outcomes)
    if as_json:
        emit(json.dumps(table), "\n")
    else:
        for name, row in table.items():
            share = f"{100 * row['accuracy']:6.1f} % ± {100 * row['error']:.1f}"
            emit(f"{name:<16} {row['right']:>5} / {row['asked']:<5} {share}", "\n")
    if html is not None:
        write_page(html, task_page(f"{model_name}: {len(outcomes)} questions", table, outcomes))
    shares = {"right": [100 * row["accuracy"] for row in table.values()]}
    errors = {"right": [100 * row["error"] for row in table.values()]}
    show_chart(Chart(f"{model_name}: right answers", "task", list(table), shares, "%", errors), plot, as_json=as_json)
    for name in table if show_wrong else ():
        for outcome in [o for o in outcomes if o.question.task == name and not o.right][:show_wrong]:
            prompt, expected = outcome.question.messages[-1]["content"], outcome.question.answer
            say(f"{name}: {prompt!r} -> {outcome.reply!r}, expected {expected!r}")


@opt.flag_groups
def ppl(
    file: TextFile,
    model: opt.ModelArgument = None,
    *,
    cut: WindowFlags,
    ctx_shift: Annotated[
        bool,
        typer.Option("--ctx-shift", help="Score the text in one pass; drop half of the window whenever it is full."),
    ] = False,
    ctx_keep: Annotated[
        int | None,
        typer.Option("--ctx-keep", help="With --ctx-shift: number of initial tokens to keep [default: 32].", min=0),
    ] = None,
    flags: opt.ModelFlags,
    as_json: opt.AsJson = False,
) -> None:
    """Measure the perplexity of a text in sliding windows, and its bits per byte (independent of the tokenizer)."""
    opt.shift_of(ctx_shift, ctx_keep)
    text = _read(file)
    from genai.evaluate import perplexity

    with flags.load(model) as subject, task("Scoring") as line:
        keep = (32 if ctx_keep is None else ctx_keep) if ctx_shift else None
        result = perplexity(subject, text, **dataclasses.asdict(cut), ctx_shift=keep, progress=partial(_tell, line))
    emit_figures(to_json(result) if as_json else result.rows())


@opt.flag_groups
def kld(
    file: TextFile,
    base: opt.ModelArgument = None,
    other: OtherArgument = None,
    *,
    cut: WindowFlags,
    plot: PlotFile = None,
    flags: PairFlags,
    as_json: opt.AsJson = False,
) -> None:
    """Measure the KL divergence of OTHER from BASE at every token of a text. OTHER can be BASE with other options."""
    text = _read(file)
    from genai.common.plots import Chart
    from genai.evaluate import kl_divergence
    from genai.evaluate.divergence import keep_kv_quality
    from genai.models.kv_quality import MEASURED

    with loaded(*flags.sides(base, other)) as (reference, subject), task("Scoring") as line:
        result = kl_divergence(reference, subject, text, **dataclasses.asdict(cut), progress=partial(_tell, line))
        recorded = keep_kv_quality(reference, subject, result)
    emit_figures(to_json(result) if as_json else result.rows())
    if recorded is not None:
        say(f"{MEASURED} KV cache: {recorded}")
    names = {"median": result.median, "90 %": result.p90, "99 %": result.p99, "maximum": result.maximum}
    series = {"divergence": list(names.values())}
    show_chart(Chart("KL divergence", "quantile of tokens", list(names), series, "nats"), plot, as_json=as_json)


def _read(file: str) -> str:
    from genai.common.reading import read_text_file

    text = read_stdin() if file == "-" else read_text_file(Path(file))
    if not text:
        origin = "standard input" if file == "-" else file
        raise InputError(f"{origin} is empty", "there is no text to score", "pass a file that contains text")
    return text


def _tell(line: Task, progress: ScoringProgress) -> None:
    """Show the progress; at the end, print the total."""
    speed = f"{progress.tokens_per_second:.0f} tok/s"
    counted = f"{progress.scored}/{progress.total} tokens scored · {speed}"
    line.show(progress.scored, progress.total, counted)
    if progress.scored == progress.total:
        say(f"{counted} in {progress.seconds:.1f} s")


@contextmanager
def loaded(base: Side, other: Side) -> Iterator[tuple[Model, Model]]:
    """Load both models. If both sides are the same, load the model only once."""
    with ExitStack() as stack:
        first = stack.enter_context(base[1].load(base[0]))
        yield first, first if other == base else stack.enter_context(other[1].load(other[0]))
