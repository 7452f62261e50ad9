"""A model folder in figures, for people and for scripts: nothing is loaded, compiled or copied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from genai.kvcache.budget import available_memory, format_bytes

from .config import Config, ModelConfig
from .decoder_graph import read_decoder
from .errors import CacheCapacityError, ModelFolderError
from .machine.footprint import PROGRAM_BYTES
from .memory_plan import MemoryPlan, check_limit, default_context, plan_memory
from .parsing import detect, get_parser
from .runtime.plan import missing_operators
from .text.chat_template import ChatTemplates


def describe(
    source: str | Path | Config,
    *,
    context_size: int | None = None,
    kv_dtype: str = "auto",
    accuracy: str = "auto",
    available_bytes: int | None = None,
) -> dict[str, Any]:
    """Facts about a model folder, read from its configuration and graph alone.

    Args:
        source: the folder, or a Config.
        context_size: the context for which "memory" says whether it fits; None = the model's whole context.
        kv_dtype, accuracy: as in genai.Model; they decide on the type of the cache.
        available_bytes: memory to fit into; None = what is free now.

    Returns:
        Names to str, int, float, bool, None, and lists and dicts of these. Sizes are in bytes.

    Raises:
        GenaiError: the folder cannot be read as a model, as in genai.Model.
        OptionError: the context_size is beyond the model's.
    """
    config = source if isinstance(source, Config) else Config(source)
    decoder = read_decoder(config, kv_dtype=kv_dtype, accuracy=accuracy)
    plan = plan_memory(decoder, config)
    if context_size is not None:
        check_limit(plan, context_size)
    available = available_memory() if available_bytes is None else available_bytes
    missing = missing_operators(decoder.model)
    return {
        "folder": str(config.folder),
        **_architecture(config.model),
        "parameters": decoder.parameters,
        "bits_per_weight": round(8 * decoder.weight_bytes / decoder.parameters, 2) if decoder.parameters else None,
        "weight_bytes": decoder.weight_bytes,
        "files": _file_sizes(config.folder),
        "kv_dtype": decoder.kv_dtype,
        "kv_bytes_per_token": decoder.bytes_per_token,
        "kv_bytes_per_token_by_type": dict(decoder.kv_bytes_per_token),
        "kv_bytes_full_context": plan.cache(plan.context_limit),
        **_text_interface(config),
        "batched": decoder.flat is not None,
        "not_batched_because": decoder.reason or None,
        "operators": dict(decoder.operators),
        "operators_without_kernel": missing,
        "config_keys_without_effect": list(config.ignored_keys),
        "memory": memory_verdict(plan, context_size, available),
    }


def memory_verdict(plan: MemoryPlan, context_size: int | None, available_bytes: int) -> dict[str, Any]:
    """Whether a context fits into memory, and what to change if it does not.

    Args:
        context_size: the context asked for; None = the model's whole context.
        available_bytes: memory free before the program starts.
    """
    context = context_size or plan.context_limit
    needed = plan.needed(context) + PROGRAM_BYTES
    free = available_bytes - PROGRAM_BYTES
    missing = max(needed - available_bytes, 0)
    largest = plan.context_within(free - plan.fixed)
    try:
        chosen: int | None = default_context(plan, free)
    except CacheCapacityError:
        chosen = None
    return {
        "available_bytes": available_bytes,
        "needed_bytes": needed,
        "loaded_weight_bytes": plan.weights,
        "cache_bytes": plan.cache(context),
        "activation_bytes": plan.workspace,
        "program_bytes": PROGRAM_BYTES,
        "context_size": context,
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
        return f"fits with --ctx-size {largest}; {whole or 'the asked '}{context} needs {format_bytes(missing)} more"
    return f"does not fit: {format_bytes(missing)} more memory is needed, or a smaller or more strongly quantised model"


def _architecture(model: ModelConfig) -> dict[str, Any]:
    decoder = model.decoder
    return {
        "type": model.type,
        "layers": decoder.num_hidden_layers,
        "hidden_size": decoder.hidden_size,
        "attention_heads": decoder.num_attention_heads,
        "key_value_heads": decoder.num_key_value_heads,
        "head_size": decoder.head_size,
        "sliding_window": decoder.sliding_window,
        "vocab_size": model.vocab_size,
        "context_length": model.context_length,
        "eos_token_ids": list(model.eos_token_ids),
    }


def _text_interface(config: Config) -> dict[str, Any]:
    """The chat template, and what its text says about replies."""
    template = ChatTemplates(config.folder).text()
    if not template:
        return {"chat_template": False, "reply_format": None, "reasoning": False, "tool_calls": False}
    name = detect(template)
    marks_reasoning = any(marker in template for marker in get_parser(name).reasoning or ())
    return {
        "chat_template": True,
        "reply_format": name,
        # gpt-oss writes its reasoning into a channel of its own, always.
        "reasoning": marks_reasoning or name == "gpt_oss",
        "tool_calls": name not in ("none", "think"),
    }


def _file_sizes(folder: Path) -> dict[str, int]:
    """Regular files of the folder, largest first."""
    try:
        sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    except OSError as error:
        raise ModelFolderError(f"{folder}: cannot be read", str(error), "check the folder's permissions") from error
    return dict(sorted(sizes.items(), key=lambda item: (-item[1], item[0])))
