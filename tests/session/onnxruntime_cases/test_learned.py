"""Models of ai.onnx.ml: maps, dictionaries, labels, trees."""

from __future__ import annotations

import math

import numpy as np
import pytest
from onnx import TensorProto, helper

ML = "ai.onnx.ml"
LEAVES = [0.7284910678863525, 0.9134243130683899]


@pytest.fixture
def learned(opened, make_model):
    """learned(nodes, inputs, outputs): a session of a model of ai.onnx.ml 3."""

    def made(nodes, inputs, outputs):
        plain = {name: kind for name, kind in outputs.items() if isinstance(kind, tuple)}
        typed = {name: kind for name, kind in inputs.items() if isinstance(kind, tuple)}
        imports = [helper.make_opsetid("", 15), helper.make_opsetid(ML, 3)]
        model = make_model(nodes, typed, plain, imports=imports)
        for values, kinds in ((model.graph.input, inputs), (model.graph.output, outputs)):
            for name, kind in kinds.items():
                if not isinstance(kind, tuple):
                    values.append(helper.make_value_info(name, kind))
        return opened(model)

    return made


def mapped(key, value=TensorProto.FLOAT):
    return helper.make_map_type_proto(key, helper.make_tensor_type_proto(value, []))


@pytest.mark.parametrize(
    ("key", "attribute", "labels"),
    [
        pytest.param("string", "classlabels_strings", ["class2", "class1", "class3"], id="testZipMapStringFloat"),
        pytest.param("int64", "classlabels_int64s", [10, 20, 30], id="testZipMapInt64Float"),
    ],
)
def test_zip_map(learned, key, attribute, labels):
    node = helper.make_node("ZipMap", ["X"], ["Z"], domain=ML, **{attribute: labels})
    kind = mapped(TensorProto.STRING if key == "string" else TensorProto.INT64)
    session = learned([node], {"X": (1, [None, 3])}, {"Z": helper.make_sequence_type_proto(kind)})
    assert session.get_outputs()[0].type == f"seq(map({key},tensor(float)))"
    x = np.array([[1, 0, 3], [44, 23, 11]], np.float32)
    (z,) = session.run(["Z"], {"X": x})
    assert z == [dict(zip(labels, row, strict=True)) for row in x.tolist()]


def test_dict_vectorizer(learned, errors):
    """Also keys and values that are NumPy's numbers, and a key of another kind."""
    node = helper.make_node("DictVectorizer", ["x"], ["y"], domain=ML, int64_vocabulary=[0, 1, 2, 3, 4])
    session = learned([node], {"x": mapped(TensorProto.INT64)}, {"y": (1, [1, 5])})
    assert (session.get_inputs()[0].type, session.get_inputs()[0].shape) == ("map(int64,tensor(float))", [])
    x = {0: 25.0, 1: 5.13, 2: 0.0, 4: 5.966}
    for key, value in ((int, float), (np.int64, np.float32), (np.int64, np.float64), (np.int32, np.float64)):
        (y,) = session.run(["y"], {"x": {key(k): value(v) for k, v in x.items()}})
        assert y.dtype == np.float32
        np.testing.assert_allclose(y.ravel(), [25, 5.13, 0, 0, 5.966], rtol=1e-6)
    with pytest.raises(errors, match="str"):
        session.run(["y"], {"x": {**x, "a": 5.6}})


def test_label_encoder(learned):
    node = helper.make_node(
        "LabelEncoder", ["x"], ["y"], domain=ML, keys_strings=["1", "2", "3", "4"], values_int64s=[0, 1, 2, 3]
    )
    session = learned([node], {"x": (TensorProto.STRING, [1, 1])}, {"y": (TensorProto.INT64, [1, 1])})
    assert (session.get_inputs()[0].type, session.get_outputs()[0].type) == ("tensor(string)", "tensor(int64)")
    for x in (np.array([["4"]]), np.array(["4"], ndmin=2), np.array([["4"]], object)):
        assert session.run(["y"], {"x": x})[0].tolist() == [[3]]


def test_run_model_mlnet(learned):
    """Texts with zeros inside and at their ends, which only arrays of np.void keep."""
    categories = ["A\0A\0", "missing", "B\0B", "C\0C\0"]
    node = helper.make_node("OneHotEncoder", ["x"], ["y"], domain=ML, cats_strings=categories, zeros=1)
    session = learned([node], {"x": (TensorProto.STRING, [1, 3])}, {"y": (1, [1, 3, 4])})
    x = np.array([[b"A\0A\0", b"B\0B\0", b"C\0C\0"]], np.void)
    assert session.run(None, {"x": x})[0].tolist() == [[[1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1]]]
    longer = np.array([[b"A\0A\0\0", b"B\0B\0\0", b"C\0C\0\0"]], np.void)
    assert session.run(None, {"x": longer})[0].sum() == 0


def test_run_model_tree_ensemble_aionnxml_3(learned):
    """Thresholds of double precision, between which float32 sees no difference."""
    node = helper.make_node(
        "TreeEnsembleRegressor", ["X"], ["F"], domain=ML, n_targets=1, post_transform="NONE",
        nodes_treeids=[0, 0, 0], nodes_nodeids=[0, 1, 2], nodes_featureids=[2, 0, 0],
        nodes_modes=["BRANCH_LEQ", "LEAF", "LEAF"], nodes_truenodeids=[1, 0, 0], nodes_falsenodeids=[2, 0, 0],
        nodes_values_as_tensor=helper.make_tensor("v", TensorProto.DOUBLE, [3], [1.7999999523162842, 0, 0]),
        target_treeids=[0, 0], target_nodeids=[1, 2], target_ids=[0, 0],
        target_weights_as_tensor=helper.make_tensor("w", TensorProto.DOUBLE, [2], LEAVES),
    )  # fmt: skip
    double = helper.make_node("Cast", ["F"], ["Y"], to=TensorProto.DOUBLE)
    session = learned([node, double], {"X": (TensorProto.DOUBLE, [None, 4])}, {"Y": (TensorProto.DOUBLE, [None, 1])})
    rows = np.array([[0, 1, value, 3] for value in (1.7999999523162842, 1.7999999523, 1.79999995232)])
    for given, expected in (
        (rows, [LEAVES[0], LEAVES[0], LEAVES[1]]),
        (rows.astype(np.float32).astype(np.float64), [LEAVES[0]] * 3),
    ):
        (y,) = session.run(None, {"X": given})
        assert y.dtype == np.float64 and y.ravel().tolist() == expected


@pytest.mark.parametrize(
    ("split", "weights", "base", "score"),
    [(True, [0.3, -0.3], -0.405, -0.105), (False, [0.0], -0.405, -0.405), (False, [-0.405], 0.0, -0.405)],
)
def test_tree_ensemble_logistic(learned, split, weights, base, score):
    """A tree with a split, and trees that are a leaf alone, of a weight that is or is not negative."""
    count = 3 if split else 1
    node = helper.make_node(
        "TreeEnsembleClassifier", ["X"], ["label", "probs"], domain=ML, post_transform="LOGISTIC",
        nodes_treeids=[0] * count, nodes_nodeids=list(range(count)), nodes_featureids=[0] * count,
        nodes_modes=["BRANCH_LT", "LEAF", "LEAF"] if split else ["LEAF"],
        nodes_values=[0.5, 0.0, 0.0][:count] if split else [0.0],
        nodes_truenodeids=[1, 0, 0] if split else [0], nodes_falsenodeids=[2, 0, 0] if split else [0],
        nodes_missing_value_tracks_true=[0] * count, nodes_hitrates=[1.0] * count,
        class_treeids=[0] * len(weights), class_nodeids=[1, 2] if split else [0], class_ids=[0] * len(weights),
        class_weights=weights, classlabels_int64s=[0, 1], base_values=[base],
    )  # fmt: skip
    kinds = {"label": (TensorProto.INT64, [None]), "probs": (1, [None, 2])}
    session = learned([node], {"X": (1, [None, 3])}, kinds)
    _, probabilities = session.run(None, {"X": np.array([[0.1, 0, 0]], np.float32)})
    assert abs(probabilities[0][1] - 1 / (1 + math.exp(-score))) < 1e-5
