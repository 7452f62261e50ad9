"""The template sandbox: what a hostile or broken template cannot do."""

import pytest
from jinja2.exceptions import SecurityError, UndefinedError

from genai.text.template_limits import MAX_SIZE, LimitExceeded, RenderLimits
from genai.text.template_sandbox import compile_template, render


def run(source: str, limits: RenderLimits | None = None, **variables: object) -> str:
    return render(compile_template(source), variables, limits)


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
    """The sandbox either raises or gives an undefined value; it never gives the object."""
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


DOUBLE = "{{% set ns = namespace(x='ab') %}}{{% for i in range(60) %}}{{% set ns.x = {} %}}{{% endfor %}}"


@pytest.mark.parametrize(
    "source",
    [
        DOUBLE.format("ns.x ~ ns.x"),
        DOUBLE.format("ns.x + ns.x"),
        DOUBLE.format("ns.x * 2"),
        DOUBLE.format("ns.x.replace('a', 'aa')"),
        DOUBLE.format("ns.x | replace('a', 'aa')"),
        DOUBLE.format("[ns.x, ns.x] | join"),
        DOUBLE.format("'{0}{0}'.format(ns.x)"),
        DOUBLE.format("'%s%s' % (ns.x, ns.x)"),
        DOUBLE.format("ns.x.join(['a', 'b', 'c'])"),
        DOUBLE.format("(ns.x, ns.x) | map('string') | join"),
        "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x=7) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
        "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set t %}{{ ns.x }}{{ ns.x }}{% endset %}"
        "{% set ns.x = t %}{% endfor %}",
        "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}"
        "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = f(ns.x) %}{% endfor %}",
        "{% for i in range(99999) %}" + "some constant text " * 10 + "{% endfor %}",
        "{{ 'a' * 10 ** 12 }}",
        "{{ 10 ** 12 * 'a' }}",
        "{{ [1] * 10 ** 12 }}",
        "{{ 10 ** 10000000000 }}",
        "{{ 'a'.center(10 ** 10) }}",
        "{{ 'a' | center(10 ** 10) }}",
        "{{ 'a'.ljust(width) }}",
        "{{ 'a'.zfill(width) }}",
        "{{ 'a\\tb'.expandtabs(width) }}",
        "{{ 'a\\nb' | indent(width) }}",
        "{{ [1] | tojson(indent=width) }}",
        "{{ [1] | batch(10 ** 9, 'x') | list }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (10 ** 9, 1) }}",
        "{{ '%(a)1000000000d' % {'a': 1} }}",
        "{{ '%.1000000000f' % 1 }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 10 ** 9) }}",
        "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
        "{{ 'a'.translate({97: 'aaaa'}) }}",
        "{{ range(10 ** 7) | list }}",
    ],
)
def test_nothing_grows_without_end(source):
    with pytest.raises((LimitExceeded, OverflowError)):
        run(source, width=10**9)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
        "{% for i in range(90000) recursive %}{{ loop(range(90000)) }}{% endfor %}",
    ],
)
def test_nothing_runs_without_end(source):
    with pytest.raises(LimitExceeded, match="more than 20000 loop rounds and calls"):
        run(source, RenderLimits(steps=20_000))


def test_slow_work_meets_the_time_limit():
    source = "{% for i in range(90000) %}{% set x = text | upper %}{% endfor %}"
    with pytest.raises(LimitExceeded, match=r"longer than 0\.05 seconds"):
        run(source, RenderLimits(seconds=0.05), text="a" * 2**20)


def test_output_has_a_limit_of_its_own():
    assert len(run("{{ text }}", RenderLimits(characters=10), text="a" * 10)) == 10
    with pytest.raises(LimitExceeded, match="wrote more than 10 characters"):
        run("{{ text }}", RenderLimits(characters=10), text="a" * 11)


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
        ("{{ text | length }}", str(MAX_SIZE)),
    ],
)
def test_ordinary_sizes_pass(source, expected):
    assert run(source, text="a" * MAX_SIZE) == expected


def test_threads_render_one_template_at_once():
    from concurrent.futures import ThreadPoolExecutor

    template = compile_template("{% for i in range(n) %}{{ i }},{% endfor %}")
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda n: render(template, {"n": n}), range(100)))
    assert texts == ["".join(f"{i}," for i in range(n)) for n in range(100)]
