"""onnxruntime's exception classes by name, as kinds of our errors.

Scripts that catch `onnxruntime.capi.onnxruntime_pybind11_state.InvalidArgument` catch `genai.InvalidArgument` after
changing the import. Wrong names and missing inputs are ValueErrors too, as onnxruntime raises there. What the session
below raises gets the name that onnxruntime has for it when it leaves this package (`typed`), its parts unchanged.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FunctionType
from typing import Any, TypeVar, cast

from genai.kernels.device import DeviceFailed

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
    """A node failed while running, or a model cannot be loaded for a reason that has no class of its own."""


class InvalidArgument(ArgumentError):
    """An input, output or option is unknown, of the wrong type or shape, or holds values out of range."""


class NoSuchFile(ModelFolderError):
    """The model's file is missing."""


class NoModel(GenaiError):
    """The session has no model."""


class InvalidProtobuf(ProtobufError):
    """The model is not a protobuf message."""


class InvalidGraph(GraphError):
    """The model is protobuf, but not a valid graph."""


class NotImplemented(UnsupportedOpError):
    """An operator, a version of it or an element type has no kernel."""


class RuntimeException(OutOfMemoryError):
    """Something outside the model failed while running: memory."""


class ModelLoaded(GenaiError):
    """The session already has its model."""


class ModelLoadCanceled(LoadCancelledError):
    """Loading was called off by `SessionOptions.set_load_cancellation_flag`."""


class EngineError(GenaiError):
    """An execution provider failed."""


class EPFail(ProviderError):
    """An execution provider could not be set up, or failed."""


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
# Other functions raise these too, and keep them.
_OF_LOADING: _Classes = (
    *_OF_SESSIONS,
    (ModelFolderError, NoSuchFile),
    (UnsupportedOpError, NotImplemented),
    (UnsupportedModelError, Fail),
    (ProtobufError, InvalidProtobuf),
    (GraphError, InvalidGraph),
)


def renamed(error: GenaiError, *, loading: bool = False) -> GenaiError:
    """The error under the name that onnxruntime has for it; itself where there is none.

    Args:
        loading: whether it comes from loading a model.
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
    """Give errors of loading a model the names that onnxruntime has for them."""
    try:
        yield
    except InternalError as error:
        raise error.__cause__ or error from None  # which `typed` makes an InvalidArgument
    except GenaiError as error:
        if (found := renamed(error, loading=True)) is error:
            raise
        raise found from error


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
    """The function; its errors get onnxruntime's names, and those that are not ours become InvalidArgument.

    But for those that no argument is to blame for: memory that does not suffice is a RuntimeException, a GPU that fails
    a DeviceError. Calls of wrong arity are Python's affair.
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
                f"help(genai.{label or function.__name__}) says what it takes",
            ) from error

    return cast(F, call)
