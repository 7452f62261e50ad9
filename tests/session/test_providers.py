"""Providers as plug-ins: found by entry point, given runs of nodes, and replaced by the CPU where they decline."""

from __future__ import annotations

import sys
import warnings
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

import genai as ort
from genai.session import execution_providers

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "onnxruntime_provider"


class Reference:
    """Takes Add and Mul, and counts what it compiles."""

    compiled: ClassVar[list[list[str]]] = []

    def __init__(self, ops="Add Mul", fails=False):
        self.ops, self.fails = ops.split(), fails

    def supports(self, node, graph, version):
        return node.op_type in self.ops

    def compile(self, model):
        if self.fails:
            raise RuntimeError("no device")
        self.compiled.append([node.op_type for node in model.graph.node])
        evaluator, names = ReferenceEvaluator(model), [value.name for value in model.graph.input]
        return lambda values: evaluator.run(None, dict(zip(names, values, strict=True)))


def broken(**options):
    raise OSError("no driver")


@pytest.fixture(autouse=True)
def plug_ins(monkeypatch):
    Reference.compiled = []
    points = [
        EntryPoint("TestProvider", f"{__name__}:Reference", execution_providers.GROUP),
        EntryPoint("BrokenProvider", f"{__name__}:broken", execution_providers.GROUP),
    ]
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or _this_module())
    monkeypatch.setattr(execution_providers, "entry_points", lambda group: points)
    return points


def _this_module():
    import types

    module = types.ModuleType(__name__)
    module.Reference, module.broken = Reference, broken
    return module


@pytest.fixture
def model(make_model):
    """((x + w) * x) -> Sin -> + w, and the product as a second output."""
    kind = (1, [2])
    nodes = [
        helper.make_node("Add", ["x", "w"], ["a"]), helper.make_node("Mul", ["a", "x"], ["m"]),
        helper.make_node("Sin", ["m"], ["s"]), helper.make_node("Add", ["s", "w"], ["y"]),
    ]  # fmt: skip
    return make_model(nodes, {"x": kind}, {"y": kind, "m": kind}, {"w": np.array([1, 2], np.float32)})


def test_runs_of_nodes_go_to_the_provider(model):
    feed = {"x": np.array([3, 4], np.float32)}
    expected = ort.InferenceSession(model).run(None, feed)
    session = ort.InferenceSession(model, providers=["TestProvider", "CPUExecutionProvider"])
    assert session.get_providers() == ["TestProvider", "CPUExecutionProvider"]
    for ours, plain in zip(session.run(None, feed), expected, strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-6)
    assert Reference.compiled == [["Add", "Mul"], ["Add"]]


def test_which_provider_computes_which_nodes(model):
    options = ort.SessionOptions()
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    session = ort.InferenceSession(model, options, providers=["TestProvider", "CPUExecutionProvider"])
    found = session.get_provider_graph_assignment_info()
    described = [(subgraph.ep_name, [node.op_type for node in subgraph.get_nodes()]) for subgraph in found]
    assert described == [
        ("TestProvider", ["Add", "Mul"]), ("TestProvider", ["Add"]), ("CPUExecutionProvider", ["Sin"]),
    ]  # fmt: skip


def test_options_reach_the_provider(model):
    session = ort.InferenceSession(model, providers=[("TestProvider", {"ops": "Sin"})])
    session.run(None, {"x": np.array([3, 4], np.float32)})
    assert Reference.compiled == [["Sin"]]


def test_available():
    assert ort.get_available_providers() == ["TestProvider", "BrokenProvider", "CPUExecutionProvider"]


@pytest.mark.parametrize(
    ("provider", "message"),
    [
        ("BrokenProvider", "no driver"),
        (("TestProvider", {"unknown": 1}), "unknown"),
        (("TestProvider", {"fails": True}), "no device"),
    ],
)
def test_providers_that_fail(model, provider, message):
    with pytest.raises(ort.EPFail, match="provider") as caught:
        ort.InferenceSession(model, providers=[provider])
    assert message in caught.value.why


def test_a_provider_that_fails_while_running(model, monkeypatch):
    def fail(values):
        raise RuntimeError("device lost")

    monkeypatch.setattr(Reference, "compile", lambda self, model: fail)
    feed = {"x": np.array([3, 4], np.float32)}
    session = ort.InferenceSession(model, providers=["TestProvider"])
    session.disable_fallback()
    with pytest.raises(ort.EPFail, match="'TestProvider' failed: device lost"):
        session.run(None, feed)
    session.enable_fallback()
    with pytest.warns(UserWarning, match="device lost.*the CPU alone"):
        results = session.run(None, feed)
    assert session.get_providers() == ["CPUExecutionProvider"]
    for ours, plain in zip(results, ort.InferenceSession(model).run(None, feed), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        session.run(["y"], feed)


@pytest.mark.oracle
def test_the_example_hands_parts_to_onnxruntime(model, plug_ins, monkeypatch):
    pytest.importorskip("onnxruntime")
    monkeypatch.syspath_prepend(str(EXAMPLE))
    plug_ins.append(
        EntryPoint("OnnxRuntimeProvider", "genai_onnxruntime_provider:OnnxRuntimeProvider", execution_providers.GROUP)
    )
    feed = {"x": np.array([3, 4], np.float32)}
    session = ort.InferenceSession(model, providers=["OnnxRuntimeProvider"])
    assert len(session._session.plan.calls) == 1
    for ours, plain in zip(session.run(None, feed), ort.InferenceSession(model).run(None, feed), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-6)
