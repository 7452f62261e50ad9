"""genai: run generative language models from ONNX graphs.

Public names load lazily, so that `import genai` costs milliseconds; see docs/architecture.md for the rooms.
"""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

from .compat.refused import AVAILABLE, REASONS

__version__ = "0.1.0"

# In a checkout the rooms kernels/, kvcache/, quant/, cli/ and configs/ lie beside this folder; installed, inside it.
_here = Path(__file__).resolve().parent
if not (_here / "kernels").is_dir() and (_here.parent / "pyproject.toml").is_file():
    __path__.append(str(_here.parent))

# The stub says it once, to type checkers and to this file.
_STUB = ast.parse((_here / "__init__.pyi").read_text(encoding="utf-8"))
_MODULES = {
    alias.name: f".{node.module}" for node in _STUB.body if isinstance(node, ast.ImportFrom) for alias in node.names
} | dict.fromkeys((*REASONS, *AVAILABLE), ".compat.refused")

__all__ = [*_MODULES, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'genai' has no attribute {name!r}")
    from .common.interrupts import InterruptsDeferred

    with InterruptsDeferred():  # Python can lose an interrupt in the middle of an import
        value = getattr(import_module(_MODULES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
