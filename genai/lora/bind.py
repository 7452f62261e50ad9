"""Conversion of an adapter's parameters to the factors for a program's targets, with validation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.kernels.device import Factors

from ..errors import InputError, did_you_mean
from .names import EXPERTS, Module, likely_module_name, module_of
from .parameters import MOST_RANK, AdapterParameters, Pair, scaled
from .peft import CONFIG
from .selection import check_last_layers
from .targets import LoraTargets, TargetColumns

# The number of columns that kernels process at a time.
_COLUMNS = 16


def bind(adapter: AdapterParameters, targets: LoraTargets, *, scale: float = 1.0) -> list[list[Factors]]:
    """Return the factors of an adapter for each target of a program.

    Factors are float16 if the program's linear layers round their activations, unless a number is outside float16's
    range or all numbers of a factor are too small. Otherwise factors are float32. Scales are included in B.

    Raises:
        InputError: the base lacks a module, or its module has a different size; values are not finite; or there are no
            factors.
    """
    dtype: Any = np.float16 if targets.rounds else np.float32
    factors_of: list[list[Factors]] = [[] for _ in range(targets.count)]
    owners: dict[Module, str] = {}
    for name, pair in adapter.pairs.items():
        module = _module(adapter, name, targets)
        if module in owners:
            raise InputError(
                f"{adapter.source}: {name!r} and {owners[module]!r} are both {module}",
                "a projection can have only one pair of factors",
                "export the adapter again",
            )
        owners[module] = name
        for target, factors in _factors(adapter, name, pair, targets.parts[module], scale):
            factors_of[target].append(factors)
            if not all(map(_fits_float16, (factors.a, factors.b))):
                dtype = np.float32
    layers = 1 + max((module.layer for module in targets.parts), default=0)
    check_last_layers(adapter.source / CONFIG, adapter.last_layers, adapter.pairs, layers)
    if not owners:
        raise InputError(
            f"{adapter.source}: the adapter contains no factors of linear layers",
            "the adapter would have no effect",
            "use another adapter",
        )
    rows = {part.target.number: part.target.rows for parts in targets.parts.values() for part in parts}
    whole = [_aligned(factors, rows.get(number, 0)) for number, factors in enumerate(factors_of)]
    return [[Factors(f.first, f.a.astype(dtype), f.b.astype(dtype)) for f in factors] for factors in whole]


def _fits_float16(factor: NDArray[np.float32]) -> bool:
    """Return True if the largest numbers of a factor have the full eleven bits of precision in float16."""
    largest, limits = np.abs(factor).max(initial=0), np.finfo(np.float16)
    return bool(largest == 0 or limits.smallest_normal <= largest <= limits.max)


def _module(adapter: AdapterParameters, name: str, targets: LoraTargets) -> Module:
    module = module_of(name)
    if module in targets.parts:
        assert module is not None
        return module
    parts, known = name.split("."), [str(module) for module in targets.parts]
    if parts[-1] in ("lm_head", "embed_out", "embed_tokens", "wte"):
        why = f"{parts[-1]} is not a LoRA target: logits are computed for selected rows, and embeddings are lookups"
        known = []
    elif any(EXPERTS.search(part) for part in parts):
        why = "only attention and shared experts are LoRA targets; routed experts are not"
        known = []
    elif parts[-1] == "query_key_value":
        why = "the adapter has queries, keys and values interleaved by head, but the base has them in separate matrices"
        known = []
    else:
        why = f"the base has {len(targets.parts)} projections: {', '.join(targets.names[:7])}, …"
    otherwise = "use an adapter that was trained on this base, or merge it into the checkpoint: genai lora merge"
    fix = did_you_mean(str(module or likely_module_name(name)), known, otherwise)
    raise InputError(f"{adapter.source}: {name!r:.200} is not a projection of the base", why, fix)


def _factors(
    adapter: AdapterParameters, name: str, pair: Pair, parts: tuple[TargetColumns, ...], scale: float
) -> list[tuple[int, Factors]]:
    """Convert a pair to float32 factors for the targets that contain its module's columns."""
    columns, rows = parts[0].target.columns, sum(part.width for part in parts)
    a, b = pair.a, pair.b
    if a.shape[1:] != (columns,) or b.shape[:1] != (rows,) or a.ndim != 2 or b.ndim != 2 or len(a) != b.shape[1]:
        raise InputError(
            f"{adapter.source}: {name!r} has factors A {list(a.shape)} and B {list(b.shape)}",
            f"the base's projection has {columns} inputs and {rows} outputs, so A must be [rank, {columns}] and B "
            f"[{rows}, rank]",
            "use an adapter that was trained on this base",
        )
    if not 1 <= len(a) <= MOST_RANK:
        raise InputError(
            f"{adapter.source}: {name!r} has rank {len(a)}", f"supported ranks: 1 to {MOST_RANK}", "use another adapter"
        )
    a32, b32 = scaled(pair, scale)
    for factor, array in (("A", a32), ("B", b32)):
        if not np.isfinite(array).all():
            raise InputError(
                f"{adapter.source}: factor {factor} of {name!r} has values that are not finite",
                "the values would turn every token of every request with this adapter into NaN",
                "train or download the adapter again",
            )
    result, first = [], 0
    for part in parts:
        result.append((part.target.number, Factors(part.first, a32, b32[first : first + part.width])))
        first += part.width
    return result


def _aligned(factors: list[Factors], rows: int) -> list[Factors]:
    """Return factors whose column ranges start at multiples of _COLUMNS; if needed, merge them, padded with zeros."""
    ends = [f.first + len(f.b) for f in factors]
    if all(
        f.first % _COLUMNS == 0 and (end % _COLUMNS == 0 or end == rows) for f, end in zip(factors, ends, strict=True)
    ):
        return factors
    rank = sum(f.rank for f in factors)
    b: NDArray[np.float32] = np.zeros((rows, rank), np.float32)
    offset = 0
    for f, end in zip(factors, ends, strict=True):
        b[f.first : end, offset : offset + f.rank] = f.b
        offset += f.rank
    return [Factors(0, np.concatenate([f.a for f in factors]), b)]


def delta(adapter: AdapterParameters, module: str, weight: float = 1.0) -> NDArray[np.float32]:
    """Return the change of a module's weight in the base's layout: float32 [outputs, inputs], or transposed.

    Raises:
        InputError: values are not finite.
    """
    a, b = scaled(adapter.pairs[module], weight)
    with np.errstate(over="ignore", invalid="ignore"):
        added = b @ a
    if not np.isfinite(added).all():
        raise InputError(
            f"{adapter.source}: the change of {module!r} is not finite",
            f"the factors, multiplied by the weight {weight:g}, are too large for float32, or are damaged",
            "use a smaller weight, or train or download the adapter again",
        )
    return added.T if adapter.fan_in_fan_out else added


def check_mergeable(
    adapter: AdapterParameters, module: str, shape: tuple[int, ...] | None, names: Iterable[str]
) -> None:
    """Check that a checkpoint has the weight that an adapter changes.

    Args:
        adapter: the adapter.
        module: name of the module.
        shape: shape of the checkpoint's weight; None if there is none.
        names: names of the checkpoint's weights, for suggestions.

    Raises:
        InputError: the weight is missing or has another shape.
    """
    pair = adapter.pairs[module]
    expected = (len(pair.b), pair.a.shape[1])
    expected = expected[::-1] if adapter.fan_in_fan_out else expected
    if shape is None:
        raise InputError(
            f"{adapter.source}: the checkpoint has no {module + '.weight'!r}", "the adapter changes this weight",
            did_you_mean(module + ".weight", names, "merge the adapter into the checkpoint that it was trained on"),
        )  # fmt: skip
    if shape != expected:
        raise InputError(
            f"{adapter.source}: {module!r} adds a matrix of shape {list(expected)} to a weight of shape {list(shape)}",
            "the shapes must match", "merge the adapter into the checkpoint that it was trained on",
        )  # fmt: skip
