"""The program of the process that renders chat templates, as Hugging Face's transformers does, in jinja2's sandbox.

It reads requests line by line and answers each. A template comes with a model, so it is untrusted code: the sandbox
keeps it from reaching Python. What it may use of the processor and of memory the operating system counts, also inside a
single operation of Python: a process that goes beyond is ended, and nothing else is.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterable, Mapping
from datetime import datetime
from traceback import walk_tb
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
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
"""{"text": …}, or {"kind", "message", "line"} of what went wrong."""


def serve(cpu_seconds: float, memory_bytes: int) -> None:
    """Answer requests until the input ends.

    A request is a JSON object with `source` (a template), `values` (its variables), `changes` (a list of variables
    that replace some of them) and `most_characters` (of a prompt); the answer is a list with one Result for each
    change, or with that of the first alone if it failed.

    An empty list comes first, when the process is ready.

    Args:
        cpu_seconds: processor time of one request; a request that takes more ends the process with SIGPROF.
        memory_bytes: address space of the process.
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
            return  # what was left behind might be missing in the next request


def _write(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


def _end_after(cpu_seconds: float) -> None:
    """End this process after so much processor time; 0 = never. Where no timer does it (Windows), the parent does."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)


def _lock_up(memory_bytes: int) -> None:
    """No more memory than this, no file written, no process started, no core left behind."""
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
                if sys.platform == "linux":  # others may refuse some: macOS that of memory
                    raise


def _answer(line: bytes, compiled: dict[str, Template]) -> bytes | None:
    """One Result per change, as a line of JSON; None where memory ran out."""
    results: list[Result] = []
    try:
        request = json.loads(line)
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
    except Exception as error:  # the parser and Python's compiler have limits of their own
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


def _failure(kind: str, message: str, line: int | str) -> Result:
    return {"kind": kind, "message": message[:_LONGEST_MESSAGE], "line": line}


class TemplateRefusal(TemplateError):
    """The template called raise_exception()."""


def compile_template(source: str) -> Template:
    """A template whose `render` gives the text. Raises jinja2.TemplateSyntaxError: with the line."""
    return _ChatEnvironment().from_string(source)


def failed_line(error: BaseException) -> int | str:
    """The template's line in a traceback; jinja2 puts the template there as a file of its own."""
    lines = [line for frame, line in walk_tb(error.__traceback__) if frame.f_code.co_filename == "<template>"]
    return lines[-1] if lines else "unknown"


class _Generation(Extension):
    """{% generation %} marks the assistant's words for training; when rendering it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(lineno)

    def _body(self, caller: Macro) -> str:
        return str(caller())


class _TemplateDict:
    """What a template may do with `dict`: not the type itself, behind which Python's internals lie."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _TemplateNamespace(Namespace):
    """Jinja's namespace without underscore names, behind which Python's internals lie."""

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
    """The sandbox, with transformers' settings, filters and globals."""

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
    """JSON as it is: jinja2's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateRefusal(message)
