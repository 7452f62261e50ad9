"""A loader for decoders in model folders. It compiles the result of `decoder_graph`, and allocates the cache."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from genai import kernels
from genai.common import memory_limits
from genai.common.log import logger
from genai.common.progress import quietly, task
from genai.kernels.cpu.jit.kernel_cache import source_key
from genai.kernels.device import DeviceFailed, Executor, UnsupportedOp
from genai.kernels.ir import Ids, RowsType
from genai.kvcache.pool import BlockPool
from genai.kvcache.storage import PagedStorage, blocks_and_slots

from ..devices import open_asked, open_executor, tell_of_the_cpu
from ..engine.decoder import Decoder
from ..engine.mtp import HeadDecoder
from ..engine.paged import PagedDecoder
from ..engine.state_file import Identity
from ..engine.unbatched import UnbatchedDecoder, UnbatchedInput
from ..errors import CacheCapacityError, DeviceError, UnsupportedModelError
from ..lora.inputs import with_defaults
from ..lora.targets import LoraTargets, with_targets
from ..lowering.flatten import hidden_width
from ..lowering.program import build_program
from ..onnx.ir import OnnxModel
from ..optimize.decoders import widen_floats
from ..optimize.shapes import infer_shapes
from ..session.plan import PlanOptions, build_plan
from .chosen_device import ChosenDevice
from .config import Config
from .decoder_file import read_decoder_file
from .decoder_graph import BLOCK_SIZE, DecoderInfo, numpy_dtype, read_decoder
from .draft_block import MTP
from .identity import LoadedFiles
from .kv_types import check_kv_type, kv_types_on
from .memory_plan import budget_cache, plan_memory
from .mtp import check_head, missing_rows, unusable_head

_log = logger(__name__)
# Maximum size of the pool, in full contexts. More blocks would only enlarge the free list.
MAX_CONTEXTS_IN_POOL = 256
# Maximum number of blocks of a model without keys and values. Their contexts have up to a million tokens, and the free
# list needs about 50 bytes per block.
_MOST_EMPTY_BLOCKS = 1 << 20
# Devices that use the host's memory.
_ON_THE_HOST = ("cpu", "reference")


def load_decoder(
    config: Config,
    *,
    threads: int | None,
    kv_dtype: str,
    accuracy: str,
    cache_bytes: int | None,
    context_size: int | None,
    quiet: bool,
    device: str | ChosenDevice = "cpu",
    lora: bool = False,
    files: LoadedFiles | None = None,
    token_rows: str = "",
) -> tuple[Decoder, DecoderInfo, LoraTargets | None]:
    """Load the decoder of a model folder; see genai.Model for the other arguments and the errors.

    Args:
        files: records the files that the decoder is loaded from.
        token_rows: the output with the hidden states that an MTP head reads; "" = there is no head.
    """
    chosen = device if isinstance(device, ChosenDevice) else ChosenDevice(device)
    if chosen.name == "reference":  # full precision: neither activations nor keys and values are rounded
        accuracy = "fp32"
    options: dict[str, Any] = {"kv_dtype": kv_dtype, "accuracy": accuracy, "lora": lora, "files": files}
    options |= {"cache_bytes": cache_bytes, "context_size": context_size, "token_rows": token_rows}
    with quietly(quiet), task(f"Loading {config.folder.name}"):
        if config.exported is not None and config.exported.others:
            others = ", ".join(one.decoder for one in config.exported.others)
            _log.info("using the graph %s; the others are %s", config.exported.variant.decoder, others)
        executor = open_chosen(chosen, threads)
        check_kv_type(kv_dtype, executor.name, chosen)
        if chosen.cpu_serves_too and executor.name != "cpu":
            try:
                return _load_on(executor, config, **options)
            except (DeviceError, CacheCapacityError, UnsupportedModelError) as error:
                if kv_dtype != "auto" and kv_dtype not in kv_types_on("cpu"):
                    raise
                why = f"{error.what}: {error.why}".replace("\n", " ")
                tell_of_the_cpu(why, chosen.name, chosen.asked_by)
            executor = open_executor("cpu", threads)
        return _load_on(executor, config, **options)


def load_head(config: Config, model: Decoder, info: DecoderInfo, *, accuracy: str, quiet: bool) -> HeadDecoder | None:
    """Load the MTP head of a model on the model's device, with a cache for as many tokens as the model's.

    Args:
        config: the configuration of the head; see Config.for_mtp.
        model, info: the loaded model.
        accuracy, quiet: see genai.Model.

    Returns:
        The head; None if the model runs sequence by sequence, because it then cannot verify proposals.

    Raises:
        ConfigError, GraphError, UnsupportedModelError: the head does not fit the model, or cannot run.
    """
    if not isinstance(model, PagedDecoder):
        return None
    with quietly(quiet), task(f"Loading {config.model.decoder.filename}"):
        head, _, _ = _load_on(
            model.executor, config, kv_dtype="auto", accuracy=accuracy, cache_bytes=None,
            context_size=info.context_size, lora=False, files=None, token_rows=config.model.decoder.hidden_output,
            cache_tokens=info.cache_tokens,
        )  # fmt: skip
    assert isinstance(head, HeadDecoder)
    check_head(config, head, model.program)
    return head


def open_chosen(chosen: ChosenDevice, threads: int | None = None) -> Executor:
    """Return the executor of a device, or the CPU's if that is an acceptable fallback.

    Raises:
        OptionError, DeviceError: as for `open_executor`.
    """
    if chosen.asked_by:
        return open_asked(chosen.name, chosen.asked_by, threads)
    return open_executor(chosen.name, threads)


def _load_on(
    executor: Executor, config: Config, *, kv_dtype: str, accuracy: str, cache_bytes: int | None,
    context_size: int | None, lora: bool, files: LoadedFiles | None, token_rows: str, cache_tokens: int | None = None,
) -> tuple[Decoder, DecoderInfo, LoraTargets | None]:  # fmt: skip
    """Load the decoder on a device."""
    source = read_decoder(
        config, kv_dtype=kv_dtype, accuracy=accuracy, files=files, stores_values=not executor.reads_values_from_keys,
        token_rows=token_rows,
    )  # fmt: skip
    if cache_tokens is not None and source.layout is not None:
        cache_bytes = -(-cache_tokens // BLOCK_SIZE) * source.layout.bytes_per_block
    with refused_by(executor):
        free = executor.free_bytes()
    cache = budget_cache(
        plan_memory(source, config, device="" if free is None else executor.device, tokens=executor.step_sizes.fast),
        free_bytes=memory_limits.available_memory() if free is None else free,
        context_size=context_size,
        cache_bytes=cache_bytes,
    )
    kernel = {"accuracy": accuracy, "threads": executor.host_threads, "executor": lambda: executor}
    if source.flat is None or source.layout is None:
        _log.info("running sequence by sequence, without batching: %s", source.info.reason)
        info = replace(source.info, context_size=cache.context_size)
        if lora:
            raise _no_lora_targets(info)
        if config.model.decoder.block == MTP:
            raise unusable_head(config, source.info.reason)
        with refused_by(executor):
            return _dense(source.model, config, executor, PlanOptions(kernel=kernel)), info, None
    if token_rows and not source.flat.has_token_rows:
        raise missing_rows(config, token_rows, source.flat.output_names)
    names = config.model.decoder.names
    kinds = {names.input_ids: Ids.TOKENS, names.position_ids: Ids.POSITIONS}
    inputs = {v.name: (kinds[v.name], numpy_dtype(v)) for v in source.model.graph.inputs if v.name in kinds}
    most = -(-cache.context_size // BLOCK_SIZE) * len(source.layout.groups) * MAX_CONTEXTS_IN_POOL
    if not source.layout.bytes_per_token:
        most = min(most, _MOST_EMPTY_BLOCKS)
    step_tokens = executor.step_sizes.fast
    fitting, num_slots = blocks_and_slots(source.layout, cache.cache_bytes, cache.context_size, step_tokens)
    num_blocks = min(fitting, most)
    packing = task(
        "Packing weights",
        source.info.weight_bytes,
        amount=lambda count: memory_limits.format_bytes(int(count)),
    )
    options = PlanOptions(kernel=kernel, on_packed=packing.add)
    with packing, refused_by(executor):
        given = {
            value.name: RowsType((1, -1, width), width)
            for value in source.model.graph.inputs
            if value.name == names.hidden_states and (width := hidden_width(value))
        }
        program, targets = build_program(source.model, inputs, options, given), None
        if lora:
            program, targets = with_targets(program)
        decoder = (HeadDecoder if config.model.decoder.block == MTP else PagedDecoder)(
            executor,
            program,
            vocab_size=config.model.vocab_size,
            pool=BlockPool(num_blocks),
            storage=PagedStorage(source.layout, num_blocks, executor.allocate, num_slots),
            state_pool=BlockPool(num_slots) if num_slots else None,
            rope_threshold=source.flat.rope_threshold,
            files=source.model.files,
            output_names=source.flat.output_names,
            token_rows=program.outputs[-1] if source.flat.has_token_rows else "",
        )
    cache_tokens = source.layout.tokens_within(num_blocks, decoder.token_budget, num_blocks * BLOCK_SIZE)
    info = replace(source.info, context_size=cache.context_size, cache_tokens=cache_tokens)
    return decoder, info, targets


def kernel_sources() -> str:
    """Return a hash of the kernels' source code, because a change may affect rounding."""
    return source_key(Path(next(iter(kernels.__path__))), ())


def keep_prefixes(decoder: Decoder, info: DecoderInfo, folder: Path, max_bytes: int, identity: Identity) -> None:
    """See Model.keep_prefixes_in."""
    if not isinstance(decoder, PagedDecoder):
        raise UnsupportedModelError(
            "the prefix cache cannot be stored in a folder",
            f"the model has no cache blocks: {info.reason}",
            "leave prefix_cache_dir out",
        )
    parts = kernel_sources(), identity.model, identity.numerics, repr(decoder.arrays_for(BLOCK_SIZE))
    decoder.keep_blocks_in(folder, max_bytes, hashlib.sha256("\0".join(parts).encode()).digest())


def add_lora_targets(decoder: Decoder, info: DecoderInfo) -> LoraTargets:
    """Add target modules for adapters to a decoder's program.

    Raises:
        UnsupportedModelError: the program has no possible target modules.
    """
    if not isinstance(decoder, PagedDecoder):
        raise _no_lora_targets(info)
    program, targets = with_targets(decoder.program)
    if not targets.count:
        raise UnsupportedModelError(
            "the model has no target modules for adapters",
            "no matmul in its graph has the name of a projection (layers.0.….q_proj)",
            "export the model with the names of its modules",
        )
    with refused_by(decoder.executor):
        decoder.replace_program(program)
    return targets


@contextmanager
def refused_by(executor: Executor) -> Iterator[None]:
    """Convert errors of a device: missing kernels to UnsupportedModelError, failures to DeviceError, and full device
    memory to CacheCapacityError. A MemoryError of the host is passed on, because the caller can describe it better.
    """
    try:
        yield
    except UnsupportedOp as error:
        raise UnsupportedModelError(
            f"the device {executor.device!r} cannot run this model", str(error), 'use device="cpu"'
        ) from error
    except DeviceFailed as error:
        raise DeviceError(
            f"the device {executor.device!r} failed while the model was loaded",
            str(error),
            'run `genai doctor` to see the available devices, or use device="cpu"',
        ) from error
    except MemoryError as error:
        if executor.device in _ON_THE_HOST:
            raise
        raise CacheCapacityError(
            f"the model needs more memory than is available on the device {executor.device!r}",
            str(error) or "its driver refused the allocation",
            'choose a smaller context, stop other programs on that device, or use device="cpu"',
        ) from error


def load_as_exported(config: Config, executor: Executor, accuracy: str, files: LoadedFiles) -> UnbatchedDecoder:
    """Load the decoder with its graph as exported. Inputs of this graph that have a default can be fed.

    Raises:
        ModelFolderError: the files differ from those that the model was loaded from.
    """
    config = copy(config)
    config.model_data = files.as_loaded(config.model_data)
    model = read_decoder_file(config, files)
    infer_shapes(model)
    graph, defaults = model.graph, {}
    for name in with_defaults(graph):
        defaults[name] = np.array(graph.initializers[name].array())
        graph.remove_initializer(name)
    graph.invalidate()
    widen_floats(model)
    kernel = {"accuracy": accuracy, "threads": executor.host_threads, "executor": lambda: executor}
    with refused_by(executor):
        decoder = _dense(model, config, executor, PlanOptions(kernel=kernel))
    decoder.defaults = defaults
    return decoder


def check_draft_inputs(decoder: Decoder, filename: str) -> None:
    """Raise UnsupportedModelError if a draft model's graph has inputs that no caller can set."""
    if isinstance(decoder, UnbatchedDecoder) and decoder.wanted:
        raise UnsupportedModelError(
            f"{filename}: the draft model's graph has the input {decoder.wanted[0]!r}",
            "a Generator sets additional inputs only for the target model",
            "export the draft model without this input, remove model.draft, or use Model(folder, draft=False)",
        )


def _no_lora_targets(info: DecoderInfo) -> UnsupportedModelError:
    return UnsupportedModelError(
        "the model has no target modules for adapters",
        f"its graph runs sequence by sequence, as exported: {info.reason}",
        "export the model so that its graph can be flattened, or merge the adapter before the export",
    )


def _dense(model: OnnxModel, config: Config, executor: Executor, options: PlanOptions) -> UnbatchedDecoder:
    if executor.free_bytes() is not None:
        raise UnsupportedOp("GPUs can run only flattened decoders, and this graph cannot be flattened")
    decoder = config.model.decoder
    inputs = {}
    for value in model.graph.inputs:
        if value.name not in model.graph.initializers:
            shape = getattr(value.type, "shape", None) or ()
            sizes = tuple(size if isinstance(size, int) else None for size in shape)
            inputs[value.name] = UnbatchedInput(numpy_dtype(value), sizes)
    past_shape = decoder.num_key_value_heads, decoder.head_size
    plan = build_plan(model, options)
    return UnbatchedDecoder(plan, executor, inputs, decoder.names, config.model.vocab_size, past_shape)
