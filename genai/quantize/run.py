"""Quantisation of a model: from its folder to a folder with a report."""

from __future__ import annotations

import errno
import hashlib
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from genai.quant.methods import METHODS

from ..common.cores import default_threads
from ..common.memory_limits import format_bytes
from ..common.reading import read_text_file
from ..convert.folder import require_absent, unfinished_folder
from ..errors import InputError, ModelFolderError, OptionError, UnsupportedModelError
from ..text.tokenizer import Tokenizer
from .allocation import Candidate, Candidates
from .assemble import write_folder
from .calibration import CalibrationText, read_text, written_text
from .choices import TABLE_FORMAT, FormatChoice
from .costs import EVAL_SAMPLES, costs_text
from .matrix_quantizer import MatrixQuantizer
from .options import QuantizeOptions
from .quality import Evaluation, Quality
from .report import NAME as REPORT, MatrixRow, Point, Report
from .sensitivity import from_report, measure_candidates
from .sites import Site
from .source import FloatGraph, FloatModel
from .streaming import Override, StreamedDecoder
from .target_search import TargetSearch
from .targets import beside_bytes, candidate_choices, choose, curve, sensitivity_table
from .workspace import FinishedMatrices, workspace_folder

# Increase this number when the same options produce different bytes.
_VERSION = 3
# The same for runs with a divergence target, whose rounds depend on the search.
_SEARCH_VERSION = 2
# If one text is used for calibration and evaluation, one in this number of sequences is held out for evaluation.
_HELD_OUT = 8
# Maximum number of attempts to meet a divergence target.
_MOST_ROUNDS = 8
# Number of tokens for measuring the candidates' divergences.
_SENSITIVITY_TOKENS = 2048
# Maximum number of values on disk, in widths of the residual stream: two between stages, two for the float model, and
# two that are being written.
_WIDTHS_ON_DISK = 6
# Upper bound for the size of a report with one line per matrix.
_REPORT_BYTES = 1 << 20
# Reference points on the curve: bits and block sizes, rounded to nearest.
_CURVE = ((4, 128), (4, 32), (8, 32))

# Called with the phase, the amount done, and the total amount.
Progress = Callable[[str, float, float], None]
# The candidate of each matrix, by the matrix's name.
Allocation = dict[str, Candidate]


def quantize_model(
    source: str | Path,
    output: str | Path,
    options: QuantizeOptions | None = None,
    *,
    progress: Progress = lambda phase, done, total: None,
    command: str = "",
    plain_roundings: bool = True,
) -> Report:
    """Quantise a model's matrices, and write a model folder that includes a report.

    Only one matrix is in memory at a time, and, while texts pass through the decoder, one stage of the decoder.
    Finished matrices are kept in a hidden folder next to the output until all matrices are finished. If the same
    command is run again after an interruption, it resumes with the unfinished matrices and produces the same bytes.

    Args:
        source: a Hugging Face checkpoint folder, or a decoder folder in floats.
        output: the folder to create. Its parent must exist, but the folder itself must not.
        options: None means the defaults.
        progress: called with the phase, the amount done, and the total amount.
        command: command line to show in the report.
        plain_roundings: False to leave the three round-to-nearest models, which `report` measures for the curve, out.

    Raises:
        ModelFolderError: the output exists, or the disk is full.
        OptionError: a target cannot be met; or see QuantizeOptions.
        InputError: the model is already quantised or has NaN, a text is too short, or a recipe's rule matches nothing.
        UnsupportedModelError: the decoder cannot be quantised.
    """
    run = _QuantizeRun(Path(source), Path(output), options or QuantizeOptions(), progress, command, plain_roundings)
    try:
        return run.all()
    except OSError as error:
        raise unwritable(output, error) from error
    except ModelFolderError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in _NO_ROOM:
            raise unwritable(output, error.__cause__) from error
        raise


# System errors about insufficient space, and their causes.
_NO_ROOM = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the user's disk quota is exceeded",
    errno.EFBIG: "the file is larger than the limit of this process or file system (ulimit -f)",
}


def unwritable(output: str | Path, error: OSError) -> ModelFolderError:
    """Return the error for an output that the operating system refused to write."""
    fix = "free some space and run the same command again, which reuses finished matrices"
    if error.errno not in _NO_ROOM:
        fix = "check that the parent folder exists and is writable"
    why = _NO_ROOM.get(error.errno or 0, "the operating system refused to write")
    return ModelFolderError(f"cannot write {output}: {error.strerror or error}", why, fix)


@dataclass
class _QuantizeRun:
    source_path: Path
    output: Path
    options: QuantizeOptions
    progress: Progress
    command: str
    plain_roundings: bool = True

    def all(self) -> Report:
        if (self.output / f"{REPORT}.json").exists():  # an earlier run was killed after its last step
            shutil.rmtree(workspace_folder(self.output), ignore_errors=True)
        require_absent(self.output)
        if not self.output.parent.is_dir():
            raise ModelFolderError(
                f"{self.output.parent} is not a folder",
                f"{self.output.name} is created in this folder",
                "create the folder first",
            )
        self._seconds: dict[str, float] = {}
        with ExitStack() as stack:
            with self._phase("reading"):
                self._source = stack.enter_context(FloatModel(self.source_path, requantize=self.options.requantize))
                self._given, self._weights = self.options, sum(site.elements for site in self._source.all_sites)
                self.options = self._given.resolved(self._weights)
                self._check_default_method()
                recipe = self._given.read_recipe(self.options.choice)
                choices = recipe.choices(self._source.all_sites)
                self._apply_ends(choices)
                self._check_experts(choices)
                self._check_finite()
            self._require_room(choices)
            self._workspace = stack.enter_context(FinishedMatrices(self.output, self._plan(recipe.text)))
            self._remarks = [*self._source.remarks, *self._default_remarks, *recipe.remarks(self._source.all_sites)]
            if self._workspace.resumed:
                self._remarks.append(f"{self._workspace.resumed} matrices were finished by an interrupted run")
            self._decoder: StreamedDecoder | None = None
            needs_data = any(
                choice.bits and METHODS[choice.method].needs != "nothing" and not site.in_mtp_head
                for site, choice in choices.items()
            )
            self._remark_unused_calib(needs_data)
            if needs_data or self.options.evaluate or self.options.has_target:
                self._decoder = StreamedDecoder(self._source, self.options.threads)
            self._texts(needs_data)
            self._remark_costs()
            self._evaluation = None
            if self.options.evaluate or self.options.has_target:
                with self._phase("float model"):
                    assert self._decoder is not None and self._eval_text is not None
                    self._evaluation = Evaluation(self._decoder, self._eval_text)
            self._candidates: Candidates = {}
            self._beside = beside_bytes(self._source)
            if (head := self._quantize_head(choices)) is not None:
                self._beside += beside_bytes(head.source) + sum(
                    head.choices[site].nbytes(site) for site in head.source.sites
                )
            quantizer, quality = self._quantize_all({site: choices[site] for site in self._source.sites})
            report = self._write(quantizer, head, quality)
            self._workspace.remove()
        return report

    # Preparation

    def _check_default_method(self) -> None:
        """Use a method without data if the default method cannot run the decoder and nothing else needs to run it."""
        self._default_remarks: list[str] = []
        options = self.options
        if self._given.method is not None or options.evaluate or options.has_target:
            return
        if METHODS[options.method or ""].needs == "nothing":
            return
        try:
            StreamedDecoder(self._source, options.threads)
        except UnsupportedModelError as error:
            self.options = replace(options, method="search")
            self._default_remarks.append(f"the method is search, because {options.method} cannot be used: {error.what}")

    def _remark_costs(self) -> None:
        """Add a remark with the method that was selected by the model's size, and the times of the others."""
        if self._given.method is not None or not self.options.choice.bits or self.options.recipe is not None:
            return
        threads = self.options.threads or default_threads()
        samples, length = self.options.samples or 0, self._length
        times = costs_text(
            ("rtn", "search", "gptq", "distill"), self._weights, samples * length,
            generated=self.options.calib is None, threads=threads,
        )  # fmt: skip
        text = "no calibration text" if self._calib_text is None else f"calibration text: {self._calib_text.origin}"
        self._remarks.append(
            f"method {self.options.method}, the default for {self._weights / 1e6:,.1f} million weights; {text}. "
            f"Estimated times of methods on {threads} threads: {times}"
        )

    def _remark_unused_calib(self, needs_data: bool) -> None:
        """Add a remark if nothing needs the calibration text, such as in a comparison with `rtn`."""
        options = self.options
        measures = (options.evaluate or options.has_target) and options.eval_file is None
        if options.calib is None or needs_data or measures:
            return
        read_text_file(options.calib)  # raises if it cannot be read
        self._remarks.append(
            f"{options.calib} was not used: the method {options.method} needs no calibration text"
            if options.recipe is None
            else f"{options.calib} was not used: the recipe's methods need no calibration text"
        )

    def _apply_ends(self, choices: dict[Site, FormatChoice]) -> None:
        """Apply head_bits and embedding_bits; tables that are used only for look-ups have 8 bits by default."""
        head, embedding = self.options.head_bits, self.options.embedding_bits
        if self.options.recipe is None and embedding is None:
            for site in choices:
                if site.is_table and choices[site].bits:
                    choices[site] = choices[site].changed({**TABLE_FORMAT, "qdq": False})
        if head is None and embedding is None:
            return
        for site in choices:
            end_bits = {bits for bits, is_it in ((head, site.products), (embedding, site.lookups)) if is_it}
            if site.layer is not None or site.in_mtp_head or not (end_bits := end_bits - {None}):
                continue
            if len(end_bits) > 1:
                raise OptionError(
                    f"head_bits is {head}, but embedding_bits is {embedding}",
                    f"the head and the embedding of {self.source_path} are one matrix, {site.name}",
                    "set both options to the same bits, or set only one of them",
                )
            choices[site] = choices[site].changed({"bits": int(end_bits.pop() or 0)})

    def _check_experts(self, choices: Mapping[Site, FormatChoice]) -> None:
        """Raise OptionError if QMoE does not support the choices; it needs equal uniform blocks for both matrices."""
        sizes: dict[str, FormatChoice] = {}
        for site, choice in choices.items():
            if site.mixture is None:
                continue
            if not (choice.bits and choice.has_foreign_kernel(site)) or choice.qdq or not choice.block_size:
                raise OptionError(
                    f"the experts {site.base_name} cannot be quantised as {choice.label()}",
                    "QMoE supports only blocks of 2-bit, 4-bit or 8-bit values",
                    "set the bits to 2, 4 or 8; to change only the experts, use a recipe with a rule for them",
                )  # fmt: skip
            other = sizes.setdefault(site.mixture.output(0), choice)
            if (choice.block_size, choice.symmetric) != (other.block_size, other.symmetric):
                raise OptionError(
                    f"the experts {site.base_name} have blocks of {other.block_size} and of {choice.block_size}",
                    "both matrices of a mixture must have the same block size, and both or neither must have "
                    "zero points",
                    "use the same settings for both matrices",
                )

    def _check_finite(self) -> None:
        """Check all weights before the quantisation, which takes long, starts."""
        pairs = [(graph, site) for graph in self._graphs for site in graph.sites]
        for index, (graph, site) in enumerate(pairs):
            graph.check(site)
            graph.release(site.name)
            self.progress("Checking weights", index + 1, len(pairs))

    @property
    def _graphs(self) -> list[FloatGraph]:
        """The graphs of the decoder and of the MTP head."""
        return [self._source, *([] if self._source.head is None else [self._source.head])]

    def _require_room(self, choices: Mapping[Site, FormatChoice]) -> None:
        # All matrices are written twice, to the workspace and to the output, with the tokenizer's files and the report.
        other = sum(path.stat().st_size for path in self._source.folder.glob("*.json")) + _REPORT_BYTES
        needed = 2 * sum(choice.nbytes(site) for site, choice in choices.items()) + other
        needed += sum(map(beside_bytes, self._graphs))
        done = workspace_folder(self.output)  # of an interrupted run, which may be resumed
        needed -= sum(path.stat().st_size for path in done.glob("*.npy")) if done.is_dir() else 0
        if any(choice.bits and METHODS[choice.method].needs != "nothing" for choice in choices.values()):
            needed += self._most_tokens() * 4 * self._source.config.model.decoder.hidden_size * _WIDTHS_ON_DISK
        free = shutil.disk_usage(self.output.parent).free
        if free < needed:
            raise ModelFolderError(
                f"{self.output.parent} has {format_bytes(free)} free, but {format_bytes(needed)} is needed",
                "finished matrices and intermediate activations are stored until the output folder is complete",
                "free some space, or choose another output folder",
            )

    def _most_tokens(self) -> int:
        """Return an upper bound on the number of calibration tokens, including the chat template's tokens."""
        tokens, path = (self.options.samples or 0) * self._length, self.options.calib
        return tokens if path is None or not path.is_file() else min(tokens, 2 * path.stat().st_size)

    @property
    def _length(self) -> int:
        """The number of tokens per sequence."""
        return min(self.options.length or 0, self._source.config.model.context_length)

    def _plan(self, recipe: str) -> dict[str, Any]:
        """Return all settings and inputs that the result's bytes depend on."""
        plain = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(self.options).items()}
        for key in ("threads", "evaluate", "report"):
            plain.pop(key)
        if self.options.target_kld is None:  # the evaluation has no effect on the bytes
            plain["eval_samples"] = self._given.eval_samples or EVAL_SAMPLES
        plain["form"] = plain.pop("format")  # the earlier name, so that runs of earlier versions can be resumed
        files = [path for path in sorted(self.source_path.rglob("*")) if path.is_file()]
        stats = [
            (str(path.relative_to(self.source_path)), path.stat().st_size, path.stat().st_mtime_ns) for path in files
        ]
        paths = (self.options.calib, self.options.eval_file, self.options.sensitivity)
        files_read = [path for path in paths if path is not None and path.is_file()]
        texts = [hashlib.sha256(path.read_bytes()).hexdigest() for path in files_read]
        version = _VERSION if self.options.target_kld is None else f"{_VERSION}, {_SEARCH_VERSION}"
        return {"version": version, "options": plain, "files": stats, "texts": texts, "recipe": recipe}

    def _texts(self, needs_data: bool) -> None:
        """Set the texts for calibration and evaluation. If one file is used for both, they share no tokens."""
        self._calib_text: CalibrationText | None = None
        self._eval_text: CalibrationText | None = None
        options, decoder = self.options, self._decoder
        if decoder is None:
            return
        tokenizer = Tokenizer(self._source.folder)
        length = self._length
        if length < (self._given.length or 0):
            self._remarks.append(f"sequences have {length} tokens (the model's context length), not {options.length}")
        samples, eval_samples, eval_length = options.samples or 0, options.eval_samples or 0, self._eval_length
        columns = max(site.columns for site in self._source.sites)
        measures = options.evaluate or options.has_target

        def from_file(path: Path, count: int, least: int, length: int = length) -> CalibrationText:
            rng = np.random.Generator(np.random.Philox(key=options.seed))
            return read_text(
                path, tokenizer, count=count, length=length, least=least, vocab_size=decoder.vocab_size, rng=rng
            )

        def written(count: int, length: int, seed: int, phase: str) -> CalibrationText:
            return written_text(
                decoder, tokenizer, count=count, length=length, seed=seed,
                progress=lambda done, total: self.progress(phase, done, total),
            )  # fmt: skip

        with self._phase("texts"):
            if measures and options.eval_file is not None:
                self._eval_text = from_file(options.eval_file, eval_samples, 64, eval_length)
            if options.calib is not None:
                self._from_calib(from_file, needs_data=needs_data, measures=measures, columns=columns)
            elif needs_data:
                self._calib_text = written(samples, length, 2 * options.seed, "Generating calibration text")
            if measures and self._eval_text is None:
                self._eval_text = written(eval_samples, eval_length, 2 * options.seed + 1, "Generating evaluation text")

    @property
    def _eval_length(self) -> int:
        """The number of tokens per sequence of the evaluation."""
        return self._given.eval_length(self._length)

    def _from_calib(
        self, from_file: Callable[[Path, int, int], CalibrationText], *, needs_data: bool, measures: bool, columns: int
    ) -> None:
        """Read the calibration file, and hold out a part of it if there is no other text for the evaluation."""
        options, path = self.options, self.options.calib
        assert path is not None
        samples, eval_samples = options.samples or 0, options.eval_samples or 0
        holds_out = measures and self._eval_text is None
        whole = from_file(path, samples + eval_samples * holds_out, columns)
        held_out = min(eval_samples, max(1, len(whole.tokens) // _HELD_OUT)) if holds_out else 0
        if held_out == len(whole.tokens):
            raise InputError(
                f"{path} has only one sequence of {whole.tokens.shape[1]} tokens",
                "a part of the text must be held out for evaluation",
                "use a longer text, --eval-file FILE, or --no-eval",
            )
        if holds_out:
            self._eval_text = CalibrationText(
                whole.tokens[-held_out:, : self._eval_length],
                f"{held_out} sequences of {path}, held out from calibration",
            )
        if not needs_data:
            return
        self._calib_text = CalibrationText(whole.tokens[: len(whole.tokens) - held_out], whole.origin)
        if self._calib_text.tokens.size < samples * self._length:
            self._remarks.append(
                f"calibration used {self._calib_text.tokens.size} of {samples * self._length} requested tokens"
            )

    # Quantisation

    def _quantize_all(self, choices: dict[Site, FormatChoice]) -> tuple[MatrixQuantizer, Quality | None]:
        if not self.options.has_target:
            quantizer = self._quantize(choices, "")
            return quantizer, self._measure(quantizer)
        with self._phase("sensitivity"):
            self._candidates = self._costs()
        if self.options.target_kld is not None:
            return self._meet_divergence(self.options.target_kld)
        quantizer = self._quantize(self._sites(self._choose()), "0/")
        return quantizer, self._measure(quantizer)

    def _meet_divergence(self, target: float) -> tuple[MatrixQuantizer, Quality]:
        """Quantise and measure models of several sizes; return the smallest model that meets the target."""
        search, tried = TargetSearch(self._candidates, target), []
        allocation: Allocation | None = self._choose()
        for number in range(_MOST_ROUNDS):
            assert allocation is not None
            quantizer = self._quantize(self._sites(allocation), f"{number}/")
            quality = self._measure(quantizer)
            assert quality is not None
            tried.append((quantizer, quality))
            search.add(allocation, quality.kld)
            if (allocation := search.next()) is None:
                break
        return self._best(tried)

    def _choose(self) -> Allocation:
        return choose(self.options, self._candidates, beside=self._beside, weights=self._weights)

    def _sites(self, allocation: Allocation) -> dict[Site, FormatChoice]:
        """Return the choices of an allocation."""
        return {site: candidate_choices(self.options, site)[allocation[site.name].label] for site in self._source.sites}

    def _costs(self) -> Candidates:
        """Return all candidates of all matrices with their divergences."""
        choices = partial(candidate_choices, self.options)
        if self.options.sensitivity is not None:
            return from_report(self.options.sensitivity, self._source, choices)
        text = self._calib_text or self._eval_text  # avoid the text of the final evaluation if possible
        assert self._decoder is not None and text is not None
        count, done = len(self._source.sites), 0

        def tell() -> None:
            nonlocal done
            done += 1
            self.progress("Measuring sensitivity", done - 1, count)

        part = text.tokens[: max(1, _SENSITIVITY_TOKENS // text.tokens.shape[1])]
        evaluation = Evaluation(self._decoder, CalibrationText(part, text.origin))
        return measure_candidates(self._source, choices, evaluation, self._workspace, tell)

    def _best(self, tried: list[tuple[MatrixQuantizer, Quality]]) -> tuple[MatrixQuantizer, Quality]:
        """Return the smallest model that meets the target."""
        target = self.options.target_kld or 0.0
        reached = [pair for pair in tried if pair[1].kld <= target]
        if not reached:
            nearest = min(quality.kld for _, quality in tried)
            raise OptionError(
                f"target_kld is {target:g}", f"the smallest divergence reached is {nearest:.4g} nats per token",
                f"use --target-kld {nearest * 1.01:.3g} or more, or choose a more accurate --method",
            )  # fmt: skip
        return min(reached, key=lambda pair: sum(choice.nbytes(site) for site, choice in pair[0].choices.items()))

    def _quantize_head(self, choices: Mapping[Site, FormatChoice]) -> MatrixQuantizer | None:
        """Quantise the matrices that only the MTP head has, without data, because texts pass through the decoder."""
        if (graph := self._source.head) is None:
            return None
        quantizer = MatrixQuantizer(graph, {site: choices[site] for site in graph.sites}, self._workspace)
        with self._phase("MTP head"):
            quantizer.quantize_without_data()
        return quantizer

    def _quantize(self, choices: Mapping[Site, FormatChoice], prefix: str) -> MatrixQuantizer:
        total, done = sum(site.elements for site, choice in choices.items() if choice.bits), 0

        def tell(site: Site) -> None:
            nonlocal done
            done += site.elements
            self.progress("Quantising", done, total)

        quantizer = MatrixQuantizer(self._source, choices, self._workspace, tell, prefix=prefix)
        with self._phase("quantising"):
            if quantizer.needs_data:
                if self._decoder is None or self._calib_text is None:
                    raise OptionError(
                        "a selected method needs calibration data",
                        "no calibration text is available",
                        "use --calib FILE",
                    )
                quantizer.quantize_with_data(self._decoder, self._calib_text)
            else:
                quantizer.quantize_without_data()
        return quantizer

    def _measure(self, quantizer: MatrixQuantizer) -> Quality | None:
        if self._evaluation is None or self._decoder is None:
            return None
        count = len(self._decoder.stages)
        with self._phase("evaluation"):
            return self._evaluation.measure(
                quantizer.effective, lambda stage: self.progress("Evaluating", stage + 1, count)
            )

    # Output

    def _write(self, quantizer: MatrixQuantizer, head: MatrixQuantizer | None, quality: Quality | None) -> Report:
        with unfinished_folder(self.output) as folder:
            with self._phase("writing"):
                nbytes = write_folder(quantizer, folder, accuracy_level=self.options.accuracy_level, head=head)
            on_disk = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            report = self._report(quantizer, head, quality, nbytes, on_disk)
            report.write(folder)
            require_absent(self.output)
            folder.rename(self.output)
        return report

    def _report(
        self, quantizer: MatrixQuantizer, head: MatrixQuantizer | None, quality: Quality | None, nbytes: int,
        on_disk: int,
    ) -> Report:  # fmt: skip
        sensitivity = sensitivity_table(self._candidates)
        rows = [self._row(quantizer, site, sensitivity.get(site.name, {})) for site in self._source.sites]
        beside, weights = nbytes - sum(row.nbytes for row in rows), self._weights
        rows += [self._row(head, site, {}) for site in head.source.sites] if head is not None else []
        bits = nbytes * 8 / weights
        points = [] if quality is None else [Point("this output", bits, quality.kld, "this output")]
        if quality is not None and self._evaluation is not None and self.options.report and self.plain_roundings:
            with self._phase("curve"):
                points += self._curve_points(self._evaluation, beside, weights)
        points += [
            Point("", *pair, "predicted")
            for pair in (curve(self._candidates, beside=self._beside, weights=weights) if self._candidates else [])
        ]
        default = f"genai quantize {shlex.quote(str(self.source_path))} -o {shlex.quote(str(self.output))}"
        return Report(
            command=self.command or default,
            source=str(self.source_path),
            output=str(self.output),
            options={key: str(v) if isinstance(v, Path) else v for key, v in asdict(self.options).items()},
            weights=weights,
            nbytes=nbytes,
            folder_bytes=on_disk,
            bits_per_weight=bits,
            parts=_parts(rows, nbytes),
            readers=_readers(rows),
            calibration=None if self._calib_text is None else self._calib_text.origin,
            evaluation=None if quality is None or self._eval_text is None else self._eval_text.origin,
            quality=quality,
            matrices=rows,
            curve=points,
            seconds=self._seconds,
            peak_memory=_peak_memory(),
            remarks=self._remarks,
        )

    def _row(self, quantizer: MatrixQuantizer, site: Site, sensitivity: Mapping[str, float]) -> MatrixRow:
        choice, stored = quantizer.choices[site], quantizer.stored(site)
        notes = {} if stored is None else dict(stored.notes)
        nbytes = choice.nbytes(site)
        by = "onnxruntime" if choice.has_foreign_kernel(site) else "functions"
        return MatrixRow(
            site.base_name, site.part, site.layer, site.rows, site.columns, choice.label(),
            nbytes * 8 / site.elements, nbytes,
            notes.pop("weight_error", 0.0), notes.pop("output_error", None), sensitivity, notes,
            0.0 if stored is None else stored.seconds, by,
        )  # fmt: skip

    def _curve_points(self, evaluation: Evaluation, beside: int, weights: int) -> list[Point]:
        points = []
        for number, (bits, size) in enumerate(_CURVE):
            self.progress("Measuring reference points", number, len(_CURVE))
            choice = FormatChoice(bits=bits, block_size=size, method="rtn", half_scales=self.options.half_scales)
            nbytes = beside + sum(choice.nbytes(site) for site in self._source.sites)
            kld = evaluation.measure(self._rounded(choice)).kld
            points.append(Point(f"rtn {bits}/{size}", nbytes * 8 / weights, kld, "measured"))
        return points

    def _rounded(self, choice: FormatChoice) -> Override:
        def instead(site: Site) -> Any:
            weight = self._source.weight(site)
            return METHODS["rtn"].quantize(weight, choice.grid(site.columns), None).packed.dequantize()

        return instead

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start


def _readers(rows: list[MatrixRow]) -> tuple[str, ...]:
    """Return the runtimes that can run the model, and how each runtime runs it."""
    wide = [row for row in rows if row.computed_by == "functions"]
    if not wide:
        return ("this toolkit", "onnxruntime", "onnxruntime-genai")
    size = format_bytes(4 * sum(row.rows * row.columns for row in wide))
    how = f"through the model's functions, which expand {len(wide)} matrices to float32 ({size})"
    return ("this toolkit", f"onnxruntime and onnxruntime-genai {how}")


def _parts(rows: list[MatrixRow], nbytes: int) -> dict[str, dict[str, float]]:
    """Return weights, bytes and bits per weight by part, including a part for the rest of the file."""
    table: dict[str, dict[str, float]] = {}
    for row in rows:
        part = table.setdefault(row.part, {"weights": 0, "nbytes": 0})
        part["weights"] += row.rows * row.columns
        part["nbytes"] += row.nbytes
    for part in table.values():
        part["bits_per_weight"] = part["nbytes"] * 8 / part["weights"]
    weights = sum(part["weights"] for part in table.values())
    beside = nbytes - sum(part["nbytes"] for part in table.values())
    table["norms and tables"] = {"weights": 0, "nbytes": beside, "bits_per_weight": beside * 8 / weights}
    return table


def _peak_memory() -> int:
    """Return the peak memory of this process in bytes, or 0 if the system does not report it."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024
