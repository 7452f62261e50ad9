"""docs/reference/onnxruntime-tests.md is true: each case that it lists as passing is here, each refusal is raised."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

import genai

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "onnxruntime-tests.md"
ROWS = dict(re.findall(r"^\| (test\w+) \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.M))
REFUSED = {
    "test_create_allocator": lambda session: genai.OrtArenaCfg(8, 0, 4, 2),
    "test_get_and_set_tuning_results": lambda session: session.get_tuning_results(),
    "test_register_custom_ops_library": lambda session: genai.SessionOptions().register_custom_ops_library("x.so"),
    "test_set_default_logger_callback": lambda session: genai.set_default_logger_callback(print),
    "test_shared_allocator_using_create_and_register_allocator": lambda session: genai.create_and_register_allocator(
        genai.OrtMemoryInfo(), None
    ),
    "test_sparse_tensor_coo_format": lambda session: genai.SparseTensor.sparse_coo_from_numpy([9], [1.0], [0]),
    "test_sparse_tensor_csr_format": lambda session: genai.SparseTensor.sparse_csr_from_numpy([9], [1.0], [0], [0]),
}


def plain(name: str) -> str:
    return name.lower().replace("_", "")


def test_cases_that_pass_are_here():
    sources = [path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py")]
    here = {plain(name) for source in sources for name in re.findall(r'(?:def |id=")(test\w+)', source)}
    said = {name for name, state in ROWS.items() if state.startswith("passes")}
    assert [name for name in said if plain(name) not in here] == []
    assert len(said) > 70


def test_every_other_case_has_a_reason():
    others = {name: state for name, state in ROWS.items() if not state.startswith("passes")}
    assert {state.split(":")[0] for state in others.values()} == {"refused", "differs", "other hardware"}
    assert all(len(state.split(": ", 1)[-1]) > 10 for state in others.values())
    assert {name for name, state in others.items() if state.startswith("refused")} == REFUSED.keys()


def test_the_sums_of_the_page():
    counts = Counter(state.split(":")[0] for state in ROWS.values())
    text = " ".join(PAGE.read_text("utf-8").split())
    said = re.search(r"Of (\d+) cases, (\d+) pass, (\d+) .*?, (\d+) .*?, and (\d+) ", text)
    assert said is not None
    states = ("passes", "refused", "differs", "other hardware")
    assert [int(number) for number in said.groups()] == [len(ROWS), *(counts[state] for state in states)]


@pytest.mark.parametrize("name", REFUSED)
def test_refused_cases(add, name):
    with pytest.raises(genai.GenaiError, match=r"not supported|library") as caught:
        REFUSED[name](add)
    assert caught.value.why and caught.value.fix
