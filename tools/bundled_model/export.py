"""Write the shipped folder from the float checkpoint: INT4 projections, INT8 tied embedding and head.

The folder is written by the toolkit's own builder (genai.convert), which needs only onnx and numpy.
"""

import json
import shutil
from pathlib import Path

from safetensors.numpy import load_file

from genai.convert import DecoderSpec, ExportOptions, write_model_folder
from genai.convert.options import Precision

KEPT = ("MODEL_CARD.md", "generation_config.json")  # edited by hand, so an export must not replace it


def decoder_spec(checkpoint: Path) -> DecoderSpec:
    raw = json.loads((checkpoint / "config.json").read_text())
    return DecoderSpec(
        model_type="llama",
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_attention_heads=raw["num_attention_heads"],
        num_key_value_heads=raw["num_key_value_heads"],
        head_size=raw["head_dim"],
        context_length=raw["max_position_embeddings"],
        rms_norm_eps=raw["rms_norm_eps"],
        rope_theta=raw["rope_theta"],
        tie_word_embeddings=True,
        bos_token_id=raw["pad_token_id"],  # never added to a prompt, but required by the file format
        eos_token_ids=tuple(raw["eos_token_id"]),
        pad_token_id=raw["pad_token_id"],
    )


def export_folder(checkpoint: Path, folder: Path, *, precision: Precision = "int4", accuracy_level: int = 4) -> None:
    """Replace everything in `folder` except its model card; precision "fp32" is for comparisons."""
    head: Precision = "int8" if precision == "int4" else precision
    options = ExportOptions(precision=precision, head_precision=head, accuracy_level=accuracy_level)
    kept = {name: (folder / name).read_bytes() for name in KEPT if (folder / name).exists()}
    if folder.exists():
        shutil.rmtree(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    weights = load_file(str(checkpoint / "model.safetensors"))
    write_model_folder(folder, decoder_spec(checkpoint), options, weights, tokenizer_dir=checkpoint)
    for name, content in kept.items():
        (folder / name).write_bytes(content)
