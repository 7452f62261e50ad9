"""The generation log of onnxruntime-genai's set_log_options. It is off by default."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from ...errors import InputError, OptionError, kind_of

# The kinds of lines, and the options that change how lines are written, with their defaults.
_LINES = frozenset(
    {"generate_next_token", "append_next_tokens", "hit_eos", "hit_max_length", "model_logits", "warning"}
)
_STYLES = {"ansi_tags": False, "value_stats": True}
# Options of onnxruntime-genai for lines that cannot be written here, with the reasons.
_IN_PAGES = "the decoder computes all sequences in one batch with a paged cache, so it has no such tensors"
_REFUSED = {
    "model_input_values": _IN_PAGES, "model_output_values": _IN_PAGES, "model_output_shapes": _IN_PAGES,
    "ort_lib": "models do not run in onnxruntime, so onnxruntime logs nothing",
}  # fmt: skip
# Number of values to write at the start and at the end of an array.
_ENDS = 5
_enabled = False
_wanted: set[str] = set()
_style = dict(_STYLES)
_file: TextIO | None = None
_callback: Callable[[str], object] | None = None


def set_log_options(**options: bool | str) -> None:
    """Choose which lines are logged, and where: to stderr, a file, or the callback of set_log_callback.

    If both a file and a callback are set, the later setting applies.

    Args:
        options: enabled (True to turn the log on); generate_next_token, append_next_tokens, hit_eos, hit_max_length,
            model_logits and warning (True or False: the kinds of lines); value_stats (True to write statistics after
            logits; default: True); ansi_tags (True to write colours; default: False); filename (the log file; ""
            closes it).

    Raises:
        OptionError: an option is unknown or not supported, or a value has the wrong type. In that case, nothing
            changes.
        InputError: the file cannot be written.
    """
    global _enabled
    known = {*_LINES, *_STYLES, *_REFUSED, "enabled", "filename"}
    for name, value in options.items():
        if name not in known or not isinstance(value, str if name == "filename" else bool):
            kinds = ", ".join(sorted((*_LINES, *_STYLES)))
            raise OptionError(
                f"log option {name} = {value!r}",
                f"the options are enabled, {kinds} (True or False), and filename (a string)",
                "use one of these options",
            )
        if name in _REFUSED and value:
            raise OptionError(
                f"log option {name} = True", _REFUSED[name],
                "omit the option, or log model_logits" if name != "ort_lib" else "omit the option",
            )  # fmt: skip
    if "filename" in options:
        _open(str(options["filename"]))
    _enabled = bool(options.get("enabled", _enabled))
    for name in _LINES & options.keys():
        (_wanted.add if options[name] else _wanted.discard)(name)
    _style.update({name: bool(options[name]) for name in _STYLES if name in options})
    library, writes = logging.getLogger("genai"), _enabled and "warning" in _wanted
    (library.addHandler if writes else library.removeHandler)(_WARNINGS)


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
    if _enabled and item in _wanted:
        _write(item, text.format_map(values))


def log_values(item: str, array: Any) -> None:
    """Write the ends of an array or of a list of arrays, and its statistics, if the kind of line is enabled."""
    if not _enabled or item not in _wanted:
        return
    rows = array if isinstance(array, list) else [array]  # the logits of beams are separate
    values = np.concatenate([np.asarray(row).reshape(-1) for row in rows]).astype(np.float64)
    parts = [values] if len(values) <= 2 * _ENDS else [values[:_ENDS], values[-_ENDS:]]
    _write(item, f"Values[ {' ... '.join(' '.join(f'{value:g}' for value in part) for part in parts)} ]")
    if not _style["value_stats"] or not len(values):
        return
    if not (finite := np.isfinite(values)).all():
        _write("value_stats", f"first value that is not finite at index[{int(finite.argmin())}]")
        return
    low, high = int(values.argmin()), int(values.argmax())
    ends = f"Min: {values[low]:g} at index[{low}] Max: {values[high]:g} at index[{high}]"
    _write("value_stats", f"{ends} Mean: {values.mean():g} StdDev: {values.std():g}")


def _write(item: str, text: str) -> None:
    line = f"\x1b[1m\x1b[44m  {item}  \x1b[0m {text}\n" if _style["ansi_tags"] else f"{item}: {text}\n"
    if _callback is not None:
        _callback(line)
        return
    print(line, end="", file=_file or sys.stderr, flush=True)


class _Warnings(logging.Handler):
    """A handler that also writes the library's warnings to this log."""

    def emit(self, record: logging.LogRecord) -> None:
        log("warning", "{message}", message=record.getMessage())


_WARNINGS = _Warnings(logging.WARNING)


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
