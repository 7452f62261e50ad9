"""Runs limit BLAS to one thread only if a kernel of their plan may call BLAS."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest
from onnx import helper

import genai.ops
from genai.ops.registry import WITHOUT_BLAS
from genai.session import session as session_module
from genai.session.session import Session

MULTIPLYING = {"matmul", "matmul_apart", "dot", "vdot", "inner", "tensordot", "einsum", "linalg", "convolve", "polyfit"}


@pytest.mark.parametrize("name", sorted(WITHOUT_BLAS))
def test_files_without_products(name):
    """The files of the list neither multiply matrices nor import functions that do."""
    tree = ast.parse((Path(genai.ops.__file__).parent / f"{name}.py").read_text(encoding="utf-8"))
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert not names & MULTIPLYING
    assert not any(isinstance(node, ast.MatMult) for node in ast.walk(tree))


A = {"a": (1, [3, 3])}
C = {"c": (1, None)}


def _if(make_model, op):
    result = helper.make_tensor_value_info("r", 1, None)
    nodes = {"then_branch": helper.make_node(op, "aa", "r"), "else_branch": helper.make_node("Add", "aa", "r")}
    bodies = {key: helper.make_graph([node], key, [], [result]) for key, node in nodes.items()}
    return make_model([helper.make_node("If", ["flag"], ["c"], **bodies)], {**A, "flag": (9, [])}, C)


@pytest.fixture
def entered(monkeypatch):
    """The number of runs that limited BLAS."""
    seen, single = [], session_module.BLAS_THREADS.single
    monkeypatch.setattr(session_module.BLAS_THREADS, "single", lambda: seen.append(1) or single())
    return seen


@pytest.mark.parametrize("op", ["Add", "MatMul"])
def test_single_nodes_and_branches(make_model, entered, op):
    ones, multiplies = np.ones((3, 3), np.float32), op == "MatMul"
    Session(make_model([helper.make_node(op, "aa", "c")], A, C)).run({"a": ones})
    assert len(entered) == multiplies
    Session(_if(make_model, op)).run({"a": ones, "flag": np.array(True)})
    assert len(entered) == 2 * multiplies


def test_packed_products_and_functions(make_model, entered):
    """Packed matrices are multiplied by our kernels; functions count by their nodes."""
    square = np.ones((128, 128), np.float32)
    packed = make_model([helper.make_node("MatMul", "aw", "c")], {"a": (1, [128, 128])}, C, {"w": square})
    Session(packed).run({"a": square})
    assert not entered
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("d", 1)]
    for op in ("Add", "MatMul"):
        body = helper.make_function("d", "Own", "x", "y", [helper.make_node(op, "xx", "y")], imports[:1])
        model = make_model([helper.make_node("Own", "a", "c", domain="d")], A, C, imports=imports, functions=[body])
        Session(model).run({"a": square[:3, :3]})
    assert len(entered) == 1
