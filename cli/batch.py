"""`genai batch`: turns a file of requests into a file of replies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from genai.common.progress import quietly, task
from genai.errors import OptionError

from . import options as opt
from .options import sampling_flags
from .template_args import TemplateArgs, check_template_args, read_template_args
from .terminal import need_chat_template, say

if TYPE_CHECKING:
    from genai.llm.batch.cluster import Cluster
    from genai.llm.batch.run import BatchProgress, BatchReport
    from genai.llm.llm import LLM

_FOR_CHAT = "the model is for chat; to send each prompt as a message, add --chat"


@sampling_flags
@opt.flag_groups
def batch(
    input: Annotated[
        Path,
        typer.Argument(
            metavar="INPUT", help="JSONL, CSV, TSV, Parquet or text file (one prompt per line), or - for stdin."
        ),
    ],
    model: opt.ModelArgument = None,
    *,
    output: Annotated[
        Path,
        typer.Option("-o", "--output", help="File to write: .jsonl (OpenAI's batch format), .csv, .tsv or .parquet."),
    ],
    format: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="Input format: jsonl, text, csv, tsv or parquet [default: INPUT's extension; jsonl for stdin].",
        ),
    ] = None,
    template: Annotated[
        str | None, typer.Option("--template", help='Template for each prompt, such as "Summarise: {text}".')
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw", help="Wrap each prompt in a user message, except in lines that have a body [default: raw]."
        ),
    ] = None,
    template_args: TemplateArgs = None,
    special: opt.SpecialTokens = None,
    literal: opt.Literal = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an existing OUTPUT.")] = False,
    retry: Annotated[
        bool, typer.Option("--retry-errors", help="Continue an existing OUTPUT and retry the lines that failed.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing OUTPUT.")] = False,
    in_order: Annotated[
        bool, opt.output_option("--in-order", help="Sort OUTPUT by the lines of INPUT when all replies are finished.")
    ] = False,
    html: Annotated[
        Path | None, opt.output_option("--html", help="Write an HTML report of the run to this file.")
    ] = None,
    window: Annotated[int, typer.Option("--window", help="Number of lines to read ahead.", min=1)] = 1024,
    max_sequences: Annotated[
        int, opt.model_option("--max-sequences", help="Maximum number of replies generated concurrently.", min=1)
    ] = 32,
    ray: Annotated[
        str | None,
        typer.Option(
            "--ray", help="Distribute the lines over a Ray cluster: HOST:PORT, auto (discover) or local (this machine)."
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option("--ray-workers", help="Number of engines in the cluster [default: one per node].", min=1),
    ] = None,
    flags: opt.EngineFlags,
    sampling: dict[str, Any],
) -> None:
    """Process each line of a file exactly once, even after a crash. To resume an interrupted run, add --resume.

    A line is a request in OpenAI's batch format, or contains a prompt or messages and optional sampling parameters.
    With --template, a line contains the data for the template. If a line fails, its output line contains the reason.
    """
    from genai.llm.batch.custom_ids import check_custom_ids
    from genai.llm.batch.journal import check_output
    from genai.llm.batch.lines import TextLines, open_lines
    from genai.llm.batch.page import write_page
    from genai.llm.batch.requests import PromptFormat, PromptTemplate
    from genai.llm.batch.run import run_batch
    from genai.llm.batch.tables import check_batch_output, journal_path

    as_chat = bool(chat)
    model, flags = flags.with_adapter(model)
    begin = _beginning(resume=resume, retry=retry, force=force)
    opt.check_apart([("INPUT", input), ("--output", output), ("--html", html)])
    opt.check_apart([("INPUT", input), ("the journal of --output", journal_path(output)), ("--html", html)])
    check_batch_output(output, begin)  # before the model is loaded
    if html is not None:
        check_output(html, "force")
    variables = read_template_args(template_args)
    if variables and template is not None and not as_chat:
        raise OptionError(
            "--template-arg cannot be used with --template and without --chat",
            "the prompts are raw texts, which no chat template formats",
            "add --chat",
        )
    prompt_template = PromptTemplate(template) if template is not None else None
    asking = PromptFormat(prompt_template, as_chat, flags.adapter, variables)
    lines = open_lines(input, format)
    asking.check_columns(lines)
    with quietly(flags.quiet):
        check_custom_ids(lines, asking)  # before the model is loaded
    asked = {"add_special_tokens": special, "literal": literal}
    options = {**sampling, **{name: value for name, value in asked.items() if value is not None}}
    with _engine(model, ray, workers, flags, max_sequences) as llm:
        is_for_chat = bool(llm.tokenizer.chat_template)
        if as_chat:
            need_chat_template(llm)
        check_template_args(llm, variables)
        with quietly(flags.quiet), _Line() as line:
            try:
                report = run_batch(
                    llm, lines, output, asking, begin=begin, in_order=in_order, window=window, progress=line.show,
                    **options,
                )  # fmt: skip
            except KeyboardInterrupt:
                journal = journal_path(output)
                if journal.exists() and journal.stat().st_size:
                    so_far = f"{journal} contains the replies so far; to continue, run the command again with --resume"
                    flags.voice.say(so_far)
                raise
    if html is not None:
        with quietly(flags.quiet), task(f"Writing {html.name}"):
            write_page(report, html)
    _say(report, flags)
    if is_for_chat and not as_chat and report.figures.done:
        if report.figures.done > report.figures.failed and not report.figures.generated_tokens:
            flags.voice.say(f"the replies are empty: {_FOR_CHAT}")
        elif chat is None and (lines.is_table or isinstance(lines, TextLines)):
            flags.voice.say(f"the outputs continue the prompts as raw texts: {_FOR_CHAT}; --raw hides this line")
    if report.figures.failed or report.kept_failed:
        raise typer.Exit(1)


def _engine(
    model: Path | None, ray: str | None, workers: int | None, flags: opt.EngineFlags, max_sequences: int
) -> LLM | Cluster:
    """Return the object that generates the replies: a model in this process, or the engines of a Ray cluster."""
    if ray is None:
        if workers is not None:
            raise OptionError(
                "--ray-workers cannot be used without --ray",
                "--ray-workers sets the number of engines in a Ray cluster",
                "add --ray, or remove --ray-workers",
            )
        return flags.load_llm(model, max_sequences=max_sequences)
    from genai.llm.batch.cluster import Cluster

    if flags.lora:
        raise OptionError(
            "--lora cannot be used with --ray",
            "the engines of a Ray cluster cannot load adapters",
            "remove --ray, or merge the adapter into the model with `genai lora merge`",
        )
    folder = flags.folder_of(model)
    engine = {**flags.options, "context_size": flags.ctx_size, "quiet": True, "max_sequences": max_sequences}
    engine["speculation"] = flags.speculation()
    with task("Starting the engines of the Ray cluster"):
        return Cluster(folder, ray, workers=workers, **engine)


def _beginning(*, resume: bool, retry: bool, force: bool) -> str:
    names = [name for name, given in (("resume", resume), ("retry-errors", retry), ("force", force)) if given]
    if force and len(names) > 1:
        raise OptionError(
            f"--force cannot be used with --{names[0]}",
            "one overwrites OUTPUT, the other continues it",
            "remove one of the two options",
        )
    return "force" if force else "retry" if retry else "resume" if resume else "new"


class _Line:
    """The live progress bar."""

    def __init__(self) -> None:
        self._line = task("Processing")
        self._recent: list[tuple[float, int, int]] = []

    def show(self, progress: BatchProgress) -> None:
        """Update the bar. Called ten times per second; rates are averages over the last 50 calls."""
        figures = progress.figures
        self._recent.append((figures.seconds, figures.prompt_tokens, figures.generated_tokens))
        del self._recent[:-50]
        since, read, written = self._recent[0]
        seconds = max(figures.seconds - since, 1e-9)
        failed = f", {figures.failed:,} failed" if figures.failed else ""
        counted = (
            f"{figures.done:,} lines{failed}; prompt {(figures.prompt_tokens - read) / seconds:,.0f} tok/s, "
            f"generated {(figures.generated_tokens - written) / seconds:,.0f} tok/s"
        )
        if progress.total is None:
            self._line.count(counted)
        else:
            self._line.show(progress.done, progress.total, counted)

    def __enter__(self) -> _Line:
        return self

    def __exit__(self, *_: object) -> None:
        self._line.close()


def _say(report: BatchReport, flags: opt.EngineFlags) -> None:
    """Print a summary of the run."""
    from genai.llm.batch.tables import journal_path

    figures, tell = report.figures, flags.voice.say
    seconds = max(figures.seconds, 1e-9)
    if report.cut:
        tell(f"{report.output}: the last line was incomplete and was processed again")
    if report.other_models:
        others = ", ".join(sorted(report.other_models)[:3])
        tell(f"lines with another model name ({others}) were processed with {report.model}")
    kept = f" · {report.kept:,} already done" if report.kept else ""
    tell(
        f"{report.output}: {_lines(figures.done)}{kept} · {figures.failed:,} failed · {figures.seconds:,.1f} s · "
        f"prompt {figures.prompt_tokens / seconds:,.0f} tok/s ({figures.cached_tokens:,} of "
        f"{figures.prompt_tokens:,} cached) · generated {figures.generated_tokens / seconds:,.0f} tok/s"
    )
    if figures.failed:
        most = ", ".join(f"{count:,} {kind}" for kind, count in report.errors.most_common(3))
        for first in report.failures[:1]:
            say(f"line {first.number} failed: {first.text}")  # also with --quiet, which hides no errors
        tell(f"failed: {most}; the output contains the reasons; to retry, run the command again with --retry-errors")
    if journal_path(report.output) != report.output:
        tell(f"{journal_path(report.output).name} has the responses in OpenAI's format; --resume continues from it")
    if report.kept_failed:
        failed = _lines(report.kept_failed)
        tell(f"{failed} failed in an earlier run; to retry them, run the command with --retry-errors")


def _lines(count: int) -> str:
    return f"{count:,} line{'s' * (count != 1)}"
