"""Moving keys of a full context to earlier positions: which models allow it, and how it is done."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from genai.kernels.cache_layout import CacheLayer, PagedLayer
from genai.kernels.device import Executor, KeyRotation
from genai.kernels.ir import Attention, Embedding, HostNode, Ids, OpProgram, Rope
from genai.kvcache.rotation import rotate_back

from ..errors import UnsupportedModelError


def key_rotator(
    executor: Executor, program: OpProgram, rope_threshold: int | None, layers: Sequence[CacheLayer]
) -> Callable[[Sequence[Sequence[int]], int], None]:
    """A function that moves the keys in some blocks of each cache group so many positions back.

    Where it is given no blocks it only makes the device ready for it.

    Raises:
        UnsupportedModelError: positions are known to this model by more than the rotation of keys.
    """
    ropes = {op.layer: op.rope for op in program.ops if isinstance(op, Attention)}
    if (why := _obstacle(program, rope_threshold, ropes.values())) is not None:
        raise UnsupportedModelError(
            "the context cannot be shifted with this model", why, "leave ctx_shift out, or use a larger context"
        )

    def turn(blocks: Sequence[Sequence[int]], distance: int) -> None:
        by_rope = {rope: _turn(program, rope, distance) for rope in set(filter(None, ropes.values()))}
        pages = [(layers[layer], by_rope[rope]) for layer, rope in ropes.items() if rope]
        for group, own in enumerate(blocks):
            executor.rotate_keys(
                own, [(layer, by) for layer, by in pages if isinstance(layer, PagedLayer) and layer.group == group]
            )

    return turn


def _turn(program: OpProgram, rope: Rope, distance: int) -> KeyRotation:
    cos, sin = program.constants.array(rope.cos), program.constants.array(rope.sin)
    return rotate_back(cos, sin, rope.interleaved, distance)


def _obstacle(program: OpProgram, rope_threshold: int | None, ropes: Collection[Rope | None]) -> str | None:
    """What is in the way, if anything is."""
    names = {name for name, (kind, _) in program.ids.items() if kind is Ids.POSITIONS}
    reads_positions = any(
        part.ids is Ids.POSITIONS
        if isinstance(part, Embedding)
        else isinstance(part, HostNode) and names & {*part.inputs}
        for part in program.parts
    )
    if reads_positions or not any(ropes):
        return "it does not know positions by the rotation of its keys alone"
    if rope_threshold is not None:
        return f"a sequence of more than {rope_threshold} tokens has other rotary tables than a shorter one"
    try:
        for rope in filter(None, ropes):
            _turn(program, rope, 1)
    except ValueError as error:
        return str(error)
    return None
