"""From a model folder to a decoder: compile what `decoder_graph` read, and lay out the cache."""

from __future__ import annotations

from dataclasses import replace

from genai.kernels.executor import Executor
from genai.kernels.messages import ProgressLine, tell
from genai.kernels.records import Ids
from genai.kvcache import budget
from genai.kvcache.pool import BlockPool
from genai.kvcache.storage import PagedStorage

from ..engine.decoder import Decoder
from ..engine.dense import DenseDecoder, DenseInput
from ..engine.paged import PagedDecoder
from ..runtime.device import open_executor, report_progress
from ..runtime.plan import PlanOptions, build_plan
from ..runtime.row_program import build_row_program
from .config import Config
from .decoder_graph import BLOCK_SIZE, DecoderGraph, DecoderInfo, numpy_dtype, read_decoder
from .memory_plan import budget_cache, plan_memory

# A pool larger than this many full contexts would only cost memory for its free list.
MAX_CONTEXTS_IN_POOL = 256
# Packing that takes longer shows a bar.
_QUIET_SECONDS = 1.0


def load_decoder(
    config: Config,
    *,
    threads: int | None,
    kv_dtype: str,
    accuracy: str,
    cache_bytes: int | None,
    context_size: int | None,
    quiet: bool,
    device: str = "cpu",
) -> tuple[Decoder, DecoderInfo]:
    """Load the decoder of a model folder; see genai.Model for the arguments and errors."""
    if device == "reference":  # in full precision: neither activations nor keys and values are rounded
        accuracy = "fp32"
    with report_progress((lambda current, total: None) if quiet else None):
        source = read_decoder(config, kv_dtype=kv_dtype, accuracy=accuracy)
        cache = budget_cache(
            plan_memory(source, config),
            free_bytes=budget.available_memory(),
            context_size=context_size,
            cache_bytes=cache_bytes,
        )
        executor = open_executor(device, threads)
        kernel = {"accuracy": accuracy, "threads": executor.host_threads, "executor": executor}
        if source.flat is None or source.layout is None:
            if not quiet:
                tell(f"genai: running sequence by sequence, without batching: {source.info.reason}")
            info = replace(source.info, context_size=cache.context_size)
            return _dense(source, config, executor, PlanOptions(kernel=kernel)), info
        names = config.model.decoder.names
        kinds = {names.input_ids: Ids.TOKENS, names.position_ids: Ids.POSITIONS}
        inputs = {v.name: (kinds[v.name], numpy_dtype(v)) for v in source.model.graph.inputs if v.name in kinds}
        most = -(-cache.context_size // BLOCK_SIZE) * MAX_CONTEXTS_IN_POOL
        num_blocks = min(budget.blocks_that_fit(source.layout, cache.cache_bytes), most)
        progress = ProgressLine(
            "Packing weights",
            source.info.weight_bytes,
            amount=lambda count: budget.format_bytes(int(count)),
            after=_QUIET_SECONDS,
        )
        options = PlanOptions(kernel=kernel, on_packed=None if quiet else progress.add)
        with progress:
            decoder = PagedDecoder(
                executor,
                build_row_program(source.model, inputs, options),
                vocab_size=config.model.vocab_size,
                pool=BlockPool(num_blocks),
                storage=PagedStorage(source.layout, num_blocks, executor.allocate),
                rope_threshold=source.flat.rope_threshold,
                files=source.model.files,
                output_names=source.flat.output_names,
            )
    return decoder, replace(source.info, context_size=cache.context_size, cache_tokens=num_blocks * BLOCK_SIZE)


def _dense(source: DecoderGraph, config: Config, executor: Executor, options: PlanOptions) -> DenseDecoder:
    decoder = config.model.decoder
    inputs = {}
    for value in source.model.graph.inputs:
        if value.name not in source.model.graph.initializers:
            shape = getattr(value.type, "shape", None) or ()
            sizes = tuple(size if isinstance(size, int) else None for size in shape)
            inputs[value.name] = DenseInput(numpy_dtype(value), sizes)
    past_shape = decoder.num_key_value_heads, decoder.head_size
    plan = build_plan(source.model, options)
    return DenseDecoder(plan, executor, inputs, decoder.names, config.model.vocab_size, past_shape)
