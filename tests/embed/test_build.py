"""Encoders built from checkpoints equal sentence-transformers, run in onnxruntime, and can be quantised."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import genai
from genai import Embedder, Reranker
from genai.convert.encoders.build import build_encoder, built_encoder, is_encoder_checkpoint
from genai.convert.encoders.graph import position_buckets, relative_buckets
from genai.convert.options import ExportOptions
from genai.embed.describe import describe_encoder
from genai.onnx.reader import read_model
from tests.cli.processes import run
from tests.embed.conftest import MODELS
from tests.embed.test_goldens import AS_EXPORTED, EMBEDDERS, GOLDENS, RERANKERS

Checkpoint = Callable[[str], Path]
FP32 = ExportOptions(precision="fp32")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """Return a copy of a checkpoint without its graph."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(MODELS / name, tmp_path / name, ignore=shutil.ignore_patterns("onnx")))

    return copy


@pytest.mark.parametrize("name", EMBEDDERS)
def test_vectors(name: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = build_encoder(checkpoint(name), tmp_path / "out", FP32)
    golden = GOLDENS[name]
    with Embedder(folder, threads=1) as embedder:
        assert embedder.info.flattened == (name not in AS_EXPORTED), embedder.info.reason
        for prompt, vectors in golden["vectors"].items():
            found = embedder.embed(golden["texts"], prompt_name=prompt or None)
            np.testing.assert_allclose(found, vectors, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", RERANKERS)
def test_scores(name: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    golden = GOLDENS[name]
    expected = np.array(golden["scores"])
    with Reranker(build_encoder(checkpoint(name), tmp_path / "out", FP32), threads=1) as reranker:
        found = reranker.score(golden["query"], golden["documents"])
    np.testing.assert_allclose(found, expected if expected.ndim == 1 else expected[:, -1], rtol=0, atol=1e-5)


@pytest.mark.oracle
@pytest.mark.parametrize("name", [name for name in GOLDENS if (MODELS / name / "onnx").is_dir()])
def test_onnxruntime_runs_the_graph_on_padded_batches(name: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    built = build_encoder(checkpoint(name), tmp_path / "out", FP32) / "onnx" / "model.onnx"
    ids = np.random.default_rng(0).integers(5, 90, (2, 9))
    mask = np.ones_like(ids)
    mask[1, 6:] = 0
    ids[1, 6:] = json.loads((MODELS / name / "config.json").read_text())["pad_token_id"]
    found = []
    for path in (built, MODELS / name / "onnx" / "model.onnx"):
        session = runtime.InferenceSession(str(path))
        feeds = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        (out,) = session.run(None, {one.name: feeds[one.name] for one in session.get_inputs()})
        found.append(out if out.ndim == 2 else np.concatenate([out[0], out[1, :6]]))
    np.testing.assert_allclose(found[0], found[1], rtol=0, atol=2e-5)


@pytest.mark.parametrize(("precision", "least"), [("fp16", 0.99999), ("int8", 0.9997), ("int4", 0.9)])
@pytest.mark.parametrize("name", ["bert", "modernbert", "gemma3"])
def test_precisions(name: str, precision: Any, least: float, checkpoint: Checkpoint, tmp_path: Path) -> None:
    options = ExportOptions(precision=precision, block_size=16)
    golden = GOLDENS[name]
    with Embedder(build_encoder(checkpoint(name), tmp_path / "out", options), threads=1) as embedder:
        found, expected = embedder.embed(golden["texts"], normalize=True), np.array(golden["vectors"][""])
        expected /= np.linalg.norm(expected, axis=1, keepdims=True)
        assert (found * expected).sum(axis=1).min() > least
        together = embedder.embed(golden["texts"] * 2, normalize=True)
        np.testing.assert_array_equal(together[len(found) :], found)


@pytest.mark.drawn(4)
@pytest.mark.parametrize("name", EMBEDDERS)
def test_int8_of_every_architecture(name: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    golden, options = GOLDENS[name], ExportOptions(precision="int8")
    with Embedder(build_encoder(checkpoint(name), tmp_path / "out", options), threads=1) as embedder:
        found, expected = embedder.embed(golden["texts"], normalize=True), np.array(golden["vectors"][""])
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    assert (found * expected).sum(axis=1).min() > 0.998


def test_int4_weights_in_the_cache_have_small_blocks(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GENAI_CACHE_DIR", str(tmp_path / "cache"))
    folder, expected = checkpoint("bert"), np.array(GOLDENS["bert"]["vectors"][""])
    with Embedder(folder, device="reference", precision="int4") as embedder:  # compiles no kernels
        found = embedder.embed(GOLDENS["bert"]["texts"])
    assert (found * expected).sum(axis=1).min() > 0.9  # both have length 1
    built = built_encoder(folder, "int4")
    matmuls = [node for node in read_model(built / "onnx/model.onnx").graph.nodes if node.op_type == "MatMulNBits"]
    assert matmuls and all(node.attribute("block_size", 0) == 16 and node.input(3) for node in matmuls)
    assert describe_encoder(folder)["graph"] == str(built)


def test_a_checkpoint_is_built_once(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GENAI_CACHE_DIR", str(tmp_path / "cache"))
    folder, golden = checkpoint("bert"), GOLDENS["bert"]
    with Embedder(folder, threads=1) as embedder:
        np.testing.assert_allclose(embedder.embed(golden["texts"]), golden["vectors"][""], rtol=0, atol=1e-5)
        first = embedder.identity()
    (built,) = (tmp_path / "cache").glob("**/onnx/model.onnx")
    stamp = built.stat().st_mtime_ns
    assert describe_encoder(folder)["graph"] == str(built.parent.parent)
    with Embedder(folder, threads=1) as embedder:
        assert embedder.identity() == first
    assert built.stat().st_mtime_ns == stamp
    with Embedder(folder, threads=1, precision="fp16") as embedder:
        assert embedder.identity() != first
    assert len(list((tmp_path / "cache").glob("**/onnx/model.onnx"))) == 2
    assert built_encoder(folder) == built.parent.parent
    with pytest.raises(genai.OptionError, match="precision is 'int5'"):
        Embedder(folder, precision="int5")
    with pytest.raises(genai.OptionError, match="whose weights are not converted") as caught:
        Embedder(MODELS / "bert", precision="int8")
    assert "genai build" in caught.value.fix


def test_names_of_old_checkpoints(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """A prefix of the model's class, and the first names of the parameters of norms."""
    folder, golden = checkpoint("bert"), GOLDENS["bert"]
    tensors = load_file(folder / "model.safetensors")
    renamed = {
        f"bert.{name}".replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): array
        for name, array in tensors.items()
    }
    save_file(renamed, folder / "model.safetensors")
    with Embedder(build_encoder(folder, tmp_path / "out", FP32), threads=1) as embedder:
        np.testing.assert_allclose(embedder.embed(golden["texts"]), golden["vectors"][""], rtol=0, atol=1e-5)


def test_on_the_command_line(checkpoint: Checkpoint, tmp_path: Path) -> None:
    result = run("build", str(checkpoint("bert")), "-o", str(tmp_path / "out"))
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == str(tmp_path / "out") and "genai embed" in result.stderr
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"onnx", "modules.json", "1_Pooling", "config.json"}
    assert run("embed", str(tmp_path / "out"), "-p", "the cat").returncode == 0
    again = run("build", str(checkpoint("roberta")), "-o", str(tmp_path / "out"))
    assert again.returncode == 1 and "already exists" in again.stderr


def test_encoders_and_decoders_name_the_other_command(checkpoint: Checkpoint, tmp_path: Path) -> None:
    from genai.models.folders import bundled_model

    encoder = checkpoint("bert")
    chat = run("chat", str(encoder), "-p", "hello")
    assert chat.returncode == 1 and "genai embed" in chat.stderr
    with pytest.raises(genai.UnsupportedModelError, match="generates text") as caught:
        Embedder(bundled_model())
    assert "genai chat" in caught.value.fix
    with pytest.raises(genai.UnsupportedModelError, match="is an encoder, which has no MTP head"):
        build_encoder(encoder, tmp_path / "out", ExportOptions(mtp=True))


def test_what_is_an_encoder(checkpoint: Checkpoint) -> None:
    assert is_encoder_checkpoint(checkpoint("bert")) and is_encoder_checkpoint(checkpoint("qwen3"))
    folder = checkpoint("gemma3")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["Gemma3ForCausalLM"]}))
    assert is_encoder_checkpoint(folder)  # modules.json says so
    (folder / "modules.json").unlink()
    assert not is_encoder_checkpoint(folder)
    (folder / "model.safetensors").unlink()
    assert not is_encoder_checkpoint(folder)


@pytest.mark.parametrize(
    ("name", "changes", "error", "message"),
    [
        ("bert", {"model_type": "bert-like"}, genai.UnsupportedModelError, "not a known encoder"),
        ("bert", {"hidden_size": 25}, genai.ConfigError, "a multiple of"),
        ("bert", {"hidden_size": 48}, genai.InputError, "has shape"),
        ("bert", {"num_hidden_layers": 3}, genai.InputError, "no tensor"),
        ("bert", {"num_hidden_layers": -1}, genai.ConfigError, "num_hidden_layers is -1"),
        ("bert", {"vocab_size": "many"}, genai.ConfigError, "vocab_size is 'many'"),
        ("bert", {"intermediate_size": None}, genai.ConfigError, "intermediate_size is missing"),
        ("bert", {"hidden_act": "snake"}, genai.UnsupportedModelError, "hidden_act is 'snake'"),
        ("bert", {"position_embedding_type": "relative_key"}, genai.UnsupportedModelError, "position_embedding_type"),
        ("bert", {"is_decoder": True}, genai.UnsupportedModelError, "is_decoder is True"),
        ("bert", {"layer_norm_eps": "small"}, genai.ConfigError, "layer_norm_eps is 'small'"),
        ("albert", {"num_hidden_groups": 2}, genai.UnsupportedModelError, "num_hidden_groups is 2"),
        ("deberta_v2", {"conv_kernel_size": 3}, genai.UnsupportedModelError, "conv_kernel_size is 3"),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 0}, genai.ConfigError, "sliding_window is 0"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, genai.UnsupportedModelError, "attn_logit_softcapping"),
        (
            "nomic_bert", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, genai.UnsupportedModelError,
            "rope_type is 'yarn'",
        ),
    ],
)  # fmt: skip
def test_configurations_that_cannot_be_built(
    name: str, changes: Any, error: Any, message: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = checkpoint(name)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(error, match=message) as caught:
        build_encoder(folder, tmp_path / "out", FP32)
    assert caught.value.fix and not (tmp_path / "out").exists()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_weights_that_are_not_finite(bad: float, precision: Any, checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = checkpoint("bert")
    tensors = load_file(folder / "model.safetensors")
    tensors["encoder.layer.1.output.dense.weight"][3, 5] = bad
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(genai.InputError, match=r"encoder\.layer\.1\.output\.dense"):
        build_encoder(folder, tmp_path / "out", ExportOptions(precision=precision))
    assert [path.name for path in tmp_path.iterdir()] == ["bert"]


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
def test_files_that_are_missing(file: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = checkpoint("bert")
    (folder / file).unlink()
    with pytest.raises(genai.ModelFolderError):
        build_encoder(folder, tmp_path / "out", FP32)


def test_buckets_of_distances() -> None:
    """Against the definitions, one distance at a time."""
    import math

    def bucket(distance: int) -> int:
        found, away = (16 if distance > 0 else 0), abs(distance)
        if away < 8:
            return found + away
        return found + min(15, 8 + int(math.log(away / 8) / math.log(128 / 8) * 8))

    distances = np.arange(-300, 301)
    assert relative_buckets(distances, 32, 128).tolist() == [bucket(int(one)) for one in distances]

    def log_bucket(distance: int) -> int:
        away = 3 if -4 < distance < 4 else abs(distance)
        if away <= 4:
            return distance
        return int((math.ceil(math.log(away / 4) / math.log(59 / 4) * 3) + 4) * math.copysign(1, distance))

    assert position_buckets(distances, 8, 60).tolist() == [log_bucket(int(one)) for one in distances]
    assert position_buckets(distances, 8, 0).tolist() == distances.tolist()


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["qwen3_generator", "llama_generator"])
def test_onnxruntime_computes_the_score_of_the_last_token(name: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """The score does not depend on the side on which a batch is padded."""
    runtime = pytest.importorskip("onnxruntime")
    built = build_encoder(checkpoint(name), tmp_path / "out", FP32)
    session = runtime.InferenceSession(str(built / "onnx" / "model.onnx"))
    ids = np.random.default_rng(0).integers(5, 90, (1, 6))
    (alone,) = session.run(None, {"input_ids": ids, "attention_mask": np.ones_like(ids)})
    padded = np.concatenate([ids, np.zeros((1, 3), np.int64)], axis=1)
    (after,) = session.run(None, {"input_ids": padded, "attention_mask": (padded > 0).astype(np.int64)})
    np.testing.assert_allclose(after, alone, rtol=0, atol=1e-5)


def test_files_of_generating_rerankers_are_checked(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = checkpoint("qwen3_generator")
    settings = folder / "1_LogitScore" / "config.json"
    for text, message in [
        ('{"true_token_id": 4000}', "the score is computed from the token 4000"),
        ('{"true_token_id": null}', "true_token_id is null"),
        ('{"true_token_id": 3, "false_token_id": "no"}', 'false_token_id is "no"'),
    ]:
        settings.write_text(text)
        with pytest.raises(genai.ConfigError, match=message):
            build_encoder(folder, tmp_path / "out", FP32)
    settings.write_text('{"true_token_id": 3}')
    shutil.copytree(MODELS / "bert_reranker", tmp_path / "bert", ignore=shutil.ignore_patterns("onnx"))
    shutil.copytree(folder / "1_LogitScore", tmp_path / "bert" / "1_LogitScore")
    shutil.copy(folder / "modules.json", tmp_path / "bert")
    with pytest.raises(genai.UnsupportedModelError, match="'bert' has no language model head"):
        build_encoder(tmp_path / "bert", tmp_path / "out", FP32)
    with pytest.raises(genai.ModelFolderError, match="classifies texts"):
        Embedder(folder)


def test_the_template_must_write_both_texts(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GENAI_CACHE_DIR", str(tmp_path / "cache"))
    folder, golden = checkpoint("llama_generator"), GOLDENS["llama_generator"]
    with Reranker(folder, threads=1) as reranker:
        plain = reranker.score(golden["query"], golden["documents"])
        np.testing.assert_allclose(plain, golden["scores"], rtol=0, atol=1e-5)
        with pytest.raises(genai.InputError, match="text 3 has"):
            reranker.score(golden["query"], golden["documents"], truncate=False)
        instructed = reranker.score(golden["query"], golden["documents"], prompt="two dog")
        assert (instructed != plain).any()
        with pytest.raises(genai.InputError, match="prompts are none"):
            reranker.score(golden["query"], golden["documents"], prompt_name="web")
    template = folder / "chat_template.jinja"
    structured = template.read_text().replace("map(attribute='content') | first }}", "first).content[0].text }}")
    template.write_text(structured.replace("{{ messages | select", "{{ (messages | select"))
    with Reranker(folder, threads=1) as reranker:  # a template that reads lists of parts
        np.testing.assert_allclose(
            reranker.score(golden["query"], golden["documents"]), golden["scores"], rtol=0, atol=1e-5
        )
    template.write_text("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}a")
    with pytest.raises(genai.UnsupportedModelError, match="does not write a query and a document"):
        Reranker(folder, threads=1)


def test_qwen3_reranker_without_modules(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first form of Qwen3-Reranker: a checkpoint that generates text, whose model card has the prompt."""
    monkeypatch.setenv("GENAI_CACHE_DIR", str(tmp_path / "cache"))
    folder = checkpoint("qwen3_generator")
    (folder / "modules.json").unlink()
    with pytest.raises(genai.UnsupportedModelError, match="no token 'yes'"):
        Reranker(folder, threads=1)
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text.replace('"red"', '"yes"').replace('"blue"', '"no"'))
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content if m.role == 'user' }}{% endfor %}"
    )
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(
        config.replace('"max_position_embeddings": 60', '"max_position_embeddings": 500')
    )
    with Reranker(folder, threads=1, max_length=500) as reranker:
        scores = reranker.score("a cat", ["the cat", "a dog"], prompt="one two")
        assert scores.shape == (2,) and ((scores > 0) & (scores < 1)).all()
        assert (reranker.score("a cat", ["the cat", "a dog"]) != scores).all()


@pytest.mark.parametrize("name", ["qwen3_reranker", "qwen3"])
def test_windows_of_decoders(name: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """A window at least as long as the text changes nothing, and a shorter one does."""
    folder, golden = checkpoint(name), GOLDENS[name]
    config = json.loads((folder / "config.json").read_text())
    found = []
    for window in (60, 5):
        changes = {"use_sliding_window": True, "sliding_window": window, "layer_types": ["sliding_attention"] * 2}
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
        built = build_encoder(folder, tmp_path / str(window), FP32)
        if "scores" in golden:
            with Reranker(built, threads=1) as reranker:
                assert reranker.info.flattened and reranker.info.rows == "last"
                found.append(reranker.score(golden["query"], golden["documents"]))
        else:
            with Embedder(built, threads=1) as embedder:
                found.append(embedder.embed(golden["texts"]))
    expected = golden.get("scores") or golden["vectors"][""]
    np.testing.assert_allclose(found[0], expected, rtol=0, atol=1e-5)
    assert np.abs(found[1] - found[0]).max() > 1e-3
    (folder / "config.json").write_text(json.dumps({**config, **changes, "layer_types": ["sliding_attention"]}))
    with pytest.raises(genai.ConfigError, match="layer_types is"):
        build_encoder(folder, tmp_path / "out", FP32)


def test_frequencies_of_the_first_gte_checkpoints(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Type "new": a base multiplied by the factor, and frequencies divided by factor ** (2 / head size)."""
    folder, golden = checkpoint("gte"), GOLDENS["gte"]
    config = json.loads((folder / "config.json").read_text())
    scaling = config.pop("rope_parameters")
    factor = scaling["factor"] ** (config["hidden_size"] / config["num_attention_heads"] / 2)
    config |= {
        "model_type": "new", "position_embedding_type": "rope", "rope_theta": scaling["rope_theta"] / factor,
        "rope_scaling": {"type": "ntk", "factor": factor},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    with Embedder(build_encoder(folder, tmp_path / "out", FP32), threads=1) as embedder:
        np.testing.assert_allclose(embedder.embed(golden["texts"]), golden["vectors"][""], rtol=0, atol=1e-5)
    for scaling, error, message in [
        ({"type": "ntk", "factor": factor, "mixed_b": 0.6}, genai.UnsupportedModelError, "mixed_b"),
        ({"type": "yarn", "factor": 2.0}, genai.UnsupportedModelError, "rope_type is"),
        ({"type": "ntk", "factor": -1}, genai.ConfigError, "rope_scaling is"),
        ("ntk", genai.ConfigError, "rope_scaling is 'ntk'"),
    ]:
        (folder / "config.json").write_text(json.dumps({**config, "rope_scaling": scaling}))
        with pytest.raises(error, match=message):
            build_encoder(folder, tmp_path / "refused", FP32)


def test_adapters_of_tasks(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first checkpoints of jina-embeddings-v3: weights with an adapter per task, merged for one of them."""
    monkeypatch.setenv("GENAI_CACHE_DIR", str(tmp_path / "cache"))
    folder, golden = checkpoint("jina_v3"), GOLDENS["jina_v3"]
    config = json.loads((folder / "config.json").read_text())
    theta = config.pop("rope_parameters")["rope_theta"]
    changes = {"model_type": "xlm-roberta", "position_embedding_type": "rotary", "rotary_emb_base": theta,
               "lora_adaptations": ["retrieval.query", "text-matching"], "lora_rank": 3, "lora_alpha": 1.5}  # fmt: skip
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    rng, tensors = np.random.default_rng(0), load_file(folder / "model.safetensors")
    stored = {}
    for name, array in tensors.items():
        if not name.endswith(".weight") or array.ndim != 2:
            stored[f"roberta.{name}"] = array
            continue
        layer, (rows, columns) = name.removesuffix(".weight"), array.shape
        shapes = [(2, 3, columns), (2, rows, 3)] if "embeddings" not in layer else [(2, rows, 3), (2, 3, columns)]
        a, b = (rng.normal(0, 0.3, shape).astype(np.float32) for shape in shapes)
        product = (a @ b if "embeddings" in layer else b @ a)[1]
        stored[f"roberta.{layer}.parametrizations.weight.original"] = array - product * np.float32(0.5)
        stored[f"roberta.{layer}.parametrizations.weight.0.lora_A"] = a
        stored[f"roberta.{layer}.parametrizations.weight.0.lora_B"] = b
    save_file(stored, folder / "model.safetensors")
    with Embedder(folder, threads=1, task="text-matching") as embedder:
        assert embedder.tasks == ("retrieval.query", "text-matching")
        np.testing.assert_allclose(embedder.embed(golden["texts"]), golden["vectors"][""], rtol=0, atol=1e-5)
    for task in (None, "retrieval.query"):
        with Embedder(folder, threads=1, task=task) as embedder:
            assert np.abs(embedder.embed(golden["texts"]) - golden["vectors"][""]).max() > 0.01
    with pytest.raises(genai.OptionError, match=r"adapters for retrieval\.query, text-matching"):
        Embedder(folder, threads=1, task="retrieval.querry")
    with pytest.raises(genai.OptionError, match="adapters for no tasks"):
        Embedder(checkpoint("roberta"), threads=1, task="text-matching")
    with pytest.raises(genai.OptionError, match="an adapter is merged into the weights"):
        Embedder(MODELS / "deberta_v2_reranker" / "onnx", threads=1, task="x", pooling="mean")
    shown = run("embed", folder, "-p", golden["texts"][1], "--task", "text-matching")
    np.testing.assert_allclose(json.loads(shown.stdout), golden["vectors"][""][1], rtol=0, atol=1e-5)
