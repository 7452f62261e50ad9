"""`genai info`: describes a model folder, and checks whether it fits in this machine's memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from genai.common.progress import task

from . import options as opt
from .terminal import emit_figures
from .wrapping import printable

_FILES_SHOWN = 4

# Labels of facts that their names do not explain. These facts are shown only if they have a value.
_LABELS = {
    "read_bytes": "checkpoint",
    "mtp_parameters": "parameters of MTP head",
    "built_bytes": "size after build",
    "memory_bytes": "memory when built",
    "sampling_defaults_without_effect": "ignored defaults",
}


def info(
    model: opt.ModelArgument = None,
    ctx_size: Annotated[
        int | None,
        typer.Option("-c", "--ctx-size", help="Context size to check, in tokens [default: the model's limit]."),
    ] = None,
    accuracy: opt.Accuracy = "auto",
    kv_type: opt.KvType = "auto",
    device: opt.Device = None,
    as_json: opt.AsJson = False,
) -> None:
    """Describe a model without loading it: architecture, size, cache per token, and whether it fits in memory.

    With --device, checks the memory of that device. Also describes .onnx files, checkpoints, GGUF files, encoders,
    adapters, MODEL+ADAPTER, and models on the hub, without a download.
    """
    from genai.doctor.model_info import describe
    from genai.models.folders import bundled_model
    from genai.models.model_options import check_model_options

    flags = {"--ctx-size": ctx_size, "--accuracy": accuracy != "auto", "--kv-type": kv_type != "auto"}
    flags |= {"--device": device not in (None, "cpu")}
    if model is not None and model.suffix == ".onnx":
        _refuse(flags, model.name, "an .onnx file")
    check_model_options(device=device, kv_dtype=kv_type, accuracy=accuracy, context_size=ctx_size)
    base, adapter = _split(model)
    facts = _facts_of_source(bundled_model() if base is None else base)
    if isinstance(facts, Path):
        with task(f"Reading {facts.name}"):
            facts = describe(facts, context_size=ctx_size, kv_dtype=kv_type, accuracy=accuracy, device=device)
        rows = list(figures_of(facts))
    else:
        _refuse(flags, str(model), facts.get("kind", ""))
        rows = [
            (_LABELS.get(name, name.replace("_", " ")), shown(name, value))
            for name, value in facts.items()
            if value or name not in _LABELS
        ]
    if adapter is not None:
        from genai.doctor.source_info import describe_adapter

        about = describe_adapter(adapter)
        facts = {**facts, "adapter": {name.removeprefix("adapter_"): value for name, value in about.items()}}
        rows += [(name.replace("_", " "), shown(name, value)) for name, value in about.items() if name != "kind"]
    emit_figures(json.dumps(facts, indent=2) if as_json else ((name, printable(text)) for name, text in rows))


def _split(model: Path | None) -> tuple[Path | None, Path | None]:
    """Return the base and the adapter of MODEL."""
    if model is None or "+" not in str(model):
        return model, None
    from genai.lora.named import split_adapter

    base, adapter = split_adapter(model)
    return (model, None) if adapter is None else (Path(base), adapter[1])


def _facts_of_source(model: Path) -> dict[str, Any] | Path:
    """Return the facts about a model that is not a model folder, or the model folder to describe."""
    from genai.convert.checkpoint import is_checkpoint
    from genai.convert.resolve import found_model
    from genai.doctor.model_info import describe_onnx
    from genai.doctor.source_info import describe_adapter, describe_checkpoint, describe_download
    from genai.embed.describe import describe_encoder, is_encoder_folder
    from genai.lora.describe import is_adapter
    from genai.models.exported_config import is_exported_decoder

    with task(f"Reading {model.name}"):
        if model.suffix == ".onnx":
            return describe_onnx(model)
        found = found_model(model)
        if not isinstance(found, Path):
            return describe_download(found)
        if (found / "genai_config.json").is_file() or (not is_checkpoint(found) and is_exported_decoder(found)):
            return found
        if is_adapter(found):
            return describe_adapter(found)
        if is_encoder_folder(found):
            return describe_encoder(found)
        if is_checkpoint(found):
            return describe_checkpoint(found)
        return found


def _refuse(flags: dict[str, Any], name: str, kind: str) -> None:
    from genai.errors import OptionError

    for flag, value in flags.items():
        if value:
            raise OptionError(
                f"{flag} cannot be used with {name}",
                f"this option applies to a model folder, and this is {kind}",
                "remove the option",
            )


def shown(name: str, value: object) -> str:
    """Return a fact as text: bytes with their unit, lists with commas."""
    from genai.common.memory_limits import format_bytes

    if name.endswith("bytes") and isinstance(value, int):
        return format_bytes(value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {format_bytes(count)}" for key, count in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return "-" if value in (None, "") else str(value)


_ONE_AT_A_TIME = (
    "requests are computed one after the other, so N requests take about N times as long as one; no prefix cache, no "
    "adapters, no speculative decoding. `genai build` converts the model's checkpoint to a folder that runs batched"
)


def figures_of(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the names and values of a model folder's facts as text."""
    from genai.common.memory_limits import format_bytes as size

    yield "folder", facts["folder"]
    if facts["derived"] is not None:
        yield "graph", _graph(facts["derived"])
        yield "derived", _derived(facts["derived"]["values_by_source"])
    window = f", sliding window {facts['sliding_window']}" if facts["sliding_window"] else ""
    yield (
        "architecture",
        f"{facts['type']}: {facts['layers']} layers, hidden size {facts['hidden_size']}, {facts['attention_heads']} "
        f"heads, {facts['key_value_heads']} key/value heads of size {facts['head_size']}{window}",
    )
    yield from _about_weights(facts)
    yield "numerics", _numerics(facts)
    yield "files", _files(facts["files"])
    ids = ", ".join(map(str, facts["eos_token_ids"])) or "none"
    yield "vocabulary", f"{facts['vocab_size']:,} tokens, EOS {ids}"
    yield "context", f"{facts['context_length']:,} tokens"
    by_type = ", ".join(f"{size(value)} in {name}" for name, value in facts["kv_bytes_per_token_by_type"].items())
    yield "cache per token", f"{by_type}; {facts['kv_dtype']} is used"
    yield "full cache", f"{size(facts['kv_bytes_full_context'])} at {facts['context_length']:,} tokens{_by_kind(facts)}"
    yield "chat template", _template(facts)
    yield "runs", _how_it_runs(facts)
    if facts["not_batched_because"]:
        yield "effect", _ONE_AT_A_TIME
    if facts["draft_model"] is not None:
        yield "draft model", f"{facts['draft_model']} (not described here); --speculate auto uses it"
    if facts["mtp_head"] is not None:
        yield "MTP head", f"{facts['mtp_head']} (not described here); --speculate auto uses it"
    yield "operators", ", ".join(f"{name} {count}" for name, count in facts["operators"].items())
    yield "without kernel", ", ".join(facts["operators_without_kernel"]) or "none"
    if facts["sampling_defaults_without_effect"]:
        yield "ignored defaults", ", ".join(facts["sampling_defaults_without_effect"])
    if facts["config_keys_without_effect"]:
        yield "ignored keys", ", ".join(facts["config_keys_without_effect"])
    memory = facts["memory"]
    parts = {
        "resident weights": "loaded_weight_bytes",
        "cache": "cache_bytes",
        "activations": "activation_bytes",
        "program": "program_bytes",
    }
    terms = " + ".join(f"{name} {size(memory[key])}" for name, key in parts.items())
    of = "" if memory["device"] == "cpu" else f" on the device {memory['device']}"
    yield "memory", f"{terms} = {size(memory['needed_bytes'])}; {size(memory['available_bytes'])} free{of}"
    if memory["mapped_weight_bytes"]:
        table = (
            f"{size(memory['mapped_weight_bytes'])} of embeddings stays in the file; each row is cached when it is read"
        )
        yield "mapped", table
    yield "margin", f"{size(memory['margin_bytes'])} is reserved"
    yield "verdict", memory["verdict"]
    if memory["default_context"] is not None:
        yield (
            "default context",
            f"{memory['default_context']:,} tokens, so that the cache uses at most half of the remaining memory",
        )


def _graph(derived: dict[str, Any]) -> str:
    others = f"; others: {', '.join(derived['other_graphs'])}" if derived["other_graphs"] else ""
    return f"{derived['graph']}{others}"


def _derived(values: dict[str, list[str]]) -> str:
    """Return the values that genai_config.json would contain, by the file that they were derived from."""
    parts = [f"{', '.join(key.rsplit('.', 1)[-1] for key in keys)} from {source}" for source, keys in values.items()]
    return f"genai_config.json is missing; {'; '.join(parts)}"


def _about_weights(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    from genai.common.memory_limits import format_bytes as size

    parameters, apart = facts["parameters"], facts["embedding_parameters"]
    stored = f"weights as stored: {size(facts['weight_bytes'])}"
    if not apart or apart >= parameters:
        yield "parameters", f"{parameters:,}"
        yield "bits per weight", f"{facts['bits_per_weight'] or '-'} ({stored})"
        return
    bits = facts["embedding_bytes"] * 8 / apart
    others = (facts["weight_bytes"] - facts["embedding_bytes"]) * 8 / (parameters - apart)
    yield "parameters", f"{parameters:,}, {apart:,} of them in the embedding, which is stored apart from the LM head"
    yield (
        "bits per weight",
        f"{facts['bits_per_weight']}: {bits:.4g} in the embedding, {others:.4g} in the other weights ({stored})",
    )


def _by_kind(facts: dict[str, Any]) -> str:
    """Return the cache size of each kind of layer, or "" if all layers are of the same kind."""
    from genai.common.memory_limits import format_bytes as size

    parts = [f"{group['name']}: {size(group['bytes'])}" for group in facts["cache_groups"]]
    return f" ({', '.join(parts)})" if len(parts) > 1 else ""


def _how_it_runs(facts: dict[str, Any]) -> str:
    if facts["operators_without_kernel"]:
        return "cannot run: some operators have no kernel"
    if facts["batched"]:
        return "batched over the paged cache"
    return f"one sequence at a time, because {facts['not_batched_because']}"


def _numerics(facts: dict[str, Any]) -> str:
    rounded, exact = (facts["quantised_products_by_activation"][name] for name in ("int8", "fp32"))
    cache = f"cache {facts['kv_dtype']}"
    if not rounded:
        hint = "; --accuracy int8 is faster" if exact else ""
        return f"activations fp32, {cache}{hint}"
    mixed = f" in {rounded} matmuls with quantised weights, fp32 in {exact}" if exact else ""
    return f"activations int8{mixed}, {cache}; with --accuracy fp32, activations are not quantised"


def _files(files: dict[str, int]) -> str:
    from genai.common.memory_limits import format_bytes as size

    largest = [f"{name} {size(count)}" for name, count in list(files.items())[:_FILES_SHOWN]]
    rest = len(files) - len(largest)
    more = [f"{rest} more"] if rest else []
    return f"{size(sum(files.values()))}: {', '.join(largest + more)}"


def _template(facts: dict[str, Any]) -> str:
    if not facts["chat_template"]:
        return "none: this may be a base model, or the template is missing"
    abilities = [name for name, key in (("reasoning", "reasoning"), ("tool calls", "tool_calls")) if facts[key]]
    return (
        f"yes; {' and '.join(abilities)} in the {facts['reply_format']} format"
        if abilities
        else "yes; no reasoning, no tool calls"
    )
