"""The registry of kernels, keyed by (domain, operator, version), and kernels as plain functions of arrays.

A kernel is created once per node, when the plan is built: it reads attributes and packs constant weights. It is then
called once per step. The registry also records each kernel's source for the documentation. The signature of a plain
function declares its operator's inputs and attributes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from types import UnionType
from typing import Annotated, Any, Literal, Protocol, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from ..common.interrupts import InterruptsDeferred
from ..onnx.node import Node
from .index import OPERATORS

Array = NDArray[Any]
T = TypeVar("T")


class Kernel(Protocol):
    """Called once per step with the node's inputs (None = absent); returns the node's outputs in order."""

    def __call__(self, context: Any, inputs: Sequence[Any], /) -> tuple[Any, ...]: ...


class Subgraph(Protocol):
    """A compiled subgraph: a kernel that also has the (dtype, sizes) of each output, with None for unknown parts."""

    @property
    def outputs(self) -> Sequence[tuple[Any, tuple[int | None, ...] | None]]: ...

    def __call__(self, context: Any, inputs: Sequence[Any], /) -> tuple[Any, ...]: ...


# The accuracy_level of MatMulNBits and QMoE that allows int8 activations.
INT8_LEVEL = 4


class Packer(Protocol):
    """Shares packed weights: constants that several nodes use in one format are packed once."""

    def packed(self, names: tuple[str, ...], layout: str, make: Callable[[], T]) -> T: ...


@dataclass(frozen=True)
class NodeSpec:
    """The description of a node that a kernel factory receives.

    Attributes:
        domain, op_type, version: the operator, and the version that its model imports.
        attributes: attribute values in Python form (strings decoded).
        inputs: input names ("" = absent).
        outputs: output names ("" = unused).
        constants: constant value per input, or None.
        weights: packed forms of constants, shared between nodes.
        options: run-wide options, such as the accuracy or the threads.
        subgraphs: callable per attribute that runs the subgraph: (context, inputs) -> outputs.
        proto: function that creates the node as an onnx.NodeProto, for onnx.reference.
    """

    domain: str
    op_type: str
    version: int
    attributes: Mapping[str, Any]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    constants: tuple[Array | None, ...]
    weights: Packer
    options: Mapping[str, Any] = field(default_factory=dict)
    subgraphs: Mapping[str, Subgraph] = field(default_factory=dict)
    proto: Callable[[], Any] | None = None

    @property
    def exact(self) -> bool:
        """True if a product with quantised weights keeps its activations in float32.

        The option "accuracy" ("fp32", "int8", "auto") decides. With "auto", the node decides: accuracy_level 4 allows
        int8 activations. Levels 0 (unset) and 1 require float32. Levels 2 and 3 allow less precision, but float32 is
        used, as in onnxruntime.
        """
        accuracy = self.options.get("accuracy", "auto")
        allowed = accuracy == "int8" or self.attributes.get("accuracy_level", 0) == INT8_LEVEL
        return accuracy == "fp32" or not allowed

    def has(self, index: int) -> bool:
        """Return True if input `index` is present."""
        return index < len(self.inputs) and self.inputs[index] != ""

    def constant(self, index: int) -> Array:
        """Return the constant value of input `index`. Raises KernelError if it is computed at run time."""
        value = self.constants[index] if index < len(self.constants) else None
        if value is None:
            name = self.inputs[index] if index < len(self.inputs) else "(absent)"
            raise KernelError(f"{self.op_type}: input {index} ({name!r}) must be a constant")
        return value

    def constant_name(self, index: int) -> str:
        """Return the name of a constant input, "" if absent. Raises KernelError if it is computed at run time."""
        if not self.has(index):
            return ""
        self.constant(index)
        return self.inputs[index]

    def pack(self, indices: tuple[int, ...], layout: str, make: Callable[[], T]) -> T:
        """Pack the constants at `indices` into `layout`, once for all nodes that request the same packed weight."""
        return self.weights.packed(tuple(map(self.constant_name, indices)), layout, make)


class KernelError(ValueError):
    """A node is not supported by its kernel; the message names the operator and the reason."""


KernelFactory = Callable[[NodeSpec], Kernel]


@dataclass(frozen=True)
class Entry:
    """A registered kernel; `source` records its origin."""

    domain: str
    op_type: str
    since_version: int
    source: str
    factory: KernelFactory


_ENTRIES: dict[tuple[str, str], list[Entry]] = {}


def register(
    op_type: str, *, domain: str = "", since_version: int = 1, source: str = "ours"
) -> Callable[[KernelFactory], KernelFactory]:
    """Return a decorator that registers a kernel factory for an operator."""

    def add(factory: KernelFactory) -> KernelFactory:
        entries = _ENTRIES.setdefault((domain, op_type), [])
        # The latest registration of a version comes first, so that users can replace kernels.
        entries.insert(0, Entry(domain, op_type, since_version, source, factory))
        entries.sort(key=lambda entry: entry.since_version, reverse=True)
        return factory

    return add


def find_kernel(domain: str, op_type: str, version: int) -> Entry | None:
    """Return an operator's newest kernel that is not newer than the model's version, or None."""
    load_operator(domain, op_type)
    return next((entry for entry in _ENTRIES.get((domain, op_type), ()) if entry.since_version <= version), None)


def entries() -> list[Entry]:
    """Return all registered kernels; the documentation lists them."""
    load_ops()
    return [entry for several in _ENTRIES.values() for entry in several]


def load_operator(domain: str, op_type: str) -> None:
    """Import the files of this package that register an operator's kernels and rules."""
    for module in _FILES.get((domain, op_type), ()):
        load(f"{__package__}.{module}")


def load_ops() -> None:
    """Import all files, so that the registry is complete."""
    for module in OPERATORS:
        load(f"{__package__}.{module}")


_LOADED: set[str] = set()


def load(module: str) -> None:
    """Import a module; interrupts are deferred, because Python can lose them during an import."""
    if module not in _LOADED:  # sys.modules also contains modules that another thread is importing
        with InterruptsDeferred():
            import_module(module)
        _LOADED.add(module)


def files_of(index: Mapping[str, Mapping[str, str]]) -> dict[tuple[str, str], list[str]]:
    """Invert an index by file and domain to the files that register each (domain, operator)."""
    files: dict[tuple[str, str], list[str]] = {}
    for file, domains in index.items():
        for domain, names in domains.items():
            for name in names.split():
                files.setdefault((domain, name), []).append(file)
    return files


_FILES = files_of(OPERATORS)
# The files whose kernels never call BLAS.
WITHOUT_BLAS = frozenset(
    "activations blocked casting control detection elementwise filling indexing lookups movement normalization pooling "
    "reduction reshaping resize slicing text trees".split()
)


def may_call_blas(domain: str, op_type: str) -> bool:
    """Return True if kernels of this package for an operator may call BLAS."""
    files = _FILES.get((domain, op_type))
    return files is None or not WITHOUT_BLAS.issuperset(files)


class _Unpacked:
    """Packs nothing, because a node that is computed once does not benefit from packed weights."""

    def packed(self, names: tuple[str, ...], layout: str, make: Callable[[], T]) -> T:
        return make()


def evaluated(node: Node, version: int, inputs: Sequence[Any], **options: Any) -> tuple[Any, ...]:
    """Compute a node once with our kernel. Raises NotImplementedError if there is no such kernel."""
    domain, op_type = node.key
    entry = find_kernel(domain, op_type, version)
    if entry is None or entry.source != "ours":
        raise NotImplementedError(f"this package has no kernel for {op_type}")
    names, unknown = (tuple(node.inputs), tuple(node.outputs)), (None,) * len(node.inputs)
    spec = NodeSpec(domain, op_type, version, node.attribute_values(), *names, unknown, _Unpacked(), options)
    with np.errstate(all="ignore"):
        return entry.factory(spec)(None, inputs)


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Return a kernel's result as the tuple that plans expect."""
    return value if isinstance(value, tuple) else (value,)


def scalar(value: Any) -> Any:
    """Return the only element of an array of any rank. Raises KernelError if it does not have exactly one."""
    array = np.asarray(value)
    if array.size != 1:
        raise KernelError(f"a single number is expected, but the value has shape {list(array.shape)}")
    return array.item()


def rules_by_operator(rules: dict[tuple[str, str], T], own_domain: str) -> Callable[..., Callable[[T], T]]:
    """Return a decorator factory that stores a rule in `rules` for operators of a domain (default: `own_domain`)."""

    def for_operators(*op_types: str, domain: str = own_domain) -> Callable[[T], T]:
        def add(rule: T) -> T:
            rules.update({(domain, op_type): rule for op_type in op_types})
            return rule

        return add

    return for_operators


F = TypeVar("F", bound=Callable[..., Any])
# Types of attributes: integers of at least 0, integers of at least 1, and numbers as an array.
Natural: TypeAlias = Annotated[int, 0]
Positive: TypeAlias = Annotated[int, 1]
Float32s: TypeAlias = Annotated[Any, np.float32]
Maker: TypeAlias = Callable[[NodeSpec], Any]


def operator(*op_types: str, domain: str = "", since_version: int = 1, **makers: Maker) -> Callable[[F], F]:
    """Return a decorator that registers a function as the kernel for these operators.

    Positional parameters are the node's inputs; an absent input is None if the parameter's default is None.
    Keyword-only parameters are the node's attributes, converted to the annotated type, or to the type of the default if
    there is no annotation. Attributes without a parameter are ignored. `threads` and `spec` are the run's threads and
    the node itself. A returned tuple contains several outputs.

    Args:
        makers: keyword-only parameters that are not attributes, as functions that create them once per node. If such an
            object holds packed copies of constants, its attribute `packed_inputs` contains the indices of these inputs;
            the function then receives None for them.
    """

    def add(function: F) -> F:
        for op_type in op_types:
            register(op_type, domain=domain, since_version=since_version)(from_function(function, **makers))
        return function

    return add


def from_function(function: Callable[..., Any], **makers: Maker) -> KernelFactory:
    """Return the kernel factory that `operator` registers for a function."""

    def factory(spec: NodeSpec) -> Kernel:
        most, attributes = _parameters(function)
        values = {name: (makers.get(name) or read)(spec) for name, read in attributes.items()}
        call = partial(function, **values) if values else function
        count = len(spec.inputs) if most is None else most

        def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
            value = call(*inputs[:count])
            return value if isinstance(value, tuple) else (value,)

        packed = tuple(index for value in values.values() for index in getattr(value, "packed_inputs", ()))
        if packed:
            kernel.packed = packed  # type: ignore[attr-defined]
        return kernel

    return factory


@cache
def _parameters(function: Callable[..., Any]) -> tuple[int | None, Mapping[str, Maker]]:
    """Return a function's maximum number of inputs (None = unlimited), and the reader of each keyword's value."""
    if isinstance(function, np.ufunc):
        return function.nin, {}
    # A wrapper has its own inputs, and the attributes of the wrapped function.
    own_kinds = [p.kind for p in inspect.signature(function, follow_wrapped=False).parameters.values()]
    hints, parameters = get_type_hints(function, include_extras=True), inspect.signature(function).parameters
    attributes = {
        name: _reader(name, hints.get(name, type(p.default)), p.default)
        for name, p in parameters.items()
        if p.kind is p.KEYWORD_ONLY
    }
    most = (
        None
        if inspect.Parameter.VAR_POSITIONAL in own_kinds
        else own_kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD)
    )
    return most, attributes


def _reader(name: str, kind: Any, default: Any) -> Maker:
    if name == "spec":
        return lambda spec: spec
    if name == "threads":
        return lambda spec: spec.options.get("threads")

    def read(spec: NodeSpec) -> Any:
        value = spec.attributes.get(name, default)
        if value is inspect.Parameter.empty:
            raise ValueError(f"{spec.op_type}: the attribute {name!r} is missing")
        return None if value is None else _converted(spec, name, kind, value)

    return read


def _converted(spec: NodeSpec, name: str, kind: Any, value: Any) -> Any:
    """Convert an attribute's value to the type of its parameter."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return _converted(spec, name, parts[0], value)
    if origin is tuple:
        return tuple(_converted(spec, name, parts[0], item) for item in value)
    if origin is Literal:
        if value not in parts:
            raise KernelError(
                f"{spec.op_type}: {name} is {value!r}, but it must be one of {', '.join(map(str, parts))}"
            )
        return value
    if kind == Float32s:
        return np.asarray(value, np.float32)
    if kind in (Natural, Positive):
        if int(value) < parts[1]:
            raise KernelError(f"{spec.op_type}: {name} is {int(value)}, but it must be at least {parts[1]}")
        return int(value)
    return kind(value) if kind in (bool, float, int, str) else value
