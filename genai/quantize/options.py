"""What a user can ask of quantisation."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

from ..common.renamed import renamed_fields
from ..errors import OptionError, did_you_mean, kind_of
from .choices import UNIFORM, FormatChoice, Recipe, read_recipe

TARGET_RUNTIMES = ("onnxruntime", "any")
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@renamed_fields(form="format")
@dataclass(frozen=True, kw_only=True)
class QuantizeOptions:
    """Options of `quantize`.

    Attributes:
        format, bits, block_size, symmetric, method, half_scales, qdq: of every matrix that nothing else is said of; see
            FormatChoice.
        head_bits, embedding_bits: of the head and the token embedding; 0 = floats, None = as all others, but 8 bits for
            an embedding that is not the head, too, and of which no recipe or target says more. Where both are one
            matrix they must agree.
        recipe: YAML file of choices by patterns over names (docs/quantisation.md).
        target_bits: bits per weight of the whole file that the matrices' bits are chosen for.
        target_size: bytes of the whole weights, likewise.
        target_runtime: "onnxruntime": targets choose among formats that it has kernels for; "any": among the most exact
            of each size, which onnxruntime runs by the model's functions, with these weights as float32.
        target_kld: mean divergence, in nats per token, that must be kept at the least size.
        sensitivity: quantization_report.json of an earlier output of this model, made for a target: what each candidate
            costs is taken from there instead of being measured again.
        calib: text that methods with statistics are calibrated with; None = the model writes one itself.
        samples, length: sequences of calibration, and tokens of each (no more than the context), where a text is used.
        seed: of what is drawn then.
        evaluate: measure perplexity and divergence.
        eval_file: text for that; None = a part of `calib` that is kept out of it, or the model's own with another seed.
        eval_samples: sequences of it.
        accuracy_level: to what products may round activations, see `genai build`.
        requantize: take a model that is quantised already for its float model.
        threads: None = the physical cores.

    Raises:
        OptionError: a value that is not offered, or options that contradict each other.
    """

    format: str = UNIFORM
    bits: int | None = None
    block_size: int | None = None
    symmetric: bool = True
    method: str = "search"
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
    samples: int = 128
    length: int = 512
    seed: int = 0
    evaluate: bool = True
    eval_file: Path | None = None
    eval_samples: int = 16
    accuracy_level: int = 4
    requantize: bool = False
    threads: int | None = None

    def __post_init__(self) -> None:
        self.choice  # noqa: B018  # checks its own
        for name in ("recipe", "sensitivity", "calib", "eval_file"):
            if (path := getattr(self, name)) is not None:
                if not isinstance(path, str | Path):
                    raise OptionError(f"{name} is {kind_of(path)}", "it is a path", "give the path of a file")
                object.__setattr__(self, name, Path(path))
        if self.threads is not None and not (type(self.threads) is int and self.threads >= 1):
            raise OptionError(
                f"threads = {self.threads!r}", "a whole number of at least 1 is expected",
                "leave threads out for the default",
            )  # fmt: skip
        if self.choice.bits == 0 and not (self.symmetric and self.half_scales):
            raise OptionError(
                f"{'half_scales' if self.symmetric else 'symmetric'} is off, and bits is 0",
                "floats have neither scales nor zero points",
                "leave it out",
            )
        for name in ("samples", "length", "eval_samples"):
            if getattr(self, name) < (2 if name == "length" else 1):
                raise OptionError(f"{name} is {getattr(self, name)}", "at least one is needed", f"give {name} more")
        if self.accuracy_level not in range(5):
            raise OptionError(f"accuracy_level is {self.accuracy_level}", "it can be 0 to 4", "choose 4 or 1")
        targets = [name for name in ("target_bits", "target_size", "target_kld") if getattr(self, name) is not None]
        if len(targets) > 1:
            raise OptionError(f"{' and '.join(targets)} are given", "one of them decides the other", "leave one out")
        if targets:
            value = getattr(self, targets[0])
            if not (math.isfinite(value) and value > 0):
                raise OptionError(
                    f"{targets[0]} is {value}", "a target is a finite number above 0", "give such a number"
                )
            if self.recipe is not None:
                raise OptionError(f"recipe and {targets[0]} are given", "both choose bits", "leave one out")
        if self.target_runtime not in TARGET_RUNTIMES:
            raise OptionError(
                f"target_runtime is {self.target_runtime!r}", f"it can be {' or '.join(TARGET_RUNTIMES)}",
                did_you_mean(self.target_runtime, TARGET_RUNTIMES, "choose one of them"),
            )  # fmt: skip
        if self.target_runtime != TARGET_RUNTIMES[0] and not targets:
            raise OptionError(
                f"target_runtime is {self.target_runtime!r}, and there is no target",
                "it says what a target chooses from",
                "leave it out, or give --target-bits, --target-size or --target-kld",
            )
        if self.sensitivity is not None and not targets:
            raise OptionError(
                f"sensitivity is {self.sensitivity}, and there is no target", "it says what a target's candidates cost",
                "leave it out, or give --target-bits, --target-size or --target-kld",
            )  # fmt: skip
        if targets and (self.format != UNIFORM or self.bits is not None or self.block_size is not None or self.qdq):
            raise OptionError(
                f"{targets[0]} is given, and a format, bits or a block size", "a target chooses them",
                "leave one out; --method and --asymmetric go with a target",
            )  # fmt: skip
        if not self.evaluate and self.eval_file is not None:
            raise OptionError("eval_file is given, and evaluate is off", "nothing is evaluated", "leave one out")

    @property
    def choice(self) -> FormatChoice:
        """Of every matrix that nothing else is said of."""
        return FormatChoice(**{one.name: getattr(self, one.name) for one in fields(FormatChoice)})

    @property
    def has_target(self) -> bool:
        return any(value is not None for value in (self.target_bits, self.target_size, self.target_kld))

    def read_recipe(self) -> Recipe:
        """The recipe's file, or one of the options alone; raises as read_recipe does."""
        if self.recipe is None:
            return Recipe(self.choice)
        return read_recipe(self.recipe, self.choice, self.non_default(one.name for one in fields(FormatChoice)))

    def non_default(self, names: Iterable[str]) -> list[str]:
        """Those of these options that are not as usual."""
        usual = {one.name: one.default for one in fields(self)}
        return [name for name in names if getattr(self, name) != usual[name]]


_MOST_DIGITS = 20


def parse_size(text: str) -> int:
    """Bytes of a size such as "2GB", "700 MB" or "1.5GiB".

    Raises:
        OptionError: it is no size.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMG]?I?B?)\s*", text.upper())
    unit = match[2] if match else "?"
    unit = unit if unit in _UNITS else unit + "B"
    if match is None or unit not in _UNITS or len(match[1]) > _MOST_DIGITS:
        raise OptionError(f"target size {text!r:.80}", "it is no size", 'write for example "2GB" or "700MiB"')
    return int(float(match[1]) * _UNITS[unit])
