"""Modules can be imported under their earlier names, with a single warning that gives the current name."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from genai.moved import KEPT, MOVED, new_name

# All imports run in one process, which has not imported anything under an earlier name.
_PROGRAM = """
import importlib, sys, warnings
for name, new in zip(sys.argv[1::2], sys.argv[2::2]):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        module = importlib.import_module(f"genai.{name}")
    assert module is importlib.import_module(f"genai.{new}"), name
    told = [str(one.message) for one in seen if one.category is DeprecationWarning and "genai." in str(one.message)]
    print(name, "|".join(told))
"""


def told(names: dict[str, str]) -> dict[str, str]:
    """Return the warnings of the import of each earlier name."""
    command = [sys.executable, "-c", _PROGRAM, *(part for pair in names.items() for part in pair)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(line.split(" ", 1) for line in done.stdout.splitlines())


def test_earlier_names_warn() -> None:
    found = told(MOVED)
    assert found.keys() == MOVED.keys()
    assert all(f"genai.{name} is now genai.{new}" in found[name] for name, new in MOVED.items())


def test_the_page_lists_every_moved_module() -> None:
    page = (Path(__file__).parent.parent / "docs" / "reference" / "migration.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `genai\.([\w.]+)` \| `genai\.([\w.]+)` \|$", page, re.M))
    assert rows == MOVED


def test_names_of_onnxruntime_stay() -> None:
    assert set(told(KEPT).values()) == {""}


@pytest.mark.parametrize(
    ("name", "new"),
    [
        ("model.folders", "models.folders"),
        ("model.hub.store", "hub.store"),
        ("measure.bench.speed", "bench.speed"),
        ("graph.rewrites.base", "optimize.base"),
        ("models.folders", None),
        ("session.plan", None),
        ("modelling", None),
    ],
)
def test_what_is_in_a_package_moved_with_it(name: str, new: str | None) -> None:
    assert new_name(name) == new


def test_earlier_names_in_statements() -> None:
    program = """
from genai.measure.bench import speed
from genai.measure import evaluation
from genai.quantization import QuantType, matmul_nbits_quantizer
import genai.model.folders, genai.bench.speed, genai.models.folders
assert speed is genai.bench.speed and genai.model.folders is genai.models.folders
assert speed.__spec__.name == "genai.bench.speed"
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)


def test_earlier_functions_of_quant() -> None:
    """An example from an earlier version of docs/reference/quantised-formats.md."""
    program = """
import numpy as np
from genai.ops.weight_spelling import spell_product
from genai.quant import formats
from genai.quant.rounding import round_to_nearest
from tests import nearest
weight = np.random.default_rng(0).standard_normal((24, 512)).astype(np.float32)
for form, grid in (
    (formats.uniform_format(3, 32), None),
    (formats.uniform_format(4, 64, zero_points=True), None),
    (formats.uniform_format(8, 0), None),
    (formats.Q4_K, None),
    (formats.IQ4_NL, formats.GRIDS["iq4"]),
    (formats.row_scaled_format(4, 32), formats.GRIDS["iq4"]),
):
    found = round_to_nearest(weight, form, grid)
    assert found.format == form, found.format
    expected = nearest.round_to_nearest(weight, form, grid).dequantize()
    error, least = (np.linalg.norm(each - weight) for each in (found.dequantise(), expected))
    assert abs(error / least - 1) < 0.02, (form, error, least)
    assert spell_product(found).op_type
"""
    root = Path(__file__).parent.parent
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, cwd=root)


def test_what_was_never_there_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError):
        __import__("genai.model.nothing")


def test_a_name_that_stays_while_another_thread_imports_the_package() -> None:
    program = """
import sys, threading
errors = []
def load(name):
    try:
        __import__(name)
    except ImportError as error:
        errors.append(error)
names = "genai", "genai.quantization", "genai.quantization"
threads = [threading.Thread(target=load, args=(name,)) for name in names]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not errors, errors
assert sys.modules["genai.quantization"].quantize_dynamic
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=120)


def test_packages_are_attributes() -> None:
    program = """
import genai
assert genai.errors.GenaiError and genai.session.__name__ == "genai.session" and not hasattr(genai, "nothing")
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)


def test_type_checkers_see_the_names_that_stay() -> None:
    """Each module has a stub, because otherwise it is found only through its other name."""
    package = Path(__file__).parent.parent / "genai"
    modules = {path.stem for path in (package / "compat" / "onnxruntime_quantization").glob("*.py")} - {"refused"}
    assert {path.stem for path in (package / "quantization").glob("*.pyi")} == modules
