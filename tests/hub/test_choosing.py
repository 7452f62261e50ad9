"""Repositories as they are on hubs: the files that are chosen, or the error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from genai.errors import DownloadError
from genai.hub.choosing import choose, precision_in
from genai.hub.listing import Listing, RemoteFile
from genai.hub.references import parse

TOKENIZER = ["tokenizer.json", "tokenizer_config.json"]
CHECKPOINT = ["config.json", "generation_config.json", "model.safetensors", *TOKENIZER]
OLD = [
    "config.json",
    "model.safetensors",
    "tokenizer.model",
    "chat_template.jinja",
    "additional_chat_templates/a.jinja",
]
FORMS = ["a.tiktoken", "tekken.json", "tiktoken.model", "tokenizer.model.v7m1", "vocab.txt"]
INT4 = "cpu_and_mobile/cpu-int4-rtn-block-32-acc-level-4"
FAST = [f"{INT4}/{name}" for name in ("genai_config.json", "model.onnx", "model.onnx.data", *TOKENIZER)]
SLOW = [
    f"cpu_and_mobile/cpu-int4-rtn-block-32/{name}" for name in ("genai_config.json", "model.onnx", "model.onnx.data")
]
DML = [f"directml/directml-int4/{name}" for name in ("genai_config.json", "model.onnx")]
WEBGPU = [f"webgpu/webgpu-int4/{name}" for name in ("genai_config.json", "model.onnx")]
RTX = [f"NvTensorRtRtx/model-int4/{name}" for name in ("genai_config.json", "model.onnx")]
QNN = [f"qnn/model-int4/{name}" for name in ("genai_config.json", "model.onnx")]
BESIDE = ["config.json", "generation_config.json", *TOKENIZER]
GRAPHS = [f"onnx/{name}" for name in ("model.onnx", "model.onnx_data", "model_fp16.onnx", "model_quantized.onnx")]
Q4 = ["onnx/model_q4.onnx", "onnx/model_q4.onnx_data", "onnx/model_q4.onnx_data_1"]
CUDA = [f"cuda/cuda-int4-rtn-block-32/{name}" for name in ("genai_config.json", "model.onnx")]
SHARDS = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]


def listing(files: Sequence[str], reference: str = "org/name") -> Listing:
    found = parse(reference)
    assert found is not None
    remote = tuple(RemoteFile(path, 1000, "", "") for path in sorted(files))
    return Listing(found, "", "a" * 40, "", False, remote)


# What is in it, the reference, and the kind, root and files that are taken.
CHOSEN: list[tuple[list[str], str, str, str, list[str]]] = [
    ([*CHECKPOINT, "README.md", ".gitattributes"], "org/name", "checkpoint", "", CHECKPOINT),
    # Several formats of the same weights side by side.
    ([*CHECKPOINT, "pytorch_model.bin", "tf_model.h5", "flax_model.msgpack"], "org/name", "checkpoint", "", CHECKPOINT),
    # transformers.js' graphs say nothing of how text is made.
    ([*CHECKPOINT, "onnx/model.onnx", "onnx/model_q4.onnx"], "org/name", "checkpoint", "", CHECKPOINT),
    # Sharded; Mistral's and Meta's originals lie beside.
    (
        ["config.json", "model.safetensors.index.json", *SHARDS, *TOKENIZER, "consolidated.safetensors", "original/x"],
        "org/name", "checkpoint", "", ["config.json", "model.safetensors.index.json", *SHARDS, *TOKENIZER],
    ),
    # Both: the single file counts, as in transformers.
    ([*CHECKPOINT, "model.safetensors.index.json", *SHARDS], "org/name", "checkpoint", "", CHECKPOINT),
    # No tokenizer_config.json, SentencePiece, templates in files.
    (
        [*OLD, "images/a.png", "vocab.json", "merges.txt", "preprocessor_config.json"],
        "org/name", "checkpoint", "", [*OLD, "vocab.json", "merges.txt"],
    ),
    # Tokenizers in their publishers' own forms.
    (
        ["config.json", "model.safetensors", *FORMS, "x/tekken.json", "tokenizer.py"],
        "org/name", "checkpoint", "", ["config.json", "model.safetensors", *FORMS],
    ),
    # ONNX folders: that for CPUs whose products are the fast ones.
    ([*FAST, *SLOW, *CUDA, "README.md", "config.json"], "org/name", "onnx", INT4, FAST),
    ([*CUDA, *SLOW], "org/name", "onnx", "cpu_and_mobile/cpu-int4-rtn-block-32", SLOW),
    ([*FAST, *SLOW, *CUDA], "org/name:cpu-int4-rtn-block-32", "onnx", "cpu_and_mobile/cpu-int4-rtn-block-32", SLOW),
    (CUDA, "org/name", "onnx", "cuda/cuda-int4-rtn-block-32", CUDA),
    ([*CUDA, *DML], "org/name", "onnx", "cuda/cuda-int4-rtn-block-32", CUDA),
    ([*FAST, *CUDA], "org/name:cuda/cuda-int4-rtn-block-32", "onnx", "cuda/cuda-int4-rtn-block-32", CUDA),
    # At the root, beside what nobody needs.
    (
        ["genai_config.json", "model.onnx", "model.onnx.data", *TOKENIZER, "LICENSE", "README.md", "a.png", "x/y.json"],
        "org/name", "onnx", "", ["genai_config.json", "model.onnx", "model.onnx.data", *TOKENIZER],
    ),
    # An ONNX folder is ready to run, a checkpoint is not.
    ([*CHECKPOINT, *FAST], "org/name", "onnx", INT4, FAST),
    ([*CHECKPOINT, *CUDA], "org/name", "checkpoint", "", CHECKPOINT),
    # The graphs of an exporter: the fastest with a small loss, or the one behind the colon, each with its weights.
    ([*BESIDE, *GRAPHS, *Q4], "org/name", "onnx", "", [*BESIDE, *Q4]),
    ([*BESIDE, *GRAPHS, *Q4], "org/name:fp32", "onnx", "", [*BESIDE, "onnx/model.onnx", "onnx/model.onnx_data"]),
    ([*BESIDE, *GRAPHS, *Q4], "org/name:int8", "onnx", "", [*BESIDE, "onnx/model_quantized.onnx"]),
    ([*BESIDE, *GRAPHS], "org/name:onnx/model_fp16.onnx", "onnx", "", [*BESIDE, "onnx/model_fp16.onnx"]),
    ([*CHECKPOINT, *Q4], "org/name:q4", "onnx", "", [*BESIDE, *Q4]),
    ([*BESIDE, "model.onnx", "README.md"], "org/name", "onnx", "", [*BESIDE, "model.onnx"]),
    (
        [*BESIDE, "onnx/decoder_model_merged_q4.onnx", "onnx/embed_tokens_q4.onnx", "onnx/vision_encoder_q4.onnx"],
        "org/name", "onnx", "", [*BESIDE, "onnx/decoder_model_merged_q4.onnx", "onnx/embed_tokens_q4.onnx"],
    ),
    # Without a generation_config.json, it is an encoder: the graph without loss.
    (["config.json", *TOKENIZER, *GRAPHS], "org/name", "onnx", "", ["config.json", *TOKENIZER, *GRAPHS[:2]]),
    (["config.json", *TOKENIZER, GRAPHS[3]], "org/name", "onnx", "", ["config.json", *TOKENIZER, GRAPHS[3]]),
    # Folders for other devices, if their graphs run on CPUs.
    (DML, "org/name", "onnx", "directml/directml-int4", DML),
    ([*WEBGPU, *QNN], "org/name", "onnx", "webgpu/webgpu-int4", WEBGPU),
    (RTX, "org/name", "onnx", "NvTensorRtRtx/model-int4", RTX),
    # GGUF: by what stands behind the colon, in any case; by the usual choice; the only one.
    (["a-Q4_K_M.gguf", "a-Q8_0.gguf", "mmproj-F16.gguf"], "org/name", "gguf", "a-Q4_K_M.gguf", ["a-Q4_K_M.gguf"]),
    (["a-Q4_K_M.gguf", "a-Q8_0.gguf"], "org/name:q8_0", "gguf", "a-Q8_0.gguf", ["a-Q8_0.gguf"]),
    (["a-Q4_K_M.gguf", "a-Q8_0.gguf"], "org/name:a-Q8_0.gguf", "gguf", "a-Q8_0.gguf", ["a-Q8_0.gguf"]),
    (["a.f16.gguf", "a.iq4_nl.gguf"], "org/name", "gguf", "a.iq4_nl.gguf", ["a.iq4_nl.gguf"]),
    (["weights.gguf", "imatrix.gguf"], "org/name", "gguf", "weights.gguf", ["weights.gguf"]),
    ([*CHECKPOINT, "a-Q4_K_M.gguf"], "org/name:Q4_K_M", "gguf", "a-Q4_K_M.gguf", ["a-Q4_K_M.gguf"]),
    # In parts, in a folder.
    (
        ["Q8_0/a-Q8_0-00001-of-00002.gguf", "Q8_0/a-Q8_0-00002-of-00002.gguf", "a-Q2_K.gguf"], "org/name:Q8_0", "gguf",
        "Q8_0/a-Q8_0-00001-of-00002.gguf", ["Q8_0/a-Q8_0-00001-of-00002.gguf", "Q8_0/a-Q8_0-00002-of-00002.gguf"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("files", "reference", "kind", "root", "taken"), CHOSEN)
def test_what_is_taken(files: list[str], reference: str, kind: str, root: str, taken: list[str]) -> None:
    found = choose(listing(files, reference))
    assert (found.kind, found.root) == (kind, root)
    assert [file.path for file in found.files] == sorted(taken)
    assert found.why


def test_names_with_spaces() -> None:
    files = ["my model Q8_0.gguf", "my model (Q4_0).gguf", "other.gguf", "third.gguf"]
    assert choose(listing(files, "org/name:Q8_0")).root == "my model Q8_0.gguf"
    assert choose(listing(files, "org/name:my model (Q4_0).gguf")).root == "my model (Q4_0).gguf"
    with pytest.raises(DownloadError, match="several GGUF files") as caught:
        choose(listing(["a b.gguf", "c d.gguf"]))
    assert "`genai pull 'org/name:a b.gguf'`" in caught.value.fix


def test_projectors_of_images_are_no_models() -> None:
    assert choose(listing(["x-Q8_0.gguf", "x-mmproj-Q8_0.gguf"], "org/name:Q8_0")).root == "x-Q8_0.gguf"


def test_what_was_left_out_is_said() -> None:
    odd = replace(listing(["README.md"]), left_out=("a:b.gguf",))
    with pytest.raises(DownloadError, match="the repository has no model that can run here") as caught:
        choose(odd)
    assert "names that are invalid on some systems are skipped: 'a:b.gguf'" in caught.value.why


def test_a_precision_wants_weights_that_can_be_quantised() -> None:
    both = listing([*CHECKPOINT, *FAST, "a-Q4_K_M.gguf"])
    assert choose(both).kind == "onnx"
    assert choose(both, precision="int4").kind == "checkpoint"
    assert choose(listing(FAST), precision="int4").kind == "onnx"


def test_a_precision_chooses_a_graph() -> None:
    graphs = listing([*BESIDE, *GRAPHS, *Q4])
    for precision, chosen in (("q4", "q4"), ("int4", "q4"), ("int8", "quantized"), ("fp16", "fp16"), ("fp32", "fp32")):
        assert choose(graphs, precision=precision).precision == chosen
    assert "others: quantized, fp16, fp32 (`genai pull org/name:quantized`)" in choose(graphs).why
    both = listing([*CHECKPOINT, *GRAPHS, *Q4])
    assert choose(both, precision="int4").kind == "checkpoint"
    assert choose(both, precision="q4").precision == "q4"
    assert choose(listing(CHECKPOINT), precision="q4").kind == "checkpoint"
    with pytest.raises(DownloadError, match="no graph in the precision 'fp16'") as caught:
        choose(listing([*BESIDE, *Q4]), precision="fp16")
    assert "`genai pull org/name:q4`" in caught.value.fix


@pytest.mark.parametrize(
    ("files", "reference", "says"),
    [
        ([], "org/name", "it has no weights"),
        (["README.md", "config.json"], "org/name", "it has no weights"),
        (["config.json", "pytorch_model.bin"], "org/name", "pickles"),
        (["consolidated.00.pth", "params.json"], "org/name", "pickles"),
        (["adapter_config.json", "adapter_model.safetensors"], "org/name", "it contains an adapter"),
        (["model_index.json", "unet/model.safetensors"], "org/name", "no config.json"),
        (["model.safetensors"], "org/name", "no config.json"),
        (["onnx/model.onnx"], "org/name", "needs config.json or genai_config.json"),
        (["unet/model.onnx", "config.json"], "org/name", "such as onnx/model.onnx"),
        (QNN, "org/name", "for other devices (qnn/model-int4)"),
        (QNN, "org/name", "or try a folder: `genai pull org/name:qnn/model-int4`"),
        ([*BESIDE, *GRAPHS], "org/name:q4", "the repository has quantized, fp16, fp32"),
        ([*BESIDE, "a.onnx", "b.onnx"], "org/name", "choose one: `genai pull org/name:a.onnx`"),
        (
            [*BESIDE, "onnx/encoder_model.onnx", "onnx/decoder_model_merged.onnx"],
            "org/name",
            "an encoder and a decoder",
        ),
        (["a.gguf", "b.gguf"], "org/name", "several GGUF files"),
        (["a-Q8_0.gguf", "b-Q8_0.gguf"], "org/name:Q8_0", "several models match"),
        (["a-Q8_0.gguf", "a-Q4_K_M.gguf"], "org/name:Q4_K", "did you mean 'Q4_K_M'"),
        (CHECKPOINT, "org/name:Q4_K_M", "no GGUF file and no ONNX folder"),
        (CHECKPOINT, "org/name:model.safetensors", "only a part of a model"),
        (
            ["a-Q8_0-00001-of-00003.gguf", "a-Q8_0-00003-of-00003.gguf"],
            "org/name",
            "2 of its 3 parts are in the repository",
        ),
        (["pytorch_model.bin"], "org/name:pytorch_model.bin", "only a part of a model"),
    ],
)
def test_what_is_said_instead(files: list[str], reference: str, says: str) -> None:
    with pytest.raises(DownloadError) as caught:
        choose(listing(files, reference))
    assert says in str(caught.value)
    assert caught.value.fix


@pytest.mark.parametrize(
    ("name", "precision"),
    [(INT4, "int4"), ("", ""), ("x/model-fp16", "fp16"), ("a-q4_k_m.gguf", "Q4_K_M"), ("a.BF16.gguf", "BF16")],
)
def test_precisions_in_names(name: str, precision: str) -> None:
    assert precision_in(name) == precision
