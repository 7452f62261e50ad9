"""Write a PEFT adapter as a GGUF file, for a model that write_gguf.py wrote (needs the gguf package).

usage: write_gguf_adapter.py CONFIG ADAPTER FILE, where CONFIG is the model's config.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gguf
import numpy as np
from write_gguf import ARCHITECTURES, gguf_name, interleaved, tensors

_PREFIX = "base_model.model."


def main() -> None:
    """Write the file."""
    config, adapter = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    alpha = json.loads((adapter / "adapter_config.json").read_text())["lora_alpha"]
    writer = gguf.GGUFWriter(sys.argv[3], ARCHITECTURES[config["model_type"]])
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(alpha))
    for name, values in tensors(adapter / "adapter_model.safetensors"):
        module, _, factor = name.removeprefix(_PREFIX).removesuffix(".weight").rpartition(".lora_")
        if config["model_type"] == "llama" and factor == "B" and module.endswith(("q_proj", "k_proj")):
            values = interleaved(values, config["num_attention_heads" if "q_proj" in module else "num_key_value_heads"])
        writer.add_tensor(f"{gguf_name(f'{module}.weight')}.lora_{factor.lower()}", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
