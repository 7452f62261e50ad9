"""Modules by their earlier names: an import of an earlier name finds the module that replaced it.

docs/reference/migration.md has the same table for users.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

MOVED = {
    "builder": "convert",
    "builder.kept": "convert.write_prequantized",
    "builder.quantised": "convert.prequantized",
    "builder.references": "convert.resolve",
    "engine.dense": "engine.unbatched",
    "engine.mix": "engine.adapter_mix",
    "engine.pace": "engine.scheduler",
    "engine.sampling.ref_chains": "engine.sampling.schema_depth",
    "engine.whole_files": "common.atomic_files",
    "graph": "onnx",
    "graph.elsewhere": "common.foreign_models",
    "graph.exported_attention": "lowering.exported_attention",
    "graph.flatten": "lowering.flatten",
    "graph.gradients": "optimize.gradients",
    "graph.home": "common.paths",
    "graph.names": "onnx.decoder_names",
    "graph.onnx_inference": "optimize.onnx_inference",
    "graph.rewrites": "optimize",
    "graph.rows": "lowering.rows",
    "graph.shape_values": "optimize.shape_values",
    "graph.shapes": "optimize.shapes",
    "kvcache.budget": "common.memory_limits",
    "llm.batch.asking": "llm.batch.requests",
    "llm.batch.openai_form": "llm.batch.openai_format",
    "llm.delivery": "llm.streaming",
    "llm.questions": "llm.map_requests",
    "llm.terms": "llm.request_options",
    "measure.bench": "bench",
    "measure.bench.forms": "bench.formats",
    "measure.evaluation": "evaluate",
    "measure.machine": "doctor",
    "measure.model_info": "doctor.model_info",
    "measure.plots": "common.plots",
    "measure.result_json": "common.to_json",
    "model": "models",
    "model.adapters": "lora",
    "model.adapters.gguf_adapter": "lora.gguf",
    "model.adapters.places": "lora.targets",
    "model.gguf_file": "weight_files.gguf",
    "model.hub": "hub",
    "model.locks": "common.locks",
    "model.reading": "common.reading",
    "model.safetensors_file": "weight_files.safetensors",
    "model.tensor_files": "weight_files.tensor_files",
    "ops.rules": "lowering.rules",
    "ops.weight_spelling": "ops.weight_nodes",
    "ort_genai": "compat.onnxruntime_genai",
    "quant.rounding": "compat.quant_rounding",
    "quantization.dynamic": "quantize.onnx_graph.dynamic",
    "quantization.operator_rules": "quantize.onnx_graph.operator_rules",
    "quantization.overrides": "quantize.onnx_graph.overrides",
    "quantization.parameters": "quantize.onnx_graph.parameters",
    "quantization.placement": "quantize.onnx_graph.placement",
    "quantization.qdq": "quantize.onnx_graph.qdq",
    "quantization.qoperator": "quantize.onnx_graph.qoperator",
    "quantization.selection": "quantize.onnx_graph.selection",
    "quantization.static": "quantize.onnx_graph.static",
    "quantization.tensors_data": "quantize.onnx_graph.tensors_data",
    "quantization.weight_methods": "quantize.onnx_graph.weight_methods",
    "quantization.writing": "quantize.onnx_graph.writing",
    "quantizer": "quantize",
    "quantizer.flow": "quantize.stage_values",
    "quantizer.quantising": "quantize.matrix_quantizer",
    "quantizer.svg": "common.svg",
    "runtime.device": "devices",
    "runtime.functions": "session.functions",
    "runtime.plan": "session.plan",
    "runtime.python_loop": "session.loop",
    "runtime.row_program": "lowering.program",
    "runtime.single": "common.single",
    "runtime.weights": "session.packed_weights",
    "session.adapter_format": "compat.onnxruntime.adapter_format",
    "session.assignment": "compat.onnxruntime.assignment",
    "session.backend": "compat.onnxruntime.backend",
    "session.binding": "compat.onnxruntime.binding",
    "session.cuda_provider": "session.cuda_partition",
    "session.errors": "compat.onnxruntime.errors",
    "session.inference_session": "compat.onnxruntime.inference_session",
    "session.islands": "session.partition",
    "session.machine": "compat.onnxruntime.module",
    "session.observing": "session.session",
    "session.options": "compat.onnxruntime.options",
    "session.preparing": "session.prepare",
    "session.providers": "compat.onnxruntime.providers",
    "session.refused": "compat.refused",
    "session.values": "compat.onnxruntime.values",
    "text.tensor": "compat.onnxruntime_genai.tensor",
}
"""Earlier and current names of modules and packages below `genai`. A package's modules were moved with it."""
KEPT = {"quantization": "compat.onnxruntime_quantization"}
"""Packages that still exist, although their modules were moved: `genai/quantization/` itself still exists."""


EMPTY = frozenset({"measure", "runtime"})
"""Former packages that contained only other packages."""


def new_name(name: str) -> str | None:
    """Return the current name of a module, relative to `genai`; None if the given name is current."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        head = ".".join(parts[:count])
        found = MOVED.get(head) or KEPT.get(head)
        if found is not None:
            return ".".join([found, *parts[count:]])
    return None


class _Alias:
    """A loader that binds a module to an earlier name.

    It has the methods of importlib.abc.Loader. Importing that class would take most of the time of `import genai`.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        earlier = module.__name__
        if earlier.removeprefix("genai.").partition(".")[0] not in KEPT or earlier.removeprefix("genai.") in MOVED:
            import warnings

            message = f"{earlier} is now {self._name}; the earlier name will be removed"
            warnings.warn(message, DeprecationWarning, stacklevel=2)
        sys.modules[earlier] = import_module(self._name)


class MovedModules:
    """A finder for earlier names of modules. It imports nothing, because Python calls it with an import lock held."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        if package != "genai":
            return None
        if name in EMPTY:
            return ModuleSpec(fullname, None, is_package=True)
        new = None if name in KEPT else new_name(name)
        loader: Any = None if new is None else _Alias(f"genai.{new}")
        return None if loader is None else ModuleSpec(fullname, loader, is_package=True)
