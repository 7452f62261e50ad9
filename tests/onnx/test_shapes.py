"""Shape inference: symbols through shape computations, rules for foreign operators, and no trust in hostile models."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from genai.errors import GraphError
from genai.onnx.ir import DataType, Graph, OnnxModel, OnnxTensor, Value, make_node
from genai.onnx.reader import read_model
from genai.onnx.types import TensorType
from genai.ops.shape_rules import SHAPE_RULES, NodeTypes
from genai.optimize import onnx_inference
from genai.optimize.onnx_inference import SingleInference, infer_single
from genai.optimize.shapes import infer_node, infer_shapes

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def model_of(nodes, inputs, outputs, initializers=(), **opsets) -> OnnxModel:
    """A model from IR nodes and {name: TensorType}; outputs by name, untyped."""
    graph = Graph(
        "g",
        [Value(name, known) for name, known in inputs.items()],
        [Value(name) for name in outputs],
        list(nodes),
        {tensor.name: tensor for tensor in initializers},
    )
    return OnnxModel(graph, 10, {"": 20, "com.microsoft": 1, **opsets})


def vector(name: str, *values: int) -> OnnxTensor:
    return OnnxTensor.from_array(name, np.array(values, np.int64))


def scalar(name: str, value: int) -> OnnxTensor:
    return OnnxTensor.from_array(name, np.array(value, np.int64))


def floats(*shape) -> TensorType:
    return TensorType(DataType.FLOAT, shape)


HIDDEN = {"x": floats("batch", "sequence", 64)}


def shape_of(model: OnnxModel, name: str):
    infer_shapes(model)
    known = model.graph.type_of(name)
    assert isinstance(known, TensorType)
    return known.shape


# Shape computations


def split_heads(last: list[OnnxTensor], *parts: str) -> OnnxModel:
    """Reshape of x to Concat(batch and sequence as read from its shape, constants)."""
    nodes = [
        make_node("Shape", ["x"], ["shape"]),
        make_node("Gather", ["shape", "zero"], ["batch_0d"], axis=0),
        make_node("Slice", ["shape", "one", "two"], ["sequence_1d"]),
        make_node("Unsqueeze", ["batch_0d", "axes"], ["batch_1d"]),
        make_node("Concat", ["batch_1d", "sequence_1d", *parts], ["target"], axis=0),
        make_node("Reshape", ["x", "target"], ["y"]),
        make_node("Transpose", ["y"], ["z"], perm=[0, 2, 1, 3]),
    ]
    constants = [scalar("zero", 0), vector("one", 1), vector("two", 2), vector("axes", 0), *last]
    return model_of(nodes, HIDDEN, ["z"], constants)


def test_symbols_pass_through_shape_computations():
    model = split_heads([vector("heads", 4), vector("size", 16)], "heads", "size")
    assert shape_of(model, "z") == ("batch", 4, "sequence", 16)
    assert model.graph.type_of("target") == TensorType(DataType.INT64, (4,))


def test_minus_one_takes_what_symbols_and_numbers_leave():
    assert shape_of(split_heads([vector("rest", 4, -1)], "rest"), "z") == ("batch", 4, "sequence", 16)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ((0, 0, 4, 16), ("batch", "sequence", 4, 16)),
        ((0, 0, -1), ("batch", "sequence", 64)),
        ((0, -1, 32), ("batch", None, 32)),
        ((-1, 64), (None, 64)),
        ((-1,), (None,)),
        ((-1, -1), (None, None)),
        ((2, 3, -5), (2, 3, None)),
    ],
)
def test_reshape_by_constants(target, expected):
    model = model_of([make_node("Reshape", ["x", "target"], ["y"])], HIDDEN, ["y"], [vector("target", *target)])
    assert shape_of(model, "y") == expected


def test_reshape_with_allowzero_and_the_old_attribute():
    node = make_node("Reshape", ["x", "target"], ["y"], allowzero=1)
    empty = {"x": floats(0, 3)}
    assert shape_of(model_of([node], empty, ["y"], [vector("target", 3, 0)]), "y") == (3, 0)
    node = make_node("Reshape", ["x"], ["y"], shape=[0, -1])
    old = model_of([node], {"x": floats(2, 3, 4)}, ["y"])
    old.opset_imports[""] = 1
    assert shape_of(old, "y") == (2, 12)


def test_reshape_by_an_input_keeps_the_rank():
    node = make_node("Reshape", ["x", "target"], ["y"])
    inputs = {**HIDDEN, "target": TensorType(DataType.INT64, (3,))}
    assert shape_of(model_of([node], inputs, ["y"]), "y") == (None, None, None)
    inputs["target"] = TensorType(DataType.INT64, ("n",))
    assert shape_of(model_of([node], inputs, ["y"]), "y") is None


def test_expand_and_constant_of_shape_take_symbols():
    nodes = [
        make_node("Shape", ["x"], ["shape"], start=0, end=2),
        make_node("ConstantOfShape", ["shape"], ["zeros"], value=OnnxTensor.from_array("", np.zeros(1, np.int64))),
        make_node("Expand", ["row", "shape"], ["rows"]),
    ]
    row = OnnxTensor.from_array("row", np.zeros((1, 1), np.float32))
    model = model_of(nodes, HIDDEN, ["zeros", "rows"], [row])
    assert shape_of(model, "zeros") == shape_of(model, "rows") == ("batch", "sequence")
    assert model.graph.type_of("zeros").dtype is DataType.INT64


@pytest.mark.parametrize(
    ("attributes", "inputs", "version", "expected"),
    [
        ({}, ["x", "", "scales"], 19, (3, None, 5)),
        ({"axes": [2]}, ["x", "", "last"], 19, (3, "n", 5)),
        ({}, ["x", "scales"], 10, (3, None, 5)),
        ({"scales": [1.0, 2.0, float(np.float32(7 / 3))]}, ["x"], 7, (3, None, 7)),
        ({}, ["x", "", "", "sizes"], 19, (3, 4, 6)),
        ({"axes": [0, 2], "keep_aspect_ratio_policy": "not_larger"}, ["x", "", "", "two"], 19, (6, "n", 6)),
        ({"keep_aspect_ratio_policy": "not_larger"}, ["x", "", "", "sizes"], 19, (None, None, None)),
        ({}, ["x", "", "last"], 19, (None, None, None)),
    ],
)
def test_resized_extents_are_those_of_float32(attributes, inputs, version, expected):
    """The kernel and onnxruntime compute in float32, where 3 * (5/3) is 5; in double precision it is a little less."""
    numbers = {"scales": [1, 1, 5 / 3], "last": [5 / 3]}
    tensors = [OnnxTensor.from_array(name, np.array(value, np.float32)) for name, value in numbers.items()]
    node = make_node("Upsample" if version < 10 else "Resize", inputs, ["y"], **attributes)
    model = model_of([node], {"x": floats(3, "n", 3)}, ["y"], [*tensors, vector("sizes", 3, 4, 6), vector("two", 6, 9)])
    model.opset_imports[""] = version
    assert shape_of(model, "y") == expected


def test_the_idiom_of_exporters_for_pads():
    """Pads [width, height] of a matrix with a row per axis, reversed; extents up to the next multiple of seven."""
    nodes = [
        make_node("Shape", ["x"], ["shape"]),
        make_node("Gather", ["shape", "two"], ["columns"], axis=0),
        make_node("Mod", ["columns", "seven"], ["rest"]),
        make_node("Sub", ["seven", "rest"], ["missing"]),
        make_node("Mod", ["missing", "seven"], ["added"]),
        make_node("Unsqueeze", ["added", "axes"], ["added_1d"]),
        make_node("Concat", ["axes", "added_1d", "axes", "one", "axes", "axes"], ["pairs"], axis=0),
        make_node("Reshape", ["pairs", "of_two"], ["rows"]),
        make_node("Slice", ["rows", "last", "before_first", "axes", "last"], ["reversed"]),
        make_node("Transpose", ["reversed"], ["columns_of_pairs"], perm=[1, 0]),
        make_node("Reshape", ["columns_of_pairs", "last"], ["pads"]),
        make_node("Pad", ["x", "pads"], ["y"]),
    ]
    constants = [
        scalar("two", 2), scalar("seven", 7), vector("axes", 0), vector("one", 1), vector("of_two", -1, 2),
        vector("last", -1), vector("before_first", -(2**63) + 1),
    ]  # fmt: skip
    assert shape_of(model_of(nodes, {"x": floats("n", 30, 40)}, ["y"], constants), "y") == ("n", 31, 42)


@pytest.mark.parametrize(
    ("inputs", "attributes", "version", "expected"),
    [
        (["x", "pads"], {}, 20, (None, 5, 3)),
        (["x", "pads", "", "chosen"], {}, 20, ("n", 5, 7)),
        (["x", "zeros"], {}, 20, ("n", 2, 5)),
        (["x", "free"], {}, 20, (None, None, None)),
        (["x", "pads", "", "free"], {}, 20, (None, None, None)),
        (["x", "pads", "", "outside"], {}, 20, (None, None, None)),
        (["x"], {"pads": [1, 2, -1, 0, 1, -1]}, 10, (None, 5, 3)),
        (["x"], {"pads": [1]}, 10, (None, None, None)),
    ],
)
def test_pads(inputs, attributes, version, expected):
    constants = [
        vector("pads", 1, 2, -1, 0, 1, -1) if "chosen" not in inputs else vector("pads", 1, 2, 1, 1),
        vector("chosen", -1, 1), vector("zeros", *[0] * 6), vector("outside", 0, 1, 7),
    ]  # fmt: skip
    given = {"x": floats("n", 2, 5), "free": TensorType(DataType.INT64, (None,))}
    model = model_of([make_node("Pad", inputs, ["y"], **attributes)], given, ["y"], constants, **{"": version})
    assert shape_of(model, "y") == expected


def test_arithmetic_of_extents():
    nodes = [
        make_node("Shape", ["x"], ["shape"]),
        make_node("Gather", ["shape", "last"], ["width"], axis=0),
        make_node("Div", ["width", "four"], ["quarter"]),
        make_node("Mul", ["quarter", "four"], ["again"]),
        make_node("Sub", ["again", "four"], ["less"]),
        make_node("Cast", ["less"], ["cast"], to=int(DataType.INT64)),
        make_node("Squeeze", ["cast"], ["squeezed"]),
        make_node("Reshape", ["squeezed", "as_vector"], ["size"]),
        make_node("ConstantOfShape", ["size"], ["y"]),
    ]
    model = model_of(nodes, HIDDEN, ["y"], [vector("last", -1), vector("four", 4), vector("as_vector", 1)])
    assert shape_of(model, "y") == (60,)


def test_sizes_and_products():
    nodes = [
        make_node("Size", ["a"], ["size"]),
        make_node("Shape", ["a"], ["shape"]),
        make_node("ReduceProd", ["shape"], ["product"], keepdims=1),
        make_node("Unsqueeze", ["size", "axes"], ["size_1d"]),
        make_node("Concat", ["size_1d", "product"], ["both"], axis=0),
        make_node("ConstantOfShape", ["both"], ["y"]),
    ]
    assert shape_of(model_of(nodes, {"a": floats(2, 5)}, ["y"], [vector("axes", 0)]), "y") == (10, 10)


def test_the_idiom_of_exporters_for_expanding_to_a_shape():
    """Expand to Where(shape == -1, 1, shape), as older PyTorch exporters write tensor.expand(batch, -1, 64)."""
    minus_one = OnnxTensor.from_array("", np.array([-1], np.int64))
    ones = OnnxTensor.from_array("", np.array([1], np.int64))
    nodes = [
        make_node("Shape", ["x"], ["shape"]),
        make_node("Slice", ["shape", "zero", "one"], ["batch"]),
        make_node("Concat", ["batch", "minus_one", "width"], ["wanted"], axis=0),
        make_node("ConstantOfShape", ["three"], ["ones"], value=ones),
        make_node("Constant", [], ["minus"], value=minus_one),
        make_node("Mul", ["ones", "minus"], ["marks"]),
        make_node("Equal", ["wanted", "marks"], ["is_mark"]),
        make_node("Where", ["is_mark", "ones", "wanted"], ["target"]),
        make_node("Expand", ["row", "target"], ["y"]),
    ]
    numbers = {"zero": 0, "one": 1, "minus_one": -1, "width": 64, "three": 3}
    constants = [vector(name, number) for name, number in numbers.items()]
    model = model_of(nodes, {**HIDDEN, "row": floats(1, 7, 1)}, ["y"], constants)
    assert shape_of(model, "y") == ("batch", 7, 64)


def test_counting_to_an_extent():
    nodes = [
        make_node("Shape", ["x"], ["shape"]),
        make_node("Gather", ["shape", "one"], ["length"], axis=0),
        make_node("Range", ["zero", "length", "one"], ["positions"]),
        make_node("Range", ["zero", "ten", "three"], ["y"]),
        make_node("Range", ["ten", "zero", "three"], ["none"]),
        make_node("Range", ["half", "many", "half"], ["open"]),
    ]
    scalars = [scalar(name, value) for name, value in {"zero": 0, "one": 1, "three": 3, "ten": 10}.items()]
    halves = [OnnxTensor.from_array(name, np.float32(value)) for name, value in {"half": 0.5, "many": 9}.items()]
    model = model_of(nodes, HIDDEN, ["positions", "y", "none", "open"], [*scalars, *halves])
    assert shape_of(model, "positions") == ("sequence",)
    assert [model.graph.type_of(name).shape for name in ("y", "none", "open")] == [(4,), (0,), (None,)]


@pytest.mark.parametrize(
    ("starts", "ends", "axes", "steps", "expected"),
    [
        ([0], [2**31 - 1], [1], None, ("batch", "sequence", 64)),
        ([1], [2**31 - 1], [1], None, ("batch", None, 64)),
        ([-10], [2**63 - 1], [-1], None, ("batch", "sequence", 10)),
        ([63], [-1000], [2], [-2], ("batch", "sequence", 32)),
        ([0, 5], [1, 9], [0, 2], [1, 3], (None, "sequence", 2)),
        ([0], [1], [9], None, (None, None, None)),
        ([0, 0, 8], [2**63 - 1, 2**63 - 1, 16], None, None, ("batch", "sequence", 8)),
    ],
)
def test_slices(starts, ends, axes, steps, expected):
    given = {"starts": starts, "ends": ends, "axes": axes, "steps": steps}
    constants = [vector(name, *numbers) for name, numbers in given.items() if numbers is not None]
    names = [name if numbers is not None else "" for name, numbers in given.items()]
    assert shape_of(model_of([make_node("Slice", ["x", *names], ["y"])], HIDDEN, ["y"], constants), "y") == expected
    if steps is None:
        old = model_of([make_node("Slice", ["x"], ["y"], starts=starts, ends=ends, axes=axes)], HIDDEN, ["y"])
        old.opset_imports[""] = 9
        assert shape_of(old, "y") == expected


def test_negative_declared_extents_are_open():
    """Some exporters write -1 for an unknown extent."""
    nodes = [
        make_node("Slice", ["x", "zero", "two", "zero"], ["a"]),
        make_node("Shape", ["x"], ["shape"]),
        make_node("ConstantOfShape", ["shape"], ["b"]),
    ]
    model = model_of(nodes, {"x": floats(-1, 3)}, ["a", "b"], [vector("zero", 0), vector("two", 2)])
    assert shape_of(model, "a") == shape_of(model, "b") == (None, 3)


def test_impossible_extents_are_open():
    shape = OnnxTensor.from_array("shape", np.array([2**62, 2**62], np.int64))
    nodes = [
        make_node("ReduceProd", ["shape"], ["product"], keepdims=1),
        make_node("ConstantOfShape", ["product"], ["y"]),
        make_node("Split", ["x"], ["a", "b"], axis=2, split=[-1.5, 65.5]),
    ]
    model = model_of(nodes, HIDDEN, ["y", "a"], [shape])
    assert shape_of(model, "y") == (None,)
    assert shape_of(model, "a") == ("batch", "sequence", None)


# Foreign operators


@pytest.fixture
def decoder_layer() -> OnnxModel:
    """The operators of one layer as onnxruntime-genai's builder writes them."""
    ms, names = {"domain": "com.microsoft"}, {"K": 64, "bits": 4, "block_size": 32}
    past = ["past_key", "past_value"]
    nodes = [
        make_node("GatherBlockQuantized", ["table", "ids", "table_scales"], ["x"], **ms, bits=4, block_size=32),
        make_node("SimplifiedLayerNormalization", ["x", "norm"], ["h"], axis=-1, epsilon=1e-6, stash_type=1),
        make_node("MatMulNBits", ["h", "w", "s"], ["qkv"], **ms, **names, N=128),
        make_node("GroupQueryAttention", ["qkv", "", "", *past, "lengths", "total"], ["a", "key", "value"], **ms,
                  num_heads=4, kv_num_heads=2),
        make_node("MatMulNBits", ["a", "w", "s"], ["o"], **ms, **names, N=64),
        make_node("SkipSimplifiedLayerNormalization", ["x", "o", "norm"], ["h2", "", "", "r"], **ms, epsilon=1e-6),
        make_node("RotaryEmbedding", ["r", "ids", "norm", "norm"], ["rotated"], **ms),
        make_node("Add", ["rotated", "h2"], ["y"]),
    ]  # fmt: skip
    cache = TensorType(DataType.FLOAT16, ("batch", 2, "past_length", 16))
    inputs = {
        "ids": TensorType(DataType.INT64, ("batch", "sequence")),
        "past_key": cache,
        "past_value": cache,
        "lengths": TensorType(DataType.INT32, ("batch",)),
        "total": TensorType(DataType.INT32, ()),
    }
    initializers = [
        OnnxTensor.from_array("table", np.zeros((100, 32), np.uint8)),
        OnnxTensor.from_array("table_scales", np.zeros((100, 2), np.float32)),
        OnnxTensor.from_array("norm", np.zeros(64, np.float32)),
        OnnxTensor.from_array("w", np.zeros((128, 2, 16), np.uint8)),
        OnnxTensor.from_array("s", np.zeros((128, 2), np.float32)),
    ]
    return model_of(nodes, inputs, ["y", "key", "value"], initializers)


def test_a_decoder_layer_is_typed_throughout(decoder_layer):
    infer_shapes(decoder_layer)
    graph = decoder_layer.graph
    hidden = floats("batch", "sequence", 64)
    for name in ("x", "h", "a", "o", "h2", "r", "rotated", "y"):
        assert graph.type_of(name) == hidden, name
    assert graph.type_of("qkv") == floats("batch", "sequence", 128)
    assert graph.type_of("key") == TensorType(DataType.FLOAT16, ("batch", 2, None, 16))


def test_attention_without_a_past_and_with_separate_projections():
    query, narrow = floats("b", "s", 64), floats("b", "s", 32)
    node = make_node(
        "GroupQueryAttention", ["q", "k", "v", "", "", "l", "t"], ["y", "key", "value"], domain="com.microsoft",
        num_heads=4, kv_num_heads=2,
    )  # fmt: skip
    lengths = {"l": TensorType(DataType.INT32, ("b",)), "t": TensorType(DataType.INT32, ())}
    model = model_of([node], {"q": query, "k": narrow, "v": narrow, **lengths}, ["y", "key", "value"])
    assert shape_of(model, "y") == ("b", "s", 64)
    assert shape_of(model, "key") == ("b", 2, None, 16)


@pytest.mark.parametrize(
    ("inputs", "width"),
    [
        ({"q": floats("b", "s", 64), "k": floats("b", "t", 64), "v": floats("b", "t", 32)}, 32),
        ({"q": floats("b", "s", 64), "k": floats("b", 4, "t", 16), "v": floats("b", 4, "t", 8)}, 32),
        ({"q": floats("b", "s", 64), "k": floats("b", "t", 4, 2, 16)}, 64),
        ({"q": floats("b", "s", 4, 3, 16)}, 64),
    ],
)
def test_multi_head_attention(inputs, width):
    node = make_node("MultiHeadAttention", list(inputs), ["y"], domain="com.microsoft", num_heads=4)
    assert shape_of(model_of([node], inputs, ["y"]), "y") == ("b", "s", width)


def test_foreign_operators_inside_branches_type_the_outer_output(if_model):
    model = read_model(if_model)
    for attribute in model.graph.nodes[-1].attributes.values():
        branch = attribute.value
        output = branch.outputs[0]
        output.type = None
        branch.nodes[-1].outputs[0] = "plain"
        branch.invalidate()
        branch.append(make_node("Gelu", ["plain"], [output.name], domain="com.microsoft"))
    model.graph.outputs[0].type = None
    model.opset_imports["com.microsoft"] = 1
    infer_shapes(model)
    assert model.graph.outputs[0].type == floats(2)
    assert model.graph.nodes[-1].attribute("then_branch").type_of("then_sum") == floats(2)


def test_own_rules_and_constants_in_them(monkeypatch):
    def repeat(types: NodeTypes):
        source, count = types.tensor(0), types.constant(1)
        return [None if source is None or count is None else TensorType(source.dtype, source.shape * int(count))]

    monkeypatch.setitem(SHAPE_RULES, ("own", "Repeat"), repeat)

    nodes = [make_node("Repeat", ["x", "n"], ["y"], domain="own"), make_node("Relu", ["y"], ["z"])]
    model = model_of(nodes, {"x": floats("a", 2)}, ["z"], [scalar("n", 2)], own=1)
    infer_shapes(model)
    assert model.graph.type_of("z") == floats("a", 2, "a", 2)


def test_a_rule_gives_way_to_the_model_s_own_function(make_model):
    function = helper.make_function(
        "com.microsoft",
        "Gelu",
        ["x"],
        ["y"],
        [helper.make_node("Flatten", ["x"], ["y"])],
        [helper.make_opsetid("", 20)],
    )
    node = helper.make_node("Gelu", ["x"], ["y"], domain="com.microsoft")
    proto = make_model(
        [node], {"x": (FLOAT, [2, 3, 4])}, {"y": (FLOAT, None)}, functions=[function], domains={"com.microsoft": 1}
    )
    model = read_model(proto)
    infer_shapes(model)
    assert model.graph.outputs[0].type == floats(2, 12)


# What is declared


def test_declared_types_of_computed_values_are_corrected():
    model = model_of([make_node("Relu", ["x"], ["a"]), make_node("Relu", ["a"], ["y"])], {"x": floats(2, 3)}, ["y"])
    model.graph.values["a"] = Value("a", floats(7, 7), "doc", {"k": "v"})
    infer_shapes(model)
    assert model.graph.values["a"].type == floats(2, 3)
    assert (model.graph.values["a"].doc_string, model.graph.values["a"].metadata) == ("doc", {"k": "v"})


def test_declared_types_fill_what_is_left_open():
    nodes = [make_node("NonZero", ["x"], ["a"]), make_node("Relu", ["a"], ["y"])]
    model = model_of(nodes, {"x": floats(2, 3)}, ["y"])
    model.graph.values["a"] = Value("a", TensorType(DataType.INT64, (9, "found")))
    infer_shapes(model)
    assert model.graph.values["a"].type == TensorType(DataType.INT64, (2, "found"))


def test_declared_types_of_unknown_operators_stay_and_are_used():
    nodes = [make_node("Mystery", ["x"], ["a"], domain="own"), make_node("Relu", ["a"], ["y"])]
    model = model_of(nodes, {"x": floats(2)}, ["y"], own=1)
    model.graph.values["a"] = Value("a", floats("n", 5))
    infer_shapes(model)
    assert model.graph.outputs[0].type == floats("n", 5)


def test_declared_outputs_are_completed_but_not_overruled():
    nodes = [make_node("Relu", ["x"], ["y"]), make_node("Neg", ["x"], ["z"])]
    model = model_of(nodes, {"x": floats("n", 3)}, [])
    model.graph.outputs += [Value("y", floats("rows", None)), Value("z", floats(8, 8))]
    infer_shapes(model)
    assert [value.type for value in model.graph.outputs] == [floats("rows", 3), floats(8, 8)]


def test_inferring_twice_gives_the_same(decoder_layer):
    infer_shapes(decoder_layer)
    first = {name: value.type for name, value in decoder_layer.graph.values.items()}
    infer_shapes(decoder_layer)
    assert {name: value.type for name, value in decoder_layer.graph.values.items()} == first


# What must not happen


def test_weights_are_not_copied_into_the_inference(monkeypatch, external_model):
    sizes = []
    original = onnx_inference.shape_inference.infer_shapes

    def measured(proto, *args, **options):
        sizes.append(proto.ByteSize())
        return original(proto, *args, **options)

    monkeypatch.setattr(onnx_inference.shape_inference, "infer_shapes", measured)
    model = read_model(external_model)
    large = OnnxTensor.from_array("large", np.zeros(1_000_000, np.float32))
    model.graph.insert_before(model.graph.nodes[0], make_node("Constant", [], ["c"], value=large))
    infer_shapes(model)
    assert model.graph.type_of("c") == floats(1_000_000)
    assert model.graph.type_of("product") == floats("n", 32)
    assert max(sizes) < 10_000


def test_the_model_keeps_its_own_data(external_model):
    model = read_model(external_model)
    infer_shapes(model)
    assert model.graph.initializers["w"].is_external
    assert model.graph.initializers["w"].array()[0, 1] == 1


@pytest.mark.parametrize("equation", ["ij,K...... i K", "\udcce i->i", "i_", "->->", "1"])
def test_equations_on_which_onnx_never_returns_are_refused(equation):
    model = model_of([make_node("Einsum", ["x"], ["y"], equation=equation)], {"x": floats(2, 2)}, ["y"])
    with pytest.raises(GraphError, match="equation"):
        infer_shapes(model)


CRASHERS = {
    "split_count": (make_node("Split", ["x"], ["a", "b", "c"], num_outputs=2), floats(2, 8)),
    "norm_axis": (make_node("LayerNormalization", ["x", "x"], ["a", "b"], axis=2**63 - 1), floats(2, 3)),
    "regex_untyped": (make_node("RegexFullMatch", ["u"], ["a"], pattern="x"), None),
    "encoder_untyped": (make_node("LabelEncoder", ["u"], ["a"], domain="ai.onnx.ml", values_int64s=[1]), None),
    "trees_without_input": (make_node("TreeEnsemble", [""], ["a"], domain="ai.onnx.ml", n_targets=2), None),
    "eye_untyped": (make_node("EyeLike", ["u"], ["a"]), None),
    "gather_nd_batch": (make_node("GatherND", ["x", "x"], ["a"], batch_dims=-(2**63)), floats(2, 3)),
    "expand_huge": (make_node("Expand", ["x", "v"], ["a"]), floats(2)),
    "reshape_huge": (make_node("Reshape", ["x", "v"], ["a"]), floats(2)),
    "of_shape_huge": (make_node("ConstantOfShape", ["v"], ["a"]), floats(2)),
}


@pytest.mark.parametrize("name", CRASHERS)
def test_models_on_which_onnx_crashes_or_hangs_do_no_harm(name):
    node, known = CRASHERS[name]
    inputs = {"x": known or floats(1), "u": None, "v": TensorType(DataType.INT64, (2**62,))}
    model = model_of([node], inputs, ["a"])
    model.opset_imports["ai.onnx.ml"] = 5
    infer_shapes(model)
    assert model.graph.nodes == [node]


def test_equal_nodes_are_inferred_once(monkeypatch):
    """Nodes are equal if their operators, attributes, and the types and small constants of their inputs are."""
    found = []
    monkeypatch.setattr(
        onnx_inference, "infer_single", lambda node, *more: found.append(node.outputs[0]) or infer_single(node, *more)
    )
    infer, size = SingleInference(), {"s": vector("s", 6, 4), "t": vector("t", 4, 6), "u": vector("u", 6, 4)}
    types = {"x": floats(2, 12), "y": floats(24), "h": TensorType(DataType.FLOAT16, (2, 12))}
    types |= {name: tensor.type for name, tensor in size.items()}
    nodes = [
        (make_node("Reshape", ["x", "s"], ["a"]), (6, 4), True),
        (make_node("Reshape", ["x", "u"], ["b"]), (6, 4), False),
        (make_node("Reshape", ["x", "t"], ["c"]), (4, 6), True),
        (make_node("Reshape", ["y", "s"], ["d"]), (6, 4), True),
        (make_node("Reshape", ["h", "s"], ["e"]), (6, 4), True),
        (make_node("Transpose", ["x"], ["f"], perm=[1, 0]), (12, 2), True),
        (make_node("Transpose", ["x"], ["g"], perm=[0, 1]), (2, 12), True),
        (make_node("Transpose", ["x"], ["i"], perm=[1, 0]), (12, 2), False),
        (make_node("Split", ["y"], ["j", "k"], num_outputs=2), (12,), True),
        (make_node("Split", ["y"], ["l", "m"], num_outputs=2), (12,), False),
        (make_node("Split", ["y"], ["n", ""], num_outputs=2), (12,), True),
    ]
    for node, shape, is_new in nodes:
        found.clear()
        known = {name: types[name] for name in node.inputs}
        result = infer(node, 20, known, {name: size[name] for name in node.inputs if name in size})
        dtype = known[node.inputs[0]].dtype
        assert result == {name: TensorType(dtype, shape) for name in node.outputs if name}
        assert found == ([node.outputs[0]] if is_new else [])


@pytest.mark.parametrize("op_type", ["TreeEnsembleClassifier", "TreeEnsembleRegressor"])
def test_the_lists_of_a_tree_ensemble_are_not_passed_to_onnx(op_type, monkeypatch):
    """ONNX's inference only tests whether the lists are present, and their conversion takes long."""
    count, of_class = 5000, op_type.endswith("Classifier")
    prefix, outputs = ("class", ["a", "b"]) if of_class else ("target", ["a"])
    lists = {"nodes_values": [0.5] * count, "nodes_modes": ["LEAF"] * count, f"{prefix}_ids": [0] * count}
    more = {"classlabels_strings": ["n", "y"]} if of_class else {"n_targets": 2}
    sizes = []
    infer = onnx_inference.shape_inference.infer_shapes
    monkeypatch.setattr(
        onnx_inference.shape_inference, "infer_shapes", lambda m: sizes.append(m.ByteSize()) or infer(m)
    )
    node = make_node(op_type, ["x"], outputs, domain="ai.onnx.ml", **lists, **more)
    model = model_of([node], {"x": floats("n", 4)}, outputs, **{"ai.onnx.ml": 3})
    infer_shapes(model)
    assert sizes[0] < count
    assert model.graph.type_of(outputs[-1]) == floats("n", 2)
    if of_class:
        assert model.graph.type_of("a") == TensorType(DataType.STRING, ("n",))
    assert len(node.attribute("nodes_values")) == count


def test_a_rule_refuses_attributes_of_the_wrong_type():
    node = make_node("MatMulNBits", ["x", "w", "s"], ["y"], domain="com.microsoft", N="many")
    with pytest.raises(GraphError, match="'N'"):
        infer_shapes(model_of([node], {"x": floats(2, 3), "w": None, "s": None}, ["y"]))


def test_a_model_that_onnx_rejects_is_reported(monkeypatch):
    def reject(*args, **options):
        raise onnx.shape_inference.InferenceError("bad model")

    monkeypatch.setattr(onnx_inference.shape_inference, "infer_shapes", reject)
    with pytest.raises(GraphError, match="bad model") as error:
        infer_shapes(model_of([], {}, []))
    assert error.value.fix


# One node


def test_single_nodes():
    value = vector("v", 2, 3)
    types, constants = {"x": floats(6), "v": value.type}, {"v": value}
    assert infer_node(make_node("Relu", ["x"], ["y"]), 20, types, {}) == {"y": floats(6)}
    assert infer_node(make_node("Reshape", ["x", "v"], ["y"]), 20, types, constants) == {"y": floats(2, 3)}
    assert infer_node(make_node("Tile", ["x", "x"], ["y"]), 20, {"x": None}, {}) == {}
    assert infer_node(make_node("Mystery", ["x"], ["y"], domain="own"), 1, types, {}) == {}
    branch = Graph("b", outputs=[Value("c")], nodes=[make_node("Neg", ["x"], ["c"])])
    assert infer_node(make_node("If", ["x"], ["y"], then_branch=branch), 20, types, {}) == {}


def test_functions_with_hidden_operators_do_not_break_the_rest(make_model):
    body = [
        helper.make_node("Constant", [], ["t"], value=numpy_helper.from_array(np.array([3, 2]))),
        helper.make_node("Reshape", ["x", "t"], ["y"]),
    ]
    function = helper.make_function("own", "Fold", ["x"], ["y"], body, [helper.make_opsetid("", 20)])
    nodes = [helper.make_node("Fold", ["x"], ["y"], domain="own"), helper.make_node("Neg", ["x"], ["z"])]
    proto = make_model(
        nodes,
        {"x": (FLOAT, [2, 3])},
        {"y": (FLOAT, None), "z": (FLOAT, None)},
        functions=[function],
        domains={"own": 1},
    )
    model = read_model(proto)
    infer_shapes(model)
    assert model.graph.type_of("z") == floats(2, 3)
