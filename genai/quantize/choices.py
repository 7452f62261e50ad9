"""Storage formats and methods for matrices, and recipes that assign formats and methods by name patterns."""

from __future__ import annotations

import fnmatch
import re
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
from ..lora.names import FUSED
from .sites import Site

_log = logger(__name__)
UNIFORM = "uniform"
# Each token reads only one row of a table, so more bits cost memory but no speed. In an 8B model the table has a
# fifteenth of the weights.
TABLE_FORMAT: Mapping[str, Any] = {"format": UNIFORM, "bits": 8, "block_size": 32}
FORMATS = (UNIFORM, *NAMED_FORMATS)
# Bits for which onnxruntime has kernels: first for matmuls and experts, then for tables.
_PRODUCT_BITS, _TABLE_BITS = (2, 4, 8), (4, 8)
# Bits for which DequantizeLinear supports blocks.
_QDQ_BITS = (4, 8)


@renamed_fields(form="format")
@dataclass(frozen=True, kw_only=True)
class FormatChoice:
    """The storage format of a matrix.

    Attributes:
        format: "uniform", or a name in NAMED_FORMATS, which has fixed bits and block sizes.
        bits: 2, 3, 4, 5, 6 or 8; 0 means unchanged floats. None means 4, or the bits of a named format.
        block_size: number of columns that share a scale: 16, 32, 64, 128 or 256; 0 means a whole row. None means 32, or
            the block size of a named format.
        symmetric: False to store one zero point per block. Only the uniform format supports False.
        method: quantisation method; see `genai.quant.methods`.
        half_scales: True to store scales as float16, with a Cast to float32 in the graph.
        qdq: True to write matmuls as DequantizeLinear and MatMul instead of one operator. Only the uniform format with
            4 or 8 bits supports True.

    Raises:
        OptionError: a value is not supported at all, or is not supported by the format.
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
                raise OptionError(f"{name} is {value!r}", f"{name} must be a supported value", fix)
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
                f"{self.format} cannot be stored {'as QDQ' if self.qdq else 'with zero points'}",
                "a named format defines everything that is stored per block",
                "omit --qdq or --asymmetric, or choose --format uniform",
            )
        if self.qdq and self.bits not in (0, *_QDQ_BITS):
            raise OptionError(
                f"qdq cannot be used with {self.bits} bits",
                "DequantizeLinear supports 4 and 8 bits",
                "set bits to 4 or 8, or omit qdq",
            )

    def changed(self, changes: Mapping[str, Any]) -> FormatChoice:
        """Return a changed copy. A new format resets bits and block size; bits without a format select uniform."""
        start = {one.name: getattr(self, one.name) for one in fields(self)}
        format = changes.get("format", UNIFORM if changes.get("bits") is not None else self.format)
        if format != self.format:
            start |= {"format": format, "bits": None, "block_size": None, "symmetric": True}
        return FormatChoice(**{**start, **changes})

    def grid(self, columns: int) -> CodeGrid:
        """Return the grid that methods quantise a matrix with `columns` columns to. Floats have no grid."""
        assert self.bits and self.block_size is not None
        if self.format != UNIFORM:
            return named_grid(self.format, self.block_size, half_scales=self.half_scales)
        by_row = self.block_size == ROW
        return UniformGrid(
            self.bits, -(-columns // 16) * 16 if by_row else self.block_size, self.symmetric, self.half_scales, by_row
        )

    def nbytes(self, site: Site) -> int:
        """Return the number of bytes that a site occupies in the file."""
        if not self.bits:
            return 4 * site.elements
        stored = self.grid(site.columns).format
        half = (self.half_scales or site.half) and stored.group_size != ROW
        floats = 2 if stored.offset_bits and stored.multiplier_bits else 1
        bits = stored.bits_per_weight(site.columns, 16 if half else 32, floats_per_group=floats)
        return site.rows * round(bits * site.columns / 8)

    def has_foreign_kernel(self, site: Site) -> bool:
        """Return True if onnxruntime has kernels for the format; otherwise, onnxruntime runs the model's functions."""
        if not self.bits:
            return True
        if self.format in ("nf4", "fp4"):
            return not (site.lookups or site.experts or site.columns % (self.block_size or 1))
        if self.format != UNIFORM or (self.block_size == ROW and not self.qdq):
            return False
        return self.bits in (_TABLE_BITS if site.lookups else _PRODUCT_BITS)

    def label(self) -> str:
        """Return a description such as "4 bits, blocks of 32, gptq"."""
        if not self.bits:
            return "floats"
        size = f"blocks of {self.block_size}" if self.block_size else "one scale per row"
        zeros = "" if self.symmetric else ", zero points"
        name = f"{self.bits} bits" if self.format == UNIFORM else self.format
        return f"{name}, {size}{zeros}{', QDQ' if self.qdq else ''}, {self.method}"


def _one_of(name: str, value: object, known: Sequence[object], *, of: str = "") -> None:
    if value not in known or type(value) is not type(known[0]):
        raise OptionError(
            f"{name} is {value!r}",
            f"{'that of ' + of if of else 'it'} can be {', '.join(map(str, known))}",
            f"use a supported value for {name}",
        )  # fmt: skip


# Keys of recipes in earlier versions, and their current names.
_RENAMED_KEYS = {"form": "format"}
_RULE_KEYS = ("match", *(one.name for one in fields(FormatChoice)))


@dataclass(frozen=True)
class Recipe:
    """Choices by name patterns.

    Attributes:
        default: the choice for matrices that no rule matches.
        rules: pairs of a pattern and changes to the default; the first match applies.
        origin: description of the recipe's source.
        text: the text of the recipe's file.
    """

    default: FormatChoice
    rules: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    origin: str = "the options"
    text: str = field(default="", compare=False)

    def choices(self, sites: Sequence[Site]) -> dict[Site, FormatChoice]:
        """Return the choice for each site.

        Raises:
            InputError: a rule matches no matrix; the message contains the closest names.
        """
        names = [site.base_name for site in sites]
        for pattern, _ in self.rules:
            if not fnmatch.filter(names, pattern):
                plain = pattern.replace("*", "")
                words = sorted({part for name in names for part in (name, *name.split("."))})
                close = get_close_matches(plain, words, 3, 0.4) or names[:3]
                raise InputError(
                    f"{self.origin}: the rule {pattern!r} matches no matrix",
                    f"there are {len(names)} matrices; the closest names are {', '.join(close)}",
                    "correct the pattern (* matches any text), or remove the rule",
                )
        return {site: self._choice(site) for site in sites}

    def remarks(self, sites: Sequence[Site]) -> list[str]:
        """Return a remark for each rule that names a part of a fused matrix, because it changes the whole matrix."""
        remarks = []
        for pattern, _ in self.rules:
            for fused, parts in FUSED.items():
                part = _named_part(pattern, parts)
                some = [site for site in sites if fused in site.base_name and self._rule(site) == pattern]
                if part and some:
                    remarks.append(
                        f"{self.origin}: the rule {pattern!r} changes {len(some)} fused matrices such as "
                        f"{some[0].base_name}; {part} is not a separate matrix, but a part of {fused}"
                    )
        return remarks

    def _rule(self, site: Site) -> str | None:
        """Return the pattern of the rule that applies to a site."""
        return next((pattern for pattern, _ in self.rules if fnmatch.fnmatchcase(site.base_name, pattern)), None)

    def _choice(self, site: Site) -> FormatChoice:
        for pattern, changes in self.rules:
            if fnmatch.fnmatchcase(site.base_name, pattern):
                return self.default.changed(changes)
        return self.default


def _named_part(pattern: str, parts: Sequence[str]) -> str:
    """Return the part of a fused matrix that a pattern names, and the other parts do not share, or ""."""
    for word in re.findall(r"\w{2,}", pattern):
        named = [part for part in parts if word in part]
        if len(named) == 1:
            return named[0]
    return ""


def read_recipe(path: Path, default: FormatChoice, chosen: Sequence[str] = ()) -> Recipe:
    """Read a YAML recipe: `default:` with fields of FormatChoice, and `rules:`, each with `match:` and such fields.

    Args:
        default: the choice that the recipe's default changes.
        chosen: names of the fields of `default` that the user has set.

    Raises:
        InputError: the file cannot be read or is malformed.
        OptionError: a value is not supported, or both the recipe and the user set a default.
    """
    import yaml

    text = read_text_file(path)
    try:
        content: Any = yaml.safe_load(text)
        repeated = _repeated(yaml.compose(text, yaml.SafeLoader), set())
    except (yaml.YAMLError, RecursionError) as error:
        raise InputError(f"{path} is not valid YAML", str(error), "correct the syntax at this position") from error
    if repeated:
        raise _malformed(path, f"the key {repeated:.60} occurs twice in one mapping")
    if not isinstance(content, dict) or not set(content) <= {"default", "rules"}:
        keys = ", ".join(map(str, content)) if isinstance(content, dict) else type(content).__name__
        raise _malformed(path, f"the file must be a mapping with the keys 'default' and 'rules', not {keys}")
    changes = _changes(path, content.get("default") or {}, ())
    if changes and chosen:
        raise OptionError(
            f"{path} sets a default, and {' and '.join(chosen)} is also set",
            "both set the format of the matrices that no rule matches",
            "remove the default from the recipe, or omit the other settings",
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
            raise _malformed(path, f"the rule {rule} has no 'match' pattern")
        start.changed(changes)  # validates the values
        rules_of_file.append((pattern, changes))
    return Recipe(start, tuple(rules_of_file), str(path), text)


def _repeated(node: Any, seen: set[int]) -> str:
    """Return the first key that occurs twice in one mapping of a YAML document, or ""."""
    if id(node) in seen or not isinstance(getattr(node, "value", None), list):
        return ""
    seen.add(id(node))
    pairs = [pair if isinstance(pair, tuple) else (None, pair) for pair in node.value]
    keys = [key.value for key, _ in pairs if key is not None and isinstance(key.value, str)]
    twice = [key for index, key in enumerate(keys) if key in keys[:index]]
    return twice[0] if twice else next(filter(None, (_repeated(value, seen) for _, value in pairs)), "")


def _changes(path: Path, block: Any, more: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(block, dict):
        raise _malformed(path, f"{block!r:.60} is {kind_of(block)}, but an object is expected")
    for old, new in _RENAMED_KEYS.items():
        if old in block:
            if new in block:
                raise _malformed(path, f"{old} is the earlier name of {new}, and both are set")
            _log.warning("%s: the key %s is now %s", path, old, new)
            block = {new if key == old else key: value for key, value in block.items()}
    known = _RULE_KEYS if more else _RULE_KEYS[1:]
    for key in block:
        if key not in known:
            raise InputError(
                f"{path}: unknown key {key!r:.60}", f"valid keys are {', '.join(known)}", did_you_mean(str(key), known)
            )
    return dict(block)


def _malformed(path: Path, why: str) -> InputError:
    return InputError(
        f"{path} is not a valid recipe",
        why,
        'write "default: {bits: 4}" and "rules:" with items {match: "*down_proj*", bits: 8}',
    )
