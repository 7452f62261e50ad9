"""genai: run generative language models from ONNX graphs.

Public names load on first use, so that `import genai` takes only milliseconds. `__init__.pyi` lists the module that
defines each name, and the names that `dir(genai)` and `from genai import *` show. docs/explanation/architecture.md
describes the packages.
"""

from __future__ import annotations

import sys

from .moved import MovedModules

# This finder must come before other finders, which would load a module a second time. It must also be installed before
# the imports below, because other threads may already be importing modules of this package.
sys.meta_path.insert(0, MovedModules())

import ast  # noqa: E402
from importlib import import_module  # noqa: E402
from importlib.util import find_spec  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

__version__ = "0.1.0"

# In a checkout, kernels/, kvcache/, quant/, cli/ and configs/ lie beside this folder; in an installed package, they lie
# inside this folder. If the checkout has no symbolic links to them (git on Windows), this path finds them.
_here = Path(__file__).resolve().parent
if not (_here / "kernels").is_dir() and (_here.parent / "pyproject.toml").is_file():
    __path__.append(str(_here.parent))


def _public_names() -> tuple[dict[str, str], list[str]]:
    """Return the module of each public name, and the names in `__all__`, as `__init__.pyi` lists them."""
    modules: dict[str, str] = {}
    own: list[str] = []
    for statement in ast.parse((_here / "__init__.pyi").read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.ImportFrom):
            modules.update(dict.fromkeys((alias.name for alias in statement.names), f"genai.{statement.module}"))
        elif isinstance(statement, ast.Assign):
            own = ast.literal_eval(statement.value)
    return modules, own


_modules, __all__ = _public_names()


def __getattr__(name: str) -> Any:
    if name not in _modules:
        if name.startswith("_") or find_spec(f"genai.{name}") is None:
            raise AttributeError(f"module 'genai' has no attribute {name!r}")
        return import_module(f"genai.{name}")  # e.g. genai.errors
    from .common.interrupts import InterruptsDeferred
    from .common.start import check_interpreter, out_of_memory

    check_interpreter()
    try:
        with InterruptsDeferred():  # Python can lose an interrupt in the middle of an import
            value = getattr(import_module(_modules[name]), name)
    except (ImportError, OSError, MemoryError) as error:
        if (memory := out_of_memory(error)) is None:
            raise
        raise memory from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
