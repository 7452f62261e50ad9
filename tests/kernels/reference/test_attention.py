"""Attention: the dense form against onnxruntime, the op over pages against the dense form, rotations, refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from genai.kernels.cache_layout import PAGE_TOKENS, PagedLayer
from genai.kernels.device import PageTables, StepContext, StepError
from genai.kernels.ir import Attention, Rope
from genai.kernels.reference.functions import norm
from genai.ops.group_query_attention import group_query_attention, rotary_embedding

Run, Normal = Callable[..., Any], Callable[..., np.ndarray]
BATCH, HEADS, KV_HEADS, HEAD_SIZE, POSITIONS = 2, 4, 2, 16, 64


def assert_close(ours: np.ndarray, theirs: np.ndarray, tolerance: float = 5e-6) -> None:
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance * max(1e-3, float(np.abs(theirs).max())))


GQA_VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.3},
    "window shorter than the prompt": {"local_window_size": 3},
    "window of one token": {"local_window_size": 1},
    "window as long as the prompt": {"local_window_size": 7},
    "softcap": {"softcap": 1.5},
    "smooth softmax": {"smooth_softmax": 1},
    "rotary": {"do_rotary": 1},
    "rotary interleaved": {"do_rotary": 1, "rotary_interleaved": 1},
    "rotary and window": {"do_rotary": 1, "local_window_size": 4, "softcap": 2.0},
}


class GroupQueryCase:
    """The same GroupQueryAttention inputs, for them and for us."""

    def __init__(self, node: Run, normal: Normal, attributes: dict[str, Any], **extra: Any) -> None:
        self.node = node
        self.attributes = {"num_heads": HEADS, "kv_num_heads": KV_HEADS, **attributes}
        rotary = bool(attributes.get("do_rotary"))
        self.caches = [normal(POSITIONS, HEAD_SIZE // 2) for _ in range(2)] if rotary else [None, None]
        self.extra = extra

    def compare(self, qkv: list[Any], past: list[Any], totals: list[int], longest: int) -> list[np.ndarray]:
        seqlens, total = np.array(totals, np.int32) - 1, np.array(longest, np.int32)
        named = [self.extra.get("position_ids"), None, self.extra.get("head_sink")]
        inputs = [*qkv, *past, seqlens, total, *self.caches, *named]
        theirs = self.node("GroupQueryAttention", inputs, [0, 1, 2], **self.attributes)
        ours = group_query_attention(*inputs, **self.attributes)
        length = qkv[0].shape[1]
        for b, count in enumerate(totals):
            # Rows and cache entries of padding hold nothing of meaning.
            rows = min(length, count) if length == longest else length
            assert_close(ours[0][b, :rows], theirs[0][b, :rows])
            for mine, other in zip(ours[1:], theirs[1:], strict=True):
                assert mine.shape == other.shape
                assert_close(mine[b, :, :count], other[b, :, :count])
        return theirs


def projections(normal: Normal, length: int, packed: bool) -> list[Any]:
    sizes = [HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE]
    return [normal(BATCH, length, sum(sizes)), None, None] if packed else [normal(BATCH, length, n) for n in sizes]


@pytest.mark.oracle
@pytest.mark.parametrize("variant", GQA_VARIANTS)
@pytest.mark.parametrize("packed", [False, True])
def test_group_query_attention_prompt_then_tokens(
    onnxruntime_node: Run, normal: Normal, variant: str, packed: bool
) -> None:
    """A right-padded first prompt, one token more, then a chunk of three (onnxruntime: of one sequence only)."""
    case = GroupQueryCase(onnxruntime_node, normal, GQA_VARIANTS[variant])
    empty = np.zeros((BATCH, KV_HEADS, 0, HEAD_SIZE), np.float32)
    present = case.compare(projections(normal, 7, packed), [empty, empty], [7, 5], 7)[1:]
    present = case.compare(projections(normal, 1, packed), present, [8, 6], 8)[1:]
    chunk = [None if x is None else x[:1] for x in projections(normal, 3, packed)]
    case.compare(chunk, [x[:1] for x in present], [11], 11)


@pytest.mark.oracle
def test_group_query_attention_shared_buffer(onnxruntime_node: Run, normal: Normal) -> None:
    """A cache longer than the sequences, as with past_present_share_buffer."""
    case = GroupQueryCase(onnxruntime_node, normal, {"do_rotary": 1})
    past = [normal(BATCH, KV_HEADS, 20, HEAD_SIZE) for _ in range(2)]
    case.compare(projections(normal, 1, True), past, [8, 13], 13)


@pytest.mark.oracle
def test_group_query_attention_partial_rotary(onnxruntime_node: Run, normal: Normal) -> None:
    """Head size 32, of which 16 elements are rotated."""
    heads, kv_heads, size = 2, 1, 32
    caches = [normal(POSITIONS, 8) for _ in range(2)]
    qkv = [normal(1, 5, heads * size), normal(1, 5, kv_heads * size), normal(1, 5, kv_heads * size)]
    past = [np.zeros((1, kv_heads, 0, size), np.float32)] * 2
    inputs = [*qkv, *past, np.array([4], np.int32), np.array(5, np.int32), *caches]
    attributes = {"num_heads": heads, "kv_num_heads": kv_heads, "do_rotary": 1}
    theirs = onnxruntime_node("GroupQueryAttention", inputs, [0, 1, 2], **attributes)
    for mine, other in zip(group_query_attention(*inputs, **attributes), theirs, strict=True):
        assert_close(mine, other)


@pytest.mark.oracle
@pytest.mark.parametrize("extra", ["position_ids", "head_sink", "head_sink and window"])
def test_group_query_attention_optional_inputs(onnxruntime_node: Run, normal: Normal, extra: str) -> None:
    positions, name = np.tile(np.arange(3, 9, dtype=np.int64), (BATCH, 1)), extra.split()[0]
    values = {"position_ids": positions, "head_sink": normal(HEADS) * 2}
    attributes = {"position_ids": {"do_rotary": 1}, "head_sink and window": {"local_window_size": 2}}.get(extra, {})
    case = GroupQueryCase(onnxruntime_node, normal, attributes, **{name: values[name]})
    empty = np.zeros((BATCH, KV_HEADS, 0, HEAD_SIZE), np.float32)
    case.compare(projections(normal, 6, False), [empty, empty], [6, 6], 6)


def test_group_query_attention_norms_are_an_rms_norm_per_head(normal: Normal) -> None:
    """onnxruntime's CPU kernel rejects these inputs; the contract says: per head, before the rotation."""
    qkv, weights = projections(normal, 4, False), [normal(HEAD_SIZE), normal(HEAD_SIZE)]
    empty = np.zeros((BATCH, KV_HEADS, 0, HEAD_SIZE), np.float32)
    caches = [normal(POSITIONS, HEAD_SIZE // 2) for _ in range(2)]
    common = (empty, empty, np.array([3, 3], np.int32), 4, *caches)
    attributes = {"num_heads": HEADS, "kv_num_heads": KV_HEADS, "do_rotary": True}
    normed = [
        norm(x.reshape(BATCH, 4, -1, HEAD_SIZE), w, 1e-3).astype(np.float32).reshape(x.shape)
        for x, w in zip(qkv, weights, strict=False)
    ]
    expected = group_query_attention(*normed, qkv[2], *common, **attributes)
    ours = group_query_attention(*qkv, *common, *[None] * 5, *weights, qk_norm_epsilon=1e-3, **attributes)
    for mine, other in zip(ours, expected, strict=True):
        assert_close(mine, other)


@pytest.mark.oracle
@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("layout", ["3-D", "4-D", "3-D partial", "first position"])
def test_rotary_embedding(onnxruntime_node: Run, normal: Normal, interleaved: int, layout: str) -> None:
    width = 4 if layout == "3-D partial" else 8
    cos, sin = normal(POSITIONS, width), normal(POSITIONS, width)
    x = normal(2, 3, 5, 16) if layout == "4-D" else normal(2, 5, 48)
    positions = np.array([9], np.int64)
    if layout != "first position":
        positions = np.array([[0, 1, 2, 3, 4], [7, 8, 9, 10, 11]], np.int64)
    attributes = {"interleaved": interleaved}
    if layout == "3-D partial":
        attributes |= {"num_heads": 3, "rotary_embedding_dim": 8}
    (theirs,) = onnxruntime_node("RotaryEmbedding", [x, positions, cos, sin], [0], **attributes)
    assert_close(rotary_embedding(x, positions, cos, sin, **attributes), theirs, 2e-6)


def test_rotary_embedding_refuses_a_dimension_that_the_caches_do_not_have(normal: Normal) -> None:
    with pytest.raises(ValueError, match="rotary_embedding_dim is 6, but cos_cache has the rotary dimension 8"):
        rotary_embedding(normal(1, 1, 16), np.zeros(1, int), normal(3, 4), normal(3, 4), rotary_embedding_dim=6)


# --- the op over pages -----------------------------------------------------------------------------------------

RECORD = Attention("q", "k", "v", "out", 0, HEADS, KV_HEADS, HEAD_SIZE, HEAD_SIZE)
# Sequences: tokens before the step, tokens of the step, RoPE table.
SEQUENCES = [(0, 5, 0), (40, 1, 1), (30, 9, 0)]
RECORDS: dict[str, Attention] = {
    "plain": RECORD,
    "window": replace(RECORD, window=4, scale=0.2),
    "softcap and smooth softmax": replace(RECORD, softcap=1.5, smooth_softmax=True),
    "sinks": replace(RECORD, sinks="sinks"),
    "rope": replace(RECORD, rope=Rope("cos", "sin", interleaved=True)),
    "long rope and norms": replace(
        RECORD, rope=Rope("cos", "sin", "long_cos", "long_sin"), q_norm="q_norm", k_norm="k_norm", epsilon=1e-3
    ),
}
ATTRIBUTES = {"scale": "scale", "softcap": "softcap", "window": "local_window_size", "smooth_softmax": "smooth_softmax"}


def some_constants(normal: Normal) -> dict[str, np.ndarray]:
    tables = {name: normal(POSITIONS, HEAD_SIZE // 2) for name in ("cos", "sin", "long_cos", "long_sin")}
    return {**tables, "sinks": normal(HEADS), "q_norm": normal(HEAD_SIZE), "k_norm": normal(HEAD_SIZE)}


def a_step_with_pages(normal: Normal) -> tuple[StepContext, PagedLayer]:
    """The sequences in pages that are not in order; what is behind their ends is NaN."""
    pages = 7
    layer = PagedLayer(normal(pages, KV_HEADS, HEAD_SIZE, PAGE_TOKENS), normal(pages, KV_HEADS, PAGE_TOKENS, HEAD_SIZE))
    tables = np.array([[5, -1], [6, 0], [2, 3]], np.int32)
    counts = [count for _, count, _ in SEQUENCES]
    positions = np.concatenate([np.arange(past, past + count) for past, count, _ in SEQUENCES])
    of_row = np.repeat(np.arange(3), counts)
    for table, (past, count, _) in zip(tables, SEQUENCES, strict=True):
        last, offset = divmod(past + count, PAGE_TOKENS)
        layer.keys[table[last], :, :, offset:] = layer.values[table[last], :, offset:] = np.nan
    step = StepContext(
        tokens=np.zeros(len(positions), np.int64),
        positions=positions,
        cu_seqlens_q=np.cumsum([0, *counts]).astype(np.int32),
        context_lens=np.array([past + count for past, count, _ in SEQUENCES], np.int32),
        groups=(
            PageTables(
                tables,
                tables[of_row, positions // PAGE_TOKENS].astype(np.int64) * PAGE_TOKENS + positions % PAGE_TOKENS,
            ),
        ),
        num_decode_sequences=0,
        logits_indices=np.empty(0, np.int64),
        rope_table=np.array([table for _, _, table in SEQUENCES], np.int32),
    )
    return step, layer


def some_rows(normal: Normal, step: StepContext) -> dict[str, np.ndarray]:
    widths = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
    return {name: normal(len(step.tokens), heads * HEAD_SIZE) for name, heads in widths.items()}


@pytest.mark.parametrize("variant", RECORDS)
@pytest.mark.parametrize("packed", [False, True])
def test_the_record_is_dense_attention_of_every_sequence(
    compute: Run, normal: Normal, variant: str, packed: bool
) -> None:
    op, constants = RECORDS[variant], some_constants(normal)
    step, layer = a_step_with_pages(normal)
    rows, before = some_rows(normal, step), PagedLayer(layer.keys.copy(), layer.values.copy())
    given = {"q": np.concatenate(list(rows.values()), axis=1)} if packed else rows
    asked = replace(op, key="", value="") if packed else op
    out = compute(asked, constants, step=step, layers=[layer], **given, out=HEADS * HEAD_SIZE)
    rope = op.rope
    for index, (past, count, table) in enumerate(SEQUENCES):
        part, pages = slice(*step.cu_seqlens_q[index : index + 2]), step.groups[0].block_tables[index]
        long = rope is not None and rope.long_cos and table
        names = (rope.long_cos, rope.long_sin) if rope and long else (rope.cos, rope.sin) if rope else ("", "")
        caches = [constants.get(name) for name in names]
        keys, values = (
            np.concatenate(list(x), axis=1)[None, :, :past]
            for x in (before.keys[pages].swapaxes(2, 3), before.values[pages])
        )
        new = [rows[name][part][None] for name in ("q", "k", "v")]
        extra = [None, None, constants.get(op.sinks), None, None]
        norms = [constants.get(name) for name in (op.q_norm, op.k_norm)]
        expected, all_keys, all_values = group_query_attention(
            *new, keys, values, np.array([past + count - 1]), past + count, *caches, *extra, *norms,
            num_heads=HEADS, kv_num_heads=KV_HEADS, do_rotary=rope is not None,
            rotary_interleaved=rope is not None and rope.interleaved, qk_norm_epsilon=op.epsilon,
            **{theirs: getattr(op, ours) for ours, theirs in ATTRIBUTES.items()},
        )  # fmt: skip
        assert_close(out[part], expected[0], 1e-6)
        blocks, offsets = np.divmod(step.groups[0].slot_mapping[part], PAGE_TOKENS)
        assert_close(layer.keys[blocks, :, :, offsets], all_keys[0, :, past:].swapaxes(0, 1), 1e-6)
        np.testing.assert_array_equal(layer.values[blocks, :, offsets], all_values[0, :, past:].swapaxes(0, 1))


def test_pages_of_float16(compute: Run, normal: Normal) -> None:
    """Keys and values count as they are stored."""
    step, layer = a_step_with_pages(normal)
    rows = some_rows(normal, step)
    half = PagedLayer(layer.keys.astype(np.float16), layer.values.astype(np.float16))
    wide = PagedLayer(half.keys.astype(np.float32), half.values.astype(np.float32))
    rounded = {name: x.astype(np.float16).astype(np.float32) if name != "q" else x for name, x in rows.items()}
    found = compute(RECORD, step=step, layers=[half], **rows, out=HEADS * HEAD_SIZE)
    np.testing.assert_array_equal(found, compute(RECORD, step=step, layers=[wide], **rounded, out=HEADS * HEAD_SIZE))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slot_mapping": 7 * PAGE_TOKENS}, "slot outside the cache: 224 is not in the range 0 to 223"),
        ({"slot_mapping": -1}, "slot outside the cache: -1"),
        ({"positions": 39}, "position outside its sequence: 39 is not in the range 0 to 38"),
        ({"positions": -1}, "position outside its sequence: -1"),
        ({"context_lens": 65}, "context longer than its block table: 2 is not in the range 0 to 1"),
        ({"block_tables": 7}, "block table entry outside the cache: 7 is not in the range 0 to 6"),
        ({"block_tables": -1}, "block table entry outside the cache: -1"),
    ],
)
def test_places_outside_the_cache(compute: Run, normal: Normal, change: dict[str, int], message: str) -> None:
    step, layer = a_step_with_pages(normal)
    for name, value in change.items():
        getattr(step if hasattr(step, name) else step.groups[0], name).reshape(-1)[-1] = value
    with pytest.raises(StepError, match=message):
        compute(RECORD, step=step, layers=[layer], **some_rows(normal, step), out=HEADS * HEAD_SIZE)


@pytest.mark.parametrize("short", ["cos", "long_cos"])
def test_positions_outside_the_rotary_tables(compute: Run, normal: Normal, short: str) -> None:
    """Each sequence has the table that it asks for; tokens of short tables end at 38, those of long ones at 40."""
    step, layer = a_step_with_pages(normal)
    op, rows = RECORDS["long rope and norms"], some_rows(normal, step)
    constants = some_constants(normal)
    enough = {"cos": 39, "long_cos": 41}
    for less, refused in ((0, False), (1, True)):
        constants[short] = constants[short][: enough[short] - less]
        options = {"step": step, "layers": [layer], **rows, "out": HEADS * HEAD_SIZE}
        if refused:
            with pytest.raises(StepError, match="position outside the rotary tables"):
                compute(op, constants, **options)
        else:
            constants[short.replace("cos", "sin")] = constants[short.replace("cos", "sin")][: enough[short]]
            assert np.isfinite(compute(op, constants, **options)).all()
