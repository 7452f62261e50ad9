"""The generation log of onnxruntime-genai's set_log_options. It is off by default."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from ...errors import InputError, OptionError, kind_of

# The lines that can be logged here, and onnxruntime-genai's options for other lines (tensors) and for formatting.
_WRITTEN = frozenset({"generate_next_token", "append_next_tokens", "hit_eos", "hit_max_length"})
_WITHOUT_EFFECT = frozenset(
    "ansi_tags model_input_values model_logits model_output_shapes model_output_values ort_lib value_stats "
    "warning".split()
)
_enabled = False
_wanted: set[str] = set()
_file: TextIO | None = None
_callback: Callable[[str], object] | None = None


def set_log_options(**options: bool | str) -> None:
    """Choose which lines are logged, and where: to stderr, a file, or the callback of set_log_callback.

    If both a file and a callback are set, the later setting applies.

    Args:
        options: enabled (True to turn the log on); generate_next_token, append_next_tokens, hit_eos,
            hit_max_length (True or False); filename (the log file; "" closes it). ansi_tags, warning, value_stats,
            ort_lib and model_… are ignored: such lines are not written.

    Raises:
        OptionError: an option is unknown, or a value has the wrong type. In that case, nothing changes.
        InputError: the file cannot be written.
    """
    global _enabled
    for name, value in options.items():
        kind = str if name == "filename" else bool
        if name not in _WRITTEN | _WITHOUT_EFFECT | {"enabled", "filename"} or not isinstance(value, kind):
            known = ", ".join(sorted(_WRITTEN))
            raise OptionError(
                f"log option {name} = {value!r}",
                f"the options are enabled, {known} (True or False), and filename (a string)",
                "use one of these options",
            )
    if "filename" in options:
        _open(str(options["filename"]))
    _enabled = bool(options.get("enabled", _enabled))
    for name in _WRITTEN & options.keys():
        (_wanted.add if options[name] else _wanted.discard)(name)


def set_log_callback(callback: Callable[[str], object] | None) -> None:
    """Pass each line to a function instead of a file. None removes the function.

    Raises:
        InputError: the callback is not callable.
    """
    global _callback
    if callback is not None and not callable(callback):
        raise InputError(
            f"set_log_callback received {kind_of(callback)}", "a function is expected", "pass a function or None"
        )
    if callback is not None:
        _open("")
    _callback = callback


def log(item: str, text: str, **values: Any) -> None:
    """Write a line if its kind is enabled; `text` contains the values' names in braces."""
    if not _enabled or item not in _wanted:
        return
    line = f"{item}: {text.format_map(values)}\n"
    if _callback is not None:
        _callback(line)
        return
    print(line, end="", file=_file or sys.stderr, flush=True)


def _open(filename: str) -> None:
    global _file, _callback
    try:
        opened = Path(filename).open("w", encoding="utf-8") if filename else None  # noqa: SIM115
    except OSError as error:
        raise InputError(f"log file {filename!r} cannot be written", str(error), "use another filename") from error
    if _file is not None:
        _file.close()
    _file = opened
    if opened is not None:
        _callback = None
