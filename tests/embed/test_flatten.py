"""Encoder graphs: which masks, biases and positions can be computed in flat batches, and which cannot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import genai
from genai.devices import open_executor
from genai.kernels.cpu.jit.isa import isa
from genai.kernels.ir import Attention
from genai.lowering.program import build_program
from genai.models.encoder import Encoder, TokenSequence

WIDTH, HEADS, LONGEST = 8, 2, 40
F, I64 = np.float32, np.int64


def N(op_type: str, inputs: list[str], outputs: list[str], **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op_type, inputs, outputs, **attributes)


def save(
    path: Path, *, mask: list[Any] = (), end: list[Any] = (), positions: list[Any] = (), constants: Any = None,
    inputs: tuple[str, ...] = ("input_ids", "attention_mask"), output: str = "hidden", out_rank: int = 3,
    repeat: str = "",
) -> Path:  # fmt: skip
    """Write an encoder of one attention layer. `mask` computes "bias", `positions` "placed", `end` the output.

    `repeat`: the key in REPEATS of the nodes that repeat two key and value heads for four query heads.
    """
    rng = np.random.default_rng(3)
    arrays: dict[str, Any] = {
        "table": rng.standard_normal((30, WIDTH)).astype(F),
        "heads": np.array([0, 0, HEADS, -1], I64), "rows": np.array([0, 0, -1], I64), "zero": I64(0), "one": I64(1),
        "scale": F(0.5), "hidden_score": F(-1e9), "nothing": F(0), "first": np.array([1, 2], I64),
        "axis0": np.array([0], I64), "axis1": np.array([1], I64), "axis2": np.array([2], I64),
        **{name: rng.standard_normal((WIDTH, WIDTH)).astype(F) for name in ("wq", "wk", "wv", "wo")},
        **(constants or {}),
    }  # fmt: skip
    if repeat:
        arrays |= {
            "heads": np.array([0, 0, 4, 2], I64), "kv_heads": np.array([0, 0, 2, 2], I64),
            **{name: rng.standard_normal((WIDTH, WIDTH // 2)).astype(F) for name in ("wk", "wv")},
            "twice": np.array([0, 0, 1, 1], I64), "in_turns": np.array([0, 1, 0, 1], I64), "apart": np.array([2], I64),
            "copies": np.array([1, 1, 2, 1, 1], I64), "four": np.array([0, 4, -1, 2], I64),
        }  # fmt: skip
    nodes = [
        N("Gather", ["table", "input_ids"], ["embedded"]),
        N("Shape", ["input_ids"], ["shape"]), N("Gather", ["shape", "one"], ["length"]),
        N("Range", ["zero", "length", "one"], ["range"]),
        *(positions or [N("Identity", ["embedded"], ["placed"])]),
    ]  # fmt: skip
    for letter in "qkv":
        is_repeated = repeat and letter != "q"
        nodes += [
            N("MatMul", ["placed", f"w{letter}"], [letter]),
            N("Reshape", [letter, "kv_heads" if is_repeated else "heads"], [f"{letter}4"]),
        ]
        if is_repeated:
            nodes += [N("Transpose", [f"{letter}4"], [f"{letter}5"], perm=[0, 2, 1, 3])]
            nodes += REPEATS[repeat](f"{letter}5", f"{letter}6")
            end_of_k = N("Transpose", ["k6"], ["kh"], perm=[0, 1, 3, 2])
            nodes += [end_of_k if letter == "k" else N("Identity", ["v6"], ["vh"])]
            continue
        nodes += [N("Transpose", [f"{letter}4"], [f"{letter}h"], perm=[0, 2, 3, 1] if letter == "k" else [0, 2, 1, 3])]
    default = [
        N("Cast", ["attention_mask"], ["seen"], to=TensorProto.BOOL),
        N("Unsqueeze", ["seen", "first"], ["seen4"]),
        N("Where", ["seen4", "nothing", "hidden_score"], ["bias"]),
    ]
    nodes += [
        N("MatMul", ["qh", "kh"], ["dots"]), N("Mul", ["dots", "scale"], ["scaled"]), *(mask or default),
        N("Add", ["scaled", "bias"], ["scores"]), N("Softmax", ["scores"], ["weights"], axis=-1),
        N("MatMul", ["weights", "vh"], ["mixed"]), N("Transpose", ["mixed"], ["tokens"], perm=[0, 2, 1, 3]),
        N("Reshape", ["tokens", "rows"], ["joined"]), N("MatMul", ["joined", "wo"], ["hidden"]), *end,
    ]  # fmt: skip
    dims = ["batch", "sequence"]
    graph = helper.make_graph(
        nodes, "encoder", [helper.make_tensor_value_info(name, TensorProto.INT64, dims) for name in inputs],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, [None] * out_rank)],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in arrays.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.save(model, path)
    return path


def _expanded(source: str, result: str) -> list[onnx.NodeProto]:
    return [
        N("Unsqueeze", [source, "apart"], [f"{source}a"]), N("Expand", [f"{source}a", "copies"], [f"{source}b"]),
        N("Reshape", [f"{source}b", "four"], [result]),
    ]  # fmt: skip


REPEATS: dict[str, Callable[[str, str], list[onnx.NodeProto]]] = {
    "Gather": lambda source, result: [N("Gather", [source, "twice"], [result], axis=1)],
    "Expand": _expanded,
    "other order": lambda source, result: [N("Gather", [source, "in_turns"], [result], axis=1)],
}


def load(path: Path) -> Encoder:
    return Encoder(path, open_executor("cpu", 1), ["hidden"], LONGEST)


def expected(path: Path, sequence: TokenSequence) -> np.ndarray:
    """The graph as exported, by a session."""
    feeds: dict[str, Any] = {"input_ids": sequence.ids[None], "attention_mask": np.ones((1, len(sequence)), I64)}
    session = genai.InferenceSession(str(path))
    found = session.run(None, {one.name: feeds[one.name] for one in session.get_inputs()})
    return np.asarray(found[0])


def sequences() -> list[TokenSequence]:
    rng = np.random.default_rng(1)
    return [TokenSequence(rng.integers(1, 30, length)) for length in (1, 7, LONGEST, 13)]


def check(path: Path, *, reason: str = "") -> Encoder:
    """The results are those of a session; `reason` = why the graph is not flattened."""
    encoder = load(path)
    assert encoder.info.flattened == (not reason), encoder.info.reason
    assert reason in encoder.info.reason
    for sequence, rows in zip(sequences(), encoder.run(sequences()), strict=True):
        np.testing.assert_allclose(rows, expected(path, sequence).reshape(rows.shape), rtol=0, atol=3e-5)
    return encoder


DISTANCE = [
    N("Unsqueeze", ["range", "axis0"], ["columns"]), N("Unsqueeze", ["range", "axis1"], ["lines"]),
    N("Sub", ["columns", "lines"], ["distance"]),
]  # fmt: skip
AWAY = [*DISTANCE, N("Abs", ["distance"], ["away"])]


def visible(condition: str, *, shape: list[Any] = ()) -> list[Any]:
    return [N("Where", [condition, "nothing", "hidden_score"], ["bias2"]), N("Unsqueeze", ["bias2", "axes"], ["bias"])]


AXES = {"axes": np.array([0, 1], I64)}
MASKS: dict[str, tuple[list[Any], dict[str, Any], str]] = {
    "padding": ([], {}, ""),
    "window": ([*AWAY, N("Less", ["away", "limit"], ["near"]), *visible("near")], {"limit": I64(4), **AXES}, ""),
    "wide window": ([*AWAY, N("Less", ["away", "limit"], ["near"]), *visible("near")], {"limit": I64(99), **AXES}, ""),
    "causal": ([*DISTANCE, N("LessOrEqual", ["distance", "zero"], ["near"]), *visible("near")], AXES, ""),
    "causal window": (
        [*AWAY, N("Less", ["away", "limit"], ["close"]), N("LessOrEqual", ["distance", "zero"], ["before"]),
         N("And", ["close", "before"], ["near"]), *visible("near")],
        {"limit": I64(5), **AXES}, "",
    ),
    "only later tokens": (
        [*DISTANCE, N("GreaterOrEqual", ["distance", "zero"], ["near"]), *visible("near")], AXES,
        "neither full nor causal nor a window",
    ),
    "bias by distance": (
        [*DISTANCE, N("Cast", ["distance"], ["d"], to=1), N("Mul", ["d", "slope"], ["slanted"]),
         N("Sin", ["slanted"], ["wave"]), N("Unsqueeze", ["wave", "axes"], ["bias"])],
        {"slope": F(0.3), **AXES}, "",
    ),
    "bias per head": (
        [*AWAY, N("Cast", ["away"], ["d"], to=1), N("Mul", ["slopes", "d"], ["per_head"]),
         N("Unsqueeze", ["per_head", "axis0"], ["bias"])],
        {"slopes": np.array([-0.3, 0.2], F).reshape(2, 1, 1)}, "",
    ),
    "bias by position": (
        [*DISTANCE, N("Mul", ["columns", "lines"], ["product"]), N("Cast", ["product"], ["d"], to=1),
         N("Mul", ["d", "slope"], ["small"]), N("Unsqueeze", ["small", "axes"], ["bias"])],
        {"slope": F(0.01), **AXES}, "depends on more than the distance",
    ),
    "bias and a window": (
        [*AWAY, N("Less", ["away", "limit"], ["near"]), N("Cast", ["distance"], ["d"], to=1),
         N("Where", ["near", "d", "hidden_score"], ["bias2"]), N("Unsqueeze", ["bias2", "axes"], ["bias"])],
        {"limit": I64(4), **AXES}, "hides tokens and has other values",
    ),
    "bias of the tokens": (
        [N("ReduceMean", ["placed", "axis2"], ["mean"], keepdims=0), N("Unsqueeze", ["mean", "first"], ["bias"])],
        {}, "depends on the tokens",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
def test_masks(tmp_path: Path, name: str) -> None:
    mask, constants, reason = MASKS[name]
    inputs = ("input_ids", "attention_mask") if not mask else ("input_ids",)
    check(save(tmp_path / "model.onnx", mask=mask, constants=constants, inputs=inputs), reason=reason)


@pytest.mark.parametrize("name", REPEATS)
def test_grouped_queries_read_heads_that_are_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    programs: list[Any] = []

    def record(*args: Any, **kwargs: Any) -> Any:
        programs.append(build_program(*args, **kwargs))
        return programs[-1]

    monkeypatch.setattr("genai.models.encoder.build_program", record)
    check(save(tmp_path / "model.onnx", repeat=name))
    (program,) = programs
    (attention,) = (part for part in program.parts if isinstance(part, Attention))
    assert (attention.heads, attention.kv_heads) == (4, 4 if name == "other order" else 2)


PLACES: dict[str, tuple[list[Any], str]] = {
    "table": ([N("Gather", ["places", "range"], ["found"]), N("Add", ["embedded", "found"], ["placed"])], ""),
    "reversed": (
        [N("Sub", ["length", "range"], ["back"]), N("Gather", ["places", "back"], ["found"]),
         N("Add", ["embedded", "found"], ["placed"])],
        "is not a table of positions",
    ),
    "by the length": (
        [N("Cast", ["length"], ["size"], to=1), N("Div", ["embedded", "size"], ["placed"])],
        "is not a table of positions",
    ),
    "padding is not counted": (
        [N("Equal", ["input_ids", "pad"], ["is_pad"]), N("Not", ["is_pad"], ["kept"]), N("Cast", ["kept"], ["n"], to=7),
         N("CumSum", ["n", "one"], ["numbers"]), N("Gather", ["places", "numbers"], ["found"]),
         N("Add", ["embedded", "found"], ["placed"])],
        "",
    ),
    "mean of the text": (
        [N("ReduceMean", ["embedded", "axis1"], ["mean"]), N("Sub", ["embedded", "mean"], ["placed"])],
        "runs along the token axis",
    ),
    "token counter": (
        [N("CumSum", ["input_ids", "one"], ["sums"]), N("Mod", ["sums", "pad"], ["small"]),
         N("Gather", ["places", "small"], ["found"]), N("Add", ["embedded", "found"], ["placed"])],
        "CumSum",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLACES)
def test_positions(tmp_path: Path, name: str) -> None:
    positions, reason = PLACES[name]
    places = np.random.default_rng(2).standard_normal((LONGEST + 2, WIDTH)).astype(F)
    check(
        save(tmp_path / "model.onnx", positions=positions, constants={"places": places, "pad": I64(7)}), reason=reason
    )


def test_texts_with_an_id_that_counts_as_padding_run_as_exported(tmp_path: Path) -> None:
    places = np.random.default_rng(2).standard_normal((LONGEST + 2, WIDTH)).astype(F)
    positions, _ = PLACES["padding is not counted"]
    path = save(tmp_path / "model.onnx", positions=positions, constants={"places": places, "pad": I64(7)})
    encoder = load(path)
    padded, plain = TokenSequence(np.array([3, 7, 5, 7, 7, 9])), TokenSequence(np.array([3, 4, 5]))
    assert encoder._flat is not None and encoder._flat.excluded_ids == {7}
    found = encoder.run([plain, padded, plain])
    for sequence, rows in zip((plain, padded, plain), found, strict=True):
        np.testing.assert_allclose(rows, expected(path, sequence)[0], rtol=0, atol=3e-5)


@pytest.mark.parametrize(("index", "rows"), [(0, "first"), (-1, "last")])
def test_outputs_of_one_token(tmp_path: Path, index: int, rows: str) -> None:
    end = [N("Gather", ["hidden", "place"], ["logits"], axis=1)]
    path = save(tmp_path / "model.onnx", end=end, constants={"place": I64(index)}, output="logits", out_rank=2)
    assert check(path).info.rows == rows


def test_an_output_of_the_mean_runs_as_exported(tmp_path: Path) -> None:
    end = [N("ReduceMean", ["hidden", "axis1"], ["pooled"], keepdims=0)]
    path = save(tmp_path / "model.onnx", end=end, output="pooled", out_rank=2)
    check(path, reason="runs along the token axis")


BAKED = {"heads": np.array([1, -1, HEADS, WIDTH // HEADS], I64), "rows": np.array([1, -1, WIDTH], I64)}
ALONG_TOKENS = {
    "batched": (N("Softmax", ["hidden"], ["mixed_rows"], axis=1), {}, [4, 2]),
    "an unknown operator": (N("CumSum", ["hidden", "one"], ["mixed_rows"]), {}, [1] * 6),
    "a batch of 1": (N("Softmax", ["hidden"], ["mixed_rows"], axis=1), BAKED, [1] * 6),
}


@pytest.mark.parametrize("name", ALONG_TOKENS)
def test_texts_of_equal_length_as_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """They are computed together if no result depends on it, for any number of threads."""
    node, constants, sizes = ALONG_TOKENS[name]
    path = save(tmp_path / "model.onnx", end=[node], constants=constants, output="mixed_rows")
    texts = [TokenSequence(np.random.default_rng(n).integers(1, 30, length)) for n, length in enumerate((9, 4) * 2)]
    texts += [texts[0], TokenSequence(texts[0].ids[::-1].copy())]
    results = []
    for threads in (1, 2):
        encoder = Encoder(path, open_executor("cpu", threads), [], LONGEST)
        assert not encoder.info.flattened and "equal lengths together" in encoder.numerics
        alone = [encoder.run([text])[0] for text in texts]
        encoder.run(texts)  # includes the trial
        groups, run = [], encoder._run_exported
        monkeypatch.setattr(
            encoder, "_run_exported", lambda group, run=run, groups=groups: groups.append(len(group)) or run(group)
        )
        results.append(encoder.run(texts))
        assert groups == sizes
        for a, b in zip(alone, results[-1], strict=True):
            np.testing.assert_array_equal(a, b)
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_allclose(results[0][-1], expected(path, texts[-1])[0], rtol=0, atol=3e-5)


def test_texts_longer_than_a_bias_run_as_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("genai.lowering.encoder.LONGEST_BIAS", 20)
    mask, constants, _ = MASKS["bias per head"]
    encoder = check(save(tmp_path / "model.onnx", mask=mask, constants=constants, inputs=("input_ids",)))
    assert encoder._flat is not None and encoder._flat.max_tokens == 20


def test_other_inputs_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "model.onnx", inputs=("input_ids", "attention_mask", "pixel_values"))
    with pytest.raises(genai.UnsupportedModelError, match="the graph has the input 'pixel_values'"):
        load(path)
    words = helper.make_tensor_value_info("attention_mask", TensorProto.FLOAT, ["batch", "sequence"])
    same = helper.make_tensor_value_info("same", TensorProto.FLOAT, ["batch", "sequence"])
    graph = helper.make_graph([N("Identity", ["attention_mask"], ["same"])], "g", [words], [same])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    with pytest.raises(genai.UnsupportedModelError, match="the graph has no input 'input_ids'"):
        load(path)


@pytest.mark.parametrize("length", [0, LONGEST + 1])
def test_lengths_outside_the_limits(tmp_path: Path, length: int) -> None:
    encoder = load(save(tmp_path / "model.onnx"))
    with pytest.raises(genai.InputError, match=f"1 to {LONGEST} tokens"):
        encoder.run([TokenSequence(np.ones(length, I64))])


def test_float32_matmuls_in_bfloat16_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With AMX, all matmuls of a step are computed in tiles, whatever the number of its tokens."""
    monkeypatch.setitem(globals(), "WIDTH", 64)
    path = save(
        tmp_path / "model.onnx", constants={"table": np.random.default_rng(3).standard_normal((30, 64)).astype(F) / 64}
    )
    encoder, reference = (Encoder(path, open_executor(name, 2), [], LONGEST) for name in ("cpu", "reference"))
    texts = [TokenSequence(np.arange(length) * 7 % 30) for length in (1, 16, 17, 40)]
    for text, rows, expected in zip(texts, encoder.run(texts), reference.run(texts), strict=True):
        np.testing.assert_array_equal(encoder.run([text])[0], rows)
        np.testing.assert_allclose(rows, expected, rtol=1e-5, atol=1e-4)
    kernels = {call.op.name for part in encoder._step._parts for call in part._program.calls}  # type: ignore[union-attr]
    is_amx = isa() == "amx"
    assert ("prefill_split" in kernels) == ("bfloat16 parts" in encoder.numerics) == is_amx
    assert ("decode_dense_float32" in kernels) != is_amx
