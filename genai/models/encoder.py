"""An encoder that is ready to compute: token ids of whole sequences to rows of numbers."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.common.forks import renew_locks
from genai.common.log import logger
from genai.common.memory_limits import format_bytes
from genai.common.progress import task
from genai.kernels.cache_layout import PAGE_TOKENS, PagedLayer
from genai.kernels.cpu.arrays.blas import BLAS_THREADS
from genai.kernels.device import Executor, PageTables, StepContext
from genai.kernels.ir import Ids

from ..devices import instructions
from ..errors import GenaiError, InputError, UnsupportedModelError
from ..lowering.encoder import EncoderInputs, FlatEncoder
from ..lowering.program import build_program
from ..lowering.rows import NotFlattenable
from ..onnx.ir import OnnxModel
from ..onnx.reader import read_model
from ..onnx.types import TensorType
from ..ops.matmul import APART
from ..optimize.decoders import widen_floats
from ..optimize.shapes import infer_shapes
from ..session.loop import Plan, run
from ..session.plan import PlanOptions, build_plan
from .decoder_graph import count_activations, count_weights
from .encoder_graph import flat_encoder
from .identity import LoadedFiles
from .loading import refused_by

_log = logger(__name__)
Floats = NDArray[np.float32]
# Tokens and sequences of a step. More tokens make a step no faster per token; more sequences need more pages.
STEP_TOKENS, STEP_SEQUENCES = 2048, 256
# Texts of equal length that a graph as exported computes together have at most this number of tokens.
_EXPORTED_TOKENS = 512
_TRIAL_TOKENS = 5
# Increased when a change of the kernels changes the bits of results.
_KERNELS = 7
# Operators whose results for a text do not depend on other texts of the same length, if matmuls are computed apart.
_BATCHED = frozenset(
    "Abs Add And Cast Ceil Clip Concat Constant ConstantOfShape Div Equal Erf Expand Gather GatherElements Gelu Gemm "
    "Greater Identity LayerNormalization Less LessOrEqual Linear Log MatMul Mul Neg Not Range Reshape Shape Sign Slice "
    "Softmax Sqrt Squeeze Sub Tanh Tile Transpose Unsqueeze Where".split()
)
_KNOWN_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")


@dataclass(frozen=True)
class TokenSequence:
    """The tokens of one text.

    Attributes:
        ids: token ids, int64 [tokens], at least one.
        types: token types, int64 [tokens]; None = zeros.
    """

    ids: NDArray[np.int64]
    types: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class EncoderInfo:
    """Facts about an encoder's graph.

    Attributes:
        parameters: number of weights.
        weight_bytes: bytes of the weights in their stored form.
        flattened: True if sequences of any length are computed side by side, without padding.
        reason: reason why the graph is not flattened; "" if it is flattened.
        output: name of the output that is computed.
        rows: "tokens" = the output has one row per token; "first" or "last" = one row per sequence.
        max_tokens: maximum number of tokens of a sequence.
    """

    parameters: int
    weight_bytes: int
    flattened: bool
    reason: str
    output: str
    rows: str
    max_tokens: int


class Encoder:
    """An encoder's graph, compiled for a device.

    The result for a sequence is bit-identical for any other sequences in the same step and any number of threads.

    Args:
        path: the ONNX file.
        executor: the device. Only the CPU and the reference can run encoders.
        outputs: names of the outputs in order of preference; the graph's first output is used if it has none of them.
        max_tokens: maximum number of tokens of a sequence.
        accuracy: see genai.Model.
        files: records the files that the encoder is loaded from.

    Raises:
        ModelFolderError, GraphError: the graph cannot be read.
        UnsupportedModelError: the graph has inputs other than token ids, a mask, token types and positions, or the
            device cannot run it.
    """

    def __init__(
        self, path: Path, executor: Executor, outputs: Sequence[str], max_tokens: int, *, accuracy: str = "auto",
        files: LoadedFiles | None = None,
    ) -> None:  # fmt: skip
        self._path, self._executor, self._accuracy, self._files = path, executor, accuracy, files
        self._lock = threading.Lock()
        renew_locks(self, "_lock")
        self._plan: Plan | None = None
        self._batched: bool | None = None
        model = self._read()
        self._inputs = _inputs_of(model, path)
        self._vocabulary = _vocabulary(model, self._inputs.input_ids)
        output = _output_of(model, outputs, path)
        parameters, weight_bytes = count_weights(model.graph)
        is_exact = accuracy == "fp32" or not count_activations(model.graph, accuracy)["int8"]
        reason, self._flat = "", None
        try:
            self._flat = flat_encoder(model, self._inputs, [output], max_tokens)
        except NotFlattenable as error:
            reason = str(error)
            _log.info("running the graph as exported, without a flat batch: %s", reason)
        if self._flat is not None:
            self._compile(self._flat, "float32" if is_exact else "float16", weight_bytes)
        rows = "tokens" if self._flat is None else self._flat.rows
        flattened = self._flat is not None
        self.info = EncoderInfo(parameters, weight_bytes, flattened, reason, output, rows, max_tokens)

    @property
    def executor(self) -> Executor:
        """The device."""
        return self._executor

    @property
    def input_names(self) -> list[str]:
        """The names of the graph's inputs."""
        inputs = self._inputs
        return [name for name in (*inputs.per_token, inputs.attention_mask) if name]

    @property
    def numerics(self) -> str:
        """The device and the rounding that determine the bits of a result."""
        whole = self._flat is not None and not self._flat.excluded_ids and self._flat.max_tokens >= self.info.max_tokens
        exported = "" if whole else ", equal lengths together"
        device = instructions(self._executor)
        parts = ", bfloat16 parts" if device == "cpu amx" and self._flat is not None else ""
        return f"{device}, activations {self._accuracy}{exported}{parts}, kernels {_KERNELS}"

    def steps(self, sequences: Sequence[TokenSequence]) -> Iterator[range]:
        """Divide sequences into steps of an efficient size; yield the indices of each step, in order."""
        first = tokens = 0
        for index, sequence in enumerate(sequences):
            is_full = tokens + len(sequence) > STEP_TOKENS or index - first >= STEP_SEQUENCES
            if index > first and is_full:
                yield range(first, index)
                first, tokens = index, 0
            tokens += len(sequence)
        if first < len(sequences):
            yield range(first, len(sequences))

    def run(self, sequences: Sequence[TokenSequence]) -> list[Floats]:
        """Compute the output for a step of sequences.

        Returns:
            For each sequence, float32 [rows, width]: one row per token, or a single row (see EncoderInfo.rows).

        Raises:
            InputError: a token id is outside the vocabulary, or a sequence is empty or too long.
        """
        for sequence in sequences:
            self._check(sequence)
        results: list[Floats | None] = [None] * len(sequences)
        flat = [index for index, sequence in enumerate(sequences) if self._is_flat(sequence)]
        with self._lock:
            if flat:
                for index, rows in zip(flat, self._run_flat([sequences[index] for index in flat]), strict=True):
                    results[index] = rows
            others = [index for index, rows in enumerate(results) if rows is None]
            for group in self._equal_lengths(sequences, others):
                for index, rows in zip(group, self._run_exported([sequences[index] for index in group]), strict=True):
                    results[index] = rows
        return [rows for rows in results if rows is not None]

    def _read(self) -> OnnxModel:
        return read_model(self._path, opened=None if self._files is None else self._files.note)

    def _check(self, sequence: TokenSequence) -> None:
        if not 0 < len(sequence) <= self.info.max_tokens:
            raise InputError(
                f"a text has {len(sequence)} tokens",
                f"this model accepts 1 to {self.info.max_tokens} tokens",
                "shorten the text, or truncate it",
            )
        if (most := sequence.ids.max()) >= self._vocabulary:
            raise InputError(
                f"a text has the token id {most}",
                f"the graph has embeddings of the ids 0 to {self._vocabulary - 1}",
                "copy the tokenizer and the graph from the same model",
            )

    def _is_flat(self, sequence: TokenSequence) -> bool:
        flat = self._flat
        if flat is None or len(sequence) > flat.max_tokens:
            return False
        return not any((sequence.ids == id_).any() for id_ in flat.excluded_ids)

    # --- flat batches ---

    def _compile(self, flat: FlatEncoder, kind: str, weight_bytes: int) -> None:
        executor, inputs = self._executor, self._inputs
        kinds = {inputs.input_ids: Ids.TOKENS, inputs.token_type_ids: Ids.TYPES, flat.position_ids: Ids.POSITIONS}
        ids = {value.name: (kinds[value.name], _dtype(value.type)) for value in flat.model.graph.inputs}
        self._reads_types = inputs.token_type_ids in ids
        packing = task("Packing weights", weight_bytes, amount=lambda count: format_bytes(int(count)))
        kernel = {"accuracy": self._accuracy, "threads": executor.host_threads, "executor": lambda: executor}
        with packing, refused_by(executor):
            options = PlanOptions(kernel=kernel, on_packed=packing.add)
            program = replace(build_program(flat.model, ids, options), whole_sequences=True)
            kv_heads, head_size, v_head_size = (max(sizes) for sizes in zip(*flat.heads, strict=True))
            longest = max(STEP_TOKENS, flat.max_tokens)
            blocks = -(-longest // PAGE_TOKENS) + STEP_SEQUENCES
            # A layer reads only the keys and values that it has stored in the same step, so all layers share pages.
            item = np.dtype(kind).itemsize
            sizes = [blocks, kv_heads, PAGE_TOKENS]
            key_bytes, value_bytes = (int(np.prod(sizes)) * size * item for size in (head_size, v_head_size))
            self._memory = executor.allocate(key_bytes + value_bytes)
            keys = self._memory.bytes[:key_bytes].view(kind).reshape(blocks, kv_heads, head_size, PAGE_TOKENS)
            values = self._memory.bytes[key_bytes:].view(kind).reshape(blocks, kv_heads, PAGE_TOKENS, v_head_size)
            self._step = executor.compile(program, [PagedLayer(keys, values)])
        self._name = program.outputs[0]

    def _run_flat(self, sequences: Sequence[TokenSequence]) -> list[Floats]:
        lengths = np.array([len(sequence) for sequence in sequences])
        starts = np.concatenate([[0], np.cumsum(lengths)])
        assert self._flat is not None
        wanted = {"tokens": starts[:0], "first": starts[:-1], "last": starts[1:] - 1}[self._flat.rows]
        found = self._step.run(_step_of(sequences, lengths, starts, wanted, types=self._reads_types))[self._name]
        rows = np.asarray(found, np.float32).reshape(-1, found.shape[-1])
        if self._flat.rows == "tokens":
            return [rows[first:end] for first, end in pairwise(starts)]
        return [rows[index : index + 1] for index in range(len(sequences))]

    # --- graphs as exported ---

    def _equal_lengths(self, sequences: Sequence[TokenSequence], indices: Sequence[int]) -> Iterator[list[int]]:
        """Divide sequences into groups of equal length that are computed together."""
        by_length: dict[int, list[int]] = {}
        for index in indices:
            by_length.setdefault(len(sequences[index]), []).append(index)
        for length, group in by_length.items():
            size = max(1, _EXPORTED_TOKENS // length)
            if size > 1 and len(group) > 1 and not self._is_batched():
                size = 1
            yield from (group[first : first + size] for first in range(0, len(group), size))

    def _is_batched(self) -> bool:
        """Return True if the graph can compute texts of equal length together: its operators and a trial allow it."""
        if self._batched is None:
            known = all(call.op_type in _BATCHED for call in self._plan_as_exported().calls)
            self._batched = known and self._trial_agrees()
            if not self._batched:
                _log.info("running texts one at a time, because a text's result would depend on the other texts")
        return self._batched

    def _trial_agrees(self) -> bool:
        """Return True if two texts have the same results together and alone. Some graphs accept only a batch of 1."""
        ids = np.arange(2 * min(_TRIAL_TOKENS, self.info.max_tokens)) % self._vocabulary
        pair = [TokenSequence(one) for one in ids.reshape(2, -1)]
        try:
            together = self._run_exported(pair)
        except (GenaiError, ValueError):
            return False
        alone = [rows for one in pair for rows in self._run_exported([one])]
        return all(np.array_equal(a, b, equal_nan=True) for a, b in zip(together, alone, strict=True))

    def _run_exported(self, sequences: Sequence[TokenSequence]) -> Sequence[Floats]:
        """Run sequences of equal length with the graph as exported."""
        plan, ids = self._plan_as_exported(), np.stack([one.ids for one in sequences])
        types = np.stack([np.zeros_like(one.ids) if one.types is None else one.types for one in sequences])
        positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
        known = dict(zip(_KNOWN_INPUTS, (ids, np.ones_like(ids), types, positions), strict=True))
        feeds = {name: known[name].astype(dtype) for name, dtype in self._dtypes.items()}
        with BLAS_THREADS.single():
            out = np.asarray(run(plan, feeds)[self.info.output], np.float32)
        return list(out.reshape(len(ids), -1, out.shape[-1]))

    def _plan_as_exported(self) -> Plan:
        if self._plan is None:
            model = self._read()
            infer_shapes(model)
            widen_floats(model)
            model.graph.outputs = [value for value in model.graph.outputs if value.name == self.info.output]
            model.graph.invalidate()
            self._dtypes = {
                value.name: _dtype(value.type)
                for value in model.graph.inputs
                if value.name not in model.graph.initializers
            }
            executor = self._executor
            kernel = {
                "accuracy": self._accuracy,
                "threads": executor.host_threads,
                "executor": lambda: executor,
                "arena": None,
                APART: True,
            }
            with refused_by(self._executor):
                self._plan = build_plan(model, PlanOptions(kernel=kernel))
        return self._plan

    def close(self) -> None:
        """Free the weights and the pages. The encoder cannot be used afterwards."""
        with self._lock:
            if self._flat is not None:
                self._memory.close()
            self._plan = self._flat = None
            self._executor.close()


def _dtype(type_: Any) -> np.dtype[Any]:
    assert isinstance(type_, TensorType)
    return type_.dtype.numpy_dtype


def _inputs_of(model: OnnxModel, path: Path) -> EncoderInputs:
    names = [value.name for value in model.graph.inputs if value.name not in model.graph.initializers]
    if unknown := [name for name in names if name not in _KNOWN_INPUTS]:
        raise UnsupportedModelError(
            f"{path}: the graph has the input {unknown[0]!r}",
            f"encoders of text read only {', '.join(_KNOWN_INPUTS)}",
            "to run other graphs, use genai.InferenceSession",
        )
    if _KNOWN_INPUTS[0] not in names:
        raise UnsupportedModelError(
            f"{path}: the graph has no input {_KNOWN_INPUTS[0]!r}",
            f"its inputs are {', '.join(names) or 'none'}",
            "to run other graphs, use genai.InferenceSession",
        )
    return EncoderInputs(*(name if name in names else "" for name in _KNOWN_INPUTS))


def _output_of(model: OnnxModel, wanted: Sequence[str], path: Path) -> str:
    names = [value.name for value in model.graph.outputs]
    if not names:
        raise UnsupportedModelError(f"{path}: the graph has no outputs", "it computes nothing", "export it again")
    return next((name for name in wanted if name in names), names[0])


def _vocabulary(model: OnnxModel, input_ids: str) -> int:
    """Return the number of token ids that have an embedding in every table that the graph reads."""
    graph = model.graph
    names, rows = {input_ids}, [np.iinfo(np.int64).max]
    for node in graph.nodes:
        if node.op_type == "Cast" and node.inputs[0] in names:
            names.update(node.outputs)
        elif node.op_type in ("Gather", "GatherBlockQuantized") and node.inputs[1] in names:
            table = graph.initializers.get(node.inputs[0])
            rows += [] if table is None else [int(table.shape[0])]
    return int(min(rows))


def _step_of(
    sequences: Sequence[TokenSequence], lengths: NDArray[np.int64], starts: NDArray[np.int64],
    wanted: NDArray[np.int64], *, types: bool,
) -> StepContext:  # fmt: skip
    """Return a step of whole sequences, whose pages follow one another."""
    pages = -(-lengths // PAGE_TOKENS)
    first_pages = np.cumsum(pages) - pages
    width = int(pages.max())
    tables = first_pages[:, None] + np.arange(width)
    tables[np.arange(width) >= pages[:, None]] = -1
    positions = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    token_types = None
    if types and any(sequence.types is not None for sequence in sequences):
        zeros = (np.zeros(len(one), np.int64) if one.types is None else one.types for one in sequences)
        token_types = np.concatenate(list(zeros))
    return StepContext(
        tokens=np.concatenate([sequence.ids for sequence in sequences]),
        positions=positions,
        cu_seqlens_q=starts.astype(np.int32),
        context_lens=lengths.astype(np.int32),
        groups=(PageTables(tables.astype(np.int32), np.repeat(first_pages * PAGE_TOKENS, lengths) + positions),),
        num_decode_sequences=0,
        logits_indices=wanted,
        rope_table=np.zeros(len(sequences), np.int32),
        token_types=token_types,
    )
