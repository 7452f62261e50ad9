"""The adapters of a model, by name: loaded, shared by requests, kept within a budget, and dropped."""

from __future__ import annotations

import hashlib
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from genai.common.forks import renew_locks
from genai.common.memory_limits import available_memory, format_bytes
from genai.kernels.device import DeviceAdapter, Factors

from ..common.single import Single
from ..engine.adapter_mix import AdapterMix
from ..errors import CacheCapacityError, InputError, OptionError, StateError, did_you_mean
from ..models.model import Model
from .bind import bind
from .gguf import in_our_order
from .parameters import AdapterParameters
from .peft import BASE_HASH
from .read import read_adapter

AdapterChoice: TypeAlias = str | Mapping[str, float] | None
"""The adapters of a request: a name, names with weights, or None."""

_MOST_ADAPTERS_OF_A_REQUEST = 16
# Names that an error lists.
_MOST_SHOWN = 10


@dataclass(eq=False)
class _Entry:
    """An adapter that has a name.

    Attributes:
        modules: names of the projections that it changes.
        key: of its content and scale. device: its memory; None = evicted, to be read from `source` again.
        users: mixes that requests hold. last_used: when a request last asked for it.
        values: for inputs of the graph, of adapters that are no low-rank ones.
    """

    name: str
    source: Path
    scale: float
    key: bytes
    nbytes: int
    device: DeviceAdapter | None
    ranks: list[int]
    modules: frozenset[str]
    values: Mapping[str, Any]
    users: weakref.WeakSet[AdapterMix] = field(default_factory=weakref.WeakSet)
    last_used: float = 0.0


class Adapters(Single, AbstractContextManager["Adapters"]):
    """Low-rank adapters of a model, by name. Safe to use from several threads.

    The first one that is loaded gives the model's program places for them (loading the model with lora=True does that
    at once); from then on adapters come and go without it.

    Args:
        model: the model whose adapters they are.
        max_bytes: most memory for adapters. When one more would exceed it, those that no request uses and that were
            used longest ago are dropped from memory, and read again when a request asks for them. None = no bound.

    Raises:
        OptionError: max_bytes is no whole number of at least 1.

    >>> import genai
    >>> from genai.models.folders import bundled_adapter
    >>> model = genai.Model(genai.models.folders.bundled_model())
    >>> adapters = genai.Adapters(model)
    >>> adapters.load(bundled_adapter("pirate"), "pirate")
    >>> adapters.names
    ['pirate']
    >>> adapters.unload("pirate")
    """

    def __init__(self, model: Model, *, max_bytes: int | None = None) -> None:
        if not isinstance(model, Model):
            raise InputError(
                f"Adapters needs a Model, not {type(model).__name__}", "adapters change its products", "pass a Model"
            )
        if max_bytes is not None and (isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 1):
            raise OptionError(
                f"max_bytes = {max_bytes!r}", "a whole number of at least 1 is expected", "leave it out for no bound"
            )
        self.model, self.max_bytes = model, max_bytes
        self._entries: dict[str, _Entry] = {}
        # All that are in memory, also those that nothing but a request knows any more.
        self._in_memory: weakref.WeakSet[DeviceAdapter] = weakref.WeakSet()
        self._lock = threading.RLock()
        renew_locks(self, "_lock")

    @property
    def names(self) -> list[str]:
        """Their names, in the order in which they were loaded."""
        return list(self._entries)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that they take now, those included that were unloaded and that a request still uses."""
        with self._lock:
            return sum(device.nbytes for device in self._in_memory)

    def load(self, path: str | Path, name: str, scale: float = 1.0) -> None:
        """Read an adapter and give it a name.

        Args:
            path: a folder as PEFT writes it, an `.onnx_adapter` file, or a GGUF file.
            scale: a factor on what it adds, besides what its files say.

        Raises:
            ModelFolderError, InputError: there is none, it is damaged, it does not fit the model, or was trained on
                another one.
            OptionError: a name that is taken, or a scale that is not finite.
            UnsupportedModelError, CacheCapacityError: the model has no places for adapters; there is no memory.
        """
        _check_name(name)
        weight = _number(f"scale of adapter {name!r}", scale)
        if name in self._entries:
            raise OptionError(
                f"Adapter already loaded: {name}", "names are unique", "unload it first, or choose another name"
            )
        read = self._read(path)
        self._check_base(read)
        factors = self._factors(read, weight)
        key, modules = _key(read, weight), frozenset(read.pairs)
        entry = _Entry(name, Path(path).absolute(), weight, key, 0, None, read.ranks, modules, read.values)
        with self._lock:
            if name in self._entries:
                raise OptionError(f"Adapter already loaded: {name}", "names are unique", "choose another name")
            self._fill(entry, factors)
            self._entries[name] = entry

    def unload(self, name: str, *, when_idle: bool = False) -> None:
        """Forget an adapter; its memory goes back.

        Args:
            when_idle: requests that use it go on with it, and its memory goes back when the last of them ends.

        Raises:
            OptionError: there is none of that name. StateError: it is in use, and `when_idle` is not set.
        """
        with self._lock:
            entry = self._entry(name)
            if entry.users and not when_idle:
                raise StateError(
                    f"Adapter still in use: {name}",
                    f"{len(entry.users)} requests or generators go through it",
                    "close them first, or use unload(name, when_idle=True)",
                )
            del self._entries[name]

    def info(self, name: str) -> dict[str, Any]:
        """What is known of an adapter: source, scale, the hash of its numbers and scale, ranks, how many modules it
        changes, bytes, whether it is in memory, and how many requests use it."""
        entry = self._entry(name)
        return {
            "name": name,
            "source": str(entry.source),
            "scale": entry.scale,
            "key": entry.key.hex(),
            "ranks": entry.ranks,
            "modules": len(entry.modules),
            "bytes": entry.nbytes,
            "in_memory": entry.device is not None,
            "users": len(entry.users),
        }

    def mix(self, choice: AdapterChoice) -> AdapterMix | None:
        """The adapters of a request, in memory as long as somebody holds the result.

        Args:
            choice: a name; names with weights, which multiply what each adds; None = none.

        Raises:
            OptionError: a name that is not loaded, or a weight that is not finite.
            As load: an adapter that was dropped from memory, and whose files are gone or changed.
        """
        weights = self.check(choice)
        if not weights:
            return None
        with self._lock:
            entries = [(self._entry(name), weight) for name, weight in weights.items()]
            for entry, _ in entries:
                if entry.values:
                    raise _only_generators(entry)
                entry.last_used = time.monotonic()
            wanted_too = [entry for entry, _ in entries]
            mix = AdapterMix.of([(self._device(entry, wanted_too), entry.key, weight) for entry, weight in entries])
            for entry, _ in entries:
                entry.users.add(mix)
            return mix

    def check(self, choice: AdapterChoice) -> dict[str, float]:
        """Names and weights of a request's adapters, checked; weights of 0 are left out. Raises OptionError."""
        if choice is None:
            return {}
        choices = {choice: 1.0} if isinstance(choice, str) else choice
        if not isinstance(choices, Mapping):
            raise OptionError(
                f"adapter = {choice!r:.80}", "a name, or weights by name, are expected", 'pass "a" or {"a": 0.7}'
            )
        if len(choices) > _MOST_ADAPTERS_OF_A_REQUEST:
            raise OptionError(
                f"{len(choices)} adapters for one request",
                f"at most {_MOST_ADAPTERS_OF_A_REQUEST} go together",
                "merge some",
            )
        for name in choices:
            self._entry(name)
        weights = {name: _number(f"weight of adapter {name!r}", weight) for name, weight in choices.items()}
        return {name: weight for name, weight in weights.items() if weight != 0}

    def modules(self, name: str) -> frozenset[str]:
        """Names of the projections that an adapter changes."""
        return self._entry(name).modules

    def values(self, name: str) -> Mapping[str, Any]:
        """The arrays of an adapter that replaces defaults of the graph's inputs; empty for a low-rank one."""
        return self._entry(name).values

    def close(self) -> None:
        """Forget all of them; requests that use one go on with it."""
        with self._lock:
            self._entries.clear()

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Adapters({', '.join(self.names)})"

    # --- memory ------------------------------------------------------------------------------------------------------

    def _entry(self, name: Any) -> _Entry:
        entry = self._entries.get(name) if isinstance(name, str) else None
        if entry is None:
            names = self.names
            listed = [*names[:_MOST_SHOWN], *(["…"] if len(names) > _MOST_SHOWN else [])]
            fix = did_you_mean(str(name), names, "load it first (--lora NAME=PATH, LLM.load_adapter)")
            raise OptionError(f"Adapter not found: {name!s:.80}", f"loaded are: {', '.join(listed) or 'none'}", fix)
        return entry

    def _read(self, path: str | Path) -> AdapterParameters:
        """An adapter's files, its rows in the order of the model's."""
        decoder = self.model.config.model.decoder
        return in_our_order(read_adapter(path), decoder.num_attention_heads, decoder.num_key_value_heads)

    def _device(self, entry: _Entry, others: Sequence[_Entry]) -> DeviceAdapter:
        """Its memory; read from its files again if it was dropped, without dropping the `others`."""
        if entry.device is None:
            read = self._read(entry.source)
            if _key(read, entry.scale) != entry.key:
                raise InputError(
                    f"{entry.source}: adapter {entry.name!r} is not the one that was loaded",
                    "its files changed after it was dropped from memory (max_bytes)",
                    "unload it and load it anew",
                )
            self._fill(entry, self._factors(read, entry.scale), others)
            if entry.device is None:
                raise self._no_room(entry)
        return entry.device

    def _factors(self, read: AdapterParameters, scale: float) -> list[list[Factors]]:
        """Its factors per place of the model; none of an adapter that replaces inputs of the graph."""
        if read.values:
            self.model.check_adapter_values(read)
            return []
        return bind(read, self.model.lora_targets(), scale=scale)

    def _fill(self, entry: _Entry, factors: list[list[Factors]], others: Sequence[_Entry] = ()) -> None:
        """Bring an adapter into memory if there is room beside those in use and the `others`.

        Raises:
            CacheCapacityError: there never will be any.
        """
        if entry.values:
            return
        size = sum(one.a.nbytes + one.b.nbytes for pairs in factors for one in pairs)
        executor = self.model.decoder.executor
        on_device = executor.free_bytes()
        free = available_memory() if on_device is None else on_device
        try:
            if size > free:
                raise MemoryError
            device = executor.load_adapter(factors)
        except MemoryError as error:
            raise CacheCapacityError(
                f"adapter {entry.name!r} takes {format_bytes(size)}",
                f"{format_bytes(free)} are free",
                "unload others, or give a smaller cache_bytes when the model is loaded",
            ) from error
        entry.nbytes = device.nbytes
        if self.max_bytes is not None and entry.nbytes > self.max_bytes:
            raise self._no_room(entry)
        if self._make_room(entry.nbytes, others):
            entry.device = device
            self._in_memory.add(device)

    def _no_room(self, entry: _Entry) -> CacheCapacityError:
        return CacheCapacityError(
            f"adapter {entry.name!r} takes {format_bytes(entry.nbytes)}",
            f"max_bytes allows {format_bytes(self.max_bytes or 0)}, of which requests use {format_bytes(self.nbytes)}",
            "raise it, use fewer adapters at a time, or one of lower rank",
        )

    def _make_room(self, size: int, others: Sequence[_Entry]) -> bool:
        """Drop idle adapters, the longest unused first, until so much more fits the budget; whether it does."""
        if self.max_bytes is None:
            return True
        idle = [one for one in self._entries.values() if one.device is not None and not one.users and one not in others]
        for entry in sorted(idle, key=lambda entry: entry.last_used):
            if self.nbytes + size <= self.max_bytes:
                break
            entry.device = None
        return self.nbytes + size <= self.max_bytes

    def _check_base(self, read: AdapterParameters) -> None:
        if read.base_hash and read.base_hash != base_identity(self.model.folder):
            raise InputError(
                f"{read.source}: was trained on another base ({read.base or 'unnamed'})",
                f"it records {read.base_hash:.12}…, the model in {self.model.folder} is "
                f"{base_identity(self.model.folder):.12}…",
                f"load it into that model; or remove {BASE_HASH} from its config if you know that it fits",
            )


def base_identity(folder: Path) -> str:
    """What tells a model folder's weights from others: SHA-256 of its graph file, and of the ends and the sizes of the
    files beside it that hold weights.
    """
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.suffix in (".onnx", ".data") and path.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(_SAMPLED_BYTES))
            file.seek(max(size - _SAMPLED_BYTES, 0))
            digest.update(file.read(_SAMPLED_BYTES))
    return digest.hexdigest()


_SAMPLED_BYTES = 1 << 20


def _key(read: AdapterParameters, scale: float) -> bytes:
    return hashlib.sha256(read.content_hash + repr(scale).encode()).digest()


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not name or len(name) > 256:
        raise OptionError(f"an adapter's name is {name!r:.80}", "a text of 1 to 256 characters is expected", "pass one")


_NUMBERS: tuple[type[Any], ...] = (int, float, np.integer, np.floating)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, _NUMBERS) or not -1e6 <= _widest(value) <= 1e6:
        raise OptionError(f"{name} = {value!r:.40}", "a finite number, at most a million, is expected", "pass one")
    return float(value)


def _widest(value: Any) -> Any:
    """A number in a type that a million has a place in; NaN is between no two numbers."""
    return float(value) if isinstance(value, np.floating) else value


def _only_generators(entry: _Entry) -> InputError:
    return InputError(
        f"adapter {entry.name!r} replaces inputs of the graph that are no low-rank factors",
        "requests share their steps, and such inputs hold for a whole step",
        "use it with Generator.set_active_adapter",
    )
