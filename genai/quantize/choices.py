"""What is to become of each matrix: its grid and method, or floats; and what a user may say about that."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from genai.kernels.weights import BLOCKS, CODE_BITS, ROW
from genai.quant.grids import CodeGrid, UniformGrid
from genai.quant.methods import METHODS
from genai.quant.named_formats import NAMED_FORMATS, named_grid

from ..common.log import logger
from ..common.reading import read_text_file
from ..common.renamed import renamed_fields
from ..errors import InputError, OptionError, did_you_mean, kind_of
from .sites import Site

_log = logger(__name__)
UNIFORM = "uniform"
# A row of a table is read per token, whatever its size: exactness costs memory only, and a fifteenth of an 8B shape.
TABLE_FORMAT: Mapping[str, Any] = {"format": UNIFORM, "bits": 8, "block_size": 32}
FORMATS = (UNIFORM, *NAMED_FORMATS)
# What onnxruntime has kernels for: bits of its products and experts, and of its tables.
_PRODUCT_BITS, _TABLE_BITS = (2, 4, 8), (4, 8)
# What DequantizeLinear stores in blocks.
_QDQ_BITS = (4, 8)


@renamed_fields(form="format")
@dataclass(frozen=True, kw_only=True)
class FormatChoice:
    """How a matrix is stored.

    Attributes:
        format: "uniform", or a name of NAMED_FORMATS, which has bits and block sizes of its own.
        bits: 2, 3, 4, 5, 6 or 8; 0 = floats, as they are. None = 4, or what the format has.
        block_size: columns that share a scale: 16, 32, 64, 128, 256; 0 = all of a row. None = 32, or the format's.
        symmetric: False stores a zero point per block; of uniform formats alone.
        method: see `genai.quant.methods`.
        half_scales: scales are stored as float16, which a Cast in the graph widens.
        qdq: products are written as DequantizeLinear and MatMul, not as one operator; uniform 4 and 8 bits.

    Raises:
        OptionError: a value that is not offered, or that the format does not have.
    """

    format: str = UNIFORM
    bits: int | None = None
    block_size: int | None = None
    symmetric: bool = True
    method: str = "search"
    half_scales: bool = True
    qdq: bool = False

    def __post_init__(self) -> None:
        for name, known in (("format", FORMATS), ("method", METHODS)):
            if (value := getattr(self, name)) not in known:
                fix = did_you_mean(str(value), known, f"choose one of {', '.join(known)}")
                raise OptionError(f"{name} is {value!r}", f"there is no such {name}", fix)
        bits, sizes = NAMED_FORMATS.get(self.format, (4, (32,)))
        own_bits, own_sizes = ((bits,), sizes) if self.format in NAMED_FORMATS else ((0, *CODE_BITS), (ROW, *BLOCKS))
        for name, usual, some in (("bits", bits, own_bits), ("block_size", sizes[0], own_sizes)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, usual)
            _one_of(name, getattr(self, name), some, of="" if self.format == UNIFORM else self.format)
        for name in ("symmetric", "half_scales", "qdq"):
            _one_of(name, getattr(self, name), (True, False))
        if self.format in NAMED_FORMATS and not (self.symmetric and not self.qdq):
            raise OptionError(
                f"{self.format} {'as QDQ' if self.qdq else 'with zero points'}",
                "there is no such format; what it stores per block belongs to it",
                "leave it out, or choose the format uniform",
            )
        if self.qdq and self.bits not in (0, *_QDQ_BITS):
            raise OptionError(f"qdq with {self.bits} bits", "DequantizeLinear has 4 and 8 bits", "choose one of them")

    def changed(self, changes: Mapping[str, Any]) -> FormatChoice:
        """Another choice; a new format has its own bits and block size, and new bits alone mean the uniform one."""
        start = {one.name: getattr(self, one.name) for one in fields(self)}
        format = changes.get("format", UNIFORM if changes.get("bits") is not None else self.format)
        if format != self.format:
            start |= {"format": format, "bits": None, "block_size": None, "symmetric": True}
        return FormatChoice(**{**start, **changes})

    def grid(self, columns: int) -> CodeGrid:
        """What methods work on, for a matrix of so many columns; not for floats."""
        assert self.bits and self.block_size is not None
        if self.format != UNIFORM:
            return named_grid(self.format, self.block_size, half_scales=self.half_scales)
        by_row = self.block_size == ROW
        return UniformGrid(
            self.bits, -(-columns // 16) * 16 if by_row else self.block_size, self.symmetric, self.half_scales, by_row
        )

    def nbytes(self, site: Site) -> int:
        """Bytes that a site takes in the file."""
        if not self.bits:
            return 4 * site.elements
        stored = self.grid(site.columns).format
        half = (self.half_scales or site.half) and stored.group_size != ROW
        floats = 2 if stored.offset_bits and stored.multiplier_bits else 1
        bits = stored.bits_per_weight(site.columns, 16 if half else 32, floats_per_group=floats)
        return site.rows * round(bits * site.columns / 8)

    def has_foreign_kernel(self, site: Site) -> bool:
        """Whether onnxruntime has kernels for what is written; otherwise it runs it by the model's functions."""
        if not self.bits:
            return True
        if self.format in ("nf4", "fp4"):
            return not (site.lookups or site.experts or site.columns % (self.block_size or 1))
        if self.format != UNIFORM or (self.block_size == ROW and not self.qdq):
            return False
        return self.bits in (_TABLE_BITS if site.lookups else _PRODUCT_BITS)

    def label(self) -> str:
        """Such as "4 bits, blocks of 32, gptq"."""
        if not self.bits:
            return "floats"
        size = f"blocks of {self.block_size}" if self.block_size else "a scale per row"
        zeros = "" if self.symmetric else ", zero points"
        name = f"{self.bits} bits" if self.format == UNIFORM else self.format
        return f"{name}, {size}{zeros}{', QDQ' if self.qdq else ''}, {self.method}"


def _one_of(name: str, value: object, known: Sequence[object], *, of: str = "") -> None:
    if value not in known or type(value) is not type(known[0]):
        raise OptionError(
            f"{name} is {value!r}", f"{'that of ' + of if of else 'it'} can be {', '.join(map(str, known))}",
            f"choose one for {name}",
        )  # fmt: skip


# Keys of recipes that earlier versions read, and today's.
_RENAMED_KEYS = {"form": "format"}
_RULE_KEYS = ("match", *(one.name for one in fields(FormatChoice)))


@dataclass(frozen=True)
class Recipe:
    """Choices by patterns over names.

    Attributes:
        default: for what no rule fits.
        rules: pattern and changes of the default; the first that fits counts.
        origin: where it comes from, in words.
    """

    default: FormatChoice
    rules: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    origin: str = "the options"
    text: str = field(default="", compare=False)

    def choices(self, sites: Sequence[Site]) -> dict[Site, FormatChoice]:
        """Per site what is to become of it.

        Raises:
            InputError: a rule names nothing; the message has the nearest names.
        """
        names = [site.base_name for site in sites]
        for pattern, _ in self.rules:
            if not fnmatch.filter(names, pattern):
                plain = pattern.replace("*", "")
                words = sorted({part for name in names for part in (name, *name.split("."))})
                close = get_close_matches(plain, words, 3, 0.4) or names[:3]
                raise InputError(
                    f"{self.origin}: the rule {pattern!r} names nothing",
                    f"there are {len(names)} matrices; the nearest names are {', '.join(close)}",
                    "correct the pattern (* stands for anything), or remove the rule",
                )
        return {site: self._choice(site) for site in sites}

    def _choice(self, site: Site) -> FormatChoice:
        for pattern, changes in self.rules:
            if fnmatch.fnmatchcase(site.base_name, pattern):
                return self.default.changed(changes)
        return self.default


def read_recipe(path: Path, default: FormatChoice, chosen: Sequence[str] = ()) -> Recipe:
    """A recipe in YAML: `default:` with the fields of FormatChoice, and `rules:`, each with `match:` and such fields.

    Args:
        default: for what the recipe says nothing of. chosen: fields of it that a user has chosen.

    Raises:
        InputError: it cannot be read, or is malformed. OptionError: a value that is not offered, or two defaults.
    """
    import yaml

    text = read_text_file(path)
    try:
        content: Any = yaml.safe_load(text)
        repeated = _repeated(yaml.compose(text, yaml.SafeLoader), set())
    except (yaml.YAMLError, RecursionError) as error:
        raise InputError(f"{path}: is not YAML", str(error), "correct it at that place") from error
    if repeated:
        raise _malformed(path, f"{repeated:.60} stands twice in one place")
    if not isinstance(content, dict) or not set(content) <= {"default", "rules"}:
        keys = ", ".join(map(str, content)) if isinstance(content, dict) else type(content).__name__
        raise _malformed(path, f"it holds {keys}")
    changes = _changes(path, content.get("default") or {}, ())
    if changes and chosen:
        raise OptionError(
            f"{path} has a default, and {' and '.join(chosen)} is given too",
            "both say how everything is stored that no rule names",
            "leave one out",
        )
    start = default.changed(changes)
    rules = content.get("rules") or []
    if not isinstance(rules, list):
        raise _malformed(path, f"rules is {kind_of(rules)}")
    rules_of_file = []
    for rule in rules:
        changes = _changes(path, rule, ("match",))
        pattern = changes.pop("match", None)
        if not isinstance(pattern, str) or not pattern:
            raise _malformed(path, f"the rule {rule} has no pattern")
        start.changed(changes)  # values that are not offered
        rules_of_file.append((pattern, changes))
    return Recipe(start, tuple(rules_of_file), str(path), text)


def _repeated(node: Any, seen: set[int]) -> str:
    """The first key of a YAML document's nodes that stands twice in one mapping, "" if none does."""
    if id(node) in seen or not isinstance(getattr(node, "value", None), list):
        return ""
    seen.add(id(node))
    pairs = [pair if isinstance(pair, tuple) else (None, pair) for pair in node.value]
    keys = [key.value for key, _ in pairs if key is not None and isinstance(key.value, str)]
    twice = [key for index, key in enumerate(keys) if key in keys[:index]]
    return twice[0] if twice else next(filter(None, (_repeated(value, seen) for _, value in pairs)), "")


def _changes(path: Path, block: Any, more: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(block, dict):
        raise _malformed(path, f"{block!r:.60} is {kind_of(block)}")
    for old, new in _RENAMED_KEYS.items():
        if old in block:
            if new in block:
                raise _malformed(path, f"{old} is the earlier name of {new}, and both are given")
            _log.warning("%s: the key %s is now %s", path, old, new)
            block = {new if key == old else key: value for key, value in block.items()}
    known = _RULE_KEYS if more else _RULE_KEYS[1:]
    for key in block:
        if key not in known:
            raise InputError(
                f"{path}: unknown key {key!r:.60}", f"a rule has {', '.join(known)}", did_you_mean(str(key), known)
            )
    return dict(block)


def _malformed(path: Path, why: str) -> InputError:
    return InputError(
        f"{path}: is no recipe",
        why,
        'write "default: {bits: 4}" and "rules:" with items {match: "*down_proj*", bits: 8}',
    )
