"""Arguments of operators: what Python writes is what machine code reads; what is not declared is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from genai.kernels.cpu.jit.arguments import MAX_ARGUMENTS, Address, Arguments, Binding, BoundVector, layout, size
from genai.kernels.cpu.jit.memory import write_float32, write_int64
from genai.kernels.cpu.jit.native import Library, NativeOp
from genai.kernels.cpu.program.calls import Call, operators_of, program_of
from genai.kernels.cpu.program.driver import call_operator
from genai.kernels.cpu.program.thread_pool import Threads


class Base(Arguments):
    first: Address
    count: int


class Given(Base):
    factor: float
    last: int = -7


class NoArguments(Arguments):
    """Of an operator that is told nothing."""


class Nested(Arguments):
    before: int
    given: Given
    base: Base
    after: int


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Library:
    """A library of its own, without operators."""
    monkeypatch.setenv("GENAI_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "sources").mkdir()
    return Library(tmp_path / "sources")


def given(**changes: Any) -> Given:
    return Given(**({"first": None, "count": 3, "factor": 0.1} | changes))


def run(op: NativeOp, arguments: Arguments) -> None:
    Threads(1).run(program_of([[Call(op, arguments)]]), nanoseconds=1.0)


def test_machine_code_reads_what_python_writes(library: Library) -> None:
    """Those of a base class, of another class among them, defaults; float is read as float32."""
    out = np.zeros(8, np.int64)

    @library.native_op(Nested)
    def copy(arguments: Nested, context: int, begin: int, end: int, scratch: int) -> int:
        inner, target = arguments.given, arguments.base.first
        write_int64(target, arguments.before)
        write_int64(target + 8, arguments.after)
        write_int64(target + 16, inner.count)
        write_int64(target + 24, inner.last)
        write_int64(target + 32, arguments.base.count)
        write_int64(target + 40, inner.first)
        write_float32(target + 48, inner.factor)
        return 0

    base = Base(first=out, count=np.int64(2**62))
    run(copy, Nested(before=-1, given=given(), base=base, after=5))
    assert out[:6].tolist() == [-1, 5, 3, -7, 2**62, 0]
    assert out[6:].view(np.float32)[0] == np.float32(0.1)


def test_addresses(library: Library) -> None:
    """Of arrays (of a view its first element), of operators, as numbers; None is 0; bindings stay open."""

    @library.native_op(NoArguments)
    def nothing(arguments: NoArguments, context: int, begin: int, end: int, scratch: int) -> int:
        return 0

    array = np.zeros((4, 4), np.int16)
    array.flags.writeable = False
    addresses = [(array, array.ctypes.data), (array[1:, 2:], array.ctypes.data + 12), (None, 0), (np.int64(4096), 4096)]
    for value, expected in [*addresses, (nothing, nothing.address)]:
        assert Base(first=value, count=1).encoded() == [expected, 1]
    vector = BoundVector("v", size=4)
    assert Base(first=vector, count=Binding("n") + 2).encoded() == [vector, Binding("n", 2)]
    nested = Nested(before=0, given=given(first=nothing), base=Base(first=None, count=0), after=0)
    assert nested.operators() == [nothing]


def test_every_field_has_a_place() -> None:
    assert [(field.name, field.kind, field.first_entry) for field in layout(Nested)] == [
        ("before", "int", 0),
        ("given", Given, 1),
        ("base", Base, 5),
        ("after", "int", 7),
    ]
    assert [field.kind for field in layout(Given)] == ["address", "int", "float", "int"]
    assert (size(Nested), size(NoArguments)) == (8, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"counts": 3}, "unexpected keyword argument 'counts'"),
        ({"first": "x"}, "Given.first is 'x', expected an address"),
        ({"first": 0.5}, "Given.first is 0.5, expected an address"),
        ({"first": [1, 2]}, r"Given.first is \[1, 2\], expected an address"),
        ({"count": 3.0}, "Given.count is 3.0, expected a whole number"),
        ({"count": np.float32(3)}, "Given.count is .*3.0.*, expected a whole number"),
        ({"count": None}, "Given.count is None, expected a whole number"),
        ({"count": "3"}, "Given.count is '3', expected a whole number"),
        ({"count": np.zeros(1, np.int64)}, r"Given.count is array\(\[0\]\), expected a whole number"),
        ({"factor": "0.1"}, "Given.factor is '0.1', expected a number"),
        ({"factor": None}, "Given.factor is None, expected a number"),
        ({"factor": Binding("x")}, "Given.factor is .*, expected a number"),
        ({"factor": 1j}, "Given.factor is 1j, expected a number"),
    ],
)
def test_values_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        given(**changes).encoded()


def test_values_that_are_missing_or_of_another_class() -> None:
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'count'"):
        Base(first=None)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="takes 1 positional argument"):
        Base(None, 3)  # type: ignore[misc]
    for wrong in (Base(first=None, count=0), 3, None):
        with pytest.raises(TypeError, match=r"Nested.given is .*, expected Given"):
            Nested(before=0, given=wrong, base=Base(first=None, count=0), after=0).encoded()  # type: ignore[arg-type]


def test_declarations_that_cannot_be(library: Library) -> None:
    text = type("Text", (Arguments,), {"__annotations__": {"name": str}})
    full = type("Full", (Arguments,), {"__annotations__": {f"a{i}": int for i in range(MAX_ARGUMENTS)}})
    more = type("More", (full,), {"__annotations__": {"given": Given}})
    assert size(full) == MAX_ARGUMENTS
    for declaration, message in (
        (text, "Text.name cannot be <class 'str'>"),
        (more, f"More has {MAX_ARGUMENTS + 4} entries, but the maximum is {MAX_ARGUMENTS}"),
    ):
        with pytest.raises(TypeError, match=message):
            library.native_op(declaration)


def test_the_last_word_of_a_call(library: Library) -> None:
    """Two calls with as many arguments as there can be: neither reads the other's."""
    names = [f"a{i}" for i in range(MAX_ARGUMENTS - 1)]
    full = type("Full", (Arguments,), {"__annotations__": dict.fromkeys(names, int) | {"out": Address}})

    @library.native_op(full)
    def first_and_out(arguments: Any, context: int, begin: int, end: int, scratch: int) -> int:
        write_int64(arguments.out, arguments.a0)
        return 0

    out = np.zeros(2, np.int64)
    told = [full(**dict.fromkeys(names, 5 + index), out=out[index:]) for index in range(2)]
    Threads(1).run(program_of([[Call(first_and_out, one) for one in told]]), nanoseconds=1.0)
    assert out.tolist() == [5, 6]


def test_a_name_that_is_not_declared(library: Library) -> None:
    @library.native_op(Base)
    def misspelt(arguments: Base, context: int, begin: int, end: int, scratch: int) -> int:
        return arguments.coumt  # type: ignore[attr-defined, no-any-return]

    with pytest.raises(Exception, match="Unknown attribute 'coumt'"):
        library.prepare([misspelt])


def test_another_operators_arguments(library: Library) -> None:
    """Not even those of a class that adds to them."""

    @library.native_op(Base)
    def op(arguments: Base, context: int, begin: int, end: int, scratch: int) -> int:
        return 0

    for wrong in (given(), NoArguments()):
        with pytest.raises(TypeError, match=f"op takes Base, not {type(wrong).__name__}"):
            Call(op, wrong)


def test_an_operator_hands_a_part_of_its_arguments_on(library: Library) -> None:
    """To another one that it knows by its address, which is compiled with it."""

    @library.native_op(Given)
    def double(arguments: Given, context: int, begin: int, end: int, scratch: int) -> int:
        write_int64(scratch, 2 * arguments.count)
        return 0

    class OuterArguments(Arguments):
        out: Address
        given: Given

    @library.native_op(OuterArguments)
    def outer(arguments: OuterArguments, context: int, begin: int, end: int, scratch: int) -> int:
        inner = arguments.given
        return call_operator(inner.first, inner, context, begin, end, arguments.out)  # type: ignore[no-any-return]

    out = np.zeros(1, np.int64)
    call = Call(outer, OuterArguments(given=given(first=double, count=21), out=out))
    assert operators_of([call]) == [outer, double]
    Threads(1).run(program_of([[call]]), nanoseconds=1.0)
    assert out[0] == 42
