"""The structure of the code: imports are one-way and without cycles, functions are small, policy code has no arrays."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOP = ("kernels", "quant", "kvcache", "genai", "cli")
# The other top-level packages that each package may import; genai/common is below all of them.
ALLOWED = {
    "kernels": {"common"},
    "quant": {"common", "kernels"},
    "kvcache": {"common", "kernels"},
    "genai": {"common", "kernels", "quant", "kvcache", "configs"},
    "cli": {"common", "genai", "kernels", "quant", "kvcache", "configs"},
}
# `python -m genai` is the command line, so only this file may import from above.
ENTRY_POINT = ROOT / "genai" / "__main__.py"
# The packages inside genai/, from bottom to top: a package may import only the packages before it. Adapters change
# models, and models have slots for adapters.
LAYERS = (
    "errors moved common onnx devices hub ops weight_files optimize session lowering engine lora+models text convert "
    "doctor evaluate llm embed quantize server bench compat quantization"
).split()
LAYER = {package: level for level, layer in enumerate(LAYERS) for package in layer.split("+")}
POLICY_CODE = ("genai/engine/scheduler.py", "kvcache/pool.py", "kvcache/table.py")
RUN_TIME_STRANGERS = {"torch", "onnxruntime", "onnxruntime_genai", "transformers"}
# `genai eval diff` and `genai run` compare with onnxruntime on request, and say what to install if it is missing.
ON_REQUEST = {
    ROOT / "genai" / "evaluate" / "values.py": {"onnxruntime"},
    ROOT / "genai" / "session" / "arrays.py": {"onnxruntime"},
    # The process that measures onnxruntime's memory; it imports nothing else.
    ROOT / "genai" / "bench" / "session_memory.py": {"onnxruntime"},
}
MOST_LINES_OF_A_FUNCTION, MOST_BRANCHES = 80, 20


def files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def package_of(module: str) -> str | None:
    """Return the top-level package that an absolute import of our code refers to."""
    parts = module.split(".")
    if parts[0] != "genai":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in (*TOP, "common", "configs") else "genai"


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the absolute names of all imports in a file, including those in functions and relative imports."""
    package = ["genai", *path.relative_to(ROOT).parts[:-1]]
    if package[1] == "genai":
        package.pop(1)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((f"{module}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and _loads(node) and isinstance(name := _first(node), str):
            yield resolve_name(name, ".".join(package)), node.lineno


def _loads(node: ast.Call) -> bool:
    """Return True if the call imports the module that its first argument names."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name in ("import_module", "__import__")


def _first(node: ast.Call) -> object:
    """Return the first argument if it is a literal."""
    return node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None


@pytest.mark.parametrize("package", TOP)
def test_imports_go_one_way(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in files(package)
        if path != ENTRY_POINT
        for name, line in imports(path)
        if (target := package_of(name)) is not None and target != package and target not in ALLOWED[package]
    ]
    assert not wrong, "\n".join(wrong)


def test_imports_go_one_way_inside_genai() -> None:
    inside = [path for path in (ROOT / "genai").iterdir() if not path.is_symlink()]
    known = {path.name for path in inside if path.name[:2] not in ("__", "py")}
    assert {name.removesuffix(".py") for name in known} == set(LAYER)
    packages = {path: path.relative_to(ROOT / "genai").parts[0].removesuffix(".py") for path in files("genai")}
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path, package in packages.items()
        if package in LAYER
        for name, line in imports(path)
        if package_of(name) in ("genai", "common") and LAYER.get((*name.split("."), "")[1], -1) > LAYER[package]
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_imports_the_compatibility_layer() -> None:
    """Only the stub of the public names, which is not a module, and the public name of a part may refer to it."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for package in TOP
        for path in files(package)
        if not {"compat", "quantization"} & set(path.parts)
        for name, line in imports(path)
        if f"{name}.".startswith("genai.compat.")
    ]
    assert not wrong, "\n".join(wrong)


def test_common_imports_nothing_of_ours() -> None:
    found = {name for path in files("genai/common") for name, _ in imports(path)}
    ours = {name for name in found if name.split(".")[0] == "genai" and package_of(name) != "common"}
    assert not {name for name in ours if not name.startswith("genai.errors.")}


@pytest.mark.parametrize("package", TOP)
def test_no_run_time_import_of_torch_or_onnxruntime(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in files(package)
        for name, line in imports(path)
        if name.split(".")[0] in RUN_TIME_STRANGERS - ON_REQUEST.get(path, set())
    ]
    assert not wrong, "\n".join(wrong)


def test_kernels_do_not_import_onnx() -> None:
    assert not [path for path in files("kernels") for name, _ in imports(path) if name.split(".")[0] == "onnx"]


def test_imports_have_no_cycles() -> None:
    modules = {_module(path): path for package in TOP for path in files(package)}
    graph = {name: set(_imported(path, modules)) - {name} for name, path in modules.items()}
    while leaves := {name for name, found in graph.items() if not found}:
        graph = {name: found - leaves for name, found in graph.items() if name not in leaves}
    assert not graph, f"in cycles, or above one: {sorted(graph)}"


def test_lazy_imports_in_cycles_say_why() -> None:
    """In an import cycle, an import in a function or for type checkers needs a comment with its reason."""
    modules = {_module(path): path for package in TOP for path in files(package)}
    edges = {name: list(_all_imported(path, modules)) for name, path in modules.items()}
    reachable = {name: _reachable(name, edges) for name in modules}
    texts = {name: path.read_text(encoding="utf-8") for name, path in modules.items()}
    at_import = {name: set(_lines_at_import(ast.parse(text))) for name, text in texts.items()}
    silent = [
        f"{modules[name].relative_to(ROOT)}:{line} imports {other}, which imports it"
        for name, found in edges.items()
        for other, line in found
        if name in reachable[other] and line not in at_import[name] and not _has_reason(texts[name].splitlines(), line)
    ]
    assert not silent, "\n".join(silent)


def _all_imported(path: Path, modules: dict[str, Path]) -> Iterator[tuple[str, int]]:
    """Yield our modules that a file imports anywhere, with the lines."""
    for name, line in imports(path):
        found = name if name in modules else name.rpartition(".")[0]
        if found in modules and found != _module(path):
            yield found, line


def _reachable(name: str, edges: dict[str, list[tuple[str, int]]]) -> set[str]:
    found, left = set(), [name]
    while left:
        left += (new := {other for other, _ in edges[left.pop()]} - found)
        found |= new
    return found


def _has_reason(lines: list[str], line: int) -> bool:
    """Return True if a comment follows an import, or the line that opens its block of imports."""
    while "#" not in lines[line - 1]:
        line -= 1
        if not lines[line - 1].lstrip().startswith(("from ", "import ", "if TYPE_CHECKING")):
            return False
    return True


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "genai" else parts
    return ".".join(["genai", *(parts[:-1] if parts[-1] == "__init__" else parts)])


def _imported(path: Path, modules: dict[str, Path]) -> Iterator[str]:
    """Yield our modules that are imported when this module is; imports in functions or for type checkers are not."""
    at_import = set(_lines_at_import(ast.parse(path.read_text(encoding="utf-8"))))
    for name, line in imports(path):
        if line in at_import:
            yield (
                name
                if name in modules
                else name.rpartition(".")[0]
                if name.rpartition(".")[0] in modules
                else _module(path)
            )


def _lines_at_import(node: ast.AST) -> Iterator[int]:
    """Yield the lines of imports that run when the module is imported, including those in `try`, `if` and classes."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child.lineno
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from (line for other in child.orelse for line in _lines_at_import(other))
        elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _lines_at_import(child)


def _first_line(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the line on which the body begins, after the signature and the docstring."""
    has_text = ast.get_docstring(function) is not None and len(function.body) > 1
    return function.body[has_text].lineno


def test_functions_are_small() -> None:
    long = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name} has {length} lines"
        for package in TOP
        for path in files(package)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := node.end_lineno - _first_line(node) + 1) > MOST_LINES_OF_A_FUNCTION
    ]
    assert not long, "\n".join(long)
    ruff = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["ruff"]["lint"]
    assert "C90" in ruff["select"] and ruff["mccabe"]["max-complexity"] <= MOST_BRANCHES
    assert "C901" not in ruff["ignore"] and not any(key.endswith("per-file-ignores") for key in ruff)
    excused = re.compile(r"# noqa(?!: [A-Z])|noqa:.*C90|ruff: noqa")
    texts = {path: path.read_text(encoding="utf-8") for package in TOP for path in files(package)}
    assert not [path for path, text in texts.items() if excused.search(text)]


@pytest.mark.parametrize("name", POLICY_CODE)
def test_policy_code_imports_no_array_library(name: str) -> None:
    found = {module.split(".")[0] for module, _ in imports(ROOT / name)}
    assert found <= {"genai"} | sys.stdlib_module_names, found


def test_relative_and_nested_imports_are_seen() -> None:
    names = {name for name, _ in imports(ROOT / "genai" / "models" / "model.py")}
    assert "genai.models.config.Config" in names
    assert "genai.models.loading.load_decoder" in names
