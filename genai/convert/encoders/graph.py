"""Writes an encoder's graph in plain ONNX operators, with matmuls of quantised blocks where requested.

The inputs are those of Optimum's exports: input_ids, attention_mask and, if the encoder distinguishes them,
token_type_ids. The output is last_hidden_state, or logits if there is a classification head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError
from ..graph_writer import FLOAT, INT64, Dims, Export, hidden_dims
from ..layers import write_linear
from ..projection import Projection
from ..weights import Weights, row_chunks
from .spec import Disentangled, EncoderSpec, LayerNames, RelativeBias, TokenScore

BOOL = 9
_HIDDEN = -1e9  # added to scores of hidden tokens; finite, so that rows of padding are finite, too
_SEQUENCE: Dims = ["batch_size", "sequence_length"]


# A parametrised weight of torch.nn.utils.parametrize: the weight itself, and the factors of its adapters.
_ORIGINAL, _FACTORS = ".parametrizations.weight.original", ".parametrizations.weight.0.lora_"


@dataclass(frozen=True)
class TaskAdapter:
    """The adapter that is merged into the weights: its index in the checkpoint's tensors, and its scale."""

    index: int
    scale: float


class EncoderWeights(Mapping[str, NDArray[Any]]):
    """Tensors by the names of a model without a head, whatever prefix they have in the checkpoint.

    Args:
        tensors: tensors by their names in the checkpoint.
        prefixes: prefixes of names that are removed.
        adapter: if given, this adapter is added to each weight that has adapters; otherwise, adapters are ignored.
    """

    def __init__(
        self, tensors: Mapping[str, NDArray[Any]], prefixes: tuple[str, ...], adapter: TaskAdapter | None = None
    ) -> None:
        self._tensors, self._adapter = tensors, adapter
        self._names: dict[str, str] = {}
        for stored in tensors:
            if _FACTORS in stored:
                continue
            name = stored.replace(_ORIGINAL, ".weight")
            for prefix in prefixes:
                name = name.removeprefix(prefix)
            for old, new in (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")):
                name = name.replace(old, new)
            self._names[name] = stored

    def __getitem__(self, name: str) -> NDArray[Any]:
        stored = self._names[name]
        tensor = self._tensors[stored]
        if self._adapter is None or not stored.endswith(_ORIGINAL):
            return tensor
        a, b = (self._tensors[stored.replace(_ORIGINAL, _FACTORS + factor)] for factor in "AB")
        # A linear layer has factors A [tasks, rank, inputs] and B [tasks, outputs, rank]; an embedding table has
        # A [tasks, rows, rank] and B [tasks, rank, width].
        is_table = a.shape[1] == tensor.shape[0] and a.shape[2] == b.shape[1]
        index, factors = self._adapter.index, (a, b) if is_table else (b, a)
        if a.ndim != 3 or b.ndim != 3 or not index < min(len(a), len(b)):
            raise InputError(
                f"the adapters of {name} have the shapes {list(a.shape)} and {list(b.shape)}",
                "three axes are expected, the first of which counts the tasks",
                "download the checkpoint again",
            )
        first, second = (np.asarray(factor[index], np.float32) for factor in factors)
        merged: NDArray[np.float32] = np.asarray(tensor, np.float32) + first @ second * np.float32(self._adapter.scale)
        return merged

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names


class EncoderWriter:
    """Writes one encoder.

    Args:
        export: the graph, the options and the weights.
        spec: the encoder.
        names: names of the checkpoint's tensors.
    """

    def __init__(self, export: Export, spec: EncoderSpec, names: Mapping[str, Any]) -> None:
        self._export, self._graph, self._spec, self._names = export, export.graph, spec, names
        self._weights: Weights = export.weights
        self._dims = hidden_dims(spec.hidden_size)
        self._biases: dict[int | None, str] = {}
        self._tables: dict[float, list[str]] = {}
        self._indices: dict[bool, str] = {}
        self._distance_name = ""

    def write(self) -> None:
        """Write the whole graph."""
        graph, spec = self._graph, self._spec
        graph.input("input_ids", INT64, _SEQUENCE)
        graph.input("attention_mask", INT64, _SEQUENCE)
        if spec.has_types:
            graph.input("token_type_ids", INT64, _SEQUENCE)
        self._write_lengths()
        stream = self._embeddings()
        for layer in range(spec.num_layers):
            stream = self._layer(layer, stream)
        output = "last_hidden_state" if spec.head is None else None
        if spec.final_norm:
            stream = self._norm(stream, spec.final_norm, "/final_norm", output=output)
        elif output:
            stream = graph.node("Identity", [stream], "/last", self._dims, output=output)
        if spec.head is None:
            graph.output("last_hidden_state", FLOAT, self._dims)
        else:
            self._head(stream)

    # --- lengths, masks and positions ---

    def _write_lengths(self) -> None:
        graph = self._graph
        shape = graph.node("Shape", ["input_ids"], "/length/Shape", [2], element=INT64)
        self._length = graph.node("Gather", [shape, graph.int64(1)], "/length/Gather", [], element=INT64, axis=0)
        inputs = [graph.int64(0), self._length, graph.int64(1)]
        self._range = graph.node("Range", inputs, "/length/Range", ["sequence_length"], element=INT64)
        seen = graph.node("Cast", ["attention_mask"], "/mask/Cast", _SEQUENCE, element=BOOL, to=BOOL)
        dims: Dims = ["batch_size", 1, 1, "sequence_length"]
        self._seen = graph.node("Unsqueeze", [seen, graph.int64([1, 2])], "/mask/Unsqueeze", dims, element=BOOL)

    def _distance(self) -> str:
        """Return j - i for the token i of a row and the token j that it may see, [tokens, tokens]."""
        graph, square = self._graph, ["sequence_length", "sequence_length"]
        across = graph.node(
            "Unsqueeze", [self._range, graph.int64([0])], "/distance/columns", [1, "sequence_length"], element=INT64
        )
        down = graph.node(
            "Unsqueeze", [self._range, graph.int64([1])], "/distance/rows", ["sequence_length", 1], element=INT64
        )
        return graph.node("Sub", [across, down], "/distance/Sub", square, element=INT64)

    def _bias(self, layer: int) -> str:
        """Return the addend of a layer's scores, which hides padding and tokens outside the window."""
        window = self._spec.window(layer)
        if window not in self._biases:
            self._biases[window] = self._write_bias(window)
        return self._biases[window]

    def _write_bias(self, window: int | None) -> str:
        graph, path = self._graph, f"/mask/{window or 'whole'}"
        square: Dims = ["sequence_length", "sequence_length"]
        full: Dims = ["batch_size", 1, "sequence_length", "sequence_length"]
        seen = self._seen
        dims: Dims = ["batch_size", 1, 1, "sequence_length"]
        needed = []
        if window is not None or self._spec.causal:
            distance = self._distance_once()
            if window is not None:
                away = graph.node("Abs", [distance], f"{path}/Abs", square, element=INT64)
                needed.append(graph.node("Less", [away, graph.int64(window)], f"{path}/Less", square, element=BOOL))
            if self._spec.causal:
                inputs = [distance, graph.int64(0)]
                needed.append(graph.node("LessOrEqual", inputs, f"{path}/before", square, element=BOOL))
        for index, condition in enumerate(needed):
            seen, dims = graph.node("And", [seen, condition], f"{path}/And_{index}", full, element=BOOL), full
        inputs = [seen, graph.float32(0.0), graph.float32(_HIDDEN)]
        bias = graph.node("Where", inputs, f"{path}/Where", dims)
        if self._spec.relative is not None:
            bias = graph.node("Add", [self._relative(self._spec.relative), bias], f"{path}/Add", [
                "batch_size", self._spec.heads, "sequence_length", "sequence_length"
            ])  # fmt: skip
        return bias

    def _distance_once(self) -> str:
        if not self._distance_name:
            self._distance_name = self._distance()
        return self._distance_name

    def _relative(self, relative: RelativeBias) -> str:
        """Return the bias by distance, [1, heads, tokens, tokens]."""
        graph, most, heads = self._graph, relative.max_distance, self._spec.heads
        table = self._weights.tensor(f"{relative.table}.weight", (relative.buckets, heads)).astype(np.float32)
        rows = table[relative_buckets(np.arange(-most, most + 1), relative.buckets, most)]
        name = graph.array("relative_bias", np.ascontiguousarray(rows))
        square: Dims = ["sequence_length", "sequence_length"]
        path = "/relative"
        limits = [graph.int64(-most), graph.int64(most)]
        near = graph.node("Clip", [self._distance_once(), *limits], f"{path}/Clip", square, element=INT64)
        index = graph.node("Add", [near, graph.int64(most)], f"{path}/Add", square, element=INT64)
        found = graph.node("Gather", [name, index], f"{path}/Gather", [*square, heads])
        turned = graph.node("Transpose", [found], f"{path}/Transpose", [heads, *square], perm=[2, 0, 1])
        return graph.node("Unsqueeze", [turned, graph.int64([0])], f"{path}/Unsqueeze", [1, heads, *square])

    # --- embeddings ---

    def _table(self, name: str, rows: int) -> str:
        width = self._spec.embedding_width or self._spec.hidden_size
        tensor = self._weights.tensor(f"{name}.weight", (rows, width))
        return self._graph.initializer(f"{name}.weight", (rows, width), np.float32, row_chunks(name, tensor))

    def _embeddings(self) -> str:
        graph, spec = self._graph, self._spec
        width = spec.embedding_width or spec.hidden_size
        dims = hidden_dims(width)
        stream = graph.node("Gather", [self._table(spec.words, spec.vocab_size), "input_ids"], "/words/Gather", dims)
        if spec.embedding_scale != 1:
            scale = graph.float32(float(np.float32(spec.embedding_scale)))
            stream = graph.node("Mul", [stream, scale], "/words/Mul", dims)
        if spec.types:
            if spec.has_types:
                found = graph.node(
                    "Gather", [self._table(spec.types, spec.num_types), "token_type_ids"], "/types/Gather", dims
                )
            else:
                row = self._weights.tensor(f"{spec.types}.weight", (spec.num_types, width))[:1].astype(np.float32)
                found = graph.array(f"{spec.types}.first", row)
            stream = graph.node("Add", [stream, found], "/types/Add", dims)
        if spec.positions:
            table = self._table(spec.positions, spec.num_positions)
            own = dims if spec.padding_id is not None else dims[1:]
            found = graph.node("Gather", [table, self._position_ids()], "/positions/Gather", own)
            stream = graph.node("Add", [stream, found], "/positions/Add", dims)
        if spec.embedding_norm:
            stream = self._norm(stream, spec.embedding_norm, "/embedding_norm", width=width)
        if spec.embedding_projection:
            stream = self._linear(
                stream, "/embedding_projection", [spec.embedding_projection], [spec.hidden_size], width
            )
        return stream

    def _position_ids(self) -> str:
        """Return each token's row in the table of positions."""
        graph, padding = self._graph, self._spec.padding_id
        if padding is None:
            return self._range
        path = "/position_ids"
        is_padding = graph.node("Equal", ["input_ids", graph.int64(padding)], f"{path}/Equal", _SEQUENCE, element=BOOL)
        is_token = graph.node("Not", [is_padding], f"{path}/Not", _SEQUENCE, element=BOOL)
        ones = graph.node("Cast", [is_token], f"{path}/Cast", _SEQUENCE, element=INT64, to=INT64)
        count = graph.node("CumSum", [ones, graph.int64(1)], f"{path}/CumSum", _SEQUENCE, element=INT64)
        counted = graph.node("Mul", [count, ones], f"{path}/Mul", _SEQUENCE, element=INT64)
        return graph.node("Add", [counted, graph.int64(padding)], f"{path}/Add", _SEQUENCE, element=INT64)

    # --- layers ---

    def _layer(self, layer: int, stream: str) -> str:
        spec, names, path = self._spec, self._spec.names(layer), f"/layers.{layer}"
        source = stream
        if spec.pre_norm and names.attention_norm:
            source = self._norm(stream, names.attention_norm, f"{path}/attention_norm")
        update = self._attention(layer, names, source)
        if names.attention_end:
            update = self._norm(update, names.attention_end, f"{path}/attention_end")
        stream = self._graph.node("Add", [update, stream], f"{path}/attention/Add", self._dims)
        if not spec.pre_norm:
            stream = self._norm(stream, names.attention_norm, f"{path}/attention_norm")
        source = self._norm(stream, names.feed_norm, f"{path}/feed_norm") if spec.pre_norm else stream
        update = self._feed_forward(names, source, f"{path}/feed")
        if names.feed_end:
            update = self._norm(update, names.feed_end, f"{path}/feed_end")
        stream = self._graph.node("Add", [update, stream], f"{path}/feed/Add", self._dims)
        return stream if spec.pre_norm else self._norm(stream, names.feed_norm, f"{path}/feed_norm")

    def _attention(self, layer: int, names: LayerNames, source: str) -> str:
        graph, spec, path = self._graph, self._spec, f"/layers.{layer}/attention"
        rows = [spec.heads * spec.head_size, *[spec.kv_heads * spec.head_size] * 2]
        weights = [names.joined] if names.joined else [names.query, names.key, names.value]
        sizes = [sum(rows)] if names.joined else rows
        joined = self._linear(source, f"{path}/qkv", weights, sizes, spec.hidden_size)
        parts = [f"{path}/{name}" for name in ("query", "key", "value")]
        graph.nodes("Split", [joined, graph.int64(rows)], parts, f"{path}/Split", axis=-1)
        for name, width in zip(parts, rows, strict=True):
            graph.value(name, FLOAT, hidden_dims(width))
        heads = [
            self._heads(parts[0], f"{path}/query", spec.heads, names.query_norm, layer),
            self._heads(parts[1], f"{path}/key", spec.kv_heads, names.key_norm, layer, is_key=True),
            self._heads(parts[2], f"{path}/value", spec.kv_heads, "", None),
        ]
        if spec.kv_heads != spec.heads:
            heads[1:] = [
                self._repeated(one, f"{path}/{name}") for one, name in zip(heads[1:], ("key", "value"), strict=True)
            ]
        square: Dims = ["batch_size", spec.heads, "sequence_length", "sequence_length"]
        by_head: Dims = ["batch_size", spec.heads, "sequence_length", spec.head_size]
        keys = graph.node(
            "Transpose", [heads[1]], f"{path}/keys", ["batch_size", spec.heads, spec.head_size, "sequence_length"],
            perm=[0, 1, 3, 2],
        )  # fmt: skip
        scores = graph.node("MatMul", [heads[0], keys], f"{path}/scores", square)
        scale = 1 / math.sqrt(spec.head_size) if spec.scale is None else spec.scale
        if scale != 1:
            scores = graph.node("Mul", [scores, graph.float32(float(np.float32(scale)))], f"{path}/scale", square)
        if spec.disentangled is not None:
            added = self._to_positions(spec.disentangled, layer, names, heads[0], heads[1], scale)
            for index, one in enumerate(added):
                scores = graph.node("Add", [scores, one], f"{path}/position_{index}", square)
        scores = graph.node("Add", [scores, self._bias(layer)], f"{path}/bias", square)
        shares = graph.node("Softmax", [scores], f"{path}/Softmax", square, axis=-1)
        mixed = graph.node("MatMul", [shares, heads[2]], f"{path}/mixed", by_head)
        tokens = graph.node(
            "Transpose", [mixed], f"{path}/tokens", ["batch_size", "sequence_length", spec.heads, spec.head_size],
            perm=[0, 2, 1, 3],
        )  # fmt: skip
        width = spec.heads * spec.head_size
        joined = graph.node("Reshape", [tokens, graph.int64([0, 0, width])], f"{path}/joined", hidden_dims(width))
        return self._linear(joined, f"{path}/output", [names.output], [spec.hidden_size], width)

    def _to_positions(
        self, spec: Disentangled, layer: int, names: LayerNames, queries: str, keys: str, scale: float
    ) -> list[str]:
        """Return the scores of content and relative positions, [batch, heads, tokens, tokens] each."""
        graph, heads, size = self._graph, self._spec.heads, self._spec.head_size
        path, square = f"/layers.{layer}/attention/positions", self._square_of_heads()
        found = []
        for is_query, wanted in ((False, spec.to_positions), (True, spec.from_positions)):
            if not wanted:
                continue
            role = "query" if is_query else "key"
            rows = self._position_rows(spec, names, is_query=is_query)
            by_head = np.ascontiguousarray(rows.reshape(2 * spec.span, heads, size).transpose(1, 2, 0)[None])
            table = graph.array(f"{path[1:].replace('/', '.')}.{role}", by_head * np.float32(scale))
            dims: Dims = ["batch_size", heads, "sequence_length", 2 * spec.span]
            products = graph.node("MatMul", [keys if is_query else queries, table], f"{path}/{role}/MatMul", dims)
            index = self._position_index(spec, square, is_query=is_query)
            part = graph.node("GatherElements", [products, index], f"{path}/{role}/Gather", square, axis=3)
            if is_query:
                part = graph.node("Transpose", [part], f"{path}/{role}/Transpose", square, perm=[0, 1, 3, 2])
            found.append(part)
        return found

    def _square_of_heads(self) -> Dims:
        return ["batch_size", self._spec.heads, "sequence_length", "sequence_length"]

    def _position_rows(self, spec: Disentangled, names: LayerNames, *, is_query: bool) -> NDArray[np.float32]:
        """Return the keys or queries of relative positions, [2 * span, heads * head_size]."""
        hidden, count = self._spec.hidden_size, 2 * spec.span
        stored = len(self._names[f"{spec.table}.weight"])
        table = self._weights.tensor(f"{spec.table}.weight", (stored, hidden)).astype(np.float64)[:count]
        if spec.norm:
            centred = table - table.mean(axis=1, keepdims=True)
            table = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + self._spec.epsilon)
            table = table * self._weights.vector(f"{spec.norm}.weight", hidden)
            table = table + self._weights.vector(f"{spec.norm}.bias", hidden)
        name = names.query if is_query else names.key
        if spec.own_projections:
            name = name.rpartition(".")[0] + (".pos_query_proj" if is_query else ".pos_key_proj")
        weight = self._weights.tensor(f"{name}.weight", (hidden, hidden)).astype(np.float64)
        rows = table @ weight.T
        if f"{name}.bias" in self._names:
            rows = rows + self._weights.vector(f"{name}.bias", hidden)
        found: NDArray[np.float32] = rows.astype(np.float32)
        return found

    def _position_index(self, spec: Disentangled, square: Dims, *, is_query: bool) -> str:
        """Return the row of relative positions for each pair of tokens, [batch, heads, tokens, tokens]."""
        if is_query not in self._indices:
            graph, most = self._graph, self._spec.max_tokens - 1
            path = f"/position_index/{'query' if is_query else 'key'}"
            distance = np.arange(most, -most - 1, -1)  # i - j for j - i = -most to most
            bucket = position_buckets(distance, spec.span, spec.max_distance)
            rows = np.clip((-bucket if is_query else bucket) + spec.span, 0, 2 * spec.span - 1)
            table = graph.array(f"{path[1:].replace('/', '.')}.rows", rows.astype(np.int64))
            flat: Dims = ["sequence_length", "sequence_length"]
            place = graph.node("Add", [self._distance_once(), graph.int64(most)], f"{path}/Add", flat, element=INT64)
            index = graph.node("Gather", [table, place], f"{path}/Gather", flat, element=INT64)
            shape = graph.node("Shape", ["input_ids"], f"{path}/Shape", [2], element=INT64)
            batch = graph.node("Gather", [shape, graph.int64([0])], f"{path}/batch", [1], element=INT64)
            length = graph.node("Gather", [shape, graph.int64([1])], f"{path}/length", [1], element=INT64)
            parts = [batch, graph.int64([self._spec.heads]), length, length]
            dims = graph.node("Concat", parts, f"{path}/Concat", [4], element=INT64, axis=0)
            self._indices[is_query] = graph.node("Expand", [index, dims], f"{path}/Expand", square, element=INT64)
        return self._indices[is_query]

    def _heads(self, source: str, path: str, heads: int, norm: str, layer: int | None, *, is_key: bool = False) -> str:
        """Return [batch, heads, tokens, size], normalised and rotated as the model requires."""
        graph, size = self._graph, self._spec.head_size
        apart: Dims = ["batch_size", "sequence_length", heads, size]
        by_head: Dims = ["batch_size", heads, "sequence_length", size]
        split = graph.node("Reshape", [source, graph.int64([0, 0, heads, size])], f"{path}/split", apart)
        if norm:
            weight = self._weights.vector(f"{norm}.weight", size) + np.float32(self._spec.norm_offset)
            name = graph.array(f"{norm}.weight", weight)
            split = graph.node(
                "SimplifiedLayerNormalization", [split, name], f"{path}/norm", apart, axis=-1,
                epsilon=self._spec.epsilon, stash_type=1,
            )  # fmt: skip
        turned = graph.node("Transpose", [split], f"{path}/heads", by_head, perm=[0, 2, 1, 3])
        if layer is None or not self._spec.thetas:
            return turned
        return self._rotated(turned, f"{path}/rotation", by_head, self._spec.thetas[layer])

    def _rotated(self, x: str, path: str, dims: Dims, theta: float) -> str:
        """Return x * cos + rotate_half(x) * sin (Su et al. 2021)."""
        graph, size = self._graph, self._spec.head_size
        half: Dims = [*dims[:3], size // 2]
        cos, sin = self._rotation_tables(theta)
        steps = [graph.int64([1])]
        bounds = [[graph.int64([begin]), graph.int64([end]), graph.int64([-1]), *steps]
                  for begin, end in ((0, size // 2), (size // 2, size))]  # fmt: skip
        first = graph.node("Slice", [x, *bounds[0]], f"{path}/first", half)
        second = graph.node("Slice", [x, *bounds[1]], f"{path}/second", half)
        negated = graph.node("Neg", [second], f"{path}/Neg", half)
        turned = graph.node("Concat", [negated, first], f"{path}/Concat", dims, axis=-1)
        plain = graph.node("Mul", [x, cos], f"{path}/cos", dims)
        crossed = graph.node("Mul", [turned, sin], f"{path}/sin", dims)
        return graph.node("Add", [plain, crossed], f"{path}/Add", dims)

    def _rotation_tables(self, theta: float) -> list[str]:
        """Return the cosines and sines of the positions, [1, 1, tokens, size]."""
        if theta not in self._tables:
            graph, size, count = self._graph, self._spec.head_size, self._spec.max_tokens
            frequencies = (1.0 / theta ** (np.arange(0, size, 2, dtype=np.float32) / np.float32(size))).astype(
                np.float32
            )
            frequencies = frequencies / np.float32(self._spec.rotation_factor)
            angles = np.arange(count, dtype=np.float32)[:, None] * frequencies
            both = np.concatenate([angles, angles], axis=1)
            names = []
            for name, table in (("cos", np.cos(both)), ("sin", np.sin(both))):
                path = f"/rotation/{theta:g}/{name}"
                data = graph.array(path[1:].replace("/", "."), table.astype(np.float32))
                rows = graph.node("Gather", [data, self._range], f"{path}/Gather", ["sequence_length", size])
                names.append(
                    graph.node(
                        "Unsqueeze", [rows, graph.int64([0, 1])], f"{path}/Unsqueeze", [1, 1, "sequence_length", size]
                    )
                )
            self._tables[theta] = names
        return self._tables[theta]

    def _repeated(self, x: str, path: str) -> str:
        """Repeat each head of keys or values for the query heads that share it."""
        graph, spec = self._graph, self._spec
        group, size = spec.heads // spec.kv_heads, spec.head_size
        order = graph.int64(np.repeat(np.arange(spec.kv_heads), group).tolist())
        dims: Dims = ["batch_size", spec.heads, "sequence_length", size]
        return graph.node("Gather", [x, order], f"{path}/repeated", dims, axis=1)

    def _feed_forward(self, names: LayerNames, source: str, path: str) -> str:
        graph, spec, size = self._graph, self._spec, self._spec.intermediate
        dims = hidden_dims(size)
        joined = names.gate_up or names.up_gate
        if joined or names.gate:
            weights, rows = ([joined], [2 * size]) if joined else ([names.gate, names.up], [size, size])
            both = self._linear(source, f"{path}/gate_up", weights, rows, spec.hidden_size)
            parts = [f"{path}/gate", f"{path}/up"]
            in_order = parts[::-1] if names.up_gate else parts
            graph.nodes("Split", [both, graph.int64([size, size])], in_order, f"{path}/Split", axis=-1)
            for name in parts:
                graph.value(name, FLOAT, dims)
            active = graph.node(
                "Mul", [self._activated(parts[0], spec.activation, path, dims), parts[1]], f"{path}/Mul", dims
            )
        else:
            up = self._linear(source, f"{path}/up", [names.up], [size], spec.hidden_size)
            active = self._activated(up, spec.activation, path, dims)
        return self._linear(active, f"{path}/down", [names.down], [spec.hidden_size], size)

    def _activated(self, x: str, name: str, path: str, dims: Dims) -> str:
        graph = self._graph
        match name:
            case "gelu":
                return graph.node("Gelu", [x], f"{path}/Gelu", dims)
            case "gelu_tanh":
                return graph.node("Gelu", [x], f"{path}/Gelu", dims, approximate="tanh")
            case "silu":
                squashed = graph.node("Sigmoid", [x], f"{path}/Sigmoid", dims)
                return graph.node("Mul", [x, squashed], f"{path}/silu", dims)
            case _:
                return graph.node({"relu": "Relu", "tanh": "Tanh"}[name], [x], f"{path}/{name}", dims)

    def _linear(self, source: str, path: str, weights: list[str], rows: list[int], columns: int) -> str:
        biased = f"{weights[0]}.bias" in self._names
        projection = Projection(path, tuple(weights), tuple(rows), columns)
        precision = self._export.options.precision
        return write_linear(self._export, projection, source, precision=precision, bias=biased)

    def _norm(self, x: str, name: str, path: str, *, output: str | None = None, width: int = 0) -> str:
        graph, spec, width = self._graph, self._spec, width or self._spec.hidden_size
        weight = self._weights.vector(f"{name}.weight", width) + np.float32(spec.norm_offset)
        inputs = [x, self._shared(f"{name}.weight", weight)]
        operator = "SimplifiedLayerNormalization"
        if spec.norm == "layer":
            operator = "LayerNormalization"
            if f"{name}.bias" in self._names:
                inputs.append(self._shared(f"{name}.bias", self._weights.vector(f"{name}.bias", width)))
        attributes: dict[str, Any] = {"axis": -1, "epsilon": spec.epsilon, "stash_type": 1}
        return graph.node(operator, inputs, f"{path}/norm", hidden_dims(width), output=output, **attributes)

    def _shared(self, name: str, array: NDArray[np.float32]) -> str:
        return name if self._graph.has_initializer(name) else self._graph.array(name, array)

    # --- classification ---

    def _head(self, stream: str) -> None:
        graph, spec = self._graph, self._spec
        assert spec.head is not None
        dims: Dims = ["batch_size", spec.hidden_size]
        match spec.head.pooling:
            case "mean":
                value = self._mean(stream)
            case "last":
                value = self._last(stream)
            case _:
                value = graph.node("Gather", [stream, graph.int64(0)], "/head/Gather", dims, axis=1)
        *before, (last, _) = spec.head.layers
        for index, (name, activation) in enumerate(before):
            value = self._dense(value, name, spec.hidden_size, f"/head/{index}")
            value = self._activated(value, activation, f"/head/{index}", dims)
        if spec.head.norm:
            weight = self._weights.vector(f"{spec.head.norm}.weight", spec.hidden_size)
            inputs = [value, graph.array(f"{spec.head.norm}.weight", weight)]
            value = graph.node("LayerNormalization", inputs, "/head/norm", dims, axis=-1, epsilon=spec.epsilon)
        if spec.head.score is not None:
            self._score(value, spec.head.score, last)
        else:
            self._dense(value, last, spec.num_labels, "/head/logits", output="logits")
        graph.output("logits", FLOAT, ["batch_size", spec.num_labels])

    def _last(self, stream: str) -> str:
        """Return the row of the last token that is not padding, [batch, hidden_size]."""
        graph, dims = self._graph, cast(Dims, ["batch_size", self._spec.hidden_size])
        index = graph.node(
            "ArgMax", ["attention_mask"], "/head/ArgMax", ["batch_size", 1], element=INT64, axis=1, keepdims=1,
            select_last_index=1,
        )  # fmt: skip
        return graph.node("GatherND", [stream, index], "/head/GatherND", dims, batch_dims=1)

    def _score(self, x: str, score: TokenScore, head: str) -> None:
        """Write the logit of a token less that of another: one row of the head, or the difference of two rows."""
        graph, spec = self._graph, self._spec
        name = head if f"{head}.weight" in self._names else spec.words  # tied to the embeddings
        table = self._weights.tensor(f"{name}.weight", (spec.vocab_size, spec.hidden_size))
        row = table[score.true_id].astype(np.float32)
        bias = self._weights.vector(f"{head}.bias", spec.vocab_size) if f"{head}.bias" in self._names else None
        shift = np.float32(0 if bias is None else bias[score.true_id])
        if score.false_id is not None:
            row = row - table[score.false_id].astype(np.float32)
            shift = shift - np.float32(0 if bias is None else bias[score.false_id])
        inputs = [x, graph.array("score.weight", row[None]), graph.array("score.bias", np.array([shift], np.float32))]
        graph.node("Gemm", inputs, "/head/logits/Gemm", ["batch_size", 1], output="logits", transB=1)

    def _mean(self, stream: str) -> str:
        graph, dims = self._graph, cast(Dims, ["batch_size", self._spec.hidden_size])
        mask = graph.node("Cast", ["attention_mask"], "/head/Cast", _SEQUENCE, to=FLOAT)
        column = graph.node("Unsqueeze", [mask, graph.int64([2])], "/head/mask", [*_SEQUENCE, 1])
        kept = graph.node("Mul", [stream, column], "/head/Mul", self._dims)
        total = graph.node("ReduceSum", [kept, graph.int64([1])], "/head/sum", dims, keepdims=0)
        count = graph.node("ReduceSum", [column, graph.int64([1])], "/head/count", ["batch_size", 1], keepdims=0)
        return graph.node("Div", [total, count], "/head/mean", dims)

    def _dense(self, x: str, name: str, rows: int, path: str, *, output: str | None = None) -> str:
        graph, columns = self._graph, self._spec.hidden_size
        weight = self._weights.tensor(f"{name}.weight", (rows, columns)).astype(np.float32)
        inputs = [x, graph.array(f"{name}.weight", weight)]
        if f"{name}.bias" in self._names:
            inputs.append(graph.array(f"{name}.bias", self._weights.vector(f"{name}.bias", rows)))
        return graph.node("Gemm", inputs, f"{path}/Gemm", ["batch_size", rows], output=output, transB=1)


def relative_buckets(distance: NDArray[np.int64], buckets: int, max_distance: int) -> NDArray[np.int64]:
    """Return the bucket of each distance j - i (Raffel et al. 2020, with attention in both directions)."""
    half = buckets // 2
    exact = half // 2
    away = np.abs(distance)
    growth = np.log(np.maximum(away, 1).astype(np.float32) / np.float32(exact)) / np.float32(
        math.log(max_distance / exact)
    )
    large = np.minimum(exact + (growth * np.float32(half - exact)).astype(np.int64), half - 1)
    return (distance > 0) * half + np.where(away < exact, away, large)


def position_buckets(distance: NDArray[np.int64], span: int, max_distance: int) -> NDArray[np.int64]:
    """Return the buckets of distances i - j (He et al. 2021); max_distance 0 = every distance is its own bucket."""
    if not max_distance:
        return distance
    middle = span // 2
    near = (distance < middle) & (distance > -middle)
    away = np.where(near, middle - 1, np.abs(distance)).astype(np.float32)
    growth = np.log(away / np.float32(middle)) / np.float32(math.log((max_distance - 1) / middle))
    far = np.ceil(growth * np.float32(middle - 1)) + middle
    return np.where(away <= middle, distance, far * np.sign(distance)).astype(np.int64)
