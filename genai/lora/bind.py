"""From what an adapter's files hold to the factors that a program's targets take, with everything checked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.kernels.device import Factors

from ..errors import InputError, did_you_mean
from .names import EXPERTS, Module, likely_module_name, module_of
from .parameters import MOST_RANK, AdapterParameters, Pair, scaled
from .targets import LoraTargets, TargetColumns

# Kernels add to so many columns at once.
_COLUMNS = 16


def bind(adapter: AdapterParameters, targets: LoraTargets, *, scale: float = 1.0) -> list[list[Factors]]:
    """The factors of an adapter per target of a program.

    They are float16 where the program's products round their activations, unless a number is too large for that, or all
    of a factor are too small, else float32. Scales are part of B.

    Raises:
        InputError: a module that the base has not, or has in another size; numbers that are not finite; nothing that
            could be added.
    """
    dtype: Any = np.float16 if targets.rounds else np.float32
    factors_of: list[list[Factors]] = [[] for _ in range(targets.count)]
    owners: dict[Module, str] = {}
    for name, pair in adapter.pairs.items():
        module = _module(adapter, name, targets)
        if module in owners:
            raise InputError(
                f"{adapter.source}: {name!r} and {owners[module]!r} are both {module}",
                "a projection has one pair of factors",
                "export the adapter again",
            )
        owners[module] = name
        for target, factors in _factors(adapter, name, pair, targets.parts[module], scale):
            factors_of[target].append(factors)
            if not all(map(_fits_float16, (factors.a, factors.b))):
                dtype = np.float32
    if not owners:
        raise InputError(
            f"{adapter.source}: holds no factors of products", "there is nothing to add", "give another adapter"
        )
    rows = {part.target.number: part.target.rows for parts in targets.parts.values() for part in parts}
    whole = [_aligned(factors, rows.get(number, 0)) for number, factors in enumerate(factors_of)]
    return [[Factors(f.first, f.a.astype(dtype), f.b.astype(dtype)) for f in factors] for factors in whole]


def _fits_float16(factor: NDArray[np.float32]) -> bool:
    """Whether numbers keep eleven bits as float16, in proportion to the largest of them."""
    largest, limits = np.abs(factor).max(initial=0), np.finfo(np.float16)
    return bool(largest == 0 or limits.smallest_normal <= largest <= limits.max)


def _module(adapter: AdapterParameters, name: str, targets: LoraTargets) -> Module:
    module = module_of(name)
    if module in targets.parts:
        assert module is not None
        return module
    parts, known = name.split("."), [str(module) for module in targets.parts]
    if parts[-1] in ("lm_head", "embed_out", "embed_tokens", "wte"):
        why = f"{parts[-1]} has no place of adapters: logits are computed for single rows, embeddings looked up"
        known = []
    elif any(EXPERTS.search(part) for part in parts):
        why = "experts have no places of adapters; attention and shared experts have"
        known = []
    elif parts[-1] == "query_key_value":
        why = "it holds queries, keys and values of one head after the other, which the base has apart"
        known = []
    else:
        why = f"the base has {len(targets.parts)} projections: {', '.join(targets.names[:7])}, …"
    otherwise = "use an adapter that was trained on this base, or merge it into the checkpoint: genai lora merge"
    fix = did_you_mean(str(module or likely_module_name(name)), known, otherwise)
    raise InputError(f"{adapter.source}: {name!r:.200} is no projection of the base", why, fix)


def _factors(
    adapter: AdapterParameters, name: str, pair: Pair, parts: tuple[TargetColumns, ...], scale: float
) -> list[tuple[int, Factors]]:
    """A pair as float32 factors of the targets that its module's columns lie in."""
    columns, rows = parts[0].target.columns, sum(part.width for part in parts)
    a, b = pair.a, pair.b
    if a.shape[1:] != (columns,) or b.shape[:1] != (rows,) or a.ndim != 2 or b.ndim != 2 or len(a) != b.shape[1]:
        raise InputError(
            f"{adapter.source}: {name!r} has A {list(a.shape)} and B {list(b.shape)}",
            f"its projection of the base has {columns} inputs and {rows} outputs: A is [rank, {columns}] and B "
            f"[{rows}, rank]",
            "use an adapter that was trained on this base",
        )
    if not 1 <= len(a) <= MOST_RANK:
        raise InputError(f"{adapter.source}: {name!r} has rank {len(a)}", f"1 to {MOST_RANK} run", "use another")
    a32, b32 = scaled(pair, scale)
    for factor, array in (("A", a32), ("B", b32)):
        if not np.isfinite(array).all():
            raise InputError(
                f"{adapter.source}: factor {factor} of {name!r} has numbers that are not finite",
                "they would make every token of every request that uses it NaN",
                "train or download the adapter again",
            )
    result, first = [], 0
    for part in parts:
        result.append((part.target.number, Factors(part.first, a32, b32[first : first + part.width])))
        first += part.width
    return result


def _aligned(factors: list[Factors], rows: int) -> list[Factors]:
    """Factors of ranges that begin on a multiple of _COLUMNS; where one does not, all as one, with zeros elsewhere."""
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
    """What an adapter adds to the weight of a module, as the base stores it: float32 [outputs, inputs], or turned.

    Raises:
        InputError: numbers that are not finite.
    """
    a, b = scaled(adapter.pairs[module], weight)
    with np.errstate(over="ignore", invalid="ignore"):
        added = b @ a
    if not np.isfinite(added).all():
        raise InputError(
            f"{adapter.source}: what it adds to {module!r} is not finite",
            f"its factors, times the weight {weight:g}, are too large for float32, or damaged",
            "use a smaller weight; or train or download the adapter again",
        )
    return added.T if adapter.fan_in_fan_out else added


def check_mergeable(
    adapter: AdapterParameters, module: str, shape: tuple[int, ...] | None, names: Iterable[str]
) -> None:
    """Whether a checkpoint has the weight that an adapter changes, in its size (`shape`; None = it has it not).

    Raises:
        InputError: it has not.
    """
    pair = adapter.pairs[module]
    expected = (len(pair.b), pair.a.shape[1])
    expected = expected[::-1] if adapter.fan_in_fan_out else expected
    if shape is None:
        raise InputError(
            f"{adapter.source}: the checkpoint has no {module + '.weight'!r}", "the adapter changes that module",
            did_you_mean(module + ".weight", names, "merge into the checkpoint that it was trained on"),
        )  # fmt: skip
    if shape != expected:
        raise InputError(
            f"{adapter.source}: {module!r} adds {list(expected)} to {list(shape)}", "both must agree",
            "merge into the checkpoint that it was trained on",
        )  # fmt: skip
