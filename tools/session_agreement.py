"""Compare sessions with onnxruntime on exported models: `python -m tools.session_agreement [PATTERN]`.

The models are small random transformers, exported by both of torch.onnx's exporters ("bert legacy", "bert dynamo"), and
pipelines of scikit-learn, LightGBM and XGBoost ("forest pipeline"). Each model is made in a temporary folder and run by
both runtimes; the largest difference is printed. The tool needs the extra "export" and onnxruntime. Nothing is
downloaded.
"""

# ruff: noqa: E501 - each model is one line of a table

from __future__ import annotations

import io
import logging
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

from genai.errors import InputError
from tools import session_pipelines

TEXT = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
DECODER = {**TEXT, "num_key_value_heads": 2, "max_position_embeddings": 64, "use_cache": False}
IMAGE = {"image_size": 32, "patch_size": 8} | {name: size for name, size in TEXT.items() if name != "vocab_size"}
STAGES = {"hidden_sizes": [8, 16], "depths": [1, 1], "embedding_size": 8}
# model_type -> (kind of input, changes to the default configuration)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "albert": ("text", {**TEXT, "embedding_size": 16}),
    "bert": ("text", TEXT),
    "big_bird": ("text", {**TEXT, "attention_type": "original_full"}),
    "bloom": ("text", {"vocab_size": 99, "hidden_size": 32, "n_layer": 2, "n_head": 4, "use_cache": False}),
    "camembert": ("text", TEXT),
    "codegen": ("text", {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "use_cache": False}),
    "convbert": ("text", {**TEXT, "embedding_size": 32}),
    "data2vec-text": ("text", TEXT),
    "deberta": ("text", TEXT),
    "deberta-v2": ("text", TEXT),
    "distilbert": ("text", {"vocab_size": 99, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}),
    "electra": ("text", {**TEXT, "embedding_size": 16}),
    "ernie": ("text", TEXT),
    "esm": ("text", {**TEXT, "pad_token_id": 1, "position_embedding_type": "rotary"}),
    "flaubert": ("text", {"n_words": 99, "emb_dim": 32, "n_layers": 2, "n_heads": 4}),
    "gemma": ("text", {**DECODER, "head_dim": 8}),
    "gpt2": ("text", {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "use_cache": False}),
    "gpt_neox": ("text", {**TEXT, "use_cache": False}),
    "gptj": ("text", {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "use_cache": False}),
    "ibert": ("text", TEXT),
    "layoutlm": ("text", TEXT),
    "llama": ("text", DECODER),
    "longformer": ("text", {**TEXT, "attention_window": 4}),
    "mistral": ("text", DECODER),
    "mobilebert": ("text", {**TEXT, "embedding_size": 32, "true_hidden_size": 32, "intra_bottleneck_size": 32}),
    "modernbert": ("text", {**TEXT, "pad_token_id": 0}),
    "mpnet": ("text", TEXT),
    "mpt": ("text", {"vocab_size": 99, "d_model": 32, "n_layers": 2, "n_heads": 4, "use_cache": False}),
    "nystromformer": ("text", {**TEXT, "segment_means_seq_len": 8, "num_landmarks": 8}),
    "olmo": ("text", DECODER),
    "opt": ("text", {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 48, "word_embed_proj_dim": 32, "use_cache": False}),
    "phi": ("text", {**TEXT, "use_cache": False}),
    "qwen2": ("text", DECODER),
    "qwen3": ("text", {**DECODER, "head_dim": 8}),
    "rembert": ("text", {**TEXT, "input_embedding_size": 16}),
    "roberta": ("text", TEXT),
    "roformer": ("text", {**TEXT, "embedding_size": 32}),
    "splinter": ("text", TEXT),
    "squeezebert": ("text", TEXT | {"embedding_size": 32}),
    "stablelm": ("text", DECODER),
    "starcoder2": ("text", DECODER),
    "xglm": ("text", {"vocab_size": 99, "d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48, "use_cache": False}),
    "xlm-roberta": ("text", TEXT),
    "beit": ("image", IMAGE),
    "convnext": ("image", {"image_size": 32, "hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}),
    "convnextv2": ("image", {"image_size": 32, "hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}),
    "deit": ("image", IMAGE),
    "dinov2": ("image", IMAGE),
    "efficientnet": ("image", {"image_size": 32, "width_coefficient": 0.25, "depth_coefficient": 0.2, "hidden_dim": 320}),
    "mobilenet_v1": ("image", {"image_size": 32, "depth_multiplier": 0.25}),
    "mobilenet_v2": ("image", {"image_size": 32, "depth_multiplier": 0.25}),
    "mobilevit": ("image", {"image_size": 64, "hidden_sizes": [16, 24, 32]}),
    "poolformer": ("image", {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}),
    "regnet": ("image", {**STAGES, "groups_width": 8}),
    "resnet": ("image", STAGES),
    "segformer": ("image", {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 1, 2, 2]}),
    "swin": ("image", {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}),
    "vit": ("image", IMAGE),
    "yolos": ("image", {**IMAGE, "image_size": [32, 32], "num_detection_tokens": 4}),
    "hubert": ("audio", {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "conv_dim": [8] * 7, "num_conv_pos_embedding_groups": 4, "num_conv_pos_embeddings": 8}),
    "wav2vec2": ("audio", {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "conv_dim": [8] * 7, "num_conv_pos_embedding_groups": 4, "num_conv_pos_embeddings": 8}),
}  # fmt: skip


def export(model_type: str, folder: Path, dynamo: bool = False) -> tuple[Path, dict[str, Any]]:
    """Write a model with torch's legacy or newer exporter; return the model's path and inputs."""
    import torch
    from transformers import AutoConfig, AutoModel

    kind, sizes = MODELS[model_type]
    torch.manual_seed(0)
    model = AutoModel.from_config(AutoConfig.for_model(model_type, **sizes)).eval()
    feed = _feed(kind, model)
    path = folder / f"{model_type}.onnx"

    class FirstOutput(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *inputs: Any) -> Any:
            return self.model(**dict(zip(feed, inputs, strict=True)))[0]

    form = (
        {"dynamo": True, "verbose": False, "external_data": False} if dynamo else {"dynamo": False, "opset_version": 17}
    )
    torch.onnx.export(FirstOutput().eval(), tuple(feed.values()), str(path), input_names=list(feed), **form)
    return path, {name: value.numpy() for name, value in feed.items()}


def _feed(kind: str, model: Any) -> dict[str, Any]:
    import torch

    if kind == "audio":
        return {"input_values": torch.randn(1, 2000)}
    if kind == "image":
        size = getattr(model.config, "image_size", 32)
        height, width = (size, size) if isinstance(size, int) else size
        return {"pixel_values": torch.randn(1, 3, height, width)}
    ids = torch.randint(3, 99, (2, 8))
    return {"input_ids": ids} if kind == "ids" else {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def cases() -> dict[str, Callable[[Path], tuple[Any, dict[str, Any]]]]:
    """Return, by name, functions that make a model (as a path or bytes) and its inputs."""
    made: dict[str, Callable[[Path], tuple[Any, dict[str, Any]]]] = {}
    for model_type in MODELS:
        made[f"{model_type} legacy"] = partial(export, model_type)
        made[f"{model_type} dynamo"] = partial(export, model_type, dynamo=True)
    for name in session_pipelines.names():
        made[f"{name} pipeline"] = partial(_pipeline, name)
    return made


def _pipeline(name: str, folder: Path) -> tuple[Any, dict[str, Any]]:
    return session_pipelines.exported(name)


def outcome(make: Callable[[Path], tuple[Any, dict[str, Any]]], folder: Path) -> str:
    """Return one line with the largest difference, or with the error and the step that failed."""
    from genai.compat.onnxruntime.inference_session import InferenceSession
    from genai.session.arrays import Peer, differences

    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            source, feed = make(folder)
    except Exception as error:
        return f"not exported: {type(error).__name__}: {str(error).splitlines()[0][:100] if str(error) else ''}"
    try:
        expected = Peer(source if isinstance(source, bytes) else str(source)).run(feed)
    except InputError as error:
        return f"not run by onnxruntime: {error.why[:200]}"
    try:
        session = InferenceSession(source)
        ours = dict(zip((item.name for item in session.get_outputs()), session.run(None, feed), strict=True))
        _, _, relative = differences(ours, expected)[0]
    except Exception as error:
        return f"FAILED: {type(error).__name__}: {str(error)[:300]}"
    return f"{'agrees' if relative < 1e-3 else 'DIFFERS'}: {relative:.2g}"


def main() -> None:
    """Run the cases whose names match; exit with 1 if a case fails or differs."""
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    pattern = sys.argv[1] if len(sys.argv) > 1 else ""
    outcomes = {}
    for name, make in cases().items():
        if re.search(pattern, name):
            with tempfile.TemporaryDirectory() as folder:
                outcomes[name] = outcome(make, Path(folder))
            print(f"{name:<24} {outcomes[name]}", flush=True)
    for form in ("legacy", "dynamo", "pipeline"):
        found = [text for name, text in outcomes.items() if name.endswith(form)]
        print(f"{form}: {sum(text.startswith('agrees') for text in found)} of {len(found)} agree")
    sys.exit(any(text.startswith(("FAILED", "DIFFERS")) for text in outcomes.values()))


if __name__ == "__main__":
    main()
