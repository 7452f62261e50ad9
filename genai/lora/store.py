"""A model's adapters, by name: they are loaded, shared by requests, limited to a memory budget, and unloaded."""

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
from genai.common.progress import task
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

_MOST_ADAPTERS_OF_A_REQUEST = 16
# The maximum number of names that an error lists.
_MOST_SHOWN = 10


@dataclass(eq=False)
class _Entry:
    """A loaded adapter.

    Attributes:
        name: name of the adapter.
        source: the adapter's folder or file.
        scale: factor that the adapter's effect is multiplied by.
        key: hash of the adapter's content and scale.
        nbytes: number of bytes on the device.
        device: the adapter's device memory; None = evicted, to be read from `source` again.
        ranks: the adapter's distinct ranks.
        modules: names of the projections that the adapter changes.
        values: arrays for graph inputs, for adapters that are not LoRA.
        users: mixes that requests currently hold.
        last_used: time at which a request last used it.
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


NamedChoice: TypeAlias = str | Mapping[str, float] | None
"""Adapters by name: a name, a mapping from names to weights, or None."""


@dataclass(frozen=True, eq=False)
class PinnedAdapters:
    """Adapters that were found by their names once. Adapters that take these names later have no effect on it.

    `Adapters.pin` creates it. It does not keep the adapters in memory, except with a mix.

    Attributes:
        choice: the adapters, as the caller named them.
        entries: the adapters and their weights, without weights of 0.
        mix: the same adapters in memory, if they are held there.
    """

    choice: NamedChoice = None
    entries: tuple[tuple[_Entry, float], ...] = ()
    mix: AdapterMix | None = None

    @property
    def modules(self) -> frozenset[str]:
        """The names of the projections that the adapters change."""
        return frozenset().union(*(entry.modules for entry, _ in self.entries))

    @property
    def weights(self) -> dict[str, float]:
        """The weights by name, without weights of 0."""
        named = {} if self.choice is None else {self.choice: 1.0} if isinstance(self.choice, str) else self.choice
        return {name: float(weight) for name, weight in named.items() if weight != 0}


AdapterChoice: TypeAlias = NamedChoice | PinnedAdapters
"""The adapters of a request: a name, a mapping from names to weights, the result of `Adapters.pin`, or None."""


class Adapters(Single, AbstractContextManager["Adapters"]):
    """LoRA adapters of a model, by name. Several threads may use this object.

    Loading the first adapter recompiles the model's program with LoRA targets. (If you load the model with lora=True,
    the program is compiled with targets from the start.) After that, adapters are loaded and unloaded without
    recompilation.

    Args:
        model: the model that the adapters are for.
        max_bytes: maximum memory for adapters; None = no limit. If another adapter would exceed the limit, idle
            adapters are evicted, the least recently used first. They are read again when a request needs them.

    Raises:
        OptionError: max_bytes is not a whole number, or is less than 1.

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
                f"Adapters needs a Model, not {type(model).__name__}",
                "adapters change the linear layers of a model",
                "pass a Model",
            )
        if max_bytes is not None and (isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 1):
            raise OptionError(
                f"max_bytes = {max_bytes!r}",
                "expected: a whole number of at least 1",
                "leave max_bytes out for no limit",
            )
        self.model, self.max_bytes = model, max_bytes
        self._entries: dict[str, _Entry] = {}
        # All adapters in memory, including unloaded adapters that a request still uses.
        self._in_memory: weakref.WeakSet[DeviceAdapter] = weakref.WeakSet()
        self._lock = threading.RLock()
        renew_locks(self, "_lock")

    @property
    def names(self) -> list[str]:
        """The names of the adapters, in the order in which they were loaded."""
        return list(self._entries)

    @property
    def nbytes(self) -> int:
        """The number of bytes in memory, including unloaded adapters that a request still uses."""
        with self._lock:
            return sum(device.nbytes for device in self._in_memory)

    def load(self, path: str | Path, name: str, scale: float = 1.0) -> None:
        """Load an adapter under a name.

        Args:
            path: a folder of PEFT or mlx-lm, an `.onnx_adapter` file, or a GGUF file.
            name: name of the adapter, unique.
            scale: factor that the adapter's effect is multiplied by, in addition to the scale in the adapter's files.

        Raises:
            ModelFolderError, InputError: the adapter is missing or damaged, does not fit the model, or was trained on
                another base.
            OptionError: the name is in use, or the scale is not finite.
            UnsupportedModelError: the model has no LoRA targets.
            CacheCapacityError: there is not enough memory.
        """
        _check_name(name)
        weight = _number(f"scale of adapter {name!r}", scale)
        if name in self._entries:
            raise OptionError(
                f"Adapter already loaded: {name}",
                "adapter names must be unique",
                "unload that adapter first, or choose another name",
            )
        with task(f"Loading the adapter {name}"):
            read = self._read(path)
            self._check_base(read)
            factors = self._factors(read, weight)
        key, modules = _key(read, weight), frozenset(read.pairs)
        entry = _Entry(name, Path(path).absolute(), weight, key, 0, None, read.ranks, modules, read.values)
        with self._lock:
            if name in self._entries:
                raise OptionError(
                    f"Adapter already loaded: {name}", "adapter names must be unique", "choose another name"
                )
            self._fill(entry, factors)
            self._entries[name] = entry

    def unload(self, name: str, *, when_idle: bool = False) -> None:
        """Unload an adapter and free its memory.

        Args:
            name: name of the adapter.
            when_idle: True = requests that use the adapter continue, and its memory is freed when the last one ends.

        Raises:
            OptionError: there is no adapter with this name.
            StateError: the adapter is in use, and `when_idle` is False.
        """
        with self._lock:
            entry = self._entry(name)
            if entry.users and not when_idle:
                raise StateError(
                    f"Adapter still in use: {name}",
                    f"{len(entry.users)} requests or generators use it",
                    "close these requests and generators first, or call unload(name, when_idle=True)",
                )
            del self._entries[name]
            entry.device = None  # a pinned choice may refer to the entry; requests hold the memory that they use

    def info(self, name: str) -> dict[str, Any]:
        """Return facts about an adapter.

        The facts are: source, scale, hash of the numbers and scale, ranks, number of changed modules, bytes, whether
        the adapter is in memory, and the number of requests that use it.
        """
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
        """Return the adapters of a request. They stay in memory for as long as the result is referenced.

        Args:
            choice: a name, or a mapping from names to weights that multiply each adapter's effect; None = none. Of a
                pinned choice, the names are not looked up again.

        Raises:
            OptionError: a name is not loaded, or a weight is not finite.
            InputError: an evicted adapter's files were changed. Other errors are the same as for `load`.
        """
        pinned = self.pin(choice)
        if pinned.mix is not None or not pinned.entries:
            return pinned.mix
        with self._lock:
            entries = pinned.entries
            for entry, _ in entries:
                entry.last_used = time.monotonic()
            wanted_too = [entry for entry, _ in entries]
            mix = AdapterMix.of([(self._device(entry, wanted_too), entry.key, weight) for entry, weight in entries])
            for entry, _ in entries:
                entry.users.add(mix)
                if self._entries.get(entry.name) is not entry:  # unloaded: in memory for as long as the mix exists
                    entry.device = None
            return mix

    def pin(self, choice: AdapterChoice) -> PinnedAdapters:
        """Return the adapters that the names of a choice refer to now, after validation.

        Raises:
            OptionError: a name, a weight or the number of adapters is invalid.
            InputError: an adapter is not a LoRA adapter.
        """
        if isinstance(choice, PinnedAdapters):
            return choice
        with self._lock:
            weights = self.check(choice)
            entries = tuple((self._entry(name), weight) for name, weight in weights.items())
        for entry, _ in entries:
            if entry.values:
                raise _only_generators(entry)
        return PinnedAdapters(choice if choice is None or isinstance(choice, str) else dict(choice), entries)

    def check(self, choice: AdapterChoice) -> dict[str, float]:
        """Return the names and weights of a request's adapters after validation, omitting weights of 0.

        Raises:
            OptionError: a name, a weight or the number of adapters is invalid.
        """
        if choice is None:
            return {}
        if isinstance(choice, PinnedAdapters):
            return choice.weights
        choices = {choice: 1.0} if isinstance(choice, str) else choice
        if not isinstance(choices, Mapping):
            raise OptionError(
                f"adapter = {choice!r:.80}",
                "a name, or a mapping of names to weights, is expected",
                'for example, pass "a" or {"a": 0.7}',
            )
        if len(choices) > _MOST_ADAPTERS_OF_A_REQUEST:
            raise OptionError(
                f"{len(choices)} adapters for one request",
                f"a request can use at most {_MOST_ADAPTERS_OF_A_REQUEST}",
                "merge some of the adapters",
            )
        for name in choices:
            self._entry(name)
        weights = {name: _number(f"weight of adapter {name!r}", weight) for name, weight in choices.items()}
        return {name: weight for name, weight in weights.items() if weight != 0}

    def modules(self, name: str) -> frozenset[str]:
        """Return the names of the projections that an adapter changes."""
        return self._entry(name).modules

    def values(self, name: str) -> Mapping[str, Any]:
        """Return the arrays with which an adapter replaces defaults of graph inputs; empty for a LoRA adapter."""
        return self._entry(name).values

    def close(self) -> None:
        """Unload all adapters; requests that use an adapter continue."""
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
            fix = did_you_mean(str(name), names, "load the adapter first (--lora NAME=PATH, or LLM.load_adapter)")
            raise OptionError(
                f"Adapter not found: {name!s:.80}", f"loaded adapters: {', '.join(listed) or 'none'}", fix
            )
        return entry

    def _read(self, path: str | Path) -> AdapterParameters:
        """Read an adapter's files, and put the rows into the order of the model."""
        decoder = self.model.config.model.decoder
        return in_our_order(read_adapter(path), decoder.num_attention_heads, decoder.num_key_value_heads)

    def _device(self, entry: _Entry, others: Sequence[_Entry]) -> DeviceAdapter:
        """Return the adapter's device memory. If it was evicted, load it again without evicting `others`."""
        if entry.device is None:
            read = self._read(entry.source)
            if _key(read, entry.scale) != entry.key:
                raise InputError(
                    f"{entry.source}: adapter {entry.name!r} has changed since it was loaded",
                    "the files changed after the adapter was evicted from memory because of max_bytes",
                    "unload the adapter and load it again",
                )
            self._fill(entry, self._factors(read, entry.scale), others)
            if entry.device is None:
                raise self._no_room(entry)
        return entry.device

    def _factors(self, read: AdapterParameters, scale: float) -> list[list[Factors]]:
        """Return the factors per LoRA target of the model; empty for an adapter that replaces graph inputs."""
        if read.values:
            self.model.check_adapter_values(read)
            return []
        return bind(read, self.model.lora_targets(), scale=scale)

    def _fill(self, entry: _Entry, factors: list[list[Factors]], others: Sequence[_Entry] = ()) -> None:
        """Load an adapter into device memory if it fits together with the adapters in use and `others`.

        Raises:
            CacheCapacityError: the adapter can never fit.
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
                f"adapter {entry.name!r} needs {format_bytes(size)}",
                f"only {format_bytes(free)} is free",
                "unload other adapters, or load the model with a smaller cache_bytes",
            ) from error
        entry.nbytes = device.nbytes
        if self.max_bytes is not None and entry.nbytes > self.max_bytes:
            raise self._no_room(entry)
        if self._make_room(entry.nbytes, others):
            entry.device = device
            self._in_memory.add(device)

    def _no_room(self, entry: _Entry) -> CacheCapacityError:
        return CacheCapacityError(
            f"adapter {entry.name!r} needs {format_bytes(entry.nbytes)}",
            f"max_bytes is {format_bytes(self.max_bytes or 0)}, of which requests use {format_bytes(self.nbytes)}",
            "raise max_bytes, use fewer adapters at a time, or use an adapter of lower rank",
        )

    def _make_room(self, size: int, others: Sequence[_Entry]) -> bool:
        """Evict idle adapters, least recently used first, until `size` more bytes fit; else return False."""
        if self.max_bytes is None:
            return True
        idle = [one for one in self._entries.values() if one.device is not None and not one.users and one not in others]
        for entry in sorted(idle, key=lambda entry: entry.last_used):
            if self.nbytes + size <= self.max_bytes:
                break
            entry.device = None
        return self.nbytes + size <= self.max_bytes

    def _check_base(self, read: AdapterParameters) -> None:
        if not read.base_hash:
            return
        base = base_identity(self.model.folder_as_loaded())
        if read.base_hash != base:
            raise InputError(
                f"{read.source}: the adapter was trained on another base ({read.base or 'unnamed'})",
                f"the adapter records the base {read.base_hash:.12}…, but the model in {self.model.folder} is "
                f"{base:.12}…",
                f"load the adapter into that base; if it does fit this model, remove {BASE_HASH} from its config file",
            )


def base_identity(folder: Path) -> str:
    """Return a hash that identifies the weights in a model folder.

    The hash is SHA-256 over the names, sizes, beginnings and ends of the graph file and the weight files.
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
        raise OptionError(
            f"the adapter's name is {name!r:.80}", "expected: a string of 1 to 256 characters", "use another name"
        )


_NUMBERS: tuple[type[Any], ...] = (int, float, np.integer, np.floating)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, _NUMBERS) or not -1e6 <= _widest(value) <= 1e6:
        raise OptionError(
            f"{name} = {value!r:.40}", "expected: a number from -1e6 to 1e6", "use a number in this range"
        )
    return float(value)


def _widest(value: Any) -> Any:
    """Convert NumPy floats to Python floats, because a million is outside float16's range."""
    return float(value) if isinstance(value, np.floating) else value


def _only_generators(entry: _Entry) -> InputError:
    return InputError(
        f"adapter {entry.name!r} replaces graph inputs and is not a LoRA adapter",
        "a step computes several requests, but graph inputs apply to the whole step",
        "use this adapter with Generator.set_active_adapter",
    )
