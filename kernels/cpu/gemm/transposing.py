"""Lines of 32-bit words turned into columns: sixteen by sixteen of them in registers."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from ..emit import INT1, INT32, INT32_VECTOR, INT64, LANES, POINTER, VOID, Emitter, constant, micro_kernel

_MASK, _ALIGNMENT = ir.VectorType(INT1, LANES), INT32(1)


def _first_lanes(e: Emitter, count: Any) -> Any:
    """A mask of the lanes below `count`."""
    lanes = ir.Constant(INT32_VECTOR, list(range(LANES)))
    return e.builder.icmp_signed("<", lanes, e.splat(e.builder.trunc(count, INT32)))


def _turned(e: Emitter, vectors: list[Any]) -> list[Any]:
    """Sixteen vectors as the columns of what they were the rows of: ever smaller squares change places."""
    vectors, size = list(vectors), LANES // 2
    while size:
        upper = [lane if lane & size == 0 else LANES + lane - size for lane in range(LANES)]
        lower = [lane + size if lane & size == 0 else LANES + lane for lane in range(LANES)]
        for i in (i for i in range(LANES) if i & size == 0):
            a, c = vectors[i], vectors[i + size]
            vectors[i] = e.builder.shuffle_vector(a, c, ir.Constant(INT32_VECTOR, upper))
            vectors[i + size] = e.builder.shuffle_vector(a, c, ir.Constant(INT32_VECTOR, lower))
        size //= 2
    return vectors


def _emit(e: Emitter, source: Any, line_step: Any, lines: Any, words: Any, out: Any, word_step: Any) -> None:
    b = e.builder
    last, stored = b.sub(lines, INT64(1)), _first_lanes(e, lines)
    places = [b.select(b.icmp_signed("<", INT64(m), last), INT64(m), last) for m in range(LANES)]
    line_at = [e.at(source, b.mul(place, line_step)) for place in places]
    nothing = constant(INT32_VECTOR, 0)
    with e.loop(b.lshr(b.add(words, INT64(LANES - 1)), INT64(4)), []) as (index, _, following):
        first = b.shl(index, INT64(4))
        left = b.sub(words, first)
        loaded = _first_lanes(e, left)
        vectors = []
        for line in line_at:
            pointer = b.inttoptr(e.at(line, b.shl(first, INT64(2))), POINTER)
            arguments = [pointer, _ALIGNMENT, loaded, nothing]
            vectors.append(e.call("llvm.masked.load.v16i32.p0", INT32_VECTOR, arguments))
        target = e.at(out, b.mul(first, word_step))
        for place, vector in enumerate(_turned(e, vectors)):
            mask = b.select(b.icmp_signed("<", INT64(place), left), stored, constant(_MASK, 0))
            pointer = b.inttoptr(e.at(target, b.mul(word_step, INT64(place))), POINTER)
            e.call("llvm.masked.store.v16i32.p0", VOID, [vector, pointer, _ALIGNMENT, mask])
        following()


# Word k of line m, at source + m * line_step + 4 * k, goes to out + k * word_step + 4 * m; nothing else is touched.
# Its arguments, one tuple: source, line_step, lines (1 to 16), words (at least 1), out, word_step.
turn_lines = micro_kernel(_emit)
