"""The products of a model one kind at a time: seconds and ceilings by number of rows, as FEW and as MANY rows."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from genai.kernels.cpu.isa import isa
from genai.kernels.cpu.products.calls import has_many
from genai.kernels.cpu.tape.context import ContextTable, Word
from genai.kernels.cpu.tape.walkers import Walkers
from genai.kernels.row_ops.base import RowType
from genai.kernels.row_ops.products import Product
from genai.kernels.step import StepContext

from ..errors import UnsupportedModelError
from ..model import Model
from ..runtime.segments import TapeStep
from .ceilings import bandwidth, products

Row = dict[str, Any]


def bench_kernels(model: Model, *, rows: Sequence[int], repeat: int = 5) -> Iterator[Row]:
    """Per kind of product (shape and format of its weights) and number of rows: the time of one, and its shares.

    All matrices of a kind are multiplied one after another, so that none of them waits in a cache for its turn.

    Args:
        rows: numbers of rows; each is run as FEW, and as MANY where the machine has kernels for those.

    Raises:
        UnsupportedModelError: the model's products do not run on tapes.
    """
    tapes = [step.kernel for step in getattr(getattr(model.decoder, "plan", None), "steps", ())]
    found = [product for tape in tapes if isinstance(tape, TapeStep) for product in tape.products]
    if not found:
        raise UnsupportedModelError(
            "the products of this model cannot be measured alone",
            "none of them is part of a tape",
            "use `genai bench decode` and `genai bench prefill`",
        )
    kinds: dict[str, list[Product]] = {}
    for product in found:
        kinds.setdefault(_kind(product), []).append(product)
    walkers = Walkers(model.threads)
    try:
        read = bandwidth(model.threads)()
        for kind, alike in kinds.items():
            for count in rows:
                for many in (False, True):
                    if not many or (alike[0].quantized and alike[0].per_token and has_many(alike[0].matrix)):
                        seconds = _seconds(alike, count, many, walkers, repeat) / len(alike)
                        yield _row(kind, alike[0], count, many, seconds, read, model.threads)
    finally:
        walkers.close()


def _kind(product: Product) -> str:
    matrix = product.matrix
    layout = getattr(matrix, "layout", None)
    form = f"int{layout.bits} by {layout.block_size}" if layout else getattr(matrix, "type", "float")
    gate = f", {product.gate} of two" if product.gate else ""
    return f"{matrix.rows} x {matrix.columns} {form}{gate}"


def _seconds(alike: Sequence[Product], count: int, many: bool, walkers: Walkers, repeat: int) -> float:
    """Median time of all these products."""
    given = {name: _given_type(product, name) for product in alike for name in product.inputs}
    step = TapeStep(list(alike), given, {}, walkers, copied=())
    context = _context(count, many)
    step.walk(context)
    times = []
    for _ in range(repeat):
        begin = time.perf_counter()
        step.walk(context)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _given_type(product: Product, name: str) -> RowType:
    width = product.matrix.columns if name == product.x else product.type.width
    return RowType((1, -1, width), width, product.type.counted)


def _context(count: int, many: bool) -> StepContext:
    table = ContextTable()
    table.count(Word.TOKENS, count)
    table.count(Word.MANY if many else Word.FEW, count)
    table.count(Word.WANTED, count)
    integers = np.zeros(count, np.int64)
    empty = np.zeros(0, np.int32)
    return StepContext(integers, empty, empty, empty.reshape(0, 0), integers, 0, integers, empty, (), None, table)


def _arithmetic(product: Product, many: bool) -> str:
    if many:
        return "amx bf16"
    return "vnni int8" if product.quantized and isa() in ("amx", "vnni") else "fp32"


def _row(kind: str, product: Product, count: int, many: bool, seconds: float, read: float, threads: int) -> Row:
    operations = 2.0 * product.num_weights * count / seconds
    ceiling = products(_arithmetic(product, many), threads)()
    return {
        "product": kind,
        "rows": count,
        "as": "many" if many else "few",
        "ms": 1e3 * seconds,
        "GB/s": product.weight_bytes / seconds / 1e9,
        "of bandwidth": product.weight_bytes / seconds / read,
        "TOP/s": operations / 1e12,
        "of products": operations / ceiling,
    }
