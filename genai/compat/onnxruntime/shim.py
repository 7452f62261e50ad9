"""Redirection of `import onnxruntime` to this package, for programs that must not be changed."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType

from ...errors import NotSupportedYetError

API_VERSION = "1.32.0"
"""The version of onnxruntime whose API this package has."""
_THEIRS, _OURS = "onnxruntime", __package__ or ""
# onnxruntime.quantization is a separate package here.
_APART = {f"{_THEIRS}.quantization": "genai.compat.onnxruntime_quantization"}


def install() -> None:
    """Make `import onnxruntime`, also in other packages, return this package. Repeated calls have no effect.

    `importlib.metadata.version("onnxruntime")` then returns `API_VERSION`. onnxruntime need not be installed.

    Raises:
        NotSupportedYetError: the program has already imported onnxruntime itself.
    """
    if any(isinstance(finder, OnnxruntimeFinder) for finder in sys.meta_path):
        return
    if _THEIRS in sys.modules:
        raise NotSupportedYetError(
            "onnxruntime has already been imported",
            "modules that have imported onnxruntime keep its classes",
            "call install() before the program imports onnxruntime, or a package that imports onnxruntime",
        )
    sys.meta_path.insert(0, OnnxruntimeFinder())


def uninstall() -> None:
    """Undo `install`: later imports of onnxruntime return the installed package. Modules keep what they imported."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, OnnxruntimeFinder)]
    for name in [name for name in sys.modules if name == _THEIRS or name.startswith(f"{_THEIRS}.")]:
        del sys.modules[name]


class _Alias(Loader):
    """A loader that binds one of our modules to a name of onnxruntime."""

    def __init__(self, name: str) -> None:
        self._name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = import_module(self._name)


class OnnxruntimeFinder(MetaPathFinder):
    """A finder for onnxruntime and its modules. It imports nothing, because Python holds an import lock."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for onnxruntime and for its modules that exist here, else None."""
        if fullname == _THEIRS or fullname in _APART:
            return ModuleSpec(fullname, _Alias(_APART.get(fullname, _OURS)), is_package=True)
        parent, _, name = fullname.rpartition(".")
        if parent.partition(".")[0] != _THEIRS or PathFinder.find_spec(fullname, path) is None:
            return None
        ours = sys.modules[parent].__name__
        return ModuleSpec(fullname, _Alias(f"{ours}.{name}"), is_package=True)

    def find_distributions(self, context: DistributionFinder.Context) -> Iterable[Distribution]:
        """Return the metadata of onnxruntime, if they are requested."""
        return [_Metadata()] if context.name is not None and context.name.lower() == _THEIRS else []


class _Metadata(Distribution):
    """Metadata that `importlib.metadata` returns for onnxruntime."""

    def read_text(self, filename: str) -> str | None:
        return f"Metadata-Version: 2.1\nName: {_THEIRS}\nVersion: {API_VERSION}\n" if filename == "METADATA" else None

    def locate_file(self, path: object) -> Path:
        return Path(__file__).parent / str(path)
