"""Memory arithmetic: the needs of a model, the context that fits, and the error when none does."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import genai as og
from genai.convert import DecoderSpec, ExportOptions, LongRope, write_model_folder
from genai.doctor.model_info import describe
from genai.errors import CacheCapacityError, OptionError
from genai.kernels.cpu.linear.packing import pack_matrix
from genai.kernels.weight_layout import BlockMatrix, layout_with
from genai.models.config import Config
from genai.models.decoder_graph import read_decoder
from genai.models.memory_plan import (
    CacheBudget,
    MemoryPlan,
    budget_cache,
    check_context,
    default_context,
    packed_bytes,
    plan_memory,
    usable,
)
from tests.decoder.test_narrow_floats import narrow_folder
from tools.random_weights import RandomWeights

# 1000 bytes of weights and 200 of activations; 10 bytes per token in blocks of 32.
PLAN = MemoryPlan(weights=1000, workspace=200, cache_bytes_per_token=10, context_limit=1000)
SMALL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_size": 16,
    "context_length": 256,
}
Folder = Callable[..., Path]


@pytest.fixture
def write_folder(tmp_path: Path) -> Folder:
    """write_folder(changes of SMALL, export options) -> a folder with random weights."""

    def write(changes: dict[str, Any], **export: Any) -> Path:
        spec = DecoderSpec(**{**SMALL, **changes})
        folder = tmp_path / "model"
        write_model_folder(folder, spec, ExportOptions(**export), RandomWeights(spec, seed=1))
        return folder

    return write


# --- pure arithmetic -------------------------------------------------------------------------------------------------


def test_the_cache_grows_by_blocks() -> None:
    assert [PLAN.cache(n) for n in (0, 1, 32, 33)] == [0, 320, 320, 640]
    assert PLAN.needed(33) == 1000 + 200 + 640


@pytest.mark.parametrize(
    ("cache_bytes", "context"), [(-1, 0), (0, 0), (319, 0), (320, 32), (639, 32), (640, 64), (10**9, 1000)]
)
def test_context_within(cache_bytes: int, context: int) -> None:
    assert PLAN.context_within(cache_bytes) == context


def test_a_model_without_cache_has_its_whole_context() -> None:
    assert MemoryPlan(1, 1, 0, 77).context_within(0) == 77


def free_for(num_bytes: int) -> int:
    """Return the least free memory of which a model may use `num_bytes`."""
    return next(free for free in range(num_bytes, 2 * num_bytes + 2) if usable(free) >= num_bytes)


def test_a_twentieth_stays_free() -> None:
    assert (usable(2000), usable(0), usable(-5)) == (1900, 0, -5)
    assert (free_for(1900), usable(1999)) == (1999, 1900)


@pytest.mark.parametrize(("free", "context"), [(free_for(1840), 32), (free_for(2480), 64), (10**9, 1000)])
def test_the_default_takes_half_of_what_is_left(free: int, context: int) -> None:
    assert default_context(PLAN, free) == context


@pytest.mark.parametrize("free", [0, 500, 1200, 1200 + 639])
def test_no_default_where_not_even_a_block_fits(free: int) -> None:
    with pytest.raises(CacheCapacityError) as caught:
        default_context(PLAN, free)
    assert "1.0 kB" in caught.value.why
    assert caught.value.fix


def test_an_asked_context_may_take_all() -> None:
    check_context(PLAN, 1000, free_for(PLAN.needed(1000)))
    with pytest.raises(CacheCapacityError) as caught:
        check_context(PLAN, 1000, free_for(PLAN.needed(1000)) - 1)
    assert "a context of 1000 tokens" in caught.value.what
    assert "cache 10.2 kB" in caught.value.why
    assert "at most 992" in caught.value.fix
    with pytest.raises(CacheCapacityError, match="smaller or more strongly quantised"):
        check_context(PLAN, 1, 1000)


@pytest.mark.parametrize("asked", [0, -3, 1001])
def test_contexts_beyond_the_model(asked: int) -> None:
    with pytest.raises(OptionError) as caught:
        check_context(PLAN, asked, 10**9)
    assert str(asked) in caught.value.what
    assert "1000" in caught.value.why
    assert caught.value.fix


def test_budgets() -> None:
    free = free_for(1200 + 2 * 640)
    assert budget_cache(PLAN, free_bytes=free) == CacheBudget(64, 640)
    assert budget_cache(PLAN, free_bytes=free, context_size=10) == CacheBudget(10, 640)
    assert budget_cache(PLAN, free_bytes=free, context_size=100) == CacheBudget(100, 1280)
    assert budget_cache(PLAN, free_bytes=0, cache_bytes=640) == CacheBudget(64, 640)
    assert budget_cache(PLAN, free_bytes=0, cache_bytes=640, context_size=40) == CacheBudget(40, 640)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"cache_bytes": 319}, CacheCapacityError, "too small for one block"),
        ({"cache_bytes": 640, "context_size": 65}, CacheCapacityError, "64 tokens fit"),
        ({"cache_bytes": 640, "context_size": 1001}, OptionError, "context length of the model is 1000"),
        ({"context_size": 200}, CacheCapacityError, "at most 128"),
        ({"context_size": 0}, OptionError, "1 to 1000"),
    ],
)
def test_budgets_that_cannot_be(options: dict[str, int], error: type[og.GenaiError], text: str) -> None:
    with pytest.raises(error, match=text) as caught:
        budget_cache(PLAN, free_bytes=free_for(1200 + 2 * 640), **options)
    assert caught.value.why
    assert caught.value.fix


# --- estimates against what is really taken --------------------------------------------------------------------------


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize(("bits", "block_size"), [(4, 32), (4, 128), (8, 32)])
@pytest.mark.parametrize(("rows", "columns"), [(32, 64), (33, 65), (100, 300)])
def test_packed_bytes(rows: int, columns: int, bits: int, block_size: int, zero_points: bool) -> None:
    blocks = -(-columns // block_size)
    points = np.full((rows, blocks), 3.5, np.float32) if zero_points else None
    matrix = pack_matrix(
        np.zeros(rows * blocks * block_size * bits // 8, np.uint8),
        np.ones(rows * blocks, np.float32),
        points,
        n=rows,
        k=columns,
        bits=bits,
        block_size=block_size,
    )
    layout = layout_with(bits, block_size, "half", zero_points, whole_points=False)
    assert packed_bytes(rows, columns, layout) == matrix.nbytes


FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp32": ({}, {"precision": "fp32"}),
    "int4": ({}, {"precision": "int4"}),
    "zero points": ({}, {"precision": "int4", "symmetric": False}),
    "int8": ({}, {"precision": "int8"}),
    "tied": ({"tie_word_embeddings": True}, {"precision": "int4"}),
    "biases": ({"qkv_bias": True, "o_bias": True, "mlp_bias": True, "model_type": "qwen2"}, {"precision": "int4"}),
}


def packed_matrices() -> list[BlockMatrix]:
    """Return all packed matrices of this process; `type`, because isinstance would dereference dead weak references."""
    return [item for item in gc.get_objects() if type(item) is BlockMatrix]


@pytest.mark.parametrize("form", FORMS)
def test_weights_as_loaded(write_folder: Folder, form: str) -> None:
    """The packed matrices and the unpacked initializers add up to the estimate."""
    changes, export = FORMS[form]
    config = Config(write_folder(changes, **export))
    source = read_decoder(config)
    before = packed_matrices()
    known = {id(matrix) for matrix in before}
    with og.Model(config):
        packed = sum(matrix.nbytes for matrix in packed_matrices() if id(matrix) not in known)
    quantised = {
        node.input(i)
        for node in source.model.graph.nodes
        for op_type, places in (("MatMulNBits", (1, 2, 3)), ("GatherBlockQuantized", (0, 2, 3)))
        if node.op_type == op_type
        for i in places
    }
    plain = sum(t.nbytes for name, t in source.model.graph.initializers.items() if name not in quantised)
    assert (packed > 0) == (form != "fp32")
    plan = plan_memory(source, config)
    assert plan.weights + plan.mapped == packed + plain
    assert (plan.mapped > 0) == (form != "tied")


@pytest.mark.parametrize("export", [{"precision": "int4"}, {"precision": "fp32"}])
def test_activations_of_a_prefill(write_folder: Folder, export: dict[str, Any]) -> None:
    """A step of 512 tokens uses no more than planned, and at least half of it."""
    sizes = {"hidden_size": 128, "intermediate_size": 512, "head_size": 32, "num_attention_heads": 4}
    config = Config(write_folder({**sizes, "context_length": 1024}, **export))
    planned = plan_memory(read_decoder(config), config).workspace
    with og.Model(config, threads=1) as model:  # kernels are loaded now, or compiled
        og.Generator(model, og.GeneratorParams(model)).append_tokens([5] * 600)
    with og.Model(config, threads=1) as model:
        generator = og.Generator(model, og.GeneratorParams(model))
        generator.append_tokens([1, 2, 3])
        tracemalloc.start()
        generator.append_tokens([5] * 600)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert planned / 2 < peak <= planned


def test_activations_grow_with_the_steps_of_a_device(write_folder: Folder) -> None:
    """With four times the tokens, up to the context."""
    config = Config(write_folder({"hidden_size": 64, "context_length": 1024}))
    decoder = read_decoder(config)
    planned = {tokens: plan_memory(decoder, config, tokens=tokens).workspace for tokens in (256, 1024, 4096)}
    assert planned[256] == plan_memory(decoder, config).workspace
    assert 3 * planned[256] < planned[1024] <= 4 * planned[256] and planned[4096] == planned[1024]


MEASURED = """
import sys
from pathlib import Path
import genai as og
with og.Model(sys.argv[1], threads=2, context_size=512, quiet=True) as model:
    generator = og.Generator(model, og.GeneratorParams(model))
    generator.append_tokens([[i % 300 for i in range(500)]])
    generator.generate_next_token()
    status = Path("/proc/self/status").read_text().splitlines()
    print(next(int(line.split()[1]) for line in status if line.startswith("VmHWM:")) * 1024)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
@pytest.mark.parametrize(
    ("hidden", "vocab", "export"),
    [
        (128, 2000, {"precision": "int4", "embedding_precision": "fp32"}),
        (512, 32000, {"precision": "int4", "embedding_precision": "fp32"}),
        (512, 16000, {"precision": "fp32"}),
        (512, 32000, {"precision": "int8", "embedding_precision": "fp16"}),
    ],
)
def test_the_peak_that_is_measured(write_folder: Folder, hidden: int, vocab: int, export: dict[str, Any]) -> None:
    """A process that loads a model and computes a prompt uses what `genai info` predicts, and not much less."""
    sizes = {"hidden_size": hidden, "vocab_size": vocab, "intermediate_size": 2 * hidden, "context_length": 512}
    heads = {"head_size": 64, "num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 128}
    folder = write_folder({**sizes, **heads}, **export)
    memory = describe(folder, context_size=512)["memory"]
    peaks = []
    for _ in range(2):  # the first may compile kernels, with the compiler in memory
        done = subprocess.run([sys.executable, "-c", MEASURED, str(folder)], capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout))
    assert memory["needed_bytes"] / 2 < peaks[1] <= memory["needed_bytes"] * 1.05


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
@pytest.mark.parametrize(("kind", "widened", "external"), [("float16", False, True), ("float16", True, False)])
def test_the_peak_of_a_graph_that_is_not_flattened(
    write_folder: Folder, tmp_path: Path, kind: str, widened: bool, external: bool
) -> None:
    """Half-precision weights become fp32; weights within model.onnx are in memory twice while it is read."""
    sizes = {"hidden_size": 512, "vocab_size": 32000, "intermediate_size": 1024, "context_length": 512}
    source = write_folder(
        {**sizes, "head_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4}, precision="fp32"
    )
    folder = narrow_folder(source, tmp_path / "narrow", kind, widened=widened)
    if external:
        model = onnx.load(folder / "model.onnx")
        (folder / "model.onnx.data").unlink()
        onnx.save(model, folder / "model.onnx", save_as_external_data=True, location="model.onnx.data")
    plan = describe(folder, context_size=512)
    assert not plan["batched"]
    peaks = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", MEASURED, str(folder)], capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout))
    assert plan["memory"]["needed_bytes"] / 2 < peaks[1] <= plan["memory"]["needed_bytes"] * 1.05


def test_cache_of_a_flat_and_of_a_dense_decoder(write_folder: Folder) -> None:
    source = read_decoder(Config(write_folder({}, precision="int4")))
    numbers = 8 * 16
    assert source.kv_bytes_per_token == {
        "fp16": 2 * numbers, "fp32": 4 * numbers, "bf16": 2 * numbers, "fp8": numbers, "int8": 8 * (16 + 2),
    }  # fmt: skip
    assert source.info.kv_dtype == "fp16"
    assert source.layout is not None
    assert source.layout.bytes_per_token == source.info.kv_bytes_per_token


# --- Model(context_size=…) -------------------------------------------------------------------------------------------


def test_the_context_of_a_model(write_folder: Folder) -> None:
    folder = write_folder({}, precision="int4")
    with og.Model(folder) as model:
        assert model.context_size == 256
    with og.Model(folder, context_size=100) as model:
        assert model.context_size == 100
        params = og.GeneratorParams(model)
        assert params.get_search_options()["max_length"] == 100
        with pytest.raises(OptionError, match="the context size is 100 tokens"):
            params.set_search_options(max_length=101)
        generator = og.Generator(model, params)
        generator.append_tokens([1] * 100)
        with pytest.raises(og.GenaiError, match="exceed max_length 100"):
            generator.append_tokens([1])


def test_a_small_cache_makes_a_small_context(write_folder: Folder) -> None:
    with og.Model(write_folder({}, precision="int4"), cache_bytes=3 * 32 * 256) as model:
        assert model.context_size == 96
        assert model.info.cache_tokens == 96


def test_the_folders_own_max_length_yields_to_the_context(write_folder: Folder) -> None:
    folder = write_folder({}, precision="int4")
    path = folder / "genai_config.json"
    config = json.loads(path.read_text())
    config["search"] = {"max_length": 256}
    path.write_text(json.dumps(config))
    with og.Model(folder, context_size=64) as model:
        assert og.GeneratorParams(model).get_search_options()["max_length"] == 64
    config["search"] = {"max_length": 257}
    path.write_text(json.dumps(config))
    with og.Model(folder, context_size=64) as model, pytest.raises(OptionError, match="max_length = 257"):
        og.GeneratorParams(model)


def test_numbers_of_numpy_are_numbers(write_folder: Folder) -> None:
    threads, size = np.int64(1), np.int32(64)
    with og.Model(write_folder({}, precision="int4"), threads=threads, context_size=size) as model:  # type: ignore[arg-type]
        assert (model.threads, model.context_size, type(model.context_size)) == (1, 64, int)


@pytest.mark.parametrize("size", [0, -1, 257, 2.5, True, "64", np.int64(0), np.bool_(True)])
def test_contexts_that_a_model_refuses(write_folder: Folder, size: Any) -> None:
    with pytest.raises(OptionError) as caught:
        og.Model(write_folder({}, precision="int4"), context_size=size)
    assert caught.value.why
    assert caught.value.fix


def test_the_long_rope_threshold_does_not_follow_the_context(write_folder: Folder) -> None:
    rope = LongRope(
        short_factor=(1.0,) * 8, long_factor=tuple(1 + i / 2 for i in range(8)), original_max_position_embeddings=64
    )
    folder = write_folder({"rope_scaling": rope, "model_type": "phi3"}, precision="fp32")
    logits = []
    for size in (None, 120):
        with og.Model(folder, context_size=size) as model:
            generator = og.Generator(model, og.GeneratorParams(model))
            generator.append_tokens([7] * 100)  # beyond the threshold: the long table
            logits.append(generator.get_logits())
    np.testing.assert_array_equal(*logits)
