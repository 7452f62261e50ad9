"""onnxruntime's exception classes, as subclasses of our errors.

Scripts that catch `onnxruntime.capi.onnxruntime_pybind11_state.InvalidArgument` can catch `genai.InvalidArgument` after
changing the import, or run unchanged (`genai.compat.onnxruntime.install`). Errors about wrong names and missing inputs
are also ValueErrors, as in onnxruntime. When an error of the underlying session leaves this package, `typed` converts
it to onnxruntime's class and keeps its parts.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FunctionType
from typing import Any, TypeVar, cast

from genai.kernels.errors import DeviceFailed

from ...errors import (
    ArgumentError,
    ExternalDataError,
    GenaiError,
    GraphError,
    InternalError,
    LoadCancelledError,
    ModelFolderError,
    NodeError,
    OutOfMemoryError,
    ProtobufError,
    ProviderError,
    UnsupportedModelError,
    UnsupportedOpError,
    gpu_failed,
    out_of_memory,
)


class Fail(NodeError):
    """A node failed while running, or a model cannot be loaded for a reason without a more specific class."""


class InvalidArgument(ArgumentError):
    """An input, output or option is unknown, has the wrong type or shape, or contains values that are out of range."""


class NoSuchFile(ModelFolderError):
    """The model's file is missing."""


class NoModel(GenaiError):
    """The session has no model."""


class InvalidProtobuf(ProtobufError):
    """The model is not a protobuf message."""


class InvalidGraph(GraphError):
    """The model is protobuf, but not a valid graph."""


class NotImplemented(UnsupportedOpError):
    """An operator, an operator version or an element type has no kernel."""


class RuntimeException(OutOfMemoryError):
    """The machine or a device has insufficient memory."""


class ModelLoaded(GenaiError):
    """The session has already loaded its model."""


class ModelLoadCanceled(LoadCancelledError):
    """`SessionOptions.set_load_cancellation_flag` cancelled the loading of a model."""


class EngineError(GenaiError):
    """An execution provider failed."""


class EPFail(ProviderError):
    """An execution provider could not be set up, or failed."""


class NotFound(Exception):
    """Never raised; programs that catch it in onnxruntime can refer to it."""


class ModelRequiresCompilation(Exception):
    """Never raised: models are not compiled in advance."""


class DeviceReset(Exception):
    """Never raised: a GPU that fails raises DeviceError."""


class ExternalDataFail(Fail, ExternalDataError):
    """External data is missing, truncated, or outside the model's folder."""


_Classes = tuple[tuple[type[GenaiError], type[GenaiError]], ...]
_OF_SESSIONS: _Classes = (
    (ArgumentError, InvalidArgument),
    (NodeError, Fail),
    (ProviderError, EPFail),
    (OutOfMemoryError, RuntimeException),
    (ExternalDataError, ExternalDataFail),
)
# Functions that do not load a model also raise these errors, and there the errors keep their classes.
_OF_LOADING: _Classes = (
    *_OF_SESSIONS,
    (ModelFolderError, NoSuchFile),
    (UnsupportedOpError, NotImplemented),
    (UnsupportedModelError, Fail),
    (ProtobufError, InvalidProtobuf),
    (GraphError, InvalidGraph),
)


def renamed(error: GenaiError, *, loading: bool = False) -> GenaiError:
    """Convert an error to onnxruntime's class; errors without a counterpart are returned unchanged.

    Args:
        loading: True if the error comes from loading a model.
    """
    if type(error).__module__ == __name__:
        return error
    for ours, theirs in _OF_LOADING if loading else _OF_SESSIONS:
        if isinstance(error, ours):
            found = theirs(error.what, error.why, error.fix).with_traceback(error.__traceback__)
            found.__cause__ = error.__cause__
            return found
    return error


T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


@contextmanager
def named_as_in_onnxruntime() -> Iterator[None]:
    """Convert errors of loading a model to onnxruntime's classes."""
    try:
        yield
    except InternalError as error:
        raise error.__cause__ or error from None  # `typed` converts it to InvalidArgument
    except GenaiError as error:
        if (found := renamed(error, loading=True)) is error:
            raise
        raise found from error


def typed_errors(owner: type[T]) -> type[T]:
    """Class decorator: make public methods raise only our errors; see `typed`."""
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
    """Decorator: convert our errors to onnxruntime's classes, and other errors to InvalidArgument.

    Two kinds of errors are not caused by an argument: insufficient memory becomes RuntimeException, and a GPU failure
    becomes DeviceError. A TypeError for a wrong number of arguments is not converted.
    """

    @wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        try:
            return function(*given, **named)
        except GenaiError as error:
            if (found := renamed(error)) is error:
                raise
            raise found from found.__cause__
        except MemoryError as error:
            raise renamed(out_of_memory(f"in {label or function.__name__}", error)) from error
        except DeviceFailed as error:
            raise gpu_failed(label or function.__name__, error) from error
        except Exception as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is None:
                raise
            raise InvalidArgument(
                f"{label or function.__name__} cannot take {reprlib.repr(given)}, {reprlib.repr(named)}",
                f"{type(error).__name__}: {error!s:.300}",
                f"see help(genai.{label or function.__name__})",
            ) from error

    return cast(F, call)
