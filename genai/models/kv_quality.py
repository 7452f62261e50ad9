"""The accuracy of an int4 KV cache for a model, which must be measured on this machine before int4 is allowed.

An int4 KV cache ruins some models, especially small models, and hardly affects others. Nothing in a model's folder
distinguishes these models. `genai eval kld` measures the effect on a text that the user provides, and stores the result
in the user's cache folder, under a name that changes with the model's files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from genai.kernels.cpu.jit.kernel_cache import cache_root

from ..common.atomic_files import replacing
from ..errors import OptionError
from .config import Config

# Maximum mean KL divergence from a float cache, in nats. It corresponds to about one percent of perplexity.
MOST_DIVERGENCE = 0.01
# Minimum number of tokens for a reliable measurement.
LEAST_TOKENS = 1000
MEASURED = "int4"
_LARGEST_FILE = 2**16


@dataclass(frozen=True)
class KvQuality:
    """A measurement, with the mean KL divergence and its standard error in nats, and the number of tokens."""

    mean: float
    mean_error: float
    tokens: int

    @property
    def allows(self) -> bool:
        """True if the measurement allows an int4 KV cache."""
        return self.tokens >= LEAST_TOKENS and self.mean <= MOST_DIVERGENCE


def check_kv_quality(config: Config) -> None:
    """Raise OptionError unless a measurement for this model allows an int4 KV cache."""
    quality = recorded(config)
    if quality is not None and quality.allows:
        return
    if quality is None:
        why = "int4 caches ruin some models, and their effect on this model has not been measured on this machine"
    elif quality.tokens < LEAST_TOKENS:
        why = f"the effect of an int4 cache was measured on {quality.tokens} tokens, fewer than {LEAST_TOKENS}"
    else:
        why = f"the measured mean KL divergence is {quality.mean:.4f} nats, above the limit of {MOST_DIVERGENCE} nats"
    enough = quality is not None and quality.tokens >= LEAST_TOKENS
    measure = (
        "" if enough else f"measure the effect with `genai eval kld {config.folder} -f TEXT --other-kv-type int4`, or "
    )
    raise OptionError(
        "kv_dtype = 'int4' is refused for this model",
        why,
        f"{measure}use int8, or pass kv_dtype_force=True (--kv-force)",
    )


def recorded(config: Config) -> KvQuality | None:
    """Return the stored measurement of a model with these files, or None."""
    with contextlib.suppress(OSError, ValueError, TypeError, RuntimeError, LookupError, OverflowError):
        with _file(config).open("rb") as file:
            read = json.loads(file.read(_LARGEST_FILE))
        quality = KvQuality(float(read["mean"]), float(read["mean_error"]), int(read["tokens"]))
        return quality if math.isfinite(quality.mean) else None
    return None


def record(config: Config, quality: KvQuality) -> Path | None:
    """Store a measurement. Return the file, or None if it could not be written."""
    with contextlib.suppress(OSError, RuntimeError):
        path = _file(config)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(json.dumps({"folder": str(config.folder), **asdict(quality)}).encode())
        return path
    return None


def _file(config: Config) -> Path:
    """Return the file, whose name is a hash of the folder, its files' sizes and times, and files in memory."""
    digest = hashlib.sha256(str(config.folder.resolve()).encode())
    paths = {path for path in config.folder.iterdir() if path.suffix in (".onnx", ".data", ".json")}
    if config.exported is not None:
        paths |= {config.folder / graph for graph in config.exported.variant.graphs}
        digest.update(config.model.decoder.filename.encode())
    for path in sorted(paths):
        facts = path.stat()
        digest.update(f"\0{path.name}\0{facts.st_size}\0{facts.st_mtime_ns}".encode())
    for name, data in sorted(config.model_data.items()):
        digest.update(f"\0{name}\0".encode() + hashlib.sha256(data).digest())
    return cache_root() / "kv_quality" / f"{digest.hexdigest()[:32]}.json"
