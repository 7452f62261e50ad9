"""The float decoder in stages: all texts pass through one stage of a few ops, then through the next stage.

Only the weights of one stage are in memory at a time; between two stages, little more than the residual stream of all
texts is in memory. The decoder's program is cut at points where few values are live. The stages are compiled in float32
by the same executor that runs models. Weights can be overridden. A quantised model of any format is evaluated with
overridden weights before it is written, so only the weights differ from the float model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from genai.kernels.cpu.linear.calls import has_bfloat_products
from genai.kernels.device import PageTables, StateSlots, StepContext, StepFunction
from genai.kernels.ir import (
    Attention,
    CausalConv,
    DenseWeight,
    Embedding,
    GatedLinear,
    Ids,
    Linear,
    LinearAttention,
    MoE,
    Op,
    OpProgram,
    Weight,
    projections,
    weights_of,
)
from genai.kvcache.storage import PagedStorage

from ..devices import open_executor
from ..errors import UnsupportedModelError
from ..lowering.program import build_program
from ..models.decoder_graph import BLOCK_SIZE, cache_layout, numpy_dtype, read_decoder
from ..session.plan import PlanOptions
from .sites import Site, source_of
from .source import FloatModel

Tokens = NDArray[np.int64]
Values = dict[str, NDArray[np.float32]]
# Number of tokens computed together.
BATCH_TOKENS = 2048
# Maximum width of the live values at a cut, in widths of the residual stream: the stream and its pending update.
_WIDTHS_ALIVE = 2


@dataclass(frozen=True)
class MatrixUse:
    """A matmul by a site's matrix.

    Attributes:
        site: the matrix.
        value: name of the value that is multiplied by the matrix.
        op: the op that multiplies.
        projection: index of the projection in the op.
    """

    site: Site
    value: str
    op: Op
    projection: int


@dataclass(frozen=True)
class ProgramStage:
    """A group of parts of the program that run together.

    Attributes:
        number: index of the stage.
        program: the program, which reads `program.given` from earlier stages and computes the values that later stages
            read.
        uses: matmuls by the matrices of sites.
        lookups: sites whose inputs are not recorded: tables, and experts, because each expert has different tokens.
    """

    number: int
    program: OpProgram
    uses: tuple[MatrixUse, ...]
    lookups: tuple[Site, ...]

    @property
    def sites(self) -> tuple[Site, ...]:
        """The sites whose matrices the stage reads, without duplicates."""
        return tuple(dict.fromkeys([*self.lookups, *(use.site for use in self.uses)]))


Override = Callable[[Site], NDArray[np.float32] | None]


def nothing_instead(site: Site) -> None:
    """Return None for every site, so that the model's own weights are used."""


class StreamedDecoder:
    """A float model in stages.

    Args:
        source: the model.
        threads: number of threads; None means the number of physical cores.

    Attributes:
        stages: stages in order; the last one computes the logits.
        uses: the uses of all stages, in order.

    Raises:
        UnsupportedModelError: the decoder cannot run on a flat batch of tokens.
    """

    def __init__(self, source: FloatModel, threads: int | None = None) -> None:
        graph = read_decoder(source.config, kv_dtype="fp32", accuracy="fp32", model=source.model.copy())
        if graph.flat is None:
            raise UnsupportedModelError(
                f"{source.source}: calibration and evaluation cannot run the decoder on a flat batch of tokens",
                graph.info.reason,
                "export the decoder for onnxruntime-genai, or quantise without data: --method search --no-eval",
            )
        self.source, self._flat = source, graph.flat
        self.executor = open_executor("cpu", threads)
        names = source.config.model.decoder.names
        kinds = {names.input_ids: Ids.TOKENS, names.position_ids: Ids.POSITIONS}
        inputs = {v.name: (kinds[v.name], numpy_dtype(v)) for v in graph.model.graph.inputs if v.name in kinds}
        kernel = {"accuracy": "fp32", "threads": self.executor.host_threads, "executor": lambda: self.executor}
        self._model = graph.model  # keeps its tensors alive, because constants are views of them
        known = {site.name: site for site in source.sites}
        self._origins = {
            name: (known[tensor.name], turned)
            for node in graph.model.graph.nodes
            for name in node.inputs
            for tensor, turned in [source_of(graph.model.graph, name)]
            if tensor is not None and tensor.name in known
        }
        self.program = build_program(graph.model, inputs, PlanOptions(kernel=kernel))
        self.logits = self.program.outputs[0]
        self.vocab_size = source.config.model.vocab_size
        self.stages = tuple(self._stage(n, first, last) for n, (first, last) in enumerate(pairwise(self._cuts())))
        self.uses = tuple(use for stage in self.stages for use in stage.uses)

    def _cuts(self) -> list[int]:
        """Return the boundaries between parts at which few values are live, including 0 and the number of parts."""
        parts, types = self.program.parts, self.program.types
        first: dict[str, int] = {}
        last: dict[str, int] = dict.fromkeys(self.program.outputs, len(parts))
        for index, part in enumerate(parts):
            first.update((name, index) for name in part.outputs if name)
            last.update((name, max(index, last.get(name, 0))) for name in part.inputs if name in first)
        widths = {name: types[name].width if name in types else 1 << 60 for name in first}
        base = min((widths[name] for name in parts[0].outputs), default=0)
        cuts = [0]
        for index in range(1, len(parts)):
            alive = sum(widths[name] for name, at in first.items() if at < index <= last.get(name, -1))
            if alive <= _WIDTHS_ALIVE * base:
                cuts.append(index)
        return [*cuts, len(parts)]

    def _stage(self, number: int, first: int, last: int) -> ProgramStage:
        parts = self.program.parts[first:last]
        produced = {name for part in parts for name in part.outputs if name}
        later = {name for part in self.program.parts[last:] for name in part.inputs} | set(self.program.outputs)
        inputs = tuple(dict.fromkeys(n for part in parts for n in part.inputs if n and n not in produced))
        program = replace(
            self.program, parts=parts, given=inputs, outputs=tuple(name for name in sorted(produced) if name in later)
        )
        uses = [use for part in parts if isinstance(part, Op) for use in self._uses_of(part)]
        tables = [part.table for part in parts if isinstance(part, Embedding)]
        tables += [projection.weight for part in parts if isinstance(part, MoE) for projection in projections(part)]
        lookups = [site for table in tables if (site := self.site_of(table)) is not None]
        return ProgramStage(number, program, tuple(uses), tuple(lookups))

    def _uses_of(self, op: Op) -> Iterator[MatrixUse]:
        if isinstance(op, (Linear, GatedLinear)):
            for number, projection in enumerate(projections(op)):
                if (site := self.site_of(projection.weight)) is not None:
                    yield MatrixUse(site, op.x, op, number)

    def site_of(self, weight: Weight) -> Site | None:
        """Return the site of a weight's matrix, or None."""
        origin = self._origins.get(weight.data) if isinstance(weight, DenseWeight) else None
        return None if origin is None else origin[0]

    def is_inputs_first(self, weight: Weight) -> bool:
        """Return True if the constant of a site's weight is [columns, rows]."""
        site, turned = self._origins[weight.data]
        return site.inputs_first != turned

    @contextmanager
    def running(
        self,
        stage: ProgramStage,
        *,
        instead: Override = nothing_instead,
        only: Collection[str] = (),
        tokens: int = BATCH_TOKENS,
        narrow: bool = False,
    ) -> Iterator[RunningStage]:
        """Yield a stage that is ready to run, with its weights in memory until the end of the context.

        Args:
            instead: returns a matrix [rows, columns] to use for a site; None means the model's own matrix.
            only: values inside the stage to compute instead of the values that later stages read; parts that are not
                needed for them are skipped.
            tokens: maximum number of tokens per batch.
            narrow: True to round the operands of matmuls to bfloat16 if the machine multiplies bfloat16 much faster.
        """
        outputs = tuple(only) or tuple(stage.program.outputs)
        program = replace(stage.program, parts=_needed(stage.program.parts, outputs), outputs=outputs)
        narrow = narrow and has_bfloat_products()
        program = replace(program, constants=_StageConstants(self, stage, instead, narrow=narrow))
        if narrow:
            program = replace(program, parts=tuple(_rounding(part) for part in program.parts))
        storages: list[PagedStorage] = []
        layers: list[Any] = [None] * len(self._flat.layers)
        try:
            for op in program.ops:
                if isinstance(op, Attention | CausalConv | LinearAttention):
                    layout = cache_layout([self._flat.layers[op.layer]], "fp32", 0)
                    assert layout is not None  # float caches support all head sizes
                    # Every sequence may end in a partly filled block; blocks without tokens use no memory.
                    storages.append(PagedStorage(layout, tokens, self.executor.allocate, 2 * tokens))
                    layers[op.layer] = storages[-1].layers[0]
            yield RunningStage(self.executor.compile(program, layers), outputs)
        finally:
            self.executor.close()
            for storage in storages:
                storage.close()

    @property
    def whole(self) -> ProgramStage:
        """All stages as one stage, which needs memory for all weights."""
        return ProgramStage(-1, self.program, self.uses, ())

    def close(self) -> None:
        """Free memory."""
        self.executor.close()


class _StageConstants:
    """The constants of one stage. The matrices of sites are computed when they are packed, and are not kept."""

    def __init__(self, decoder: StreamedDecoder, stage: ProgramStage, instead: Override, *, narrow: bool) -> None:
        self._decoder, self._instead = decoder, instead
        self._narrow = {use.site for use in stage.uses}.difference(stage.lookups) if narrow else set()
        self._sites = {
            weight.data: (site, decoder.is_inputs_first(weight))
            for op in stage.program.ops
            for weight in weights_of(op)
            if (site := decoder.site_of(weight)) is not None
        }

    def array(self, name: str) -> NDArray[Any]:
        if name not in self._sites:
            return self._decoder.program.constants.array(name)
        site, inputs_first = self._sites[name]
        matrix: NDArray[Any] | None = self._instead(site)
        if site in self._narrow:
            matrix = self._decoder.source.narrow_weight(site) if matrix is None else matrix
            matrix = matrix.astype(ml_dtypes.bfloat16, copy=False)
        elif matrix is None:
            matrix = self._decoder.source.weight(site)
        if inputs_first:
            return matrix.T  # packing transposes it back
        return matrix.reshape(site.experts, -1, site.columns) if site.experts else matrix

    def packed(self, weight: Weight) -> None:
        if isinstance(weight, DenseWeight) and weight.data in self._sites:
            self._decoder.source.release(self._sites[weight.data][0].name)


def _needed(parts: Sequence[Any], outputs: Collection[str]) -> tuple[Any, ...]:
    """Return the parts, in order, that are needed to compute these outputs."""
    values, needed = set(outputs), []
    for part in reversed(parts):
        if values.intersection(part.outputs):
            values.update(part.inputs)
            needed.append(part)
    return tuple(reversed(needed))


def _rounding(part: Any) -> Any:
    return replace(part, exact=False) if isinstance(part, (Linear, GatedLinear)) else part


@dataclass(frozen=True)
class RunningStage:
    """A stage whose weights are in memory."""

    function: StepFunction
    outputs: Sequence[str]

    def run(self, tokens: Tokens, values: Mapping[str, NDArray[np.float32]]) -> Values:
        """Compute sequences [count, length], each starting with an empty cache.

        Args:
            values: values of earlier stages, one row per token.

        Returns:
            The stage's outputs, [tokens, width] each, in new arrays, like all results of CPU programs.
        """
        return self.step(step_of(tokens), values)

    def step(self, step: StepContext, values: Mapping[str, NDArray[np.float32]]) -> Values:
        """Compute any step."""
        results = self.function.run(step, values)
        return {name: np.asarray(results[name], np.float32).reshape(len(step.tokens), -1) for name in self.outputs}


def step_of(tokens: Tokens, first: int = 0, room: int = 0) -> StepContext:
    """Return a step of sequences [count, length] that start at position `first`, with the logits of all tokens.

    Args:
        room: maximum number of tokens that each sequence may grow to, by steps of one token; 0 means that no step
            follows.
    """
    count, length = tokens.shape
    blocks = -(-max(room, first + length) // BLOCK_SIZE)
    tables = np.arange(count * blocks, dtype=np.int32).reshape(count, blocks)
    positions = np.arange(first, first + length)
    slots = tables[:, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
    # Each sequence alternates between two slots for its states, one for each parity of the last position.
    own, last = 2 * np.arange(count, dtype=np.int32), first + length - 1
    writes = np.full((count, length), -1, np.int32)
    if room:
        writes[:, -1] = own + last % 2
    reads = own + (first - 1) % 2 if first else np.full(count, -1, np.int32)
    return StepContext(
        tokens=np.ascontiguousarray(tokens.reshape(-1)),
        positions=np.tile(positions, count),
        cu_seqlens_q=np.arange(count + 1, dtype=np.int32) * length,
        context_lens=np.full(count, first + length, np.int32),
        groups=(PageTables(tables, slots.reshape(-1)), StateSlots(reads.astype(np.int32), writes.reshape(-1))),
        num_decode_sequences=0,
        logits_indices=np.arange(tokens.size),
        rope_table=np.zeros(count, np.int32),
    )


def batches_of(tokens: Tokens, most: int = BATCH_TOKENS) -> list[Tokens]:
    """Split sequences [count, length] into batches of at least one sequence and, if possible, at most `most` tokens."""
    step = max(1, most // tokens.shape[1])
    return [tokens[first : first + step] for first in range(0, len(tokens), step)]
