"""Models read with the bytes of large initializers cut out are the models that protobuf reads whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, strategies as st
from onnx import TensorProto, helper, numpy_helper

from genai.errors import GraphError, ModelFolderError
from genai.onnx import reader
from genai.onnx.reader import cut_large_tensors, read_model


def model(sizes: list[int]) -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    tensors = [numpy_helper.from_array(rng.random(size).astype(np.float32), f"w{i}") for i, size in enumerate(sizes)]
    tensors.append(helper.make_tensor("typed", TensorProto.FLOAT, [3], [1.0, 2.0, 3.0]))
    nodes = [helper.make_node("Identity", [tensor.name], [f"y{i}"]) for i, tensor in enumerate(tensors)]
    outputs = [helper.make_tensor_value_info(f"y{i}", TensorProto.FLOAT, None) for i in range(len(tensors))]
    graph = helper.make_graph(nodes, "g", [], outputs, tensors, doc_string="a doc")
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], producer_name="me")


def whole_again(rest: bytes, places: dict[int, tuple[int, int]], data: bytes) -> onnx.ModelProto:
    proto = onnx.ModelProto.FromString(rest)
    for number, (first, end) in places.items():
        assert proto.graph.initializer[number].raw_data == b""
        proto.graph.initializer[number].raw_data = data[first:end]
    return proto


@pytest.mark.parametrize("smallest", [1, 16, 100, 4000, 10**9])
def test_rest_and_places_make_the_model(smallest: int) -> None:
    proto = model([5, 1000, 0, 30, 70_000])
    data = proto.SerializeToString()
    found = cut_large_tensors(data, smallest)
    assert found is not None
    rest, places = found
    assert whole_again(rest, places, data) == proto
    assert set(places) == {i for i, size in enumerate([5, 1000, 0, 30, 70_000]) if 4 * size >= smallest and size}


def test_read_model_gives_the_same_values(tmp_path: Path) -> None:
    proto = model([5, 20_000, 70_000])
    onnx.save(proto, tmp_path / "m.onnx")
    tensors = read_model(tmp_path / "m.onnx").graph.initializers
    assert list(tensors) == ["w0", "w1", "w2", "typed"]
    for item in proto.graph.initializer:
        np.testing.assert_array_equal(tensors[item.name].array(), numpy_helper.to_array(item))


def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(model([70_000]), path)

    def cut(data: reader.Data) -> object:
        found = cut_large_tensors(data)
        path.write_bytes(path.read_bytes()[:100_000])
        return found

    monkeypatch.setattr(reader, "cut_large_tensors", cut)
    with pytest.raises(ModelFolderError, match="became shorter"):
        read_model(path)


def test_sizes_that_contradict_the_shape_are_refused(tmp_path: Path) -> None:
    proto = model([70_000])
    proto.graph.initializer[0].dims[0] = 70_001
    onnx.save(proto, tmp_path / "m.onnx")
    with pytest.raises(GraphError, match="w0"):
        read_model(tmp_path / "m.onnx")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x3b",  # a group
        b"\x3a\xff",  # a length that does not end
        b"\x3a\x05ab",  # a length beyond the end
        b"\x3a\x00\x3a\x00",  # two graphs: protobuf merges them
        b"\x38\x01",  # the graph is a number
        b"\x3a\x02\x28\x01",  # an initializer is a number
        b"\x80" * 20,
    ],
)
def test_what_is_odd_is_left_to_protobuf(data: bytes) -> None:
    assert cut_large_tensors(data, 1) is None


def test_raw_data_twice_is_left_to_protobuf() -> None:
    tensor = b"\x4a\x01a\x4a\x01b"
    graph = b"\x2a" + bytes([len(tensor)]) + tensor
    assert cut_large_tensors(b"\x3a" + bytes([len(graph)]) + graph, 1) is None


SOUND = model([5, 40, 3]).SerializeToString()


@given(st.lists(st.tuples(st.integers(0, len(SOUND) - 1), st.integers(0, 255)), max_size=4), st.integers(0, 40))
def test_damaged_bytes_are_read_as_protobuf_reads_them(changes: list[tuple[int, int]], shorter: int) -> None:
    damaged = bytearray(SOUND)
    for place, byte in changes:
        damaged[place] = byte
    data = bytes(damaged[: len(damaged) - shorter])
    found = cut_large_tensors(data, 8)
    try:
        expected = onnx.ModelProto.FromString(data)
    except DecodeError:
        # The rest must be unreadable too, or rejected because of the part that was cut.
        return
    if found is not None:
        assert whole_again(*found, data).SerializeToString(deterministic=True) == expected.SerializeToString(
            deterministic=True
        )
