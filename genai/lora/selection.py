"""The modules that the settings of an adapter's configuration select, with the rules of PEFT and of mlx-lm.

Both libraries create factors only for these modules, and ignore all other tensors of an adapter's file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import re2

from ..common.log import logger
from ..errors import InputError

_log = logger(__name__)
_MOST_PATTERN = 20_000
# The maximum number of components in the end of a module's name.
_MOST_COMPONENTS = 32
_QUIETLY = re2.Options()
_QUIETLY.log_errors = False
_ALL_LINEAR = "all-linear"


def check_peft_selection(path: Path, config: Mapping[str, Any], modules: Iterable[str]) -> None:
    """Raise InputError if target_modules, exclude_modules or layers_to_transform excludes one of the modules.

    A string is a regular expression that matches the whole name of a module. A list contains names, or ends of names
    after a dot. The number of a layer follows one of layers_pattern, or any name.

    Args:
        path: path of adapter_config.json, for messages.
        config: the content of the file.
        modules: names of the modules that have factors.
    """
    targets, excluded = (_names(path, config, name) for name in ("target_modules", "exclude_modules"))
    layers, patterns = _layers(path, config)
    if isinstance(targets, str) and layers:
        raise InputError(
            f"{path}: target_modules is {targets!r:.80}, and layers_to_transform is set",
            "layers_to_transform selects layers only if target_modules is a list",
            "set layers_to_transform to null, or target_modules to a list of names",
        )
    chosen, dropped = (_Names(path, *named) for named in (("target_modules", targets), ("exclude_modules", excluded)))
    for module in modules:
        if excluded and dropped.match(module, unknown=False):
            raise _excluded(path, module, "exclude_modules", excluded)
        if targets is not None and not chosen.match(module, unknown=True):
            raise _excluded(path, module, "target_modules", targets)
        # PEFT does not check the layer of a module whose whole name is in target_modules.
        if layers and module not in (targets or ()) and _layer(module, patterns) not in layers:
            name = "layers_pattern" if patterns and _layer(module, patterns) is None else "layers_to_transform"
            raise _excluded(path, module, name, config[name])


def check_mlx_keys(path: Path, keys: Any, modules: Iterable[str]) -> None:
    """Raise InputError if `lora_parameters.keys` of mlx-lm excludes one of the modules.

    Keys are whole names of modules, or names within a layer.
    """
    if keys is None:
        return
    if not _are_texts(keys):
        raise _malformed(path, "keys", keys, "a list of names of modules")
    names = frozenset(keys)
    for module in modules:
        within = re.split(r"\.\d+\.", module, maxsplit=1)[-1]
        if module not in names and within not in names:
            raise _excluded(path, module, "keys", keys)


def last_layers(path: Path, config: Mapping[str, Any], modules: Iterable[str]) -> int:
    """Return num_layers of mlx-lm, the number of layers at the end of the base that have factors; 0 = all layers.

    Raises:
        InputError: num_layers is malformed, or the modules are in layers that are further apart.
    """
    name = "num_layers" if "num_layers" in config else "lora_layers"
    count = config.get(name)
    if count is None:
        return 0
    if type(count) is not int:
        raise _malformed(path, name, count, "a number of layers, or -1 for all layers,")
    names = list(modules)
    check_last_layers(path, count, names, 1 + max(map(_number, names), default=0))
    return max(count, 0)


def check_last_layers(path: Path, count: int, modules: Iterable[str], total: int) -> None:
    """Raise InputError if a module is not in the last `count` of `total` layers; a count of at most 0 selects all."""
    for module in modules:
        if 0 < count <= total and 0 <= _number(module) < total - count:
            raise _excluded(path, module, "num_layers", count)


def _number(module: str) -> int:
    """Return the number of a module's layer, or -1 if the module is in no layer."""
    found = re.search(r"\.(\d{1,9})\.", module)
    return int(found[1]) if found else -1


class _Names:
    """The names of modules in one setting, which is None, a regular expression, or a list of names."""

    def __init__(self, path: Path, setting: str, value: str | list[str] | None) -> None:
        self._names = frozenset(value) if isinstance(value, list) else frozenset[str]()
        self._any = setting == "target_modules" and isinstance(value, str) and value.lower() == _ALL_LINEAR
        self._pattern: Any = None
        self._is_unknown = False
        if not isinstance(value, str) or self._any:
            return
        try:
            if len(value) > _MOST_PATTERN:
                raise ValueError(f"the pattern is longer than {_MOST_PATTERN:,} characters")
            self._pattern = re2.compile(value, _QUIETLY)
        except (re2.error, ValueError):
            self._is_unknown = True
            _log.warning(
                "%s: %s is %.80r: the pattern has look-around or back-references, or is too long, and was not "
                "compared with the modules; all factors of the adapter are applied",
                path, setting, value,
            )  # fmt: skip

    def match(self, module: str, *, unknown: bool) -> bool:
        """Return True if the setting contains a module; `unknown` if its pattern is not supported."""
        if self._pattern is not None:
            return self._pattern.fullmatch(module) is not None
        if self._any or module in self._names:
            return True
        if self._is_unknown:
            return unknown
        parts = module.split(".")
        return any(".".join(parts[-n:]) in self._names for n in range(1, min(len(parts), _MOST_COMPONENTS)))


def _layer(module: str, patterns: list[str]) -> int | None:
    """Return the number of a module's layer, or None if the module is in no layer."""
    for pattern in patterns or [r"[^.]*"]:
        if found := re2.match(rf".*\.(?:{pattern})\.(?P<layer>\d{{1,9}})\.", module, _QUIETLY):
            return int(found["layer"])
    return None


def _layers(path: Path, config: Mapping[str, Any]) -> tuple[list[int], list[str]]:
    layers, patterns = config.get("layers_to_transform"), config.get("layers_pattern") or []
    numbers = [] if layers is None else layers if isinstance(layers, list) else [layers]
    if not all(type(number) is int for number in numbers):
        raise _malformed(path, "layers_to_transform", layers, "the number of a layer or a list of numbers")
    patterns = [patterns] if isinstance(patterns, str) else patterns
    if not _are_texts(patterns):
        raise _malformed(path, "layers_pattern", patterns, "a name or a list of names")
    for pattern in patterns:
        try:
            if len(pattern) > _MOST_PATTERN:
                raise ValueError(pattern)
            re2.compile(pattern, _QUIETLY)
        except (re2.error, ValueError) as error:
            raise _malformed(
                path, "layers_pattern", pattern, "the name of the list of layers, such as layers"
            ) from error
    return numbers, patterns


def _names(path: Path, config: Mapping[str, Any], name: str) -> str | list[str] | None:
    value = config.get(name)
    if value is None or isinstance(value, str):
        return value
    if not _are_texts(value):
        raise _malformed(path, name, value, "a regular expression or a list of names of modules")
    return list(value)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _malformed(path: Path, name: str, value: Any, expected: str) -> InputError:
    return InputError(f"{path}: {name} is {value!r:.80}", f"{expected} is expected", "correct the field in this file")


def _excluded(path: Path, module: str, name: str, value: Any) -> InputError:
    return InputError(
        f"{path}: {name} is {value!r:.80}, but the adapter has factors of {module!r:.200}",
        f"{name} excludes this module, so the library that trained the adapter would ignore these factors",
        f"correct {name} in this file, or remove the factors of the module from the adapter",
    )
