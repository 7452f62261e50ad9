"""What 4-bit keys and values cost a model, as measured on this machine: they are refused without, and if it is much.

Rounded to 4 bits, keys and values ruin some models, small ones above all, and leave others nearly as they were. Nothing
in a model's folder says which. `genai eval kld` measures it on a text of the user's own, and keeps the figure in the
user's cache folder, under a name that changes with the model's files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from genai.kernels.cpu.jit.kernel_cache import cache_root

from ..errors import OptionError
from .config import Config

# Mean KL divergence from a cache of floats, in nats: about one percent of perplexity.
MOST_DIVERGENCE = 0.01
# Fewer tokens say too little.
LEAST_TOKENS = 1000
MEASURED = "int4"
_LARGEST_FILE = 2**16


@dataclass(frozen=True)
class KvQuality:
    """A measurement: mean KL divergence and its standard error in nats, over so many tokens of a text."""

    mean: float
    mean_error: float
    tokens: int

    @property
    def allows(self) -> bool:
        """Whether it is good enough."""
        return self.tokens >= LEAST_TOKENS and self.mean <= MOST_DIVERGENCE


def check_kv_quality(config: Config) -> None:
    """Raises OptionError unless 4-bit keys and values were measured for this model, and cost little."""
    quality = recorded(config)
    if quality is not None and quality.allows:
        return
    if quality is None:
        why = "what they cost this model has not been measured on this machine, and some models break with them"
    elif quality.tokens < LEAST_TOKENS:
        why = f"they were measured on {quality.tokens} tokens only, fewer than {LEAST_TOKENS}"
    else:
        why = f"their mean KL divergence was measured as {quality.mean:.4f} nats, above {MOST_DIVERGENCE}"
    enough = quality is not None and quality.tokens >= LEAST_TOKENS
    measure = "" if enough else f"measure them: genai eval kld {config.folder} -f TEXT --other-kv-type int4; or "
    raise OptionError(
        "kv_dtype = 'int4' is refused for this model",
        why,
        f"{measure}use int8, or pass kv_dtype_force=True (--kv-force)",
    )


def recorded(config: Config) -> KvQuality | None:
    """The measurement of a model with these files, if there is one that can be read."""
    with contextlib.suppress(OSError, ValueError, TypeError, RuntimeError, LookupError, OverflowError):
        with _file(config).open("rb") as file:
            read = json.loads(file.read(_LARGEST_FILE))
        quality = KvQuality(float(read["mean"]), float(read["mean_error"]), int(read["tokens"]))
        return quality if math.isfinite(quality.mean) else None
    return None


def record(config: Config, quality: KvQuality) -> Path | None:
    """Keep a measurement; returns the file, or None if it could not be written."""
    with contextlib.suppress(OSError, RuntimeError):
        path = _file(config)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps({"folder": str(config.folder), **asdict(quality)}), encoding="utf-8")
        return partial.replace(path)
    return None


def _file(config: Config) -> Path:
    """Named after the folder, and after sizes and times of its files; after their content if memory holds them."""
    digest = hashlib.sha256(str(config.folder.resolve()).encode())
    for path in sorted(path for path in config.folder.iterdir() if path.suffix in (".onnx", ".data", ".json")):
        facts = path.stat()
        digest.update(f"\0{path.name}\0{facts.st_size}\0{facts.st_mtime_ns}".encode())
    for name, data in sorted(config.model_data.items()):
        digest.update(f"\0{name}\0".encode() + hashlib.sha256(data).digest())
    return cache_root() / "kv_quality" / f"{digest.hexdigest()[:32]}.json"
