"""Facts about adapters on disk."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from ..errors import GenaiError, ModelFolderError
from ..weight_files.gguf import SUFFIX as GGUF, GgufModel
from .names import module_of
from .parameters import SUFFIX, AdapterParameters
from .peft import CONFIG

_MOST_ENTRIES = 10_000


def describe(adapter: AdapterParameters) -> dict[str, Any]:
    """Return the facts that `genai lora info` shows."""
    modules = [module_of(name) for name in adapter.pairs]
    counts = Counter(module.projection if module else "unknown" for module in modules)
    return {
        "source": str(adapter.source),
        "kind": adapter.kind,
        "ranks": adapter.ranks,
        "scales": sorted({round(pair.scale, 6) for pair in adapter.pairs.values()}),
        "modules": len(adapter.pairs),
        "projections": [f"{name} {count}" for name, count in sorted(counts.items())],
        "other_inputs": sorted(adapter.values),
        "dtypes": sorted({str(array.dtype) for pair in adapter.pairs.values() for array in (pair.a, pair.b)}),
        "bytes": adapter.nbytes,
        "base": adapter.base or "-",
        "base_sha256": adapter.base_hash or "-",
        "sha256": adapter.content_hash.hex(),
    }


def find_adapters(folder: Path) -> list[Path]:
    """Return the paths of the adapters in a folder and its direct subfolders, sorted by name.

    Adapters are folders of PEFT or mlx-lm, `.onnx_adapter` files and GGUF files whose metadata marks them as adapters.

    Raises:
        ModelFolderError: the folder does not exist.
    """
    if not folder.is_dir():
        why = "the path is a file" if folder.exists() else "there is no such folder"
        raise ModelFolderError(f"{folder}: not a folder", why, "pass the folder that contains the adapters")
    if (folder / CONFIG).is_file():
        return [folder]
    entries = sorted(folder.iterdir())[:_MOST_ENTRIES]
    files = [*entries, *(path for entry in entries if entry.is_dir() for path in sorted(entry.glob("*")))]
    adapter_files = [path for path in files if path.suffix == SUFFIX or (path.suffix == GGUF and _is_adapter(path))]
    return sorted([*adapter_files, *(entry for entry in entries if (entry / CONFIG).is_file())])


def is_adapter(path: Path) -> bool:
    """Return True if a path is an adapter: a PEFT folder, an `.onnx_adapter` file, or an adapter's GGUF file."""
    if path.is_dir():
        return (path / CONFIG).is_file()
    return path.suffix == SUFFIX or (path.suffix == GGUF and path.is_file() and _is_adapter(path))


def _is_adapter(path: Path) -> bool:
    try:
        return bool(GgufModel(path).files[0].single("general.type") == "adapter")
    except GenaiError:
        return False
