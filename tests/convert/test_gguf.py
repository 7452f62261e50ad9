"""GGUF files become model folders: logits and ids of llama.cpp (tools/make_gguf_goldens.py), and what is kept."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import genai
from genai.cli.app import run
from genai.convert import ExportOptions, build_model, plan_build, resolve_model_folder
from genai.convert.build import execute
from genai.convert.gguf.architectures import ARCHITECTURES
from genai.convert.gguf.tokenizer import write_tokenizer
from genai.engine.decoder import compute
from genai.engine.paged import PagedDecoder
from genai.errors import ModelFolderError, OptionError, UnsupportedModelError
from genai.kernels.cpu.jit.native import LIBRARY
from genai.quant.ggml import GGML_TYPES
from genai.text.backend import load_tokenizer
from genai.weight_files.gguf import GgufModel
from tools import make_gguf_goldens, quantised_checkpoints
from tools.checkpoint_gguf import write_gpt_oss_gguf
from tools.gguf_models import SHAPES, TOKENS, VOCAB, VOCABULARIES, write_adapter, write_model
from tools.make_gguf_goldens import KINDS, STEP, TYPED, VOCABULARY_KINDS, Typed, texts, typed_texts, write_vocabulary

GOLDENS = Path(__file__).parent / "gguf_goldens"
LOGITS = np.load(GOLDENS / "logits.npz")
IDS = json.loads((GOLDENS / "ids.json").read_text())
TYPES = json.loads((GOLDENS / "token_types.json").read_text())
# llama.cpp looks GELU up in a table of float16, of each of whose numbers the last bit is rounded.
TOLERANCE, GELU_TOLERANCE = 5e-6, 1e-3
GELU = {
    "gemma", "gemma2", "gemma3", "gemma3n", "gemma4", "gemma4_inputs", "gemma4_experts", "gpt2", "gptneox", "falcon",
    "falcon_two_norms", "phi2", "starcoder2",
}  # fmt: skip
# Rounding errors grow in the states of the delta rule; the first token's are close to llama.cpp's epsilon.
DELTA, DELTA_TOLERANCE = {"qwen3next", "qwen35", "qwen35moe", "kimi-linear"}, 2e-5
# Of the norm of all logits: llama.cpp rounds activations to 8 bits.
ROUNDING = 0.15
CORE = ("llama", "gemma2", "qwen3moe", "phi3_long", "falcon_two_norms")
CORE_TYPES = ("Q4_K", "F16")
DRAWN = (pytest.mark.drawn(10),)


def logits(folder: Path, accuracy: str = "fp32", adapter: Path | None = None) -> Any:
    """Those that are stored of llama.cpp: of the last token, the one in the middle, and the first."""
    with genai.Model(folder, accuracy=accuracy, lora=adapter is not None) as model:
        assert isinstance(model.decoder, PagedDecoder)
        adapters = genai.Adapters(model)
        if adapter is not None:
            adapters.load(adapter, "a")
        sequence = model.decoder.open()
        sequence.adapt(adapters.mix("a" if adapter else None))
        sequence.append(list(TOKENS))
        rows = compute(model.decoder, [sequence], all_rows=True)[0]
        sequence.close()
    return np.asarray(rows)[[len(TOKENS) - 1, len(TOKENS) // 2, 0]][:, ::STEP]


def built(tmp_path: Path, shape: str, kind: str = "F32", **options: Any) -> Path:
    source = write_model(tmp_path / f"{shape}-{kind}.gguf", SHAPES[shape], kind)
    return build_model(source, tmp_path / "model", ExportOptions(**options) if options else None)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in CORE else DRAWN) for n in SHAPES])
def test_logits_of_every_architecture(name: str, tmp_path: Path) -> None:
    expected = LOGITS[f"shape/{name}"]
    found = logits(built(tmp_path, name))
    error = np.abs(found - expected).max() / np.abs(expected).max()
    assert error < (GELU_TOLERANCE if name in GELU else DELTA_TOLERANCE if name in DELTA else TOLERANCE)


def test_every_architecture_has_a_golden() -> None:
    # gpt-oss is compared with its checkpoint: test_gpt_oss_equals_its_checkpoint
    assert {shape.arch for shape in SHAPES.values()} == set(ARCHITECTURES) - {"gpt-oss"}
    assert {*(f"shape/{name}" for name in SHAPES), *(f"type/{kind}" for kind in KINDS[1:])} < set(LOGITS)


@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k in CORE_TYPES else DRAWN) for k in KINDS[1:]])
def test_logits_of_every_type(kind: str, tmp_path: Path) -> None:
    """What is kept gives the logits of the same numbers as float32, and llama.cpp's up to its rounding."""
    folder = built(tmp_path, "llama", kind)
    found, expected = logits(folder), LOGITS[f"type/{kind}"]
    assert np.linalg.norm(found - expected) < ROUNDING * np.linalg.norm(expected)
    source = tmp_path / f"llama-{kind}.gguf"
    wide = logits(build_model(source, tmp_path / "wide", ExportOptions(precision="fp32")))
    np.testing.assert_allclose(found, wide, atol=2e-5 * np.abs(wide).max())
    rounded = logits(folder, "auto")
    assert np.linalg.norm(rounded - wide) < 1.5 * max(np.linalg.norm(expected - wide), 1e-3)


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ("lfm2", "Q4_K"),
        ("qwen35", "Q8_0"),
        *(pytest.param(shape, "Q8_0", marks=DRAWN) for shape in ("qwen3next", "jamba", "kimi-linear")),
    ],
)
def test_recurrent_layers_keep_blocks(shape: str, kind: str, tmp_path: Path) -> None:
    folder = built(tmp_path, shape, kind)
    wide = logits(build_model(tmp_path / f"{shape}-{kind}.gguf", tmp_path / "wide", ExportOptions(precision="fp32")))
    np.testing.assert_allclose(logits(folder), wide, atol=2e-5 * np.abs(wide).max())
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    kept = "QuantizedMatMul" if kind == "Q4_K" else "MatMulNBits"
    inputs = [node.name for node in model.graph.node if node.op_type == kept]
    for parts in (("out_proj", "o_proj"), ("in_proj", "qkv", "q_proj")):
        assert [name for name in inputs if any(part in name for part in parts)]


OPERATORS = {"Q4_0": "MatMulNBits", "Q8_0": "MatMulNBits", "F32": "MatMul", "Q4_K": "QuantizedMatMul"}


@pytest.mark.parametrize("kind", OPERATORS)
def test_which_operators_hold_them(kind: str, tmp_path: Path) -> None:
    folder = built(tmp_path, "llama_divisors", kind)
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    kinds = [node.op_type for node in model.graph.node]
    assert kinds.count(OPERATORS[kind]) == 2 * 5 + 1  # one for queries, keys and values, and the tied head
    assert bool(model.functions) == (OPERATORS[kind] == "QuantizedMatMul")
    names = [tensor.name for tensor in model.graph.initializer]
    assert not [name for name in names if "embed_tokens" in name]  # the table is that of the head


EXACT = ("Q8_0", "IQ4_XS", *(pytest.param(kind, marks=pytest.mark.drawn(2)) for kind in
         ("Q6_K", "IQ2_XXS", "MXFP4", "Q5_0", "F16")))  # fmt: skip


@pytest.mark.parametrize("kind", EXACT)
def test_experts_that_are_whole_numbers_stay_exact(kind: str, tmp_path: Path) -> None:
    source = write_model(tmp_path / "a.gguf", SHAPES["qwen3moe"], kind)
    plan = plan_build(source)
    found = logits(execute(plan, tmp_path / "kept"))
    wide = logits(build_model(source, tmp_path / "wide", ExportOptions(precision="fp32")))
    np.testing.assert_allclose(found, wide, atol=2e-5 * np.abs(wide).max())
    assert not plan.rounded


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=DRAWN) for kind in ("Q8_0", "Q6_K")])
def test_factors_of_experts_are_part_of_their_scales(kind: str, tmp_path: Path) -> None:
    source = write_model(tmp_path / "a.gguf", SHAPES["gemma4_experts"], kind)
    plan = plan_build(source)
    found = logits(execute(plan, tmp_path / "kept"))
    wide = logits(build_model(source, tmp_path / "wide", ExportOptions(precision="fp32")))
    np.testing.assert_allclose(found, wide, atol=2e-5 * np.abs(wide).max())
    assert not plan.rounded


def test_experts_that_are_not_are_rounded_and_it_is_said(tmp_path: Path) -> None:
    plan = plan_build(write_model(tmp_path / "a.gguf", SHAPES["qwen3moe"], "Q4_K"))
    found = logits(execute(plan, tmp_path / "kept"))
    wide = logits(build_model(tmp_path / "a.gguf", tmp_path / "wide", ExportOptions(precision="fp32")))
    assert 0 < np.linalg.norm(found - wide) < 0.01 * np.linalg.norm(wide)
    (remark,) = plan.rounded
    assert remark.startswith("Q4_K expert weights are quantised to 8-bit integers (relative error 0.3")


def test_mixed_types_as_files_have_them(tmp_path: Path) -> None:
    """Values in another type than queries and keys: these three are products of their own."""
    import gguf

    from tools import gguf_models

    shape = SHAPES["llama_divisors"]
    writer = gguf.GGUFWriter(str(tmp_path / "a.gguf"), "llama")
    for key, value in gguf_models.metadata(shape).items():
        gguf_models.add_value(writer, key, value)
    random = np.random.RandomState(0)
    for name, values in gguf_models.tensors(shape, gguf_models.normal(random)):
        kind = "Q6_K" if "attn_v" in name or "token_embd" in name else "Q4_K"
        gguf_models.add_tensor(writer, name, values, kind, random)
    gguf_models.close(writer)
    found = logits(build_model(tmp_path / "a.gguf", tmp_path / "kept"))
    wide = logits(build_model(tmp_path / "a.gguf", tmp_path / "wide", ExportOptions(precision="fp32")))
    np.testing.assert_allclose(found, wide, atol=2e-5 * np.abs(wide).max())


HARMONY = ["<|startoftext|>", "<|return|>", "<|call|>", "<|end|>", "<|endoftext|>", "<|channel|>", "<|message|>"]


def harmony(count: int, *without: str) -> dict[str, Any]:
    """A vocabulary of letters and the special tokens of gpt-oss."""
    special = [token for token in HARMONY if token not in without]
    listed = [*(chr(code) for code in range(33, 33 + count - len(special) - 1)), "ab", *special]
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-4o", "tokenizer.ggml.tokens": listed,
        "tokenizer.ggml.token_type": [1] * (count - len(special)) + [3] * len(special),
        "tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.bos_token_id": listed.index("<|startoftext|>"),
        "tokenizer.ggml.eos_token_id": listed.index("<|return|>"), "tokenizer.chat_template": "{# <|channel|> #}",
    }  # fmt: skip


def all_logits(folder: Path, tokens: list[int]) -> Any:
    with genai.Model(folder, accuracy="fp32") as model:
        sequence = model.decoder.open()
        sequence.append(tokens)
        rows = np.array(compute(model.decoder, [sequence], all_rows=True)[0])
        sequence.close()
    return rows


@pytest.mark.parametrize("experts", ["mxfp4", "F32", "Q8_0"])
@pytest.mark.parametrize("yarn", [False, True], ids=["", "yarn"])
def test_gpt_oss_equals_its_checkpoint(experts: str, yarn: bool, tmp_path: Path) -> None:
    """Sinks, biases, windows of alternating layers, experts and YaRN's exact bounds, beyond the window."""
    folders = quantised_checkpoints.write_gpt_oss(tmp_path)
    if yarn:
        scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "truncate": False}
        for folder in folders:
            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps({**config, "rope_scaling": scaling}))
    source = folders[0 if experts == "mxfp4" else 1]
    vocabulary = harmony(quantised_checkpoints.VOCAB)
    file = write_gpt_oss_gguf(source, tmp_path / "a.gguf", vocabulary, "F32" if experts == "mxfp4" else experts)
    tokens = np.random.default_rng(0).integers(0, quantised_checkpoints.VOCAB, 40).tolist()
    build_model(source, tmp_path / "checkpoint", ExportOptions(precision="fp32"))
    if experts == "Q8_0":  # rounded: the router can choose other experts than in the checkpoint
        build_model(file, tmp_path / "wide", ExportOptions(precision="fp32"))
    expected = all_logits(tmp_path / ("wide" if experts == "Q8_0" else "checkpoint"), tokens)
    plan = plan_build(file)
    assert not plan.remarks and not plan.rounded
    found = all_logits(execute(plan, tmp_path / "gguf"), tokens)
    np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max())
    config, other = (json.loads((tmp_path / name / "genai_config.json").read_text())["model"]
                     for name in ("checkpoint", "gguf"))  # fmt: skip
    assert config["type"] == other["type"]
    assert config["decoder"].get("sliding_window") == other["decoder"].get("sliding_window")


@pytest.mark.parametrize(
    ("without", "ends"),
    [
        ((), ["<|return|>", "<|call|>", "<|endoftext|>"]),
        (("<|call|>",), ["<|return|>", "<|end|>", "<|endoftext|>"]),  # not the tokens of gpt-oss
    ],
    ids=["gpt-oss", "other"],
)
def test_ends_of_messages_do_not_end_a_reply(without: tuple[str, ...], ends: list[str], tmp_path: Path) -> None:
    """As in llama.cpp: with <|return|> and <|call|>, <|end|> only ends a message."""
    source, _ = quantised_checkpoints.write_gpt_oss(tmp_path)
    values = harmony(quantised_checkpoints.VOCAB, *without)
    model = GgufModel(write_gpt_oss_gguf(source, tmp_path / "a.gguf", values))
    tokens = write_tokenizer(model, quantised_checkpoints.VOCAB, tmp_path)
    listed = values["tokenizer.ggml.tokens"]
    assert sorted(listed[id_] for id_ in tokens["eos_token_id"]) == sorted(ends)
    assert listed[tokens["eos_token_id"][0]] == "<|return|>"


def test_another_precision(tmp_path: Path) -> None:
    folder = built(tmp_path, "llama", "Q6_K", precision="int4")
    kinds = [node.op_type for node in onnx.load(folder / "model.onnx", load_external_data=False).graph.node]
    assert "MatMulNBits" in kinds and "QuantizedMatMul" not in kinds
    with pytest.raises(OptionError, match="with precision 'kept'"):
        ExportOptions(precision="kept", block_size=64)
    with pytest.raises(OptionError, match="with precision 'kept'"):
        ExportOptions(precision="kept", symmetric=False)


@pytest.mark.parametrize("kind", VOCABULARY_KINDS)
def test_ids_of_llama_cpp(kind: str, tmp_path: Path) -> None:
    model = GgufModel(write_vocabulary(tmp_path / "v.gguf", kind))
    write_tokenizer(model, model.info("token_embd.weight").shape[0], tmp_path)
    backend = load_tokenizer(tmp_path).backend
    found = {text: backend.encode(text).ids for text in texts()}
    assert found == dict(zip(texts(), IDS[kind], strict=True))


@pytest.mark.parametrize("name", TYPED)
def test_types_of_tokens_as_in_llama_cpp(name: str, tmp_path: Path) -> None:
    """The texts of known marks and bytes override the types in the file."""
    typed, expected = TYPED[name], TYPES[name]
    model = GgufModel(write_vocabulary(tmp_path / "v.gguf", typed))
    ids = write_tokenizer(model, model.info("token_embd.weight").shape[0], tmp_path)
    backend = load_tokenizer(tmp_path).backend
    found = {text: backend.encode(text).ids for text in typed_texts(typed)}
    assert found == dict(zip(typed_texts(typed), expected["ids"], strict=True))
    assert sorted(ids["eos_token_id"]) == expected["ends"]


def test_tokens_with_roles_that_are_ordinary_text_are_decoded(tmp_path: Path) -> None:
    """Files name "!" for padding, or "," for the start of texts. Both are part of replies."""
    typed = Typed("qwen2", roles={"padding_token_id": "!", "bos_token_id": ",", "unknown_token_id": "<|im_start|>"})
    model = GgufModel(write_vocabulary(tmp_path / "v.gguf", typed))
    write_tokenizer(model, model.info("token_embd.weight").shape[0], tmp_path)
    tokenizer = genai.Tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("Hi, you!<|im_start|>")) == "Hi, you!"
    assert tokenizer.bos_token_id == tokenizer.to_token_id(",")


def test_bytes_without_types_of_tokens(tmp_path: Path) -> None:
    """As llama.cpp does, by their texts."""
    listed = make_gguf_goldens._pieces(json.loads(VOCABULARIES.read_text(encoding="utf-8")), "llama")
    found = []
    for without in ({}, {"tokenizer.ggml.token_type": None}):
        values = {f"tokenizer.ggml.{key}": value for key, value in listed.items()} | without
        shape = replace(SHAPES["llama"], layers=1)
        values |= {"tokenizer.ggml.pre": None, "tokenizer.ggml.merges": None}
        model = GgufModel(write_model(tmp_path / "a.gguf", shape, **values))
        write_tokenizer(model, len(listed["tokens"]), tmp_path)
        found.append(load_tokenizer(tmp_path).backend.encode("Ω is no token, 龍 neither").ids)
    assert found[0] == found[1] and len(found[0]) > 8


def test_an_adapter(tmp_path: Path) -> None:
    """Rows of queries and keys come in ggml's order, as those of the model do."""
    adapter = write_adapter(tmp_path / "adapter.gguf", SHAPES["llama"])
    found = logits(built(tmp_path, "llama"), adapter=adapter)
    expected = LOGITS["adapter/llama"]
    assert np.abs(expected - LOGITS["shape/llama"]).max() > 0.1 * np.abs(expected).max()
    assert np.abs(found - expected).max() < TOLERANCE * np.abs(expected).max()


def test_chat_imports_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert LIBRARY.folder  # chosen now: compiled kernels stay where they are
    monkeypatch.setenv("GENAI_CACHE_DIR", str(tmp_path / "cache"))
    source = write_model(tmp_path / "tiny.Q4_K.gguf", SHAPES["qwen3"], "Q4_K")
    command = ["chat", str(source), "-p", "hi", "--max-tokens", "4"]
    assert run([*command, "--no-build"]) == 1
    assert "is a GGUF file that has not been built" in capsys.readouterr().err
    assert run(command) == 0
    first = capsys.readouterr()
    assert "is a GGUF file" in first.err and "with unchanged weights" in first.err
    folder = resolve_model_folder(source, build=False)
    assert f"stored in {folder}" in first.err and "architecture ignores" not in first.err
    assert folder.parent == tmp_path / "cache" / "genai" / "models" and folder.name.startswith("tiny.Q4_K-")
    assert run([*command, "--no-build"]) == 0
    again = capsys.readouterr()
    assert "GGUF" not in again.err and again.out == first.out


def test_build_says_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_model(tmp_path / "a.gguf", SHAPES["qwen3moe"], "Q4_K")
    assert run(["build", str(source), "-o", str(tmp_path / "model")]) == 0
    shown = capsys.readouterr()
    assert (
        shown.out.strip() == str(tmp_path / "model") and "expert weights are quantised to 8-bit integers" in shown.err
    )
    config = json.loads((tmp_path / "model" / "genai_config.json").read_text())["model"]
    assert config["eos_token_id"] == [VOCAB - 3, VOCAB - 2] and config["bos_token_id"] == VOCAB - 2
    with genai.LLM(tmp_path / "model") as llm:
        assert "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n" in llm.render("hi")


def test_a_program_loads_a_file_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert LIBRARY.folder  # chosen now: compiled kernels stay where they are
    monkeypatch.setenv("GENAI_CACHE_DIR", str(tmp_path / "cache"))
    source = write_model(tmp_path / "a.gguf", SHAPES["llama"], "Q8_0")
    with genai.LLM(source, quiet=True) as llm, genai.LLM(str(source), quiet=True) as again:
        assert llm.model.folder == again.model.folder and llm.model.folder.is_relative_to(tmp_path / "cache")


def test_quantising_a_gguf_file_again_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_model(tmp_path / "a.gguf", SHAPES["llama"], "Q8_0")
    assert run(["quantize", str(source), "-o", str(tmp_path / "model"), "--method", "rtn"]) == 1
    assert "is already quantised: weights in Q8_0" in capsys.readouterr().err


def test_all_types_are_on_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "gguf.md").read_text(encoding="utf-8")
    assert all(f"`{kind.name}`" in page for kind in GGML_TYPES.values())
    assert all(f"`{name}`" in page for name in ARCHITECTURES)


def test_merging_into_a_gguf_file_is_refused(tmp_path: Path) -> None:
    from genai.lora.read import read_adapter

    read = read_adapter(write_adapter(tmp_path / "adapter.gguf", SHAPES["llama"]))
    source = write_model(tmp_path / "a.gguf", SHAPES["llama"])
    with pytest.raises(UnsupportedModelError, match="cannot be merged into weights that are already quantised"):
        plan_build(source, merge=(read, 1.0))
    with pytest.raises(UnsupportedModelError, match="an adapter, not a model"):
        plan_build(tmp_path / "adapter.gguf")
    with pytest.raises(ModelFolderError, match="a GGUF file must be converted first"):
        genai.Model(source)
