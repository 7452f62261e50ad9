"""The program of the process that renders chat templates in jinja2's sandbox, like Hugging Face's transformers.

The program reads requests line by line and answers each. A template comes with a model, so it is untrusted code. The
sandbox denies it access to Python's internals. The operating system limits its processor time and memory, even within a
single Python operation, by killing only the process that exceeds a limit.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterable, Mapping
from datetime import datetime
from traceback import walk_tb
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_MOST_COMPILED = 32
_LONGEST_MESSAGE = 2000
_OUT_OF_MEMORY = b'[{"kind": "memory", "message": "", "line": 0}]\n'

Result = dict[str, Any]
"""{"text": …}, or {"kind", "message", "line"} of an error."""


def serve(cpu_seconds: float, memory_bytes: int) -> None:
    """Answer requests until the input ends.

    A request is a JSON object with `source` (a template), `values` (its variables), `changes` (a list of sets of
    variables that override some of the values) and `most_characters` (the length limit of a prompt). The answer is a
    list with one Result per change, or with only the first Result if that is an error. A request without `values` asks
    for the names of the variables that the template reads: the answer is a list with {"names": […]} or an error.

    The process first writes an empty list to signal that it is ready.

    Args:
        cpu_seconds: processor time per request; the process ends with SIGPROF if a request exceeds this limit.
        memory_bytes: limit of the process's address space.
    """
    _lock_up(memory_bytes)
    compiled: dict[str, Template] = {}
    _write(b"[]\n")  # ready
    for line in sys.stdin.buffer:
        _end_after(cpu_seconds)
        answer = _answer(line, compiled)
        _end_after(0)
        _write(answer or _OUT_OF_MEMORY)
        if answer is None:
            return  # the memory in use might not be available to the next request


def _write(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


def _end_after(cpu_seconds: float) -> None:
    """End this process after this processor time; 0 = never. Without timers (Windows), the parent process ends it."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)


def _lock_up(memory_bytes: int) -> None:
    """Limit memory, and forbid file writes, new processes and core dumps."""
    try:
        import resource
    except ImportError:  # Windows has no such limits
        return
    limits = {"RLIMIT_AS": memory_bytes, "RLIMIT_FSIZE": 0, "RLIMIT_NPROC": 0, "RLIMIT_CORE": 0}
    for name, value in limits.items():
        kind = getattr(resource, name, None)
        if kind is not None:
            soft, hard = resource.getrlimit(kind)
            most = min((limit for limit in (soft, hard, value) if limit != resource.RLIM_INFINITY), default=value)
            try:
                resource.setrlimit(kind, (most, most))
            except (OSError, ValueError):
                if sys.platform == "linux":  # other systems may reject some limits: macOS rejects the memory limit
                    raise


def _answer(line: bytes, compiled: dict[str, Template]) -> bytes | None:
    """Return one Result per change, as a line of JSON; None if memory ran out."""
    results: list[Result] = []
    try:
        request = json.loads(line)
        if "values" not in request:
            return json.dumps([_names(request["source"])]).encode() + b"\n"
        for change in request["changes"]:
            result = _result(request["source"], {**request["values"], **change}, compiled)
            if (count := len(result.get("text", ""))) > request["most_characters"]:
                result = _failure("size", f"{count} characters", 0)
            results.append(result)
            if "text" not in results[0]:
                break
        return json.dumps(results).encode() + b"\n"
    except MemoryError:
        return None


def _result(source: str, values: Mapping[str, Any], compiled: dict[str, Template]) -> Result:
    try:
        template = compiled.get(source)
        if template is None:
            if len(compiled) >= _MOST_COMPILED:
                compiled.clear()
            template = compiled[source] = compile_template(source)
    except TemplateSyntaxError as error:
        return _failure("syntax", error.message or "", error.lineno)
    except MemoryError:
        raise
    except Exception as error:  # the parser and Python's compiler also have limits
        return _failure("compile", f"{type(error).__name__}: {error}", 0)
    try:
        text = template.render(values)
    except TemplateRefusal as error:
        return _failure("refusal", str(error), failed_line(error))
    except MemoryError:
        raise
    except Exception as error:  # an expression in a template can raise anything
        return _failure(type(error).__name__, str(error), failed_line(error))
    return {"text": text}


def _names(source: str) -> Result:
    """Return the names of the variables that a template reads and does not define, sorted."""
    try:
        return {"names": sorted(meta.find_undeclared_variables(_ChatEnvironment().parse(source)))}
    except MemoryError:
        raise
    except Exception as error:  # rendering reports the error with its line
        return _failure("syntax", str(error), 0)


def _failure(kind: str, message: str, line: int | str) -> Result:
    return {"kind": kind, "message": message[:_LONGEST_MESSAGE], "line": line}


class TemplateRefusal(TemplateError):
    """The template called raise_exception()."""


def compile_template(source: str) -> Template:
    """Compile a template, whose `render` returns the text. Raise jinja2.TemplateSyntaxError, which has the line."""
    return _ChatEnvironment().from_string(source)


def failed_line(error: BaseException) -> int | str:
    """Return the template's line in a traceback, in which jinja2 represents the template as a separate file."""
    lines = [line for frame, line in walk_tb(error.__traceback__) if frame.f_code.co_filename == "<template>"]
    return lines[-1] if lines else "unknown"


class _Generation(Extension):
    """{% generation %} marks the assistant's text for training. It does not change the rendered text."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(lineno)

    def _body(self, caller: Macro) -> str:
        return str(caller())


class _TemplateDict:
    """The `dict` of templates, because the type itself would give access to Python's internals."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _TemplateNamespace(Namespace):
    """Jinja's namespace without names that begin with an underscore, which give access to Python's internals."""

    def __init__(self, /, *args: Any, **attributes: Any) -> None:
        for name in dict(*args, **attributes):
            _check_attribute(name)
        super().__init__(*args, **attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: object) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise SecurityError(f"a namespace cannot have an attribute {name!r}")


class _ChatEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox with the settings, filters and globals of transformers."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = _tojson
        del self.globals["lipsum"]
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": lambda pattern: datetime.now().strftime(pattern),
            "dict": _TemplateDict(),
            "namespace": _TemplateNamespace,
        }


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return plain JSON; jinja2's own filter would escape it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateRefusal(message)
