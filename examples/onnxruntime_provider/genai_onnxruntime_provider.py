"""An execution provider for genai that hands parts of a graph to onnxruntime.

Installed (`pip install ./examples/onnxruntime_provider`), it is used by
`genai.InferenceSession(model, providers=[("OnnxRuntimeProvider", {"providers": ["CUDAExecutionProvider"]})])`.
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
    """Takes nodes of the domains that onnxruntime knows, but for those with subgraphs.

    Args:
        providers: onnxruntime's own, in order of preference.
    """

    def __init__(self, providers: list[str] | None = None) -> None:
        self._providers = providers or ["CPUExecutionProvider"]

    def supports(self, node: Any, graph: Any, version: int) -> bool:
        """Whether onnxruntime has the operator; types must be known, since parts of a graph declare theirs."""
        domain, op_type = node.key
        if domain not in _DOMAINS or (domain == "" and version > NEWEST_OPSET) or node.subgraphs():
            return False
        names = [name for name in (*node.inputs, *node.outputs) if name]
        return op_type != "Constant" and all(graph.type_of(name) is not None for name in names)

    def compile(self, model: onnx.ModelProto) -> Callable[[list[Any]], list[Any]]:
        """A session of onnxruntime."""
        model.ir_version = min(model.ir_version, NEWEST_IR_VERSION)
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=self._providers)
        names = [item.name for item in session.get_inputs()]
        return lambda values: list(session.run(None, dict(zip(names, values, strict=True))))
