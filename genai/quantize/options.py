"""Options of quantisation."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path

from ..common.renamed import renamed_fields
from ..errors import OptionError, did_you_mean, kind_of
from . import costs
from .choices import UNIFORM, FormatChoice, Recipe, read_recipe
from .costs import default_method

TARGET_RUNTIMES = ("onnxruntime", "any")
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@renamed_fields(form="format")
@dataclass(frozen=True, kw_only=True)
class QuantizeOptions:
    """Options of `quantize`.

    Attributes:
        format, bits, block_size, symmetric, method, half_scales, qdq: format of every matrix for which nothing else is
            set; see FormatChoice. For method, None means the method that `costs.DEFAULT_METHODS` lists for the size of
            the model.
        head_bits, embedding_bits: bits of the head and of the token embedding. 0 means floats. None means the same as
            other matrices, except that an embedding that is not also the head has 8 bits unless a recipe or a target
            sets its bits. If the head and the embedding are one matrix, both options must have the same value.
        recipe: YAML file of choices by name patterns (docs/how-to/quantise.md).
        target_bits: bits per weight of the whole file. The matrices' bits are chosen to meet this target.
        target_size: size in bytes of the whole file. The matrices' bits are chosen to meet this target.
        target_runtime: "onnxruntime" to choose among the formats for which onnxruntime has kernels; "any" to choose
            among the most accurate formats of each size, for which onnxruntime runs the model's functions and stores
            the weights as float32.
        target_kld: maximum mean divergence in nats per token. The smallest model that meets this target is chosen.
        sensitivity: quantization_report.json of an earlier output of this model that was made for a target. The losses
            of candidates are read from it instead of being measured again.
        calib: calibration text for methods that need statistics; None means that the model generates the text.
        samples: number of calibration sequences. None means 128, or 32 if both the method and the text are the
            default.
        length: tokens per sequence, at most the context length. None means 512, or 256 if both the method and the text
            are the default.
        seed: seed for random choices.
        evaluate: True to measure perplexity and divergence.
        report: True for a full evaluation, and reference points in the report. By default, the evaluation compares
            about 500 tokens, which takes seconds.
        eval_file: text for the evaluation; None means a held-out part of `calib`, or, without `calib`, a text that the
            model generates with another seed.
        eval_samples: number of evaluation sequences. None means 16 with `report` or a divergence target, and otherwise
            4 of at most 128 tokens.
        accuracy_level: precision to which matmuls may round activations; see `genai build`.
        requantize: True to accept a model that is already quantised, and to use it as the float model.
        threads: number of threads; None means the number of physical cores.

    Raises:
        OptionError: a value is not supported, or options contradict each other.
    """

    format: str = UNIFORM
    bits: int | None = None
    block_size: int | None = None
    symmetric: bool = True
    method: str | None = None
    half_scales: bool = True
    qdq: bool = False
    head_bits: int | None = None
    embedding_bits: int | None = None
    recipe: Path | None = None
    target_bits: float | None = None
    target_size: int | None = None
    target_kld: float | None = None
    target_runtime: str = "onnxruntime"
    sensitivity: Path | None = None
    calib: Path | None = None
    samples: int | None = None
    length: int | None = None
    seed: int = 0
    evaluate: bool = True
    report: bool = False
    eval_file: Path | None = None
    eval_samples: int | None = None
    accuracy_level: int = 4
    requantize: bool = False
    threads: int | None = None

    def __post_init__(self) -> None:
        self.choice  # noqa: B018  # validates the fields
        for name in ("recipe", "sensitivity", "calib", "eval_file"):
            if (path := getattr(self, name)) is not None:
                if not isinstance(path, str | Path):
                    raise OptionError(
                        f"{name} is {kind_of(path)}", "the value must be a path", "pass the path of a file"
                    )
                object.__setattr__(self, name, Path(path))
        if self.threads is not None and not (type(self.threads) is int and self.threads >= 1):
            raise OptionError(
                f"threads = {self.threads!r}", "the number of threads must be an integer of at least 1",
                "omit threads to use the default",
            )  # fmt: skip
        if self.choice.bits == 0 and not (self.symmetric and self.half_scales):
            raise OptionError(
                f"{'half_scales' if self.symmetric else 'symmetric'} is off, but bits is 0",
                "floats have neither scales nor zero points",
                "omit the option, or set bits to another value",
            )
        for name in ("samples", "length", "eval_samples"):
            value = getattr(self, name)
            if value is not None and value < (2 if name == "length" else 1):
                raise OptionError(
                    f"{name} is {getattr(self, name)}", "the minimum is 1, or 2 for length", f"increase {name}"
                )
        if self.accuracy_level not in range(5):
            raise OptionError(
                f"accuracy_level is {self.accuracy_level}",
                "the level must be from 0 to 4",
                "set accuracy_level to 4 (int8 activations) or 1 (float32 activations)",
            )
        self._check_targets()
        if not self.evaluate and self.report:
            raise OptionError(
                "report is set, but evaluate is off", "report selects the full evaluation",
                "omit --report or --no-eval",
            )  # fmt: skip
        if not self.evaluate and self.eval_file is not None:
            raise OptionError(
                "eval_file is set, but evaluate is off",
                "eval_file has no effect without an evaluation",
                "omit --eval-file or --no-eval",
            )

    def _check_targets(self) -> None:
        targets = [name for name in ("target_bits", "target_size", "target_kld") if getattr(self, name) is not None]
        if len(targets) > 1:
            raise OptionError(
                f"{' and '.join(targets)} are both set", "only one target can be met", "set only one target"
            )
        if targets:
            value = getattr(self, targets[0])
            if not (math.isfinite(value) and value > 0):
                raise OptionError(
                    f"{targets[0]} is {value}",
                    "a target must be a finite number above 0",
                    "set the target to a positive number",
                )
            if self.recipe is not None:
                raise OptionError(
                    f"recipe and {targets[0]} are both set",
                    "both a recipe and a target choose the bits",
                    "omit the recipe or the target",
                )
        if self.target_runtime not in TARGET_RUNTIMES:
            raise OptionError(
                f"target_runtime is {self.target_runtime!r}", f"the runtime can be {' or '.join(TARGET_RUNTIMES)}",
                did_you_mean(self.target_runtime, TARGET_RUNTIMES, "choose one of these runtimes"),
            )  # fmt: skip
        if self.target_runtime != TARGET_RUNTIMES[0] and not targets:
            raise OptionError(
                f"target_runtime is {self.target_runtime!r}, but there is no target",
                "target_runtime selects the formats that can be used to meet a target",
                "omit target_runtime, or set --target-bits, --target-size or --target-kld",
            )
        if self.sensitivity is not None and not targets:
            raise OptionError(
                f"sensitivity is {self.sensitivity}, but there is no target",
                "sensitivity is used only to meet a target",
                "omit sensitivity, or set --target-bits, --target-size or --target-kld",
            )  # fmt: skip
        if targets and (self.format != UNIFORM or self.bits is not None or self.block_size is not None or self.qdq):
            raise OptionError(
                f"{targets[0]} is set together with a format, bits or a block size",
                "a target determines the format, the bits and the block size",
                "omit the target or these settings; a target can be combined with --method and --asymmetric",
            )  # fmt: skip

    @property
    def choice(self) -> FormatChoice:
        """The choice for every matrix for which nothing else is set."""
        given = {one.name: getattr(self, one.name) for one in fields(FormatChoice)}
        return FormatChoice(**{name: value for name, value in given.items() if (name, value) != ("method", None)})

    @property
    def has_target(self) -> bool:
        return any(value is not None for value in (self.target_bits, self.target_size, self.target_kld))

    def resolved(self, weights: int) -> QuantizeOptions:
        """Return the options with a value for everything that depends on the number of weights or on other options."""
        is_own = self.method is None and self.calib is None
        thorough = self.report or self.target_kld is not None
        return replace(
            self,
            method=self.method or default_method(weights),
            samples=self.samples or (costs.OWN_SAMPLES if is_own else costs.SAMPLES),
            length=self.length or (costs.OWN_LENGTH if is_own else costs.LENGTH),
            eval_samples=self.eval_samples or (costs.EVAL_SAMPLES if thorough else costs.QUICK_EVAL_SAMPLES),
        )

    def eval_length(self, length: int) -> int:
        """Return the tokens per evaluation sequence, if the calibration text has sequences of `length` tokens."""
        is_quick = self.eval_samples is None and not self.report and self.target_kld is None
        return min(length, costs.QUICK_EVAL_LENGTH) if is_quick else length

    def read_recipe(self, default: FormatChoice | None = None) -> Recipe:
        """Return the recipe in the file, or a recipe with only the options' choice; raises as read_recipe does.

        Args:
            default: the choice that the recipe's default changes; None means that of these options.
        """
        start = self.choice if default is None else default
        if self.recipe is None:
            return Recipe(start)
        return read_recipe(self.recipe, start, self.non_default(one.name for one in fields(FormatChoice)))

    def non_default(self, names: Iterable[str]) -> list[str]:
        """Return the names of the options among `names` that differ from their defaults."""
        usual = {one.name: one.default for one in fields(self)}
        return [name for name in names if getattr(self, name) != usual[name]]


_MOST_DIGITS = 20


def parse_size(text: str) -> int:
    """Return the number of bytes of a size such as "2GB", "700 MB" or "1.5GiB".

    Raises:
        OptionError: the text is not a size.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMG]?I?B?)\s*", text.upper())
    unit = match[2] if match else "?"
    unit = unit if unit in _UNITS else unit + "B"
    if match is None or unit not in _UNITS or len(match[1]) > _MOST_DIGITS:
        raise OptionError(
            f"target size {text!r:.80} is not valid",
            "a size is a number and a unit",
            'pass a size such as "2GB" or "700MiB"',
        )
    return int(float(match[1]) * _UNITS[unit])
