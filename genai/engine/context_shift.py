"""Context shift: moving cached keys to earlier positions, for models that support it."""

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
    """Return a function that lowers the positions of the keys in given blocks of each cache group by a given distance.

    If the function is called without blocks, it only prepares the device.

    Raises:
        UnsupportedModelError: the model uses positions in other ways than by rotating keys.
    """
    ropes = {op.layer: op.rope for op in program.ops if isinstance(op, Attention)}
    if (why := _obstacle(program, rope_threshold, ropes.values())) is not None:
        raise UnsupportedModelError(
            "context shift is not supported for this model",
            why,
            "remove ctx_shift, or load the model with a larger context",
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
    """Return the reason why the context cannot be shifted; None if it can."""
    if any(isinstance(op, Attention) and op.chunk for op in program.ops):
        return "layers attend to chunks, which start at fixed positions"
    names = {name for name, (kind, _) in program.ids.items() if kind is Ids.POSITIONS}
    reads_positions = any(
        part.ids is Ids.POSITIONS
        if isinstance(part, Embedding)
        else isinstance(part, HostNode) and names & {*part.inputs}
        for part in program.parts
    )
    if reads_positions or not any(ropes):
        return "the model does not use positions only to rotate keys and queries"
    if rope_threshold is not None:
        return f"sequences of more than {rope_threshold} tokens use different rotary tables from shorter sequences"
    try:
        for rope in filter(None, ropes):
            _turn(program, rope, 1)
    except ValueError as error:
        return str(error)
    return None
