"""ONNX's interface for backends (onnx.backend.base) over sessions, as onnxruntime.backend has it.

>>> from genai.compat.onnxruntime import backend
>>> backend.supports_device("CPU")
True
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onnx.backend.base import Backend, BackendRep

from ...errors import InputError, OptionError
from .inference_session import InferenceSession
from .options import RunOptions, SessionOptions


class SessionRep(BackendRep):
    """A model that is ready to run."""

    def __init__(self, session: InferenceSession) -> None:
        self.session = session

    def run(self, inputs: Any, **options: Any) -> list[Any]:  # type: ignore[override]
        """Results in the order of the model's outputs.

        Args:
            inputs: arrays by name, a list or tuple of them in the order of the model's inputs, or the only one.
            options: attributes of RunOptions.

        Raises:
            InputError: there are more or fewer than the model has. OptionError: an option that is not known.
        """
        names = [value.name for value in self.session.get_inputs()]
        if not isinstance(inputs, Mapping):
            given: Sequence[Any] = inputs if isinstance(inputs, list | tuple) else [inputs]
            if len(given) != len(names):
                raise InputError(
                    f"{len(given)} inputs were given", f"the model has {len(names)}: {', '.join(names)}", "give each"
                )
            inputs = dict(zip(names, given, strict=True))
        return self.session.run(None, inputs, _with(RunOptions(), options))


class SessionBackend(Backend):
    """Makes sessions of models."""

    @classmethod
    def is_compatible(cls, model: Any, device: str | None = None, **options: Any) -> bool:
        """Whether models can be run on a device; about the model nothing is said, as in onnxruntime."""
        return device is None or cls.supports_device(device)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Whether a device can be named: the CPU."""
        return device.partition(":")[0].upper() == "CPU"

    @classmethod
    def prepare(cls, model: Any, device: str | None = None, **options: Any) -> SessionRep:
        """A model, ready to run.

        Args:
            model: a path, bytes, a ModelProto, a session, or what this returned.
            options: attributes of SessionOptions.

        Raises:
            OptionError: a device or an option that is not known. As InferenceSession.
        """
        if isinstance(model, SessionRep):
            return model
        if device is not None and not cls.supports_device(device):
            raise OptionError(f"device = {device!r}", "a backend of sessions computes on the CPU", "leave device out")
        if isinstance(model, InferenceSession):
            return SessionRep(model)
        if hasattr(model, "SerializeToString"):
            model = model.SerializeToString()
        return SessionRep(InferenceSession(model, _with(SessionOptions(), options)))

    @classmethod
    def run_model(  # type: ignore[override]
        cls, model: Any, inputs: Any, device: str | None = None, **options: Any
    ) -> list[Any]:
        """Results of one run. See `prepare` and `SessionRep.run`."""
        return cls.prepare(model, device, **options).run(inputs)

    @classmethod
    def run_node(cls, *arguments: Any, **options: Any) -> Any:
        """Raises OptionError: a node has no version of the operator set, so that it says too little."""
        raise OptionError("run_node was called", "a node by itself names no operator set", "run a model of that node")


def _with(object_: Any, options: Mapping[str, Any]) -> Any:
    for name, value in options.items():
        if name.startswith("_") or not hasattr(object_, name) or callable(getattr(object_, name)):
            raise OptionError(
                f"unknown option {name!r}", f"{type(object_).__name__} has no attribute of that name", "leave it out"
            )
        setattr(object_, name, value)
    return object_


is_compatible = SessionBackend.is_compatible
supports_device = SessionBackend.supports_device
prepare = SessionBackend.prepare
run = run_model = SessionBackend.run_model
