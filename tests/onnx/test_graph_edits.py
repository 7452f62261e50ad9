"""Edits of a graph: lookups stay right, also through subgraphs that capture values."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from onnx import TensorProto, helper

from genai.errors import GraphError
from genai.onnx import uses
from genai.onnx.ir import Attribute, AttributeType, Graph, Node, OnnxTensor, Value, make_node
from genai.onnx.reader import read_model
from genai.onnx.types import DataType, TensorType
from genai.onnx.writer import to_proto
from tests.integrity import check_graph


def chain(length: int) -> Graph:
    """x -> v0 -> v1 -> ... through Relu nodes."""
    names = ["x", *(f"v{index}" for index in range(length))]
    nodes = [make_node("Relu", [source], [target]) for source, target in pairwise(names)]
    return Graph("chain", [Value("x")], [Value(names[-1])], nodes)


def branches(model) -> dict[str, Graph]:
    node = model.graph.nodes[-1]
    return {name: attribute.value for name, attribute in node.attributes.items()}


def test_producers_and_consumers():
    graph = chain(3)
    first, second, third = graph.nodes
    assert graph.producer("v0") is first
    assert graph.producer("x") is None
    assert graph.consumers("v0") == [second]
    assert graph.consumers("v2") == []
    assert graph.is_output("v2")
    assert graph.is_used("v2")
    assert graph.is_input("x")
    assert not graph.is_used("nowhere")
    assert third in graph.consumers("v1")


def test_a_node_that_uses_a_value_twice_is_listed_once():
    graph = Graph(nodes=[make_node("Mul", ["x", "x"], ["y"])])
    assert graph.consumers("x") == graph.nodes


def test_absent_inputs_and_outputs_are_no_values():
    graph = Graph(nodes=[make_node("Clip", ["x", "", "high"], ["y", ""])])
    assert graph.consumers("") == []
    assert graph.producer("") is None
    assert graph.nodes[0].input(1) == graph.nodes[0].input(9) == ""
    assert graph.nodes[0].output(1) == graph.nodes[0].output(9) == ""


def test_insert_before_keeps_the_order():
    graph = chain(2)
    first, second = graph.nodes
    a, b = (make_node("Neg", ["x"], [name]) for name in "ab")
    graph.insert_before(second, a, b)
    assert graph.nodes == [first, a, b, second]
    assert graph.producer("b") is b
    assert graph.consumers("x") == [first, a, b]


def test_replace_node_takes_over_the_outputs():
    graph = chain(2)
    old = graph.nodes[0]
    new = make_node("Abs", ["x"], ["v0"])
    graph.replace_node(old, new)
    assert graph.producer("v0") is new
    assert graph.consumers("x") == [new]
    check_graph(graph)


def test_nodes_of_other_graphs_are_refused():
    graph, stranger = chain(2), make_node("Relu", ["x"], ["z"])
    for edit in (lambda: graph.insert_before(stranger), lambda: graph.remove_nodes([stranger])):
        with pytest.raises(GraphError, match="is not in graph"):
            edit()


def test_replace_uses_counts_and_spares_outputs_unless_asked():
    graph = chain(2)
    graph.append(make_node("Neg", ["v1"], ["n"]))
    assert graph.replace_uses("v1", "v0") == 1
    assert graph.nodes[2].inputs == ["v0"]
    assert graph.outputs[0].name == "v1"
    assert graph.replace_uses("v1", "v0", include_outputs=True) == 1
    assert graph.outputs[0].name == "v0"


def test_rename_reaches_every_place(if_model):
    model = read_model(if_model)
    graph = model.graph
    graph.values["a"] = Value("a", TensorType(DataType.FLOAT, (2,)))
    for old in ("x", "a", "w", "y"):
        graph.rename(old, f"new_{old}")
    assert graph.inputs[0].name == "new_x"
    assert graph.outputs[0].name == "new_y"
    assert graph.values["new_a"].name == "new_a"
    assert graph.initializers["new_w"].name == "new_w"
    assert branches(model)["then_branch"].nodes[0].inputs == ["new_a", "new_w"]
    check_graph(graph)
    read_model(to_proto(model))


def test_hand_edits_need_update_or_invalidate():
    graph = chain(3)
    check_graph(graph)
    graph.nodes[2].inputs[0] = "v0"
    with pytest.raises(AssertionError, match="update"):
        check_graph(graph)
    graph.update(graph.nodes[2])
    check_graph(graph)
    assert graph.consumers("v1") == []
    graph.nodes[1] = make_node("Abs", ["x"], ["v1"])
    graph.invalidate()
    assert graph.producer("v1") is graph.nodes[1]


def test_appending_to_the_node_list_is_noticed():
    graph = chain(1)
    assert graph.consumers("v0") == []
    graph.nodes.append(make_node("Neg", ["v0"], ["n"]))
    assert graph.consumers("v0") == [graph.nodes[1]]


def test_fresh_names_are_new_everywhere(if_model):
    model = read_model(if_model)
    inner = branches(model)["then_branch"]
    taken = {"x", "a", "b", "w", "y", "flag", "then_sum", "then_out", "else_out"}
    names = [
        model.graph.fresh_name("a"),
        inner.fresh_name("a"),
        model.graph.fresh_name("else_out"),
        inner.fresh_name("new"),
    ]
    names += [model.graph.fresh_name("new"), inner.fresh_name(""), inner.fresh_name("")]
    assert len(set(names)) == len(names)
    assert not set(names) & taken
    assert names[3] == "new"


def test_fresh_names_stay_taken_before_they_are_used():
    graph = chain(2)
    first = graph.fresh_name("t")
    graph.nodes.append(make_node("Neg", ["x"], ["n"]))
    graph.invalidate()
    assert graph.fresh_name("t") != first


def test_fresh_names_know_nodes_added_later():
    graph = chain(1)
    graph.fresh_name("a")
    graph.append(make_node("Neg", ["x"], ["b"]))
    graph.add_initializer(OnnxTensor.from_array("c", np.zeros(1)))
    assert graph.fresh_name("b") != "b"
    assert graph.fresh_name("c") != "c"


# Captures


def test_consumers_include_nodes_whose_subgraphs_capture(if_model):
    graph = read_model(if_model).graph
    node = graph.nodes[-1]
    assert graph.consumers("a") == [node]
    assert graph.consumers("w") == [node]
    assert graph.consumers("then_sum") == []


def test_replace_uses_reaches_into_subgraphs(if_model):
    model = read_model(if_model)
    assert model.graph.replace_uses("a", "b") == 1
    assert branches(model)["then_branch"].nodes[0].inputs == ["b", "w"]
    assert model.graph.consumers("a") == []
    assert model.graph.consumers("b") == [model.graph.nodes[-1]]
    check_graph(model.graph)


def test_replace_uses_spares_inner_values_of_the_same_name(if_model):
    if_model.graph.node[2].attribute[0].g.node.insert(0, helper.make_node("Neg", ["x"], ["a"]))
    model = read_model(if_model)
    hidden = model.graph.nodes[-1].attribute(if_model.graph.node[2].attribute[0].name)
    before = [list(node.inputs) for node in hidden.nodes]
    model.graph.replace_uses("a", "b")
    assert [list(node.inputs) for node in hidden.nodes] == before


def test_replace_uses_refuses_a_name_that_a_subgraph_hides(if_model):
    model = read_model(if_model)
    with pytest.raises(GraphError, match="fresh_name"):
        model.graph.replace_uses("a", "then_sum")


def test_edits_inside_reach_the_outer_lookups(if_model):
    model = read_model(if_model)
    graph, inner = model.graph, branches(model)["then_branch"]
    assert graph.consumers("x") == graph.nodes[:2]
    inner.nodes[0].inputs[0] = "x"
    inner.update(inner.nodes[0])
    assert graph.consumers("a") == []
    assert graph.consumers("x") == graph.nodes
    inner.remove_nodes([inner.nodes[0]])
    assert graph.consumers("x") == graph.nodes[:2]
    inner.append(make_node("Add", ["b", "b"], ["then_sum"]))
    assert graph.consumers("b") == [graph.nodes[-1]]
    check_graph(graph)


def test_edits_two_levels_down_reach_the_root():
    innermost = Graph("innermost", outputs=[Value("c")], nodes=[make_node("Neg", ["x"], ["c"])])
    middle = Graph("middle", outputs=[Value("b")], nodes=[make_node("If", ["flag"], ["b"], then_branch=innermost)])
    graph = Graph("outer", [Value("x"), Value("z"), Value("flag")], [Value("a")])
    graph.append(make_node("If", ["flag"], ["a"], then_branch=middle))
    assert graph.consumers("x") == graph.nodes
    innermost.nodes[0].inputs[0] = "z"
    innermost.update(innermost.nodes[0])
    assert graph.consumers("x") == []
    assert graph.consumers("z") == graph.nodes
    assert graph.consumers("flag") == graph.nodes


def test_a_subgraph_output_may_be_a_captured_value(if_model):
    model = read_model(if_model)
    inner = branches(model)["then_branch"]
    inner.outputs[0].name = "a"
    inner.invalidate()
    assert model.graph.consumers("a") == [model.graph.nodes[-1]]
    model.graph.replace_uses("a", "b")
    assert inner.outputs[0].name == "b"


def test_constants_and_types_are_found_in_outer_graphs(if_model):
    model = read_model(if_model)
    inner = branches(model)["then_branch"]
    np.testing.assert_array_equal(inner.constant("w"), [2, 3])
    assert inner.type_of("x") == TensorType(DataType.FLOAT, (2,))
    assert inner.outer is model.graph
    assert inner.type_of("then_sum") is None
    copied = model.copy()
    assert branches(copied)["then_branch"].outer is copied.graph


# Constants


def test_an_initializer_that_is_an_input_is_no_constant(make_model):
    kind = (TensorProto.FLOAT, [1])
    node = helper.make_node("Add", ["x", "w"], ["y"])
    for ir_version, is_constant in ((10, False), (3, True)):
        proto = make_model(
            [node], {"x": kind, "w": kind}, {"y": kind}, {"w": np.ones(1, np.float32)}, ir_version=ir_version
        )
        assert (read_model(proto).graph.constant("w") is not None) is is_constant


@pytest.mark.parametrize(
    ("attribute", "value", "expected"),
    [
        ("value", OnnxTensor.from_array("", np.array([1, 2], np.int8)), np.array([1, 2], np.int8)),
        ("value_float", 1.5, np.array(1.5, np.float32)),
        ("value_floats", [1.5, 2.0], np.array([1.5, 2.0], np.float32)),
        ("value_int", 3, np.array(3, np.int64)),
        ("value_ints", [3, 4], np.array([3, 4], np.int64)),
        ("value_string", "a", np.array("a", dtype=object)),
        ("value_strings", ["a", "b"], np.array(["a", "b"], dtype=object)),
    ],
)
def test_constant_nodes_are_constants(attribute, value, expected):
    graph = Graph(nodes=[make_node("Constant", [], ["c"], **{attribute: value})])
    found = graph.constant("c")
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert found.tolist() == expected.tolist()


def test_other_values_are_no_constants():
    graph = chain(1)
    assert graph.constant("x") is graph.constant("v0") is graph.constant("") is graph.constant("nowhere") is None


# Order


def test_topological_sort_moves_as_little_as_possible():
    nodes = [make_node("Op", [source], [target]) for source, target in ("xa", "cd", "xb", "bc", "xe")]
    graph = Graph(nodes=list(nodes))
    graph.topological_sort()
    assert [node.outputs[0] for node in graph.nodes] == ["a", "b", "c", "d", "e"]
    graph.topological_sort()
    assert [node.outputs[0] for node in graph.nodes] == ["a", "b", "c", "d", "e"]


def test_topological_sort_of_a_long_chain_needs_no_recursion():
    graph = chain(5000)
    graph.nodes.reverse()
    graph.topological_sort()
    assert [node.outputs[0] for node in graph.nodes] == [f"v{index}" for index in range(5000)]


def test_topological_sort_refuses_cycles():
    for edges in (["aa"], ["ab", "ba"], ["xa", "ab", "bc", "cb"]):
        graph = Graph(nodes=[make_node("Op", [source], [target]) for source, target in edges])
        with pytest.raises(GraphError, match="cycle"):
            graph.topological_sort()


# Cost and integrity


def test_edits_do_not_rebuild_the_index(monkeypatch):
    graph = chain(1000)
    graph.consumers("x")
    recorded = []
    original = uses.UseIndex.add
    monkeypatch.setattr(uses.UseIndex, "add", lambda self, node: (recorded.append(node), original(self, node))[1])
    for index, node in enumerate(list(graph.nodes[1:])):
        name = graph.fresh_name("new")
        graph.insert_before(node, make_node("Neg", [node.inputs[0]], [name]))
        graph.replace_uses(f"v{index + 1}", name)
        assert graph.producer(name) is not None
    assert len(recorded) < 10 * 1000


def test_random_edits_keep_the_index_right():
    generator = random.Random(0)
    for _ in range(30):
        graph = chain(6)
        for step in range(40):
            _edit_at_random(graph, generator, step)
            check_graph(graph)


def _edit_at_random(graph: Graph, generator: random.Random, step: int) -> None:
    names = ["x", *(name for node in graph.nodes for name in node.outputs)]
    choice = generator.randrange(6)
    node = generator.choice(graph.nodes) if graph.nodes else None
    if node is None or choice == 0:
        graph.append(_random_node(graph, names, generator))
    elif choice == 1:
        graph.insert_before(node, _random_node(graph, names, generator))
    elif choice == 2:
        graph.remove_nodes([node])
    elif choice == 3:
        graph.replace_uses(generator.choice(names), generator.choice(names[:1] + names[-1:]))
    elif choice == 4:
        graph.rename(node.outputs[0], graph.fresh_name(f"r{step}"))
    else:
        graph.replace_node(node, make_node("Abs", [generator.choice(names)], list(node.outputs)))


def _random_node(graph: Graph, names: list[str], generator: random.Random) -> Node:
    target = graph.fresh_name("n")
    if generator.random() < 0.3:
        body_output = graph.fresh_name("inner")
        inner = make_node("Neg", [generator.choice(names)], [body_output])
        body = Graph("body", outputs=[Value(body_output)], nodes=[inner])
        return make_node("If", [generator.choice(names)], [target], then_branch=body)
    return make_node("Add", [generator.choice(names), generator.choice(names)], [target])


# Attributes


def test_attributes_from_python_values():
    node = make_node("Op", [], [], a=1, b=2.5, c="x", d=[1, 2], e=[1.0, 2], f=["p", "q"], g=None, h=True)
    kinds = {name: attribute.type.name for name, attribute in node.attributes.items()}
    assert kinds == {"a": "INT", "b": "FLOAT", "c": "STRING", "d": "INTS", "e": "FLOATS", "f": "STRINGS", "h": "INT"}
    assert node.attributes["c"].value == b"x"
    assert node.attribute("f") == ["p", "q"]
    node.set_attribute("d", [], AttributeType.INTS)
    assert node.attribute("d") == []
    assert node.integer("a", 0) == 1
    assert node.integer("z", 7) == 7


@pytest.mark.parametrize("value", [[], object(), [1, "x"], {"a": 1}, np.float32(1)])
def test_values_that_attributes_cannot_hold(value):
    with pytest.raises(GraphError, match="cannot hold"):
        Attribute.of("a", value)


def test_attributes_of_another_type_are_refused():
    node = make_node("Op", [], [], axis="one")
    with pytest.raises(GraphError, match="not an integer"):
        node.integer("axis", 0)
    with pytest.raises(GraphError, match="not a STRING"):
        _ = Attribute.of("a", 1).text
