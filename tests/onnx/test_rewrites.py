"""Rewrites keep the outputs, and do nothing where a rule must not apply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from genai.errors import GraphError
from genai.onnx.ir import (
    Attribute,
    AttributeType,
    DataType,
    Graph,
    OnnxModel,
    OnnxTensor,
    QuantizationAnnotation,
    TrainingInfo,
    Value,
    make_node,
)
from genai.onnx.reader import read_model
from genai.onnx.types import TensorType
from genai.onnx.writer import to_proto
from genai.optimize import constant_folding
from genai.optimize.base import Level, Rewrite, pass_through, run_rewrites
from genai.optimize.constant_folding import fold_before_inference, fold_constants
from genai.optimize.shapes import infer_shapes
from genai.optimize.simplify import remove_dead_code, remove_identities
from tests.integrity import check_graph

FLOAT = TensorType(DataType.FLOAT, (2, 3))
RULES: Sequence[Rewrite] = (remove_identities, fold_constants, remove_dead_code)


def model_of(nodes, inputs=("x",), outputs=("y",), initializers=(), opset=20) -> OnnxModel:
    graph = Graph(
        "g",
        [Value(name, FLOAT) for name in inputs],
        [Value(name, TensorType(DataType.FLOAT)) for name in outputs],
        list(nodes),
        {tensor.name: tensor for tensor in initializers},
    )
    return OnnxModel(graph, 10, {"": opset})


def ops(model: OnnxModel) -> list[str]:
    return [node.op_type for node in model.graph.nodes]


def constant(name: str, *values: float) -> OnnxTensor:
    return OnnxTensor.from_array(name, np.array(values, np.float32))


@pytest.fixture
def unchanged_outputs(run_reference, same_values):
    """Applies a rule, checks that the model still computes the same, and returns how many changes were made."""

    def apply(rule: Rewrite, model: OnnxModel, inputs=None) -> int:
        inputs = inputs or [np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3) for _ in model.graph.inputs]
        expected = run_reference(to_proto(model), inputs)
        names = [value.name for value in model.graph.outputs]
        changes = rule.apply(model)
        check_graph(model.graph)
        assert [value.name for value in model.graph.outputs] == names
        assert same_values(run_reference(to_proto(read_model(to_proto(model))), inputs), expected)
        return changes

    return apply


# The loop


@dataclass
class Counting:
    """A rule that makes a fixed total number of changes."""

    name: str
    level: Level
    left: int

    def apply(self, model: OnnxModel) -> int:
        if not self.left:
            return 0
        self.left -= 1
        return 2


def test_rules_run_to_a_fixed_point_and_are_counted():
    rules = [Counting("a", Level.BASIC, 3), Counting("b", Level.BASIC, 0), Counting("c", Level.BASIC, 1)]
    assert run_rewrites(model_of([]), rules, Level.ALL) == [("a", 6), ("c", 2)]


def test_levels_include_those_below():
    for level, expected in [(Level.NONE, ""), (Level.BASIC, "b"), (Level.EXTENDED, "be"), (Level.ALL, "bea")]:
        rules = [Counting("b", Level.BASIC, 1), Counting("e", Level.EXTENDED, 1), Counting("a", Level.ALL, 1)]
        assert "".join(name for name, _ in run_rewrites(model_of([]), rules, level)) == expected


def test_rules_that_never_settle_are_reported():
    with pytest.raises(GraphError, match="endless") as error:
        run_rewrites(model_of([]), [Counting("endless", Level.BASIC, 10**9)], Level.ALL)
    assert error.value.fix


# Identity


def test_identities_in_a_row_vanish(unchanged_outputs):
    model = model_of([
        make_node("Relu", ["x"], ["a"]),
        make_node("Identity", ["a"], ["b"]),
        make_node("Identity", ["b"], ["c"]),
        make_node("Neg", ["c"], ["y"]),
    ])  # fmt: skip
    assert unchanged_outputs(remove_identities, model) == 2
    assert ops(model) == ["Relu", "Neg"]


def test_an_output_keeps_its_name(unchanged_outputs):
    nodes = [
        make_node("Relu", ["x"], ["a"]),
        make_node("Identity", ["a"], ["y"]),
        make_node("Neg", ["a"], ["z"]),
    ]
    model = model_of(nodes, outputs=["y", "z"])
    model.graph.values["a"] = Value("a", FLOAT)
    assert unchanged_outputs(remove_identities, model) == 1
    assert [(node.op_type, node.inputs, node.outputs) for node in model.graph.nodes] == [
        ("Relu", ["x"], ["y"]),
        ("Neg", ["y"], ["z"]),
    ]
    assert "a" not in model.graph.values


@pytest.mark.parametrize(
    ("nodes", "outputs", "initializers"),
    [
        ([make_node("Identity", ["x"], ["y"])], ["y"], []),
        ([make_node("Identity", ["w"], ["y"])], ["y"], [constant("w", 1)]),
        ([make_node("Relu", ["x"], ["a"]), make_node("Identity", ["a"], ["y"])], ["a", "y"], []),
    ],
    ids=["input", "initializer", "two outputs"],
)
def test_identities_that_outputs_need_stay(unchanged_outputs, nodes, outputs, initializers):
    model = model_of(nodes, outputs=outputs, initializers=initializers)
    assert unchanged_outputs(remove_identities, model) == 0


def test_casts_to_the_same_type_vanish(unchanged_outputs):
    nodes = [
        make_node("Cast", ["x"], ["a"], to=int(DataType.FLOAT)),
        make_node("Cast", ["a"], ["b"], to=int(DataType.DOUBLE)),
        make_node("Cast", ["b"], ["y"], to=int(DataType.FLOAT)),
    ]
    model = model_of(nodes)
    infer_shapes(model)
    assert unchanged_outputs(remove_identities, model) == 1
    assert [node.attribute("to") for node in model.graph.nodes] == [DataType.DOUBLE, DataType.FLOAT]


def test_casts_of_unknown_values_stay():
    model = model_of([make_node("Cast", ["u"], ["y"], to=int(DataType.FLOAT))])
    assert remove_identities.apply(model) == 0


def test_transposes_that_move_nothing_vanish(unchanged_outputs):
    nodes = [
        make_node("Transpose", ["x"], ["a"], perm=[0, 1]),
        make_node("Transpose", ["a"], ["b"], perm=[1, 0]),
        make_node("Transpose", ["b"], ["c"]),
        make_node("ReduceSum", ["c"], ["d"], keepdims=0),
        make_node("Transpose", ["d"], ["e"]),
        make_node("Neg", ["e"], ["y"]),
    ]
    model = model_of(nodes)
    infer_shapes(model)
    assert unchanged_outputs(remove_identities, model) == 2
    assert ops(model) == ["Transpose", "Transpose", "ReduceSum", "Neg"]


@pytest.mark.parametrize(
    ("opset", "inputs", "attributes", "vanishes"),
    [
        (6, ["a"], {"is_test": 1}, True),
        (6, ["a"], {}, False),
        (7, ["a"], {"ratio": 0.5}, True),
        (13, ["a"], {}, True),
        (13, ["a", "ratio", "off"], {}, True),
        (13, ["a", "ratio", "on"], {}, False),
        (13, ["a", "ratio", "flag"], {}, False),
    ],
)
def test_dropout_vanishes_in_inference_only(opset, inputs, attributes, vanishes):
    nodes = [
        make_node("Relu", ["x"], ["a"]),
        make_node("Dropout", inputs, ["b"], **attributes),
        make_node("Neg", ["b"], ["y"]),
    ]
    constants = [
        constant("ratio", 0.5),
        OnnxTensor.from_array("on", np.array(True)),
        OnnxTensor.from_array("off", np.array(False)),
    ]
    model = model_of(nodes, inputs=["x", "flag"], initializers=constants, opset=opset)
    assert remove_identities.apply(model) == int(vanishes)


def test_dropout_whose_mask_is_used_stays(unchanged_outputs):
    nodes = [make_node("Relu", ["x"], ["a"]), make_node("Dropout", ["a"], ["y", "mask"])]
    assert unchanged_outputs(remove_identities, model_of(nodes, outputs=["y", "mask"])) == 0
    unused = model_of([make_node("Relu", ["x"], ["a"]), make_node("Dropout", ["a"], ["y", "mask"])])
    assert unchanged_outputs(remove_identities, unused) == 1


def test_captured_identities_vanish(if_model, unchanged_outputs):
    if_model.graph.node.insert(2, helper.make_node("Identity", ["a"], ["a2"]))
    if_model.graph.node[3].attribute[1].g.node[0].input[0] = "a2"
    model = read_model(if_model)
    assert unchanged_outputs(remove_identities, model, [np.array([1, -2], np.float32), np.array(True)]) == 2
    assert ops(model) == ["Relu", "Neg", "If"]
    then_branch = model.graph.nodes[2].attribute("then_branch")
    assert [(node.op_type, node.inputs) for node in then_branch.nodes] == [("Add", ["a", "w"])]


def test_a_branch_that_gives_out_a_captured_value_keeps_its_identity(if_model, unchanged_outputs):
    branch = if_model.graph.node[2].attribute[1].g
    del branch.node[0]
    branch.node[0].input[0] = "a"
    model = read_model(if_model)
    assert unchanged_outputs(remove_identities, model, [np.array([1, -2], np.float32), np.array(True)]) == 0


def test_a_function_of_the_model_is_no_identity(make_model):
    function = helper.make_function(
        "", "Identity", ["x"], ["y"], [helper.make_node("Neg", ["x"], ["y"])], [helper.make_opsetid("", 20)]
    )
    kind = (TensorProto.FLOAT, [1])
    nodes = [helper.make_node("Identity", ["x"], ["a"]), helper.make_node("Relu", ["a"], ["y"])]
    model = read_model(make_model(nodes, {"x": kind}, {"y": kind}, functions=[function]))
    assert remove_identities.apply(model) == 0


def test_pass_through_refuses_nodes_without_input():
    model = model_of([make_node("Identity", [""], ["a"]), make_node("Relu", ["x"], ["y"])])
    assert not pass_through(model.graph, model.graph.nodes[0])


# Dead code


def test_dead_chains_constants_and_types_go(unchanged_outputs):
    nodes = [
        make_node("Add", ["x", "dead_weight"], ["dead_a"]),
        make_node("Relu", ["dead_a"], ["dead_b"]),
        make_node("Add", ["x", "w"], ["y"]),
    ]
    model = model_of(nodes, initializers=[constant("w", 1), constant("dead_weight", 2)])
    model.graph.values["dead_a"] = Value("dead_a", FLOAT)
    assert unchanged_outputs(remove_dead_code, model) == 3
    assert ops(model) == ["Add"]
    assert list(model.graph.initializers) == ["w"]
    assert model.graph.values == {}


def test_annotations_keep_their_parameters_and_go_with_their_value():
    nodes = [make_node("Relu", ["x"], ["y"]), make_node("Neg", ["x"], ["dead"])]
    model = model_of(nodes, initializers=[constant("y_scale", 1), constant("dead_scale", 1)])
    model.graph.quantization_annotation += [
        QuantizationAnnotation("y", {"SCALE_TENSOR": "y_scale"}),
        QuantizationAnnotation("dead", {"SCALE_TENSOR": "dead_scale"}),
    ]
    assert remove_dead_code.apply(model) == 2
    assert list(model.graph.initializers) == ["y_scale"]
    assert [annotation.tensor_name for annotation in model.graph.quantization_annotation] == ["y"]
    model.graph.rename("y_scale", "s")
    assert model.graph.quantization_annotation[0].parameters == {"SCALE_TENSOR": "s"}


def test_nodes_with_one_wanted_output_stay(unchanged_outputs):
    model = model_of([make_node("Dropout", ["x"], ["y", "mask"])], outputs=["mask"])
    assert unchanged_outputs(remove_dead_code, model) == 0


def test_inputs_and_their_defaults_stay():
    model = model_of([make_node("Relu", ["x"], ["y"])], inputs=["x", "unused"], initializers=[constant("unused", 1)])
    assert remove_dead_code.apply(model) == 0
    assert [value.name for value in model.graph.inputs] == ["x", "unused"]
    assert "unused" in model.graph.initializers


def test_what_subgraphs_capture_stays_and_what_only_their_dead_nodes_capture_goes(if_model, unchanged_outputs):
    branch = if_model.graph.node[2].attribute[1].g
    branch.node.append(helper.make_node("Neg", ["c"], ["dead"]))
    branch.initializer.append(numpy_helper.from_array(np.zeros(2, np.float32), "dead_weight"))
    if_model.graph.node.insert(0, helper.make_node("Abs", ["x"], ["c"]))
    model = read_model(if_model)
    assert unchanged_outputs(remove_dead_code, model, [np.array([1, -2], np.float32), np.array(True)]) == 3
    assert ops(model) == ["Relu", "Neg", "If"]
    then_branch = model.graph.nodes[2].attribute("then_branch")
    assert [node.op_type for node in then_branch.nodes] == ["Add", "Identity"]
    assert then_branch.initializers == {}


def test_functions_that_nothing_calls_go(make_model):
    def function(name: str, called: str):
        domain = "own" if called != "Relu" else ""
        node = helper.make_node(called, ["x"], ["y"], domain=domain)
        return helper.make_function("own", name, ["x"], ["y"], [node], [helper.make_opsetid("", 20)])

    kind = (TensorProto.FLOAT, [1])
    functions = [function("used", "inner"), function("inner", "Relu"), function("unused", "inner")]
    call = helper.make_node("used", ["x"], ["y"], domain="own")
    model = read_model(make_model([call], {"x": kind}, {"y": kind}, functions=functions, domains={"own": 1}))
    assert remove_dead_code.apply(model) == 1
    assert [key[1] for key in model.functions] == ["used", "inner"]


def test_what_training_needs_stays():
    model = model_of(
        [make_node("Relu", ["x"], ["y"])], initializers=[constant("w", 1), constant("v", 2), constant("u", 3)]
    )
    step = Graph("step", outputs=[Value("new_w")], nodes=[make_node("Neg", ["w"], ["new_w"])])
    model.training_info.append(TrainingInfo(None, step, [], [("v", "new_w")]))
    assert remove_dead_code.apply(model) == 1
    assert list(model.graph.initializers) == ["w", "v"]


# Constant folding


def test_folding_before_inference_leaves_nodes_to_other_rules():
    """Nodes that change nothing are removed later, and nodes with 16-bit floats are computed in float32 later."""
    half = OnnxTensor.from_array("h", np.ones(2, np.float16))
    nodes = [
        make_node("Concat", ["w", "w"], ["joined"], axis=0),
        make_node("Slice", ["joined", "one", "three"], ["part"]),
        make_node("Identity", ["w"], ["same"]),
        make_node("Cast", ["w"], ["kept"], to=int(DataType.FLOAT)),
        make_node("Cast", ["w"], ["narrow"], to=int(DataType.FLOAT16)),
        make_node("Add", ["h", "h"], ["twice"]),
        make_node("Identity", ["joined"], ["copied"]),
        make_node("Sum", ["x", "part", "same", "kept"], ["y"]),
    ]
    numbers = [OnnxTensor.from_array(name, np.array([value])) for name, value in (("one", 1), ("three", 3))]
    model = model_of(nodes, initializers=[constant("w", 1, 2), half, *numbers])
    assert fold_before_inference.apply(model) == 2
    assert ops(model) == ["Identity", "Cast", "Cast", "Add", "Identity", "Sum"]
    part = model.graph.constant("part")
    assert part is not None and part.tolist() == [2, 1]


def test_results_that_are_too_large_are_not_folded(monkeypatch):
    """The sizes of some results are not inferred before these are computed; a Cast widens the elements."""
    monkeypatch.setattr(constant_folding, "_MAX_BYTES", 64)
    narrow = OnnxTensor.from_array("n", np.ones(60, np.int8))
    model = model_of([make_node("Cast", ["n"], ["y"], to=int(DataType.DOUBLE))], initializers=[narrow])
    assert fold_constants.apply(model) == 0
    monkeypatch.setattr(constant_folding, "_MAX_BYTES", 480)
    assert fold_constants.apply(model) == 1


def test_chains_of_constants_fold(unchanged_outputs):
    nodes = [
        make_node("Constant", [], ["c"], value=constant("", 1, 2, 3)),
        make_node("Add", ["c", "w"], ["a"]),
        make_node("Sqrt", ["a"], ["b"]),
        make_node("Mul", ["x", "b"], ["y"]),
    ]
    model = model_of(nodes, initializers=[constant("w", 3, 2, 1)])
    assert unchanged_outputs(fold_constants, model) == 3
    assert ops(model) == ["Mul"]
    np.testing.assert_array_equal(model.graph.constant("b"), [2, 2, 2])


def test_graph_outputs_become_constant_nodes(unchanged_outputs):
    model = model_of([make_node("Neg", ["w"], ["y"])], initializers=[constant("w", 3)])
    assert unchanged_outputs(fold_constants, model) == 1
    assert ops(model) == ["Constant"]
    assert fold_constants.apply(model) == 0


def test_folding_reaches_into_branches(if_model, unchanged_outputs):
    branch = if_model.graph.node[2].attribute[1].g
    branch.node.insert(0, helper.make_node("Neg", ["w"], ["minus_w"]))
    branch.node[1].input[1] = "minus_w"
    model = read_model(if_model)
    assert unchanged_outputs(fold_constants, model, [np.array([1, -2], np.float32), np.array(True)]) == 1
    then_branch = model.graph.nodes[2].attribute("then_branch")
    np.testing.assert_array_equal(then_branch.initializers["minus_w"].array(), [-2, -3])


def test_overridable_initializers_do_not_fold():
    model = model_of([make_node("Neg", ["w"], ["a"]), make_node("Add", ["a", "x"], ["y"])], ["x", "w"],
                     initializers=[constant("w", 3)])  # fmt: skip
    assert fold_constants.apply(model) == 0
    model.graph.overridable_initializers = False
    assert fold_constants.apply(model) == 1


@pytest.mark.parametrize(
    "node",
    [
        make_node("RandomNormal", [], ["a"], shape=[3]),
        make_node("RandomUniformLike", ["w"], ["a"]),
        make_node("Bernoulli", ["w"], ["a"]),
        make_node("DequantizeLinear", ["q", "scale"], ["a"]),
        make_node("Mystery", ["w"], ["a"], domain="own"),
        make_node("SequenceConstruct", ["w"], ["a"]),
        make_node("Reshape", ["w", "bad_shape"], ["a"]),
        make_node("TfIdfVectorizer", ["q"], ["a"], ngram_counts=[0, 4, 2**63 - 1], ngram_indexes=[0], mode="TF"),
    ],
    ids=lambda node: node.op_type,
)
def test_what_must_not_or_cannot_fold_stays(node):
    constants = [constant("w", 0.5, 0.5), OnnxTensor.from_array("q", np.array([1], np.int8)), constant("scale", 1)]
    constants.append(OnnxTensor.from_array("bad_shape", np.array([7], np.int64)))
    model = model_of([node, make_node("Relu", ["x"], ["y"])], initializers=constants)
    model.opset_imports["own"] = 1
    assert fold_constants.apply(model) == 0
    assert node in model.graph.nodes


def test_folding_never_makes_large_constants():
    shape = OnnxTensor.from_array("shape", np.array([1 << 20, 1 << 20], np.int64))
    small = OnnxTensor.from_array("small", np.array([10], np.int64))
    nodes = [
        make_node("ConstantOfShape", ["shape"], ["huge"]),
        make_node("Range", ["zero", "many", "one"], ["also_huge"]),
        make_node("ConstantOfShape", ["small"], ["ten"]),
        make_node("Add", ["x", "ten"], ["y"]),
    ]
    scalars = [OnnxTensor.from_array(name, np.array(value, np.int64)) for name, value in
               {"zero": 0, "one": 1, "many": 1 << 50}.items()]  # fmt: skip
    model = model_of(nodes, initializers=[shape, small, *scalars])
    assert fold_constants.apply(model) == 1
    assert ops(model) == ["ConstantOfShape", "Range", "Add"]


def test_the_size_limit_is_obeyed(monkeypatch):
    nodes = [make_node("Neg", ["w"], ["a"]), make_node("Add", ["x", "a"], ["y"])]
    monkeypatch.setattr(constant_folding, "_MAX_BYTES", 12)
    assert fold_constants.apply(model_of(list(nodes), initializers=[constant("w", 1, 2, 3)])) == 1
    monkeypatch.setattr(constant_folding, "_MAX_BYTES", 11)
    assert fold_constants.apply(model_of(list(nodes), initializers=[constant("w", 1, 2, 3)])) == 0


def test_shapes_of_large_constants_fold(monkeypatch):
    large = OnnxTensor.from_array("large", np.zeros((1000, 1000), np.float32))
    model = model_of(
        [make_node("Shape", ["large"], ["s"]), make_node("Reshape", ["x", "s"], ["y"])], initializers=[large]
    )
    monkeypatch.setattr(constant_folding, "_MAX_BYTES", 100)
    assert fold_constants.apply(model) == 1
    assert model.graph.constant("s").tolist() == [1000, 1000]


@pytest.mark.parametrize("result", [[], [np.zeros(5, np.float32)], [np.zeros(1, np.float64)], [[1.0]], [None]])
def test_results_of_the_wrong_type_are_not_used(result, monkeypatch):
    model = model_of(
        [make_node("Neg", ["w"], ["a"]), make_node("Add", ["x", "a"], ["y"])], initializers=[constant("w", 3)]
    )
    monkeypatch.setattr(constant_folding, "evaluate", lambda *_: result)
    assert fold_constants.apply(model) == 0


def test_function_parameters_do_not_fold():
    node = make_node("LeakyRelu", ["w"], ["a"])
    node.attributes["alpha"] = Attribute("alpha", AttributeType.FLOAT, ref_attr_name="slope")
    model = model_of([node, make_node("Relu", ["x"], ["y"])], initializers=[constant("w", 3)])
    assert fold_constants.apply(model) == 0


# All together


def test_rules_together_settle(unchanged_outputs):
    nodes = [
        make_node("Identity", ["w"], ["a"]),
        make_node("Neg", ["a"], ["b"]),
        make_node("Transpose", ["x"], ["c"], perm=[0, 1]),
        make_node("Add", ["c", "b"], ["y"]),
    ]
    model = model_of(nodes, initializers=[constant("w", 3)])
    assert dict(run_rewrites(model, RULES, Level.BASIC)) == {
        "remove_identities": 2,
        "fold_constants": 1,
        "remove_dead_code": 1,
    }
    assert ops(model) == ["Add"]
    assert run_rewrites(model, RULES, Level.BASIC) == []
