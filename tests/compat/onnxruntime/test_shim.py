"""Programs that import onnxruntime run with this package in its place."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import pytest
from onnx import helper

import genai
from genai.compat import onnxruntime as ours
from genai.compat.onnxruntime.capi import onnxruntime_pybind11_state as state

PROGRAM = """
import sys
from multiprocessing import current_process

import numpy as np
import onnxruntime as ort
from onnxruntime.capi import _pybind_state as C
from onnxruntime.capi.onnxruntime_inference_collection import InferenceSession
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument, NoSuchFile

assert ort.InferenceSession is InferenceSession and C.get_all_providers()
session = ort.InferenceSession(sys.argv[1], providers=ort.get_available_providers())
print(session.run(None, {"x": np.arange(3, dtype=np.float32)})[0].tolist())
try:
    session.run(None, {"x": np.zeros(4, np.float32)})
except InvalidArgument as error:
    print("InvalidArgument")
try:
    ort.InferenceSession("missing.onnx")
except NoSuchFile as error:
    print("NoSuchFile")
try:
    session.run(["y"], {})
except ValueError as error:
    print("ValueError")
print(__name__, sys.argv[2:], current_process().name)
"""


@pytest.fixture
def program(tmp_path: Path) -> list[str]:
    """The path of a program for onnxruntime, and its arguments."""
    values = [helper.make_tensor_value_info(name, 1, [3]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "g", values[:1], values[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, tmp_path / "model.onnx")
    (tmp_path / "beside.py").write_text(PROGRAM)
    return [str(tmp_path / "beside.py"), str(tmp_path / "model.onnx"), "--flag", "-h"]


def run(*arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    root = str(Path(genai.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, env=environment, cwd=folder
    )


EXPECTED = [
    "[-0.0, -1.0, -2.0]",
    "InvalidArgument",
    "NoSuchFile",
    "ValueError",
    "__main__ ['--flag', '-h'] MainProcess",
]


def test_a_program_runs_unchanged(program):
    found = run("-m", "genai.compat.onnxruntime", "--", *program)
    assert found.stdout.splitlines() == EXPECTED, found.stderr


@pytest.mark.oracle
def test_the_program_gives_the_same_with_onnxruntime(program):
    pytest.importorskip("onnxruntime")
    found = run(*program)
    assert found.stdout.splitlines() == EXPECTED, found.stderr


def test_a_module_runs_unchanged(program, tmp_path):
    found = run("-m", "genai.compat.onnxruntime", "-m", "beside", *program[1:], folder=tmp_path)
    assert found.stdout.splitlines() == EXPECTED, found.stderr


@pytest.mark.parametrize("arguments", [[], ["--"], ["-x"], ["-m"], ["missing.py"]])
def test_wrong_command_lines(arguments):
    found = run("-m", "genai.compat.onnxruntime", *arguments)
    assert found.returncode == 2 and not found.stdout
    assert found.stderr.startswith("'missing.py' does not exist" if "missing.py" in arguments else "usage: ")


def test_usage():
    found = run("-m", "genai.compat.onnxruntime", "--help")
    assert found.returncode == 0 and found.stdout.startswith("usage: ")


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch):
    """As in a process that has not imported onnxruntime."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "onnxruntime"]:
        monkeypatch.delitem(sys.modules, name)
    yield
    ours.uninstall()


def test_install_and_uninstall(without):
    ours.install()
    ours.install()
    assert importlib.import_module("onnxruntime") is ours
    assert importlib.import_module("onnxruntime.capi._pybind_state").Fail is genai.Fail
    assert importlib.import_module("onnxruntime.backend").prepare
    assert importlib.import_module("onnxruntime.quantization").quantize_dynamic is genai.quantization.quantize_dynamic
    assert importlib.import_module("onnxruntime.quantization.shape_inference").quant_pre_process
    assert importlib.metadata.version("onnxruntime") == ours.__version__ == ours.version
    assert importlib.metadata.version("numpy") == np.__version__
    assert importlib.util.find_spec("onnxruntime.training") is None
    with pytest.raises(ModuleNotFoundError, match=r"onnxruntime\.transformers"):
        importlib.import_module("onnxruntime.transformers")
    with pytest.raises(AttributeError, match="'onnxruntime' has no attribute 'LLM'"):
        _ = ours.LLM
    ours.uninstall()
    assert not [name for name in sys.modules if name.partition(".")[0] == "onnxruntime"]
    ours.uninstall()


def test_onnxruntime_must_not_be_imported_before(without, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", ModuleType("onnxruntime"))
    with pytest.raises(genai.NotSupportedYetError, match="already been imported") as caught:
        ours.install()
    assert "call install() before" in caught.value.fix


@pytest.mark.oracle
def test_every_name_exists():
    theirs = pytest.importorskip("onnxruntime")
    internal = {"contextlib", "import_capi_exception", "onnxruntime_validation"}
    wanted = {name for name in dir(theirs) if not name.startswith("_")} - internal
    # Its packages are names of the module as soon as any test has imported them.
    wanted -= {module.name for module in pkgutil.iter_modules(theirs.__path__)}
    assert wanted <= set(dir(ours)) and all(hasattr(ours, name) for name in wanted)
    native = importlib.import_module("onnxruntime.capi.onnxruntime_pybind11_state")
    wanted = {name for name in dir(native) if not name.startswith("_")}
    assert wanted <= set(dir(state)) and all(hasattr(state, name) for name in wanted)
    errors = [name for name in wanted if isinstance(getattr(native, name), type)]
    errors = [name for name in errors if issubclass(getattr(native, name), Exception)]
    assert errors and all(issubclass(getattr(state, name), Exception) for name in errors)


def test_refused_names_of_capi():
    for name, reason in state.REFUSED.items():
        with pytest.raises(genai.GenaiError, match=name) as caught:
            getattr(state, name)()
        assert caught.value.why == reason
    assert isinstance(state.get_default_session_options(), genai.SessionOptions)


def test_other_modules_of_capi():
    collection = importlib.import_module("genai.compat.onnxruntime.capi.onnxruntime_inference_collection")
    normalized = collection.check_and_normalize_provider_args(["CPUExecutionProvider"], [{}], ["CPUExecutionProvider"])
    assert normalized == (["CPUExecutionProvider"], [{}])
    validation = importlib.import_module("genai.compat.onnxruntime.capi.onnxruntime_validation")
    package = importlib.import_module("genai.compat.onnxruntime.capi.build_and_package_info")
    assert validation.get_package_name_and_version_info()[:2] == (package.package_name, package.__version__)
    validation.check_distro_info()
