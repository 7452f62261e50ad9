"""A batch run, which reads a file of requests and writes a file of responses."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Unpack

from ...common.html_parts import figures as html_figures, folded, table
from ...common.progress import task
from ...common.renamed import renamed_arguments
from ...engine.sampling.params import SamplingOptions
from ...errors import GenaiError, InputError, OptionError
from ..llm import LLM
from ..mapping import DEFAULT_WINDOW, Answer, MapFigures
from ..request_options import PROMPT_OPTIONS, LineOptions
from .custom_ids import SeenIds, check_custom_ids
from .journal import Journal, LineId, digest
from .lines import Line, Lines
from .openai_format import InnerTokens, ResponseWriter
from .requests import PromptFormat
from .settings import ModelSettings, settings_of
from .tables import check_batch_output, is_table as is_table_name, journal_path, write_table

if TYPE_CHECKING:
    from ...text.tokenizer import Tokenizer

BEGINNINGS = ("new", "resume", "retry", "force")
# The maximum number of replies and errors in the report, and the maximum number of characters in each.
_MOST_SHOWN, _MOST_TEXT = 20, 1000
_MOST_MOMENTS = 240


@dataclass(frozen=True)
class ReportedAnswer:
    """A reply or an error in the report."""

    number: int
    custom_id: str
    text: str


def answers_table(answers: Iterable[ReportedAnswer]) -> str:
    """Return replies or errors as an HTML table."""
    return table(("line", "id", "text"), ((one.number, one.custom_id, one.text) for one in answers))


@dataclass
class BatchReport:
    """The results of a run.

    Attributes:
        input: name of the input.
        output: the output file.
        model: name of the model.
        kept: number of lines that the output already had.
        kept_failed: number of those lines that have an error.
        cut: True if the output ended with an unfinished line, which was cut off.
        reordered: True if the lines were written in another order than the input's, and were sorted at the end.
        figures: figures of this run.
        finished: number of replies per finish reason.
        errors: number of failed lines per class of error.
        lengths: histogram of the number of tokens per reply; the keys are the exponents of the next power of two.
        answers: the first replies.
        failures: the first errors.
        moments: figures at equal intervals.
        other_models: models named by lines that differ from the model of this run.
    """

    input: str
    output: Path
    model: str
    kept: int = 0
    kept_failed: int = 0
    cut: bool = False
    reordered: bool = False
    figures: MapFigures = field(default_factory=MapFigures)
    finished: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    lengths: Counter[int] = field(default_factory=Counter)
    answers: list[ReportedAnswer] = field(default_factory=list)
    failures: list[ReportedAnswer] = field(default_factory=list)
    moments: list[MapFigures] = field(default_factory=list)
    other_models: set[str] = field(default_factory=set)

    def note(self, line: Line, custom_id: str, answer: Answer[Any]) -> None:
        """Add an answer to the report."""
        if answer.error is not None:
            self.errors[type(answer.error).__name__] += 1
            reported, text = self.failures, answer.error.what
        else:
            self.finished.update(completion.finish_reason for completion in answer.completions)
            self.lengths.update(
                (len(completion.token_ids) - 1).bit_length()
                for completion in answer.completions
                if completion.token_ids
            )
            reported, text = self.answers, answer.text
        if len(reported) < _MOST_SHOWN:
            reported.append(ReportedAnswer(line.number, custom_id[:_MOST_TEXT], text[:_MOST_TEXT]))

    def summary(self) -> list[tuple[str, object]]:
        """Return the main figures as pairs of name and value."""
        done = self.figures
        seconds = max(done.seconds, 1e-9)
        cached = done.cached_tokens / max(done.prompt_tokens, 1)
        ends = ", ".join(f"{count:,} {reason}" for reason, count in self.finished.most_common())
        return [
            ("output", self.output),
            ("lines in this run", f"{done.done:,}, of which {done.failed:,} failed"),
            ("lines from earlier runs", f"{self.kept:,}"),
            ("time", f"{done.seconds:,.1f} s, {done.done / seconds:,.1f} lines per second"),
            ("prompt tokens", f"{done.prompt_tokens:,}, {done.prompt_tokens / seconds:,.1f} per second"),
            ("from the prefix cache", f"{done.cached_tokens:,}, {cached:.0%} of the prompt tokens"),
            ("generated tokens", f"{done.generated_tokens:,}, {done.generated_tokens / seconds:,.1f} per second"),
            ("finish reasons", ends or "none"),
        ]

    def _repr_html_(self) -> str:
        """Return the figures, the first errors and the first replies for a notebook."""
        parts = [html_figures(self.summary())]
        for name, answers in (("First errors", self.failures), ("First replies", self.answers)):
            parts += [folded(f"{name} ({len(answers)})", answers_table(answers))] if answers else []
        return "".join(parts)

    def note_moment(self, figures: MapFigures) -> None:
        """Record the current figures. In a long run, the intervals grow."""
        self.figures = figures
        apart = self.moments[1].seconds - self.moments[0].seconds if len(self.moments) > 1 else 0.0
        if not self.moments or figures.seconds - self.moments[-1].seconds >= apart * 0.999:
            self.moments.append(figures)
        if len(self.moments) >= _MOST_MOMENTS:
            self.moments = self.moments[::2]


@dataclass(frozen=True)
class BatchProgress:
    """The progress of a run.

    Attributes:
        done: bytes or rows of the input that this run has answered.
        total: bytes or rows that this run must answer; None if the number is unknown.
        figures: figures of this run.
    """

    done: int
    total: int | None
    figures: MapFigures


class SupportsMap(Protocol):
    """The interface that a batch run needs from a cluster. An LLM has the same, except `settings`."""

    @property
    def model(self) -> Any:
        """The model, with its `folder`."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model."""

    def settings(self) -> ModelSettings:
        """Return everything about the model that the tokens of a reply depend on."""

    def params(self, **options: Unpack[SamplingOptions]) -> object:
        """See LLM.params."""

    def map(
        self,
        items: Iterable[Any],
        ask: Callable[[Any], Any],
        *,
        in_order: bool,
        window: int,
        progress: Callable[[MapFigures], object],
        **options: Unpack[LineOptions],
    ) -> Iterator[Answer[Any]]:
        """See LLM.map."""


@dataclass(frozen=True)
class _BatchLine:
    """A line, as an item of LLM.map."""

    line: Line
    custom_id: str
    item: Mapping[str, Any] | None
    error: GenaiError | None = None


@renamed_arguments(asking="prompt_format")
def run_batch(
    llm: LLM | SupportsMap,
    lines: Lines,
    output: Path,
    prompt_format: PromptFormat | None = None,
    *,
    begin: str = "new",
    in_order: bool = False,
    window: int = DEFAULT_WINDOW,
    progress: Callable[[BatchProgress], object] | None = None,
    **options: Unpack[LineOptions],
) -> BatchReport:
    """Answer every line of an input exactly once, even if earlier runs with the same output were killed.

    Args:
        llm: the LLM, or a Cluster.
        lines: the input; see open_lines.
        output: the file of responses. Its ending determines the format: one JSON object per line, in OpenAI's batch
            format (.jsonl, .ndjson, .json, or no ending), or a table (.csv, .tsv, .parquet). A table is written at the
            end of the run, in the order of the input. Until then, and for later runs that resume this run, the
            responses are in a journal beside it, whose name is the table's name and ".jsonl".
        prompt_format: the rules for converting lines to prompts.
        begin: handling of an existing output. "new" refuses it, "resume" keeps its lines, "retry" keeps its lines
            without an error, and "force" keeps no lines.
        in_order: True to sort the output by the lines of the input at the end of the run. Until then, and with False,
            responses are in the order in which they finish, so that each one is stored as soon as it is finished.
        window: number of lines to read ahead.
        progress: called ten times per second.
        options: fields of SamplingParams, add_special_tokens and literal; the options in a line override them.

    Raises:
        InputError: the input cannot be read, or it changes; two lines of a file have the same custom_id; or the output
            exists, is not the output of a batch, or cannot be written.
        OptionError, ContextOverflowError: the options would be invalid for every line, or the output's ending is
            unknown.
        MissingPackageError: the output is a Parquet file, but pyarrow is not installed.
        StateError: another process writes to the output, or the LLM is closed.
    """
    prompt_format = prompt_format or PromptFormat()
    if begin not in BEGINNINGS:
        raise OptionError(f"begin = {begin!r}", f"allowed: {', '.join(BEGINNINGS)}", "use one of these values")
    check_batch_output(output, begin)
    prompt_format.check_columns(lines)
    check_custom_ids(lines, prompt_format)
    sampling: dict[str, Any] = {name: value for name, value in options.items() if name not in PROMPT_OPTIONS}
    llm.params(**sampling)
    settings = _settings(llm, prompt_format, options)
    if loaded := getattr(llm, "adapters", None):  # a cluster has no adapters
        prompt_format = replace(prompt_format, adapter=loaded.pin(prompt_format.adapter))
    report = BatchReport(lines.name, output, llm.model.folder.name)
    stored, is_table = journal_path(output), is_table_name(output)
    with Journal(stored, settings, lines.total if lines.total is not None else 2**60, begin) as journal:
        _check_fits(journal, lines)
        report.kept, report.kept_failed = journal.answered.count, journal.answered.failed
        report.cut = journal.was_cut
        run = _BatchRun(llm, lines, journal, prompt_format, report, settings)
        for answer in llm.map(
            run.pending_lines(),
            _item,
            in_order=False,  # a finished answer that waits for its turn would be lost if this process is killed
            window=window,
            progress=run.progress_callback(progress),
            **options,
        ):
            run.write(answer)
        if (in_order or is_table) and not journal.answered.in_order:
            journal.put_in_order()
            report.reordered = True
        if is_table:
            journal.sync()
            with task(f"Writing {output.name}"):
                write_table(stored, output)
    return report


def _settings(llm: LLM | SupportsMap, prompt_format: PromptFormat, options: Mapping[str, Any]) -> int:
    """Return a digest of everything, except the lines, that the tokens of the replies depend on."""
    inputs: dict[str, Any] = {
        "model": astuple(settings_of(llm) if isinstance(llm, LLM) else llm.settings()),
        "format": repr(prompt_format),
        "options": sorted((k, repr(v)) for k, v in options.items()),
    }
    if loaded := getattr(llm, "adapters", None):
        # Adapters are identified by their contents, because a name may refer to another adapter in the next run.
        inputs["adapters"] = {name: loaded.info(name)["key"] for name in loaded.names}
    return digest(json.dumps(inputs, sort_keys=True).encode(), 4)


def _check_fits(journal: Journal, lines: Lines) -> None:
    """Raise an error if the output answers lines that are not in the input."""
    if not journal.answered.count:
        return
    if not lines.can_be_read_again:
        raise InputError(
            f"{journal.path}: the output cannot be resumed with {lines.name} as the input",
            "the input must be read twice in order to find the lines that are already finished",
            "pass the input as a file",
        )
    if not journal.answered.fits(iter(lines)):
        raise journal.of_another_input()


def _item(line: _BatchLine) -> Mapping[str, Any]:
    if line.error is not None:
        raise line.error
    return line.item or {}


class _BatchRun:
    """A single run, which connects the input to the journal."""

    def __init__(
        self,
        llm: LLM | SupportsMap,
        lines: Lines,
        journal: Journal,
        prompt_format: PromptFormat,
        report: BatchReport,
        settings: int,
    ) -> None:
        self._lines, self._journal, self._prompt_format, self._report = lines, journal, prompt_format, report
        self._writer = ResponseWriter(report.model, InnerTokens(llm.tokenizer))
        self._settings = settings
        self._done_size = self._kept_size = 0
        self._seen = SeenIds() if not lines.can_be_read_again else None

    def pending_lines(self) -> Iterator[_BatchLine]:
        """Yield the lines that are not answered yet."""
        for line in self._lines:
            if line.number in self._journal.answered:
                self._kept_size += line.size
            else:
                yield self._batch_line(line)

    def _batch_line(self, line: Line) -> _BatchLine:
        custom_id = f"line-{line.number}"
        try:
            fields = self._lines.fields(line)
            custom_id = self._prompt_format.custom_id(fields, line.number)
            if self._seen is not None:
                self._seen.add(custom_id)
            item, model = self._prompt_format.item(
                fields, are_cells=self._lines.are_cells, is_table=self._lines.is_table
            )
        except GenaiError as error:
            return _BatchLine(line, custom_id, None, error)
        if model and model != self._report.model and len(self._report.other_models) < _MOST_SHOWN:
            self._report.other_models.add(model[:_MOST_TEXT])
        return _BatchLine(line, custom_id, item)

    def write(self, answer: Answer[_BatchLine]) -> None:
        """Write an answer to the output."""
        line = answer.item.line
        id_ = LineId(self._settings, line.number, digest(line.content))
        self._journal.write(self._writer.line(str(id_), answer.item.custom_id, answer, int(time.time())))
        self._journal.answered.follow(line.number)
        self._done_size += line.size
        self._report.note(line, answer.item.custom_id, answer)

    def progress_callback(self, progress: Callable[[BatchProgress], object] | None) -> Callable[[MapFigures], None]:
        """Return a progress callback for LLM.map."""

        def tell(figures: MapFigures) -> None:
            self._journal.sync(1.0)
            self._report.note_moment(figures)
            if progress is not None:
                total = self._lines.total
                progress(BatchProgress(self._done_size, None if total is None else total - self._kept_size, figures))

        return tell
