"""Facts about a model folder or an ONNX file, for people and scripts. No model is loaded, compiled or copied."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from genai.common.memory_limits import available_memory, format_bytes
from genai.kernels.device import Executor

from ..devices import tell_of_the_cpu
from ..errors import CacheCapacityError, DeviceError, ModelFolderError
from ..lowering.rules import find_lowering_rule
from ..models.config import Config
from ..models.decoder_graph import DecoderGraph, count_activations, count_weights, read_decoder, whole_number
from ..models.exported_config import ExportedModel
from ..models.folders import folder_errors
from ..models.kv_types import check_kv_type, kv_types_on
from ..models.loading import open_chosen, refused_by
from ..models.memory_plan import MemoryPlan, budget_cache, check_limit, default_context, plan_memory, usable
from ..onnx.ir import Graph, Value
from ..onnx.layouts import data_files
from ..onnx.reader import read_model
from ..onnx.types import DataType
from ..session.arguments import shape_of
from ..session.plan import missing_operators
from ..text.chat_template import ChatTemplates
from ..text.files import generation_defaults
from ..text.parsing import detect, get_parser
from . import PROGRAM_BYTES


def describe(
    source: str | Path | Config,
    *,
    context_size: int | None = None,
    kv_dtype: str = "auto",
    accuracy: str = "auto",
    available_bytes: int | None = None,
    device: str | None = None,
) -> dict[str, Any]:
    """Return facts about a model folder, read only from its configuration and graph.

    Args:
        source: the folder, or a Config.
        context_size: the context for which the "memory" entry is computed; None = the model's whole context.
        kv_dtype: as in genai.Model; determines the type of the cache.
        accuracy: as in genai.Model; determines the type of the activations.
        available_bytes: memory that the model has to fit into; None = the memory that is currently free.
        device: as in genai.Model; if the device has separate memory, the model has to fit into that memory.

    Returns:
        A dict from names to str, int, float, bool, None, and lists and dicts of these types. Sizes are in bytes.

    Raises:
        GenaiError: the folder cannot be read as a model, as in genai.Model.
        OptionError: context_size exceeds the model's context, or the device has no kernels for kv_dtype.
        DeviceError: the device cannot be used.
    """
    config = source if isinstance(source, Config) else Config(source)
    chosen = config.choose_device(device)
    executor = None if chosen.name == "cpu" else open_chosen(chosen)
    check_kv_type(kv_dtype, "cpu" if executor is None else executor.name, chosen)
    with folder_errors(config.folder):
        decoder = read_decoder(config, kv_dtype=kv_dtype, accuracy=accuracy)
        missing = missing_operators(decoder.model, find_lowering_rule)
    info, model, sizes, draft = decoder.info, config.model, config.model.decoder, config.for_draft()
    head = config.for_mtp()
    plan, free = plan_memory(decoder, config), None
    if context_size is not None:
        check_limit(plan, context_size)
    if executor is not None:
        # A caller that passes available_bytes needs the facts for this device, so the CPU does not replace it.
        may_move = chosen.cpu_serves_too and kv_dtype in (*kv_types_on("cpu"), "auto") and available_bytes is None
        try:
            plan, free = _plan_on(executor, decoder, config, context_size, must_fit=may_move) or (plan, None)
        except (CacheCapacityError, DeviceError) as error:
            if not may_move:
                raise
            tell_of_the_cpu(f"{error.what}: {error.why}".replace("\n", " "), chosen.name, chosen.asked_by)
            executor = None
    name, used = ("cpu", "cpu") if executor is None else (executor.name, executor.device)
    program = PROGRAM_BYTES if free is None else 0
    if available_bytes is None:
        available_bytes = available_memory() if free is None else free
    return {
        "folder": str(config.folder),
        "type": model.type,
        "layers": sizes.num_hidden_layers,
        "hidden_size": sizes.hidden_size,
        "attention_heads": sizes.num_attention_heads,
        "key_value_heads": sizes.num_key_value_heads,
        "head_size": sizes.head_size,
        "sliding_window": sizes.sliding_window,
        "vocab_size": model.vocab_size,
        "context_length": model.context_length,
        "eos_token_ids": list(model.eos_token_ids),
        "parameters": info.parameters,
        "bits_per_weight": round(8 * info.weight_bytes / info.parameters, 2) if info.parameters else None,
        "weight_bytes": info.weight_bytes,
        **_embedding(decoder.model.graph, model.vocab_size),
        "files": _file_sizes(config),
        "derived": _derived(config),
        "quantised_products_by_activation": count_activations(decoder.model.graph, accuracy),
        "kv_dtype": info.kv_dtype,
        "kv_bytes_per_token": info.kv_bytes_per_token,
        "kv_bytes_per_token_by_type": _sizes_on(name, decoder),
        **_full_cache(plan),
        **_text_interface(config),
        "batched": decoder.flat is not None,
        "not_batched_because": info.reason or None,
        "draft_model": None if draft is None else draft.model.decoder.filename,
        "mtp_head": None if head is None else head.model.decoder.filename,
        "operators": dict(decoder.operators),
        "operators_without_kernel": missing,
        "config_keys_without_effect": list(config.ignored_keys),
        "sampling_defaults_without_effect": list(generation_defaults(config.folder).unsupported),
        "memory": {"device": used, **memory_verdict(plan, context_size, available_bytes, program)},
    }


def _full_cache(plan: MemoryPlan) -> dict[str, Any]:
    """Return the size of the cache for the model's whole context, in total and by kind of layer."""
    groups = [
        {
            "name": str(group),
            "kind": group.kind.value,
            "window": group.window or None,
            "layers": list(group.layers),
            "bytes": size,
        }
        for group, size in plan.cache_by_kind(plan.context_limit)
    ]
    return {"kv_bytes_full_context": plan.cache(plan.context_limit), "cache_groups": groups}


def _plan_on(
    executor: Executor, decoder: DecoderGraph, config: Config, context_size: int | None, *, must_fit: bool
) -> tuple[MemoryPlan, int] | None:
    """Return a model's memory plan on a device with separate memory, and its free bytes; None for other devices.

    Raises:
        DeviceError: the device fails.
        CacheCapacityError: `must_fit` is True and the model does not fit.
    """
    with refused_by(executor):
        free = executor.free_bytes()
    if free is None:
        return None
    plan = plan_memory(decoder, config, device=executor.device, tokens=executor.step_sizes.fast)
    if must_fit:
        budget_cache(plan, free_bytes=free, context_size=context_size)
    return plan, free


def _sizes_on(device: str, decoder: DecoderGraph) -> dict[str, int]:
    """Return the cache bytes per token for each cache type that the device has kernels for."""
    return {name: size for name, size in decoder.kv_bytes_per_token.items() if name in kv_types_on(device)}


def memory_verdict(
    plan: MemoryPlan, context_size: int | None, available_bytes: int, program_bytes: int = PROGRAM_BYTES
) -> dict[str, Any]:
    """Return facts about the fit of a context into memory, and the changes to make if it does not fit.

    Args:
        context_size: the requested context; None = the model's whole context.
        available_bytes: memory that is free before the program starts.
        program_bytes: memory of the program without a model.
    """
    context = context_size or plan.context_limit
    needed = plan.needed(context) + program_bytes
    free = available_bytes - program_bytes
    missing = max(plan.needed(context) - usable(free), 0)
    largest = plan.context_within(usable(free) - plan.fixed)
    try:
        chosen: int | None = default_context(plan, free)
    except CacheCapacityError:
        chosen = None
    return {
        "available_bytes": available_bytes,
        "needed_bytes": needed,
        "loaded_weight_bytes": plan.weights,
        "mapped_weight_bytes": plan.mapped,
        "cache_bytes": plan.cache(context),
        "activation_bytes": plan.temporary,
        "program_bytes": program_bytes,
        "context_size": context,
        "margin_bytes": free - usable(free),
        "fits": not missing,
        "missing_bytes": missing,
        "largest_context": largest,
        "default_context": chosen,
        "verdict": _verdict(plan, context, missing, largest),
    }


def _verdict(plan: MemoryPlan, context: int, missing: int, largest: int) -> str:
    whole = "the full " if context == plan.context_limit else ""
    if not missing:
        return f"fits with {whole}{context} tokens of context"
    if largest:
        wanted = f"{whole or 'the requested '}{context}"
        return f"fits with --ctx-size {largest}; {wanted} tokens need {format_bytes(missing)} more"
    return f"does not fit: {format_bytes(missing)} more memory is needed, or a model that is smaller or has fewer bits"


def _text_interface(config: Config) -> dict[str, Any]:
    """Return facts about the chat template, and the reply format that it implies."""
    template = ChatTemplates(config.folder).text()
    if not template:
        return {"chat_template": False, "reply_format": None, "reasoning": False, "tool_calls": False}
    name = detect(template)
    marks_reasoning = any(marker in template for marker in get_parser(name).reasoning or ())
    return {
        "chat_template": True,
        "reply_format": name,
        # gpt-oss always writes its reasoning to a separate channel.
        "reasoning": marks_reasoning or name == "gpt_oss",
        "tool_calls": name not in ("none", "think"),
    }


def _file_sizes(config: Config) -> dict[str, int]:
    """Return the sizes of the regular files in the folder, largest first.

    Of graphs in several precisions, only the files of the one that is used count.
    """
    folder = config.folder
    try:
        if config.exported is None:
            paths = [path for path in folder.iterdir() if path.is_file()]
        else:
            paths = _files_of(config.exported)
        sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}
    except OSError as error:
        raise ModelFolderError(
            f"{folder}: the folder cannot be read", str(error), "check the folder's permissions"
        ) from error
    return dict(sorted(sizes.items(), key=lambda item: (-item[1], item[0])))


def _files_of(model: ExportedModel) -> list[Path]:
    folder = model.folder
    paths = [path for pattern in ("*", "onnx/*") for path in folder.glob(pattern) if path.is_file()]
    names = [path.relative_to(folder).as_posix() for path in paths]
    others = {graph for one in model.others for graph in one.graphs} - set(model.variant.graphs)
    others |= {name for graph in others for name in data_files(graph, names)}
    return [path for path, name in zip(paths, names, strict=True) if name not in others]


def _derived(config: Config) -> dict[str, Any] | None:
    """Return the values that were derived because genai_config.json is missing, by source; None if it is present."""
    model = config.exported
    if model is None:
        return None
    by_source: dict[str, list[str]] = {}
    for key, source in model.sources.items():
        by_source.setdefault(source, []).append(key)
    return {
        "graph": model.variant.decoder,
        "precision": model.variant.precision,
        "other_graphs": [one.decoder for one in model.others],
        "values_by_source": by_source,
        "config": config.raw,
    }


def describe_onnx(path: Path) -> dict[str, Any]:
    """Return facts about a model file as a dict of plain values, without compiling or running the model.

    Raises:
        ModelFolderError: there is no such file.
        GraphError: the file is not an ONNX model.
    """
    model = read_model(path)
    graph = model.graph
    constants = set(graph.initializers)
    nodes = [node for inner in model.graphs(functions=True) for node in inner.nodes]
    parameters, weight_bytes = count_weights(graph)
    operators = Counter(f"{node.domain}::{node.op_type}" if node.key[0] else node.op_type for node in nodes)
    return {
        "file": str(path),
        "producer": model.producer_name or None,
        "ir_version": model.ir_version,
        "operator_sets": ", ".join(f"{name or 'ai.onnx'} {version}" for name, version in model.opset_imports.items()),
        "inputs": _arguments(value for value in graph.inputs if value.name not in constants),
        "outputs": _arguments(graph.outputs),
        "nodes": len(nodes),
        "functions": len(model.functions),
        "parameters": parameters,
        "weight_bytes": weight_bytes,
        "operators": ", ".join(f"{name} {count}" for name, count in operators.most_common()),
    }


def _embedding(graph: Graph, vocab_size: int) -> dict[str, int]:
    """Return the parameters and the bytes of the embedding; 0 if the LM head uses the same matrix."""
    for node in graph.nodes:
        name = node.input(0)
        table = graph.initializers.get(name) if node.op_type in ("Gather", "GatherBlockQuantized") else None
        if table is not None and len(table.shape) == 2 and table.shape[0] == vocab_size:
            if graph.consumers(name) != [node]:
                break
            bits = whole_number(node, "bits", 4) if node.op_type == "GatherBlockQuantized" else 0
            beside = [graph.initializers.get(node.input(index)) for index in (2, 3)] if bits else []
            return {
                "embedding_parameters": table.num_elements * 8 // bits
                if bits and table.dtype is DataType.UINT8
                else table.num_elements,
                "embedding_bytes": table.nbytes + sum(one.nbytes for one in beside if one is not None),
            }
    return {"embedding_parameters": 0, "embedding_bytes": 0}


def _arguments(values: Iterable[Value]) -> str:
    """Return the names, types and shapes of values. Values that differ only in a number, such as caches, are joined."""
    groups: dict[tuple[str, str], list[str]] = {}
    for value in values:
        shape = ", ".join(str(dim if dim is not None else "?") for dim in shape_of(value))
        groups.setdefault((re.sub(r"\d+", "*", value.name), f"{value.type or ''}[{shape}]"), []).append(value.name)
    return "; ".join(
        f"{names[0] if len(names) == 1 else f'{names[0]} to {names[-1]} ({len(names)} values)'} {kind}"
        for (_, kind), names in groups.items()
    )
