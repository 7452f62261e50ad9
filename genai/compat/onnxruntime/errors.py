"""onnxruntime's exception classes by name, as errors of ours.

Scripts that catch `onnxruntime.capi.onnxruntime_pybind11_state.InvalidArgument` catch `genai.InvalidArgument` after
changing the import. Wrong names and missing inputs are ValueErrors too, as onnxruntime raises there.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any, TypeVar, cast

from genai.kernels.device import DeviceFailed

from ...errors import (
    DeviceError,
    ExternalDataError,
    GenaiError,
    GraphError,
    InputError,
    ModelFolderError,
    UnsupportedOpError,
)


class Fail(GenaiError):
    """A node failed while running, or a model cannot be loaded for a reason that has no class of its own."""


class InvalidArgument(InputError):
    """An input, output or option is unknown, of the wrong type or shape, or holds values out of range."""


class NoSuchFile(ModelFolderError):
    """The model's file is missing."""


class NoModel(GenaiError):
    """The session has no model."""


class InvalidProtobuf(GraphError):
    """The model is not a protobuf message."""


class InvalidGraph(GraphError):
    """The model is protobuf, but not a valid graph."""


class NotImplemented(UnsupportedOpError):
    """An operator, a version of it or an element type has no kernel."""


class RuntimeException(GenaiError):
    """Something outside the model failed while running: memory, or a call in the wrong order."""


class ModelLoaded(GenaiError):
    """The session already has its model."""


class ModelLoadCanceled(GenaiError):
    """Loading was called off by `SessionOptions.set_load_cancellation_flag`."""


class EngineError(GenaiError):
    """An execution provider failed."""


class EPFail(GenaiError):
    """An execution provider could not be set up."""


class ExternalDataFail(Fail, ExternalDataError):
    """External data is missing, truncated, or outside the model's folder."""


class SourceTypeError(InputError, TypeError):
    """A model cannot be read from an object of this kind."""


T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def typed_errors(owner: type[T]) -> type[T]:
    """Class decorator: public methods raise nothing but errors of ours; see `typed`."""
    for name, member in list(vars(owner).items()):
        if name.startswith("_") and name not in ("__init__", "__setattr__"):
            continue
        label = owner.__name__ if name == "__init__" else f"{owner.__name__}.{name}"
        if isinstance(member, staticmethod):
            setattr(owner, name, staticmethod(typed(member.__func__, label)))
        elif isinstance(member, FunctionType):
            setattr(owner, name, typed(member, label))
    return owner


def typed(function: F, label: str = "") -> F:
    """The function; errors that are not ours become InvalidArgument, but for those that no argument is to blame for.

    Memory that does not suffice is a RuntimeException, a GPU that fails a DeviceError. Calls of wrong arity are
    Python's affair.
    """

    @wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        try:
            return function(*given, **named)
        except GenaiError:
            raise
        except MemoryError as error:
            raise out_of_memory(f"in {label or function.__name__}", error) from error
        except DeviceFailed as error:
            raise DeviceError(
                f"the GPU failed in {label or function.__name__}",
                str(error),
                "make sessions and values again; genai doctor shows what is there",
            ) from error
        except Exception as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is None:
                raise
            raise InvalidArgument(
                f"{label or function.__name__} cannot take {reprlib.repr(given)}, {reprlib.repr(named)}",
                f"{type(error).__name__}: {error!s:.300}",
                f"help(genai.{label or function.__name__}) says what it takes",
            ) from error

    return cast(F, call)


def out_of_memory(where: str, error: MemoryError) -> RuntimeException:
    """The error of memory, of the host or of a GPU, that does not suffice."""
    return RuntimeException(
        f"out of memory {where}",
        str(error) or "an allocation failed",
        "use smaller inputs or a smaller model, or let go of values that are not needed any more",
    )


def as_session_error(error: GenaiError) -> GenaiError:
    """An error of the reader or compiler as the class that onnxruntime has for it; others as they are."""
    classes: tuple[tuple[type[GenaiError], type[GenaiError]], ...] = (
        (ExternalDataError, ExternalDataFail),
        (ModelFolderError, NoSuchFile),
        (UnsupportedOpError, NotImplemented),
        (GraphError, InvalidGraph),
    )
    if type(error).__module__ == __name__:
        return error
    if isinstance(error, GraphError) and error.why.startswith(
        ("it is not a protobuf", "it is empty", "it has no graph")
    ):
        return InvalidProtobuf(error.what, error.why, error.fix)
    for found, ours in classes:
        if isinstance(error, found):
            return ours(error.what, error.why, error.fix)
    return error
