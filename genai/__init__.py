"""genai: run generative language models from ONNX graphs.

Public names load on first use, so that `import genai` takes only milliseconds. `__init__.pyi` lists the module that
defines each name. docs/explanation/architecture.md describes the packages.
"""

from __future__ import annotations

import sys

from .moved import MovedModules

# This finder must come before other finders, which would load a module a second time. It must also be installed before
# the imports below, because other threads may already be importing modules of this package.
sys.meta_path.insert(0, MovedModules())

from importlib import import_module  # noqa: E402
from importlib.util import find_spec  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

from lazy_loader import attach_stub  # noqa: E402

__version__ = "0.1.0"

# In a checkout, kernels/, kvcache/, quant/, cli/ and configs/ lie beside this folder; in an installed package, they lie
# inside this folder. If the checkout has no symbolic links to them (git on Windows), this path finds them.
_here = Path(__file__).resolve().parent
if not (_here / "kernels").is_dir() and (_here.parent / "pyproject.toml").is_file():
    __path__.append(str(_here.parent))

_load, _, __all__ = attach_stub(__name__, __file__)
__all__ += ["__version__"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        if name.startswith("_") or find_spec(f"genai.{name}") is None:
            raise AttributeError(f"module 'genai' has no attribute {name!r}")
        return import_module(f"genai.{name}")  # e.g. genai.errors
    from .common.interrupts import InterruptsDeferred
    from .common.start import check_interpreter, out_of_memory

    check_interpreter()
    try:
        with InterruptsDeferred():  # Python can lose an interrupt in the middle of an import
            value = _load(name)
    except (ImportError, OSError, MemoryError) as error:
        if (memory := out_of_memory(error)) is None:
            raise
        raise memory from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
