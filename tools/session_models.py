"""Writes the models that sessions are measured on: `python -m tools.session_models FOLDER [NAME ...]`.

Random weights from transformers' own configurations, exported by torch.onnx: sizes as published, no downloads. Needs
torch and transformers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_TOKENS = 128


def _text(config: Any, model: Any) -> tuple[Any, tuple[Any, ...], list[str], dict[str, Any]]:
    import torch

    ids = torch.randint(0, config.vocab_size, (1, _TOKENS))
    axes = {0: "batch", 1: "sequence"}
    names = ["input_ids", "attention_mask"]
    return model, (ids, torch.ones_like(ids)), names, dict.fromkeys(names, axes)


def _image(model: Any) -> tuple[Any, tuple[Any, ...], list[str], dict[str, Any]]:
    import torch

    return model, (torch.randn(1, 3, 224, 224),), ["pixel_values"], {"pixel_values": {0: "batch"}}


def _bert(**sizes: int) -> Any:
    from transformers import BertConfig, BertModel

    config = BertConfig(**sizes)
    return _text(config, BertModel(config))


def _distilbert() -> Any:
    from transformers import DistilBertConfig, DistilBertModel

    config = DistilBertConfig()
    return _text(config, DistilBertModel(config))


def _vit() -> Any:
    from transformers import ViTConfig, ViTModel

    return _image(ViTModel(ViTConfig()))


def _resnet() -> Any:
    from transformers import ResNetConfig, ResNetModel

    return _image(ResNetModel(ResNetConfig()))


def _mobilenet() -> Any:
    from transformers import MobileNetV2Config, MobileNetV2Model

    return _image(MobileNetV2Model(MobileNetV2Config()))


MODELS: dict[str, Callable[[], Any]] = {
    "bert_base": _bert,
    "minilm": lambda: _bert(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536),
    "distilbert": _distilbert,
    "vit_base": _vit,
    "resnet50": _resnet,
    "mobilenet_v2": _mobilenet,
}


def export(name: str, folder: Path) -> Path:
    """Write one model; returns its path."""
    import torch

    torch.manual_seed(0)
    model, arguments, names, axes = MODELS[name]()
    path = folder / f"{name}.onnx"

    class LastHiddenState(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model.eval()

        def forward(self, *inputs: Any) -> Any:
            return self.model(**dict(zip(names, inputs, strict=True))).last_hidden_state

    torch.onnx.export(
        LastHiddenState().eval(),
        arguments,
        str(path),
        input_names=names,
        dynamic_axes=axes,
        opset_version=17,
        dynamo=False,
    )
    return path


def main() -> None:
    """Write the models named, or all."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[2:] or MODELS:
        print(export(name, folder))


if __name__ == "__main__":
    main()
