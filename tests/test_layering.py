"""Imports only go down: cli -> genai -> kvcache, quant -> kernels. Policy modules import no array library."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

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
# `genai eval diff --against onnxruntime` imports it when asked, and says what to install where it is missing.
ON_REQUEST = {ROOT / "genai" / "evaluation" / "onnxruntime_values.py": {"onnxruntime"}}


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


@pytest.mark.parametrize("room", ROOMS)
def test_no_run_time_import_of_torch_or_onnxruntime(room: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in files(room)
        for name, line in imports(path)
        if name.split(".")[0] in RUN_TIME_STRANGERS - ON_REQUEST.get(path, set())
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", PURE_POLICY)
def test_policy_imports_no_array_library(name: str) -> None:
    found = {module.split(".")[0] for module, _ in imports(ROOT / name)}
    assert found <= {"genai"} | sys.stdlib_module_names, found


def test_the_walk_sees_relative_and_nested_imports() -> None:
    names = {name for name, _ in imports(ROOT / "genai" / "model.py")}
    assert "genai.config.Config" in names
    assert "genai.loading.load_decoder" in names
