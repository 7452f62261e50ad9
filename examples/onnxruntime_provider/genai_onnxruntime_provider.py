"""An execution provider for genai that runs parts of a graph with onnxruntime.

After `pip install ./examples/onnxruntime_provider`, use the provider as follows: `genai.InferenceSession(model,
providers=[("OnnxRuntimeProvider", {"providers": ["CUDAExecutionProvider"]})])`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx
import onnxruntime

NEWEST_OPSET = 23
NEWEST_IR_VERSION = 10
_DOMAINS = {"", "ai.onnx.ml", "com.microsoft"}


class OnnxRuntimeProvider:
    """A provider for nodes of the domains that onnxruntime implements, except nodes with subgraphs.

    Args:
        providers: onnxruntime's providers, in order of preference.
    """

    def __init__(self, providers: list[str] | None = None) -> None:
        self._providers = providers or ["CPUExecutionProvider"]

    def supports(self, node: Any, graph: Any, version: int) -> bool:
        """Return True if onnxruntime supports the node. The node's types must be known, because parts declare types."""
        domain, op_type = node.key
        if domain not in _DOMAINS or (domain == "" and version > NEWEST_OPSET) or node.subgraphs():
            return False
        names = [name for name in (*node.inputs, *node.outputs) if name]
        return op_type != "Constant" and all(graph.type_of(name) is not None for name in names)

    def compile(self, model: onnx.ModelProto) -> Callable[[list[Any]], list[Any]]:
        """Return a function that runs the model in an onnxruntime session."""
        model.ir_version = min(model.ir_version, NEWEST_IR_VERSION)
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=self._providers)
        names = [item.name for item in session.get_inputs()]
        return lambda values: list(session.run(None, dict(zip(names, values, strict=True))))
