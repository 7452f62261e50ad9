"""ONNX's backend interface (onnx.backend.base) for sessions, as in onnxruntime.backend.

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
        """Run the model and return its outputs in order.

        Args:
            inputs: arrays by name, a list or tuple of arrays in the order of the model's inputs, or a single array.
            options: attributes of RunOptions.

        Raises:
            InputError: the number of inputs is wrong.
            OptionError: an option is unknown.
        """
        names = [value.name for value in self.session.get_inputs()]
        if not isinstance(inputs, Mapping):
            given: Sequence[Any] = inputs if isinstance(inputs, list | tuple) else [inputs]
            if len(given) != len(names):
                raise InputError(
                    f"{len(given)} inputs were given",
                    f"the model has {len(names)} inputs: {', '.join(names)}",
                    "pass every input",
                )
            inputs = dict(zip(names, given, strict=True))
        return self.session.run(None, inputs, _with(RunOptions(), options))


class SessionBackend(Backend):
    """A backend that creates sessions."""

    @classmethod
    def is_compatible(cls, model: Any, device: str | None = None, **options: Any) -> bool:
        """Return True if the device is supported. As in onnxruntime, the model is not checked."""
        return device is None or cls.supports_device(device)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Return True if the device is the CPU."""
        return device.partition(":")[0].upper() == "CPU"

    @classmethod
    def prepare(cls, model: Any, device: str | None = None, **options: Any) -> SessionRep:
        """Load a model.

        Args:
            model: a path, bytes, a ModelProto, a session, or a result of this method.
            device: "CPU" or None.
            options: attributes of SessionOptions.

        Raises:
            OptionError: the device or an option is unknown. Other errors: see InferenceSession.
        """
        if isinstance(model, SessionRep):
            return model
        if device is not None and not cls.supports_device(device):
            raise OptionError(f"device = {device!r}", "a backend session runs only on the CPU", "omit device")
        if isinstance(model, InferenceSession):
            return SessionRep(model)
        if hasattr(model, "SerializeToString"):
            model = model.SerializeToString()
        return SessionRep(InferenceSession(model, _with(SessionOptions(), options)))

    @classmethod
    def run_model(  # type: ignore[override]
        cls, model: Any, inputs: Any, device: str | None = None, **options: Any
    ) -> list[Any]:
        """Run a model once and return its outputs. See `prepare` and `SessionRep.run`."""
        return cls.prepare(model, device, **options).run(inputs)

    @classmethod
    def run_node(cls, *arguments: Any, **options: Any) -> Any:
        """Raises OptionError, because a single node does not specify its operator set."""
        raise OptionError(
            "run_node is not supported", "a single node has no opset version", "run a model that contains the node"
        )


def _with(object_: Any, options: Mapping[str, Any]) -> Any:
    for name, value in options.items():
        if name.startswith("_") or not hasattr(object_, name) or callable(getattr(object_, name)):
            raise OptionError(
                f"unknown option {name!r}",
                f"{type(object_).__name__} has no attribute of that name",
                "remove the option",
            )
        setattr(object_, name, value)
    return object_


is_compatible = SessionBackend.is_compatible
supports_device = SessionBackend.supports_device
prepare = SessionBackend.prepare
run = run_model = SessionBackend.run_model
