"""Renders a chat template as Hugging Face's transformers does, inside jinja2's sandbox and within limits.

Templates come with models, so they are untrusted: the sandbox keeps them from reaching Python, and every loop round,
call and written character is charged to a budget, so that none runs or grows without end.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import wraps
from typing import Any

from jinja2 import Template, TemplateError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from .template_limits import Budget, RenderLimits, bounded, check_call, check_join, check_operator

# No template can name a variable with a space.
_BUDGET = "render budget"


class TemplateRefusal(TemplateError):
    """The template called raise_exception()."""


def compile_template(source: str) -> Template:
    """A template that `render` can run.

    Raises:
        jinja2.TemplateSyntaxError: with the line.
    """
    environment = _ChatEnvironment()
    tree = _Charge().visit(environment.parse(source))
    tree.set_environment(environment)
    code = environment.compile(tree)
    return environment.template_class.from_code(environment, code, environment.make_globals(None))


def render(template: Template, variables: Mapping[str, Any], limits: RenderLimits | None = None) -> str:
    """The text of a compiled template.

    Raises:
        TemplateRefusal: the template refused the messages itself.
        LimitExceeded: it ran or grew beyond the limits.
        Exception: whatever else an expression of the template raised.
    """
    return "".join(template.generate({**variables, _BUDGET: Budget(limits or RenderLimits())}))


class _Charge(NodeTransformer):
    """Sends loops, literal text and `~` through the filters that charge or check them."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "charged")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, "bounded")

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        # A constant passes through `finalize`, which charges it; template data does not.
        return nodes.Const(node.data, lineno=node.lineno)


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


@pass_context
def _charged(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    budget: Budget = context[_BUDGET]
    for item in items:
        budget.step()
        yield item


@pass_context
def _written(context: Context, value: Any) -> str:
    text = str(value)
    context[_BUDGET].write(len(text))
    return text


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

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=_written
        )
        self.filters["tojson"] = _tojson
        self.filters = {name: _checked_filter(name, function) for name, function in self.filters.items()}
        self.filters |= {"charged": _charged, "bounded": bounded}
        del self.globals["lipsum"]
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "dict": _TemplateDict(),
            "namespace": _TemplateNamespace,
        }

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget: Budget = context[_BUDGET]
        budget.step(1 + sum(len(arg) for arg in args if isinstance(arg, (list, tuple, dict, range))))
        method = getattr(function, "__wrapped__", function)
        receiver = getattr(method, "__self__", None)
        if isinstance(receiver, str):
            name = method.__name__
            check_call(name, receiver, args, kwargs)
            if name == "join" and args:
                args = (_listed(args[0]), *args[1:])
                check_join(args[0], receiver)
        return bounded(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        check_operator(operator, left, right)
        return bounded(super().call_binop(context, operator, left, right))


def _listed(items: Any) -> Any:
    """A list of what an iterator would give; everything else as it is."""
    return list(items) if isinstance(items, Iterator) else items


def _checked_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    num_passed = int(hasattr(function, "jinja_pass_arg"))

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        passed, (value, *rest) = args[:num_passed], args[num_passed:]
        value = _listed(value) if name == "join" else value
        if name == "join":
            check_join(value, rest[0] if rest else kwargs.get("d", ""))
        else:
            check_call(name, value, rest, kwargs)
        return bounded(function(*passed, value, *rest, **kwargs))

    return checked


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


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
