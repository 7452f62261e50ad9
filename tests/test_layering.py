"""The shape of the house: imports only go down, cli -> genai -> kvcache, quant -> kernels, and functions stay small."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path

import pytest

from genai.graph.node import MS
from genai.kernels import records
from genai.ops.registry import load_ops
from genai.ops.rules import _RECORD_RULES, SHAPE_RULES

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("kernels", "quant", "kvcache", "genai", "cli")
# What each room may import from the others.
ALLOWED = {
    "kernels": set(),
    "quant": {"kernels"},
    "kvcache": {"kernels"},
    "genai": {"kernels", "quant", "kvcache", "configs"},
    "cli": {"genai", "kernels", "quant", "kvcache", "configs"},
}
# `python -m genai` is the command line, so this one file looks up.
ENTRY_POINT = ROOT / "genai" / "__main__.py"
PURE_POLICY = ("genai/engine/scheduler.py", "kvcache/pool.py", "kvcache/table.py")
RUN_TIME_STRANGERS = {"torch", "onnxruntime", "onnxruntime_genai", "transformers"}
# The rooms inside genai/, from the bottom to the top; graph and ops know each other. errors is a file.
FLOORS = (
    "errors graph+ops runtime session quantization engine model text ort_genai builder llm measure quantizer".split()
)
FLOOR = {room: level for level, floor in enumerate(FLOORS) for room in floor.split("+")}
MOST_ENTRIES = 14
# What there is to read, without tests and tools: 55,000 lines for generation, sessions, the builder and CPU kernels,
# and room for what is being added (quantisation, adapters, batches, other formats, CUDA).
MOST_LINES, MOST_LINES_OF_A_FUNCTION, MOST_BRANCHES = 102_500, 80, 20
# The NumPy meaning of what decoders compute, which a newcomer reads in a quarter of an hour; its sampler stands apart.
MOST_LINES_OF_THE_REFERENCE, BESIDE = 600, {"sampling.py"}
# A product of block-quantised weights is spelled once per task: its rules, the builder, the stored form.
MOST_FILES_THAT_NAME_A_PRODUCT = 6
# `genai eval diff` and `genai run` compare with onnxruntime when asked, and say what to install where it is missing.
ON_REQUEST = {
    ROOT / "genai" / "measure" / "evaluation" / "values.py": {"onnxruntime"},
    ROOT / "genai" / "session" / "arrays.py": {"onnxruntime"},
}


def files(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


def room_of(module: str) -> str | None:
    """The room that an absolute import of ours points to."""
    parts = module.split(".")
    if parts[0] != "genai":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in (*ROOMS, "configs") else "genai"


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Absolute names of all imports in a file, also inside functions; relative ones are made absolute."""
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
    """Whether it imports what its first argument names."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name in ("import_module", "__import__")


def _first(node: ast.Call) -> object:
    """The first argument, where it is written down."""
    return node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None


@pytest.mark.parametrize("room", ROOMS)
def test_imports_only_go_down(room: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in files(room)
        if path != ENTRY_POINT
        for name, line in imports(path)
        if (target := room_of(name)) is not None and target != room and target not in ALLOWED[room]
    ]
    assert not wrong, "\n".join(wrong)


def test_the_top_of_genai_holds_few_rooms_and_imports_go_down_between_them() -> None:
    assert len(FLOOR) <= MOST_ENTRIES
    known = {path.name for path in (ROOT / "genai").iterdir() if path.name[:2] not in ("__", "py")}
    assert {name.removesuffix(".py") for name in known} == set(FLOOR)
    inside = {path: path.relative_to(ROOT / "genai").parts[0].removesuffix(".py") for path in files("genai")}
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path, room in inside.items()
        if room in FLOOR
        for name, line in imports(path)
        if room_of(name) == "genai" and FLOOR.get((*name.split("."), "")[1], -1) > FLOOR[room]
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("room", ROOMS)
def test_no_run_time_import_of_torch_or_onnxruntime(room: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in files(room)
        for name, line in imports(path)
        if name.split(".")[0] in RUN_TIME_STRANGERS - ON_REQUEST.get(path, set())
    ]
    assert not wrong, "\n".join(wrong)


# Where a module's name is put together, and what of.
LOADED_BY_NAME = {
    "genai/__init__.py": "the table of public names, of which it makes the stub, too",
    "genai/ops/registry.py": "the files of its own folder",
    "genai/ops/borrowed.py": "operators of onnx.reference",
    "genai/measure/machine/checkup.py": "packages that genai doctor looks for",
    "kernels/cpu/lazy.py": "the modules that the kernels' files name to it",
    "kernels/cpu/every.py": "the files of the kernels",
}


def test_names_of_modules_are_written_down() -> None:
    """So that the tests above see them: a name that is put together at run time could lead anywhere."""
    found = {
        str(path.relative_to(ROOT))
        for room in ROOMS
        for path in files(room)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and _loads(node) and not isinstance(_first(node), str)
    }
    assert found == set(LOADED_BY_NAME)


def test_one_file_chooses_a_device() -> None:
    """Others do not even name it, as import_module would want."""
    found = {path for path in files("genai") for name, _ in imports(path) if name.startswith("genai.kernels.cpu")}
    found |= {path for path in files("genai") if "kernels.cpu" in path.read_text(encoding="utf-8")}
    assert found == {ROOT / "genai" / "runtime" / "device.py"}


def test_kernels_know_no_names_of_onnx() -> None:
    """Neither the library, nor the operators that onnxruntime adds, even in a sentence."""
    assert not [name for path in files("kernels") for name, _ in imports(path) if name.split(".")[0] == "onnx"]
    load_ops()
    names = {name for rules in (SHAPE_RULES, _RECORD_RULES) for domain, name in rules if domain == MS} | {MS}
    assert {"MatMulNBits", "QMoE", "GroupQueryAttention"} <= names
    names -= set(vars(records))  # those that are words
    texts = {path: set(re.findall(r"[\w.]+", path.read_text(encoding="utf-8"))) for path in files("kernels")}
    assert not {str(path.relative_to(ROOT)): found for path, text in texts.items() if (found := text & names)}


def test_imports_have_no_cycles() -> None:
    modules = {_module(path): path for room in ROOMS for path in files(room)}
    graph = {name: set(_imported(path, modules)) - {name} for name, path in modules.items()}
    while leaves := {name for name, found in graph.items() if not found}:
        graph = {name: found - leaves for name, found in graph.items() if name not in leaves}
    assert not graph, f"in cycles, or above one: {sorted(graph)}"


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "genai" else parts
    return ".".join(["genai", *(parts[:-1] if parts[-1] == "__init__" else parts)])


def _imported(path: Path, modules: dict[str, Path]) -> Iterator[str]:
    """Our modules that importing this one imports; what stands in functions, or is for type checkers only, waits."""
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
    """Lines of imports that run with the module: also in `try`, `if` and classes."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child.lineno
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from (line for other in child.orelse for line in _lines_at_import(other))
        elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _lines_at_import(child)


def test_functions_are_small() -> None:
    long = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name} has {length} lines"
        for room in ROOMS
        for path in files(room)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := node.end_lineno - node.lineno + 1) > MOST_LINES_OF_A_FUNCTION
    ]
    assert not long, "\n".join(long)
    ruff = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["ruff"]["lint"]
    assert "C90" in ruff["select"] and ruff["mccabe"]["max-complexity"] <= MOST_BRANCHES
    assert "C901" not in ruff["ignore"] and not any(key.endswith("per-file-ignores") for key in ruff)
    excused = re.compile(r"# noqa(?!: [A-Z])|noqa:.*C90|ruff: noqa")
    texts = {path: path.read_text(encoding="utf-8") for room in ROOMS for path in files(room)}
    assert not [path for path, text in texts.items() if excused.search(text)]


def test_arguments_are_declared_by_name() -> None:
    """No places in an array of arguments that are counted by hand: `A, B, C = range(3)`."""
    counted = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for room in ROOMS
        for path in files(room)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if _counts(node)
    ]
    assert not counted, counted


def _counts(node: ast.AST) -> bool:
    """Whether names are numbered: by a range, as it is or passed through what keeps its numbers."""
    return (
        isinstance(node, ast.Assign)
        and any(isinstance(one, ast.Tuple | ast.List) for one in node.targets)
        and _numbers(node.value)
    )


def _numbers(value: ast.AST) -> bool:
    match value:
        case ast.Call(func=ast.Name(id="range")):
            return True
        case ast.Call(func=ast.Name(id="tuple" | "list" | "iter" | "map" | "sorted" | "reversed"), args=given):
            return any(map(_numbers, given))
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            return any(isinstance(part, ast.Starred) and _numbers(part.value) for part in parts)
        case ast.GeneratorExp(elt=ast.Name()) | ast.ListComp(elt=ast.Name()):
            return any(_numbers(part.iter) for part in value.generators)
    return False


@pytest.mark.parametrize(
    "numbered",
    [
        "A, B = range(2)", "[A, B] = tuple(range(2))", "A = B, C = (*range(2),)", "A, B = map(int, range(2))",
        "A, B = map(np.int64, [*range(2)])", "A, B = (n for n in range(2))", "A, B = reversed(list(range(2)))",
    ],
)  # fmt: skip
def test_numbered_names_are_seen(numbered: str) -> None:
    assert _counts(ast.parse(numbered).body[0])
    assert not _counts(ast.parse("rows, columns = range(4), range(6)").body[0])
    assert not _counts(ast.parse("rows, columns = map(len, parts)").body[0])


def test_an_operator_is_named_where_it_is_told() -> None:
    named = [path for room in ROOMS for path in files(room) if "MatMulNBits" in path.read_text(encoding="utf-8")]
    assert len(named) <= MOST_FILES_THAT_NAME_A_PRODUCT, [str(path.relative_to(ROOT)) for path in named]


def test_how_much_there_is_to_read() -> None:
    lines = {path: path.read_text(encoding="utf-8").count("\n") for room in ROOMS for path in files(room)}
    assert sum(lines.values()) < MOST_LINES
    here = ROOT / "kernels" / "reference"
    reference = [count for path, count in lines.items() if here in path.parents and path.name not in BESIDE]
    assert sum(reference) < MOST_LINES_OF_THE_REFERENCE


@pytest.mark.parametrize("name", PURE_POLICY)
def test_policy_imports_no_array_library(name: str) -> None:
    found = {module.split(".")[0] for module, _ in imports(ROOT / name)}
    assert found <= {"genai"} | sys.stdlib_module_names, found


def test_the_walk_sees_relative_and_nested_imports() -> None:
    names = {name for name, _ in imports(ROOT / "genai" / "model" / "model.py")}
    assert "genai.model.config.Config" in names
    assert "genai.model.loading.load_decoder" in names
