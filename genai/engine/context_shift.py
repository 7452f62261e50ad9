"""Moving keys of a full context to earlier positions: which models allow it, and how it is done."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from genai.kernels.records import Attention, HostNode, Ids, Lookup, Rope, RowProgram
from genai.kvcache.rotation import Turn, turn_keys
from genai.kvcache.storage import PagedStorage

from ..errors import UnsupportedModelError


def keys_turner(
    program: RowProgram, rope_threshold: int | None, storage: PagedStorage
) -> Callable[[Sequence[int], int], None]:
    """A function that moves the keys in some blocks, of all layers, so many positions back.

    Raises:
        UnsupportedModelError: positions are known to this model by more than the rotation of keys.
    """
    ropes = {record.layer: record.rope for record in program.records if isinstance(record, Attention)}
    if (why := _obstacle(program, rope_threshold, storage, ropes.values())) is not None:
        raise UnsupportedModelError(
            "the context cannot be shifted with this model", why, "leave ctx_shift out, or use a larger context"
        )

    def turn(blocks: Sequence[int], distance: int) -> None:
        turns: dict[Rope, Turn] = {}
        for layer, rope in ropes.items():
            if rope is None:
                continue
            if rope not in turns:
                turns[rope] = _turn(program, rope, distance)
            turn_keys(storage.layers[layer], blocks, turns[rope])

    return turn


def _turn(program: RowProgram, rope: Rope, distance: int) -> Turn:
    cos, sin = program.constants.array(rope.cos), program.constants.array(rope.sin)
    return Turn.back(cos, sin, rope.interleaved, distance)


def _obstacle(
    program: RowProgram, rope_threshold: int | None, storage: PagedStorage, ropes: Collection[Rope | None]
) -> str | None:
    """What is in the way, if anything is."""
    names = {name for name, (kind, _) in program.ids.items() if kind is Ids.POSITIONS}
    reads_positions = any(
        part.ids is Ids.POSITIONS if isinstance(part, Lookup) else isinstance(part, HostNode) and names & {*part.inputs}
        for part in program.parts
    )
    if reads_positions or not any(ropes):
        return "it does not know positions by the rotation of its keys alone"
    if rope_threshold is not None:
        return f"a sequence of more than {rope_threshold} tokens has other rotary tables than a shorter one"
    if not isinstance(storage.blocks, np.ndarray):
        return "its cache is in the memory of a device, where keys are not turned yet"
    try:
        for rope in filter(None, ropes):
            _turn(program, rope, 1)
    except ValueError as error:
        return str(error)
    return None
