from __future__ import annotations

import builtins
import copy
import importlib
import inspect
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import genai
from genai.compat.refused import AVAILABLE, REASONS
from genai.errors import NotSupportedYetError
from tools.name_table import GENAI, INTERNAL, RUNTIME

ROOT = Path(__file__).resolve().parent.parent


STUB = ROOT / "genai" / "__init__.pyi"
# The public names and their modules, which type checkers and `genai/__init__.py` read from the stub.
MODULES = {
    name: module
    for module, names in re.findall(r"^from (\S+) import (\([^)]*\)|.*)$", STUB.read_text(encoding="utf-8"), re.M)
    for name in re.findall(r"(\w+) as \1\b", names)
}
# Names that the toolkit defines for its own API. They are in onnxruntime-genai, too.
BOTH = {"Adapters", "TokenizerStream"}


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(genai, name) is getattr(importlib.import_module(MODULES[name], "genai"), name)
    assert (name in genai.__all__) == (name in dir(genai))


def test_every_name_is_ours_or_a_name_of_the_libraries_whose_api_we_offer() -> None:
    """Names in `genai.compat` belong to these libraries, except for the two that it extends."""
    theirs = {name for name, module in MODULES.items() if module.startswith(".compat.")} - {"LLM", "register_op"}
    assert set(genai.__all__) == MODULES.keys() - theirs - BOTH | {"__version__"}
    assert {"InferenceSession", "Generator", "Model", "SparseTensor", "Fail", "set_seed"} <= theirs


@pytest.mark.oracle
def test_our_names_are_not_those_of_the_libraries() -> None:
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    for library in (RUNTIME, GENAI):
        module = pytest.importorskip(library.library)
        public = {name for name in dir(module) if not name.startswith("_")}
        assert not public & set(genai.__all__)
        assert public - set(MODULES) <= {*INTERNAL, *library.apart, "quantization"}
        for name in public & set(MODULES):
            assert getattr(genai, name) is not None


def test_a_star_import_replaces_nothing() -> None:
    """Neither builtins nor modules that programs import under their own names."""
    assert not set(genai.__all__) & (set(dir(builtins)) | set(sys.stdlib_module_names))
    code = "before = set(globals())\nfrom genai import *\nprint(*sorted(set(globals()) - before - {'before'}))"
    assert run_python(code).split() == sorted(genai.__all__)


def run_python(code: str) -> str:
    """Return the output of a fresh process, in which nothing has been imported yet."""
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_dir_shows_the_public_names_and_nothing_else() -> None:
    """This also holds after submodules were imported, which Python adds to the package as attributes."""
    code = (
        "import genai, genai.errors, genai.models.config, genai.compat.onnxruntime_genai.tensor, genai.llm.llm\n"
        "import genai.kernels; genai.LLM; "
        "print(*dir(genai), '|', *genai.__all__)"
    )
    shown, _, listed = run_python(code).partition("|")
    assert shown.split() == sorted(listed.split()) == sorted(genai.__all__)
    assert set(REASONS) | set(AVAILABLE) <= set(MODULES)
    assert not {"ast", "Path", "Any", "annotations", "errors", "model", "kernels"} & set(shown.split())


def test_every_error_of_ours_is_public() -> None:
    """The errors are all subclasses of GenaiError in any module."""
    modules = [
        path.relative_to(ROOT if package != "genai" else ROOT / "genai").with_suffix("").as_posix().replace("/", ".")
        for package in ("genai", "kernels", "quant", "kvcache", "cli")
        for path in (ROOT / package).rglob("[a-z]*.py")
    ]
    code = (
        "import importlib, genai\n"
        f"for name in {modules}: importlib.import_module(f'genai.{{name}}')\n"
        "def below(kind): return {kind}.union(*map(below, kind.__subclasses__()))\n"
        "for one in below(genai.GenaiError): print(one.__name__, getattr(genai, one.__name__, None) is one)"
    )
    found = dict(line.split() for line in run_python(code).splitlines())
    assert len(found) > 30 and {"GenaiError", "StateError", "EPFail", "MissingPackageError"} <= set(found)
    assert set(found.values()) == {"True"}, [name for name, exported in found.items() if exported != "True"]


@pytest.mark.parametrize("name", REASONS)
def test_what_is_not_there_says_so(name: str) -> None:
    found: Any = getattr(genai, name)
    for action in (lambda: found(1, x=2), lambda: found.member("x") if name[0].isupper() else found()):
        with pytest.raises(NotSupportedYetError, match=f"{name}.*is not supported") as caught:
            action()
        assert caught.value.why == REASONS[name]
        assert caught.value.fix in (
            "for the supported names, see docs/how-to/onnxruntime-genai.md",
            "for the supported names, see docs/reference/session-options.md",
        )


def test_methods_that_are_not_there_name_the_page_of_their_api(bundled_folder: Path) -> None:
    with genai.Model(bundled_folder, threads=1) as model:
        generator = genai.Generator(model, genai.GeneratorParams(model))
        for method in (generator.set_hidden_states, model.create_streaming_processor):
            with pytest.raises(NotSupportedYetError) as caught:
                method()
            assert caught.value.fix == "for the supported names, see docs/how-to/onnxruntime-genai.md"
    with pytest.raises(NotSupportedYetError) as caught:
        genai.OrtValue.as_sparse_tensor(None)  # type: ignore[arg-type]
    assert caught.value.fix == "for the supported names, see docs/reference/session-options.md"


@pytest.mark.parametrize("name", [*REASONS, *AVAILABLE])
def test_looking_at_what_is_not_there_is_harmless(name: str) -> None:
    """Tools that inspect, document, annotate, copy or pickle do this: only use of the name is refused."""
    found: Any = getattr(genai, name)
    assert getattr(genai, name) is found
    assert name in repr(found) or name in AVAILABLE
    assert found in {found: 1} and found == found and found and callable(found)
    assert pickle.loads(pickle.dumps(found)) is copy.deepcopy(found) is inspect.unwrap(found) is found
    assert inspect.signature(found) and dict(inspect.getmembers(found)) and dir(found)
    assert not hasattr(found, "__wrapped__") and not hasattr(found, "_private")
    if name[0].isupper():
        assert not isinstance(3, found) and issubclass(found, object) and found | None
        assert hasattr(found, "load") and found.load is found.load and found.FIRST != found.SECOND
        assert getattr(found, "load", None) is not None and "load" not in dir(found)
        with pytest.raises(NotSupportedYetError, match=rf"{name}\.load.* is not supported"):
            found.load.whatever("path") if inspect.isclass(found.load) else found.load("path")


def test_what_models_and_options_refuse(bundled: Any) -> None:
    generator = genai.Generator(bundled, genai.GeneratorParams(bundled))
    for action in (
        bundled.create_multimodal_processor,
        bundled.create_streaming_processor,
        generator.snapshot_state,
        lambda: genai.register_execution_provider_library("x", "y"),
    ):
        with pytest.raises(NotSupportedYetError):
            action()


def test_no_device_but_the_cpu() -> None:
    assert not any(getattr(genai, name)() for name in AVAILABLE)


@pytest.mark.oracle
def test_no_name_of_onnxruntime_genai_is_undecided() -> None:
    """The page states these decisions."""
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    table = GENAI
    theirs = table.names(pytest.importorskip(table.library))
    listed = dict(re.findall(r"^\| (\S+) \| (.+) \|$", table.page.read_text(encoding="utf-8"), re.M))
    states = {name: table.state(name) for name in theirs}
    assert "missing" not in states.values()
    assert {name: listed.get(name) for name in theirs} == states
