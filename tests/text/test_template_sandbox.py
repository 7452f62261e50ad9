"""The template sandbox: what a hostile or broken template cannot do."""

import pytest
from jinja2.exceptions import SecurityError, UndefinedError

from genai.text.template_server import compile_template


def run(source: str, **variables: object) -> str:
    return compile_template(source).render(variables)


@pytest.mark.parametrize(
    "expression",
    [
        "''.__class__",
        "''.__class__.__mro__[1].__subclasses__()",
        "().__class__.__base__",
        "run.__globals__",
        "dict.__globals__",
        "dict.__init__",
        "namespace.__init__.__globals__",
        "raise_exception.__globals__",
        "strftime_now.__code__",
        "range.__class__",
        "joiner.__init__.__globals__",
        "cycler.__init__.__globals__['os']",
        "'{0.__class__.__mro__}'.format('')",
        "'{a.__class__}'.format_map({'a': ''})",
        "'' | attr('__class__')",
        "self.__init__.__globals__",
    ],
)
def test_python_is_out_of_reach(expression):
    """The sandbox either raises or returns an undefined value, never the object."""
    try:
        text = run("{{ " + expression + " }}", run=run)
    except (SecurityError, UndefinedError):
        return
    assert text == ""


@pytest.mark.parametrize(
    "source",
    [
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{% set ns = namespace(_a=1) %}",
        "{% set ns = namespace({'__html__': 1}) %}",
        "{% set ns = namespace({1: 1}) %}",
        "{{ items.append(1) }}",
        "{{ items.clear() }}",
        "{{ table.update({'a': 1}) }}",
        "{{ table.pop('a') }}",
    ],
)
def test_nothing_given_can_be_changed_and_no_underscore_is_stored(source):
    items, table = [1], {"a": 0}
    with pytest.raises(SecurityError):
        run(source, items=items, table=table)
    assert (items, table) == ([1], {"a": 0})


def test_a_namespace_works_as_usual():
    assert run("{% set ns = namespace(n=1, self=2) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ ns.self }}") == "22"
    assert run("{% set ns = namespace({'n': 1}) %}{{ ns.n }}") == "1"


def test_there_is_no_random_text():
    assert run("{{ lipsum is defined }}") == "False"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ '=' * 80 }}", "=" * 80),
        ("{{ 'ab'.center(6) }}|{{ 7 ** 2 }}|{{ '%05.1f' % 2 }}|{{ '{:>4}'.format(1) }}", "  ab  |49|002.0|   1"),
        ("{{ '**2024** 100%: %s' % 1 if false else '{2024}' }}", "{2024}"),
        ("{{ 'year 2024: %s and {}' % 5 }}", "year 2024: 5 and {}"),
        ("{{ {'a': {'b': 1}} | tojson(indent=2) }}", '{\n  "a": {\n    "b": 1\n  }\n}'),
        ("{{ [1, 2] | batch(2) | list }}", "[[1, 2]]"),
        ("{{ dict(a=1) }}{{ dict.fromkeys(['b'], 2) }}{{ dict.__class__ }}{{ dict.mro }}", "{'a': 1}{'b': 2}"),
    ],
)
def test_ordinary_expressions(source, expected):
    assert run(source) == expected
