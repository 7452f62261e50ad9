"""MTP heads of checkpoints: their graphs, and checkpoints whose head cannot be converted.

tools/make_mtp_goldens.py computes the expected results with layers of transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import genai
from genai.convert import ExportOptions, build_model, plan_build
from genai.doctor.source_info import describe_checkpoint
from genai.engine.decoder import compute as compute_pending
from genai.errors import ConfigError, InputError, OptionError, UnsupportedModelError
from genai.quantize import QuantizeOptions, quantize_model
from genai.session.session import Session
from tests.llm.test_speculation import SteadyCosts
from tools.random_weights import random_tensor
from tools.speculation_agreement import facts, guessing

GOLDENS = Path(__file__).parent / "mtp_goldens"
NAMES = sorted(path.stem for path in GOLDENS.iterdir())
SHARED = ("model.embed_tokens.", "lm_head.", "cos_cache", "sin_cache")
Arrays = dict[str, np.ndarray]


def head_of(name: str) -> tuple[Arrays, Arrays]:
    """The tensors of a head, and the golden's arrays."""
    with safe_open(GOLDENS / f"{name}.safetensors", "np") as file:
        shapes = json.loads(file.metadata()["tensors"])
        arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    return {key: random_tensor(key, tuple(shape), 7) for key, shape in shapes.items()}, arrays


@pytest.fixture(scope="module")
def checkpoint(golden: Any, letter_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """checkpoint(name) -> the folder of a golden's checkpoint with an MTP head."""
    root = tmp_path_factory.mktemp("heads")

    def write(name: str) -> Path:
        if not (root / name).exists():
            golden(name).write_checkpoint(root / name, letter_tokenizer)
            file = root / name / "model.safetensors"
            save_file({**load_file(file), **head_of(name)[0]}, file)
        return root / name

    return write


def changed(source: Path, target: Path, change: Callable[[Arrays], None], **config: Any) -> Path:
    """A copy of a checkpoint with changed tensors and keys of config.json."""
    target.mkdir()
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    (target / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    values = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(values | config))
    return target


def rows_of_decoder(folder: Path, tokens: list[int]) -> list[np.ndarray]:
    """The logits and the vectors of a decoder for a whole prompt."""
    config = json.loads((folder / "genai_config.json").read_text())
    assert config["model"].pop("mtp")["main_hidden_states"] == config["model"]["decoder"]["outputs"]["hidden_states"]
    (folder / "genai_config.json").write_text(json.dumps(config))
    found = []
    with genai.Model(folder, accuracy="fp32") as model:
        assert model.info.flattened
        for output in ("logits", "hidden_states"):
            sequence = model.decoder.open()
            sequence.append(tokens)
            found.append(compute_pending(model.decoder, [sequence], all_rows=True, output=output)[0])
    return found


def rows_of_head(folder: Path, tokens: np.ndarray, vectors: np.ndarray) -> list[np.ndarray]:
    """The logits and the vectors of a head."""
    count, config = len(tokens), json.loads((folder / "genai_config.json").read_text())["model"]["mtp"]
    shape = (1, config["num_key_value_heads"], 0, config["head_size"])
    session = Session(folder / "mtp.onnx")
    past = {name: np.zeros(shape, np.float32) for name in ("past_key_values.0.key", "past_key_values.0.value")}
    feeds = {"input_ids": tokens[None], "attention_mask": np.ones((1, count), np.int64), "hidden_states": vectors[None]}
    if any(value.name == "position_ids" for value in session.inputs):
        feeds["position_ids"] = np.arange(count)[None]
    found = session.run(feeds | past)
    return [np.asarray(found[name])[0] for name in ("logits", "hidden_states_out")]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "qwen3_5_text" else pytest.mark.drawn(6)) for name in NAMES]
)
def test_logits_of_a_head_and_vectors_of_its_decoder(name: str, checkpoint: Any, golden: Any, tmp_path: Path) -> None:
    folder = build_model(checkpoint(name), tmp_path / "model", ExportOptions(precision="fp32", mtp=True))
    tokens, expected = golden(name).tokens, head_of(name)[1]
    head = rows_of_head(folder, np.array(tokens[1:]), expected["hidden_states"][:-1])
    for rows, reference in (
        *zip(rows_of_decoder(folder, tokens), (golden(name).logits, expected["hidden_states"]), strict=True),
        *zip(head, (expected["logits"], expected["hidden_states_out"]), strict=True),
    ):
        np.testing.assert_allclose(rows, reference, atol=2e-4 * np.abs(reference).max())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "qwen3_5_text" else pytest.mark.drawn(6)) for name in NAMES]
)
def test_a_head_proposes_tokens(name: str, checkpoint: Any, golden: Any, tmp_path: Path) -> None:
    """A loaded head computes the golden's logits in pieces, and replies are those without the head."""
    folder = build_model(checkpoint(name), tmp_path / "model", ExportOptions(precision="fp32", mtp=True))
    tokens, expected = golden(name).tokens, head_of(name)[1]
    options: dict[str, Any] = {"max_tokens": 20, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    with genai.LLM(folder, accuracy="fp32") as llm:
        plain = llm.generate([tokens, tokens[:3]], **options)
    with genai.LLM(folder, accuracy="fp32", speculation="mtp") as llm:
        head = llm.model.head
        assert head is not None
        sequence, rows = head.open(), []
        for start, end in ((0, len(tokens) // 2), (len(tokens) // 2, len(tokens) - 1)):
            sequence.feed(tokens[start + 1 : end + 1], expected["hidden_states"][start:end])
            rows += list(compute_pending(head, [sequence], all_rows=True)[0])
        sequence.close()
        np.testing.assert_allclose(rows, expected["logits"], atol=2e-4 * np.abs(expected["logits"]).max())
        made = llm._speculation.speculator()
        assert made is not None
        with guessing(llm, SteadyCosts(lookup=False, draft=made._draft, most_tokens=3)):
            found = llm.generate([tokens, tokens[:3]], **options)
    assert [facts(one) for one in found] == [facts(one) for one in plain]
    assert sum(one.proposed_tokens for one in found) > 20


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("precision", "limit"), [("fp32", 2e-4), ("fp16", 5e-3), ("int8", 0.06), ("int4", 0.5)])
@pytest.mark.drawn(2)
def test_shared_tensors(precision: Any, limit: float, tied: bool, checkpoint: Any, tmp_path: Path, golden: Any) -> None:
    source = checkpoint("qwen3_5_text")
    if tied:
        source = changed(
            source, tmp_path / "tied", lambda tensors: tensors.pop("lm_head.weight"), tie_word_embeddings=True
        )
    folder = build_model(source, tmp_path / "model", ExportOptions(precision=precision, mtp=True))
    graphs = [onnx.load(folder / name, load_external_data=False).graph for name in ("model.onnx", "mtp.onnx")]
    decoder, head = ({tensor.name: tensor for tensor in graph.initializer} for graph in graphs)
    for name, tensor in head.items():
        if name.startswith(SHARED):
            assert tensor == decoder[name]
        else:
            assert tensor.external_data[0].value == "mtp.onnx.data"
    assert any(name.startswith("lm_head.") for name in head) and {"cos_cache", "sin_cache"} <= head.keys()
    expected = head_of("qwen3_5_text")[1]
    logits, _ = rows_of_head(folder, np.array(golden("qwen3_5_text").tokens[1:]), expected["hidden_states"][:-1])
    if not tied:
        np.testing.assert_allclose(logits, expected["logits"], atol=limit * np.abs(expected["logits"]).max())


GGUF_NAMES = sorted(path.stem for path in (GOLDENS.parent / "mtp_gguf_goldens").iterdir())


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.drawn(3)) for name in GGUF_NAMES])
def test_logits_of_a_head_in_a_gguf_file(name: str, tmp_path: Path) -> None:
    """The expected logits are those of llama.cpp."""
    pytest.importorskip("gguf")
    from tools import make_mtp_gguf_goldens as maker

    expected = load_file(maker.FOLDER / f"{name}.safetensors")
    file = maker.write_model_with_head(tmp_path / "a.gguf", name)
    folder = build_model(file, tmp_path / "model", ExportOptions(precision="kept"))
    logits, _ = rows_of_head(folder, maker.TOKENS[1:], expected["hidden_states"][:-1])
    limit = 5e-6 * np.abs(expected["logits"]).max()
    np.testing.assert_allclose(logits[:, :: maker.STEP], expected["logits"], atol=limit, rtol=0)
    vectors = rows_of_decoder(folder, maker.TOKENS.tolist())[1]
    np.testing.assert_allclose(
        vectors, expected["hidden_states"], atol=2e-5 * np.abs(expected["hidden_states"]).max(), rtol=0
    )


def test_builds_without_a_head(checkpoint: Any, tmp_path: Path) -> None:
    plain = build_model(checkpoint("qwen3_5_text"), tmp_path / "plain", ExportOptions(precision="fp32", mtp=False))
    assert not list(plain.glob("mtp.*")) and "mtp" not in json.loads((plain / "genai_config.json").read_text())["model"]
    assert "hidden_states" not in {value.name for value in onnx.load(plain / "model.onnx").graph.output}
    assert plan_build(checkpoint("qwen3_5_text"), ExportOptions(prune_lm_head=True)).spec.mtp is None
    with pytest.raises(OptionError, match="prune_lm_head cannot be combined with mtp"):
        ExportOptions(prune_lm_head=True, mtp=True)


def without(prefix: str) -> Callable[[Arrays], None]:
    def change(tensors: Arrays) -> None:
        for name in [name for name in tensors if name.startswith(prefix)]:
            del tensors[name]

    return change


def widened(tensors: Arrays) -> None:
    tensors["mtp.fc.weight"] = np.ones((40, 72), np.float32)


BAD: dict[str, tuple[Callable[[Arrays], None], dict[str, Any], type[Exception], str]] = {
    "another width": (widened, {}, InputError, r"mtp\.fc\.weight of the MTP head has shape \[40, 72\]"),
    "a part": (
        without("mtp.layers.0.mlp"),
        {},
        InputError,
        "head lacks 3 tensors, such as 'mtp.layers.0.mlp.down_proj",
    ),
    "embeddings": (len, {"mtp_use_dedicated_embeddings": True}, UnsupportedModelError, "has separate embeddings"),
    "no head": (without("mtp."), {"mtp_num_hidden_layers": 1}, InputError, "has no tensors of an MTP head"),
}


@pytest.mark.parametrize("case", BAD)
def test_heads_that_are_refused(case: str, checkpoint: Any, tmp_path: Path) -> None:
    change, config, error, match = BAD[case]
    source = changed(checkpoint("qwen3_5_text"), tmp_path / "bad", change, **config)
    with pytest.raises(error, match=match) as caught:
        plan_build(source, ExportOptions(mtp=True))
    assert "--no-mtp" in getattr(caught.value, "fix")  # noqa: B009
    plan = plan_build(source)
    assert plan.spec.mtp is None and plan.remarks == [f"the model is built without its MTP head: {caught.value.what}"]
    assert not plan_build(source, ExportOptions(mtp=False)).remarks


def test_parameters_of_a_head_are_counted_apart(checkpoint: Any, tmp_path: Path) -> None:
    facts = describe_checkpoint(checkpoint("qwen3_5_text"))
    plain = changed(checkpoint("qwen3_5_text"), tmp_path / "plain", without("mtp."))
    others = describe_checkpoint(plain)
    assert facts["parameters"] == others["parameters"] and others["mtp_parameters"] == 0
    assert facts["mtp_parameters"] == sum(array.size for array in head_of("qwen3_5_text")[0].values())
    assert facts["built_bytes"] > others["built_bytes"]


def test_checkpoints_without_heads(golden: Any, letter_tokenizer: Path, tmp_path: Path) -> None:
    plain = golden("qwen3_5_text").write_checkpoint(tmp_path / "plain", letter_tokenizer)
    other = golden("llama").write_checkpoint(tmp_path / "llama", letter_tokenizer)
    for source in (plain, other):
        plan = plan_build(source, ExportOptions(mtp=None))
        assert plan.spec.mtp is None and not plan.remarks
    with pytest.raises(UnsupportedModelError, match=r"the MTP head of Llama .* cannot be converted"):
        plan_build(other, ExportOptions(mtp=True))


def test_copies_of_embeddings(checkpoint: Any, tmp_path: Path) -> None:
    """Checkpoints of DeepSeek V3 store the embeddings and the LM head again, in the layer of the head."""

    def copied(factor: int) -> Callable[[Arrays], None]:
        def change(tensors: Arrays) -> None:
            tensors["model.layers.7.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].copy()
            tensors["model.layers.7.shared_head.head.weight"] = factor * tensors["lm_head.weight"]

        return change

    same = changed(checkpoint("deepseek_v3"), tmp_path / "same", copied(1))
    assert plan_build(same, ExportOptions(mtp=True)).spec.mtp is not None
    other = changed(checkpoint("deepseek_v3"), tmp_path / "other", copied(2))
    with pytest.raises(
        UnsupportedModelError, match=r"separate embeddings \(model\.layers\.7\.shared_head\.head\.weight"
    ):
        plan_build(other, ExportOptions(mtp=True))
    assert plan_build(other).spec.mtp is None


def test_heads_with_more_layers(checkpoint: Any, tmp_path: Path) -> None:
    def doubled(tensors: Arrays) -> None:
        more = {name.replace("layers.0", "layers.1"): array for name, array in tensors.items() if "mtp.layers" in name}
        tensors.update(more)

    plan = plan_build(changed(checkpoint("qwen3_5_text"), tmp_path / "two", doubled), ExportOptions(mtp=True))
    assert plan.spec.mtp is not None
    assert "the MTP head has 2 layers, of which the first proposes all tokens; the others are left out" in plan.remarks


def test_heads_with_more_layers_at_the_end(checkpoint: Any, tmp_path: Path) -> None:
    def doubled(tensors: Arrays) -> None:
        start = "model.layers.7."
        tensors.update(
            {name.replace(start, "model.layers.8."): a for name, a in list(tensors.items()) if name.startswith(start)}
        )

    source = changed(checkpoint("deepseek_v3"), tmp_path / "two", doubled, num_nextn_predict_layers=2)
    plan = plan_build(source, ExportOptions(mtp=True))
    assert plan.spec.mtp is not None
    assert "the MTP head has 2 layers, of which the first proposes all tokens; the others are left out" in plan.remarks
    build_model(source, tmp_path / "without", ExportOptions(mtp=False))
    wrong = changed(source, tmp_path / "wrong", len, num_nextn_predict_layers=-3)
    with pytest.raises(ConfigError, match="num_nextn_predict_layers is -3"):
        plan_build(wrong)


@pytest.mark.parametrize("name", ["glm4_moe_lite", "qwen3_5_text"])
def test_the_head_of_a_quantised_checkpoint(name: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """Matrices that are read from a checkpoint one at a time are those of the built folder."""
    folder = build_model(checkpoint(name), tmp_path / "folder", ExportOptions(precision="fp32"))
    for target, source in (("one", checkpoint(name)), ("two", folder)):
        report = quantize_model(source, tmp_path / target, QuantizeOptions(method="rtn", evaluate=False))
        assert [row for row in report.matrices if row.part == "MTP head"]
    for file in ("mtp.onnx", "mtp.onnx.data", "model.onnx.data", "genai_config.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    genai.Model(tmp_path / "one", quiet=True, threads=1, mtp=True).close()
