"""What is to become of each matrix: its grid and method, or floats; and what a user may say about that."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from genai.quant.blocks import BITS, BLOCK_SIZES
from genai.quant.grids import UniformGrid
from genai.quant.methods import METHODS

from ..errors import InputError, OptionError, did_you_mean
from ..model.reading import read_text_file
from .sites import Site


@dataclass(frozen=True, kw_only=True)
class FormatChoice:
    """How a matrix is stored.

    Attributes:
        bits: 4 or 8; 0 = floats, as they are.
        block_size: columns that share a scale: 16, 32, 64, 128, 256.
        symmetric: False stores a zero point per block.
        method: see `genai.quant.methods`.
        half_scales: scales are stored as float16, which a Cast in the graph widens.

    Raises:
        OptionError: a value that is not offered.
    """

    bits: int = 4
    block_size: int = 32
    symmetric: bool = True
    method: str = "search"
    half_scales: bool = True

    def __post_init__(self) -> None:
        _one_of("bits", self.bits, (0, *BITS))
        _one_of("block_size", self.block_size, BLOCK_SIZES)
        if self.method not in METHODS:
            fix = did_you_mean(str(self.method), METHODS, f"choose one of {', '.join(METHODS)}")
            raise OptionError(f"method is {self.method!r}", "there is no such method", fix)
        for name in ("symmetric", "half_scales"):
            _one_of(name, getattr(self, name), (True, False))

    @property
    def grid(self) -> UniformGrid:
        return UniformGrid(self.bits, self.block_size, self.symmetric, self.half_scales)

    def nbytes(self, site: Site) -> int:
        """Bytes that a site takes in the file."""
        if not self.bits:
            return 4 * site.elements
        blocks = -(-site.columns // self.block_size)
        zeros = 0 if self.symmetric else -(-blocks * self.bits // 8)
        scale = 2 if self.half_scales or site.half else 4
        return site.rows * (blocks * (self.block_size * self.bits // 8 + scale) + zeros)

    def label(self) -> str:
        """Such as "4 bits, blocks of 32, gptq"."""
        if not self.bits:
            return "floats"
        zeros = "" if self.symmetric else ", zero points"
        return f"{self.bits} bits, blocks of {self.block_size}{zeros}, {self.method}"


def _one_of(name: str, value: object, known: Sequence[object]) -> None:
    if value not in known or isinstance(value, bool) != isinstance(known[0], bool):
        raise OptionError(f"{name} is {value!r}", f"it can be {', '.join(map(str, known))}", f"choose one for {name}")


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
                return replace(self.default, **changes)
        return self.default


def read_recipe(path: Path, default: FormatChoice) -> Recipe:
    """A recipe in YAML: `default:` with the fields of Choice, and `rules:`, each with `match:` and such fields.

    Raises:
        InputError: it cannot be read, or is malformed. OptionError: a value that is not offered.
    """
    import yaml

    text = read_text_file(path)
    try:
        content: Any = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise InputError(f"{path}: is not YAML", str(error), "correct it at that place") from error
    if not isinstance(content, dict) or not set(content) <= {"default", "rules"}:
        found = ", ".join(map(str, content)) if isinstance(content, dict) else type(content).__name__
        raise _malformed(path, f"it holds {found}")
    start = replace(default, **_changes(path, content.get("default") or {}, ()))
    rules = content.get("rules") or []
    if not isinstance(rules, list):
        raise _malformed(path, f"rules is a {type(rules).__name__}")
    made = []
    for rule in rules:
        changes = _changes(path, rule, ("match",))
        pattern = changes.pop("match", None)
        if not isinstance(pattern, str) or not pattern:
            raise _malformed(path, f"the rule {rule} has no pattern")
        replace(start, **changes)  # values that are not offered
        made.append((pattern, changes))
    return Recipe(start, tuple(made), str(path), text)


def _changes(path: Path, block: Any, more: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(block, dict):
        raise _malformed(path, f"{block!r:.60} is a {type(block).__name__}")
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
