"""Write the models for measuring sessions: `python -m tools.session_models FOLDER [NAME ...]`.

The models have random weights and transformers' default configurations, whose sizes are the published sizes, or the
structure of other families (tools/session_families.py). torch.onnx exports them; nothing is downloaded. Models whose
names end in _int8 are quantised by onnxruntime (dynamically for text, QDQ for images), and onnxruntime converts those
whose names end in _fp16. The trees are ensembles of scikit-learn, LightGBM and XGBoost, and random ones of the same
sizes. The tool needs the extra "export" and onnxruntime.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tools.session_families import FAMILIES, RANDOM_TREES, suppressed
from tools.session_pipelines import converted

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


IMAGES = ("vit_base", "resnet50", "mobilenet_v2")
QUANTIZED = ("bert_base_int8", "minilm_int8", "vit_base_int8", "resnet50_int8", "mobilenet_v2_int8")


HALVES = ("resnet50_fp16", "mobilenet_v2_fp16", "minilm_fp16", "unet_fp16", "yolo_nms_fp16")


def _trees(kind: str) -> bytes:
    from lightgbm import LGBMClassifier
    from sklearn.datasets import load_breast_cancer, load_digits
    from sklearn.ensemble import GradientBoostingClassifier, RandomForestClassifier
    from xgboost import XGBClassifier

    makers: dict[str, tuple[Any, Any]] = {
        "forest": (RandomForestClassifier(100, random_state=0), load_digits),
        "boosting": (GradientBoostingClassifier(random_state=0), load_breast_cancer),
        "lightgbm": (LGBMClassifier(verbose=-1), load_breast_cancer),
        "xgboost": (XGBClassifier(), load_digits),
    }
    estimator, load = makers[kind]
    rows, kinds = load(return_X_y=True)
    rows = rows.astype(np.float32)
    return converted(estimator.fit(rows, kinds), rows)


TREES = {f"trees_{kind}": partial(_trees, kind) for kind in ("forest", "boosting", "lightgbm", "xgboost")}


def export(name: str, folder: Path) -> Path:
    """Write one model and return its path."""
    import torch

    torch.manual_seed(0)
    if name in FAMILIES:
        return _export_family(name, folder)
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


def _export_family(name: str, folder: Path) -> Path:
    import onnx
    import torch

    family, path = FAMILIES[name](), folder / f"{name}.onnx"
    torch.onnx.export(
        family.module.eval(),
        tuple(family.inputs.values()),
        str(path),
        input_names=list(family.inputs),
        output_names=list(family.outputs),
        dynamic_axes=family.axes,
        opset_version=17,
        dynamo=False,
    )
    if family.suppress:
        onnx.save(suppressed(onnx.load(path)), path)
    return path


def halve(source: Path, path: Path) -> None:
    """Write the version of a model with 16-bit floats."""
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16

    onnx.save(convert_float_to_float16(onnx.load(source)), path)


def quantize(source: Path, path: Path, is_image: bool) -> None:
    """Write the 8-bit version of a model."""
    from onnxruntime.quantization import QuantType, quantize_dynamic, quantize_static

    if is_image:
        quantize_static(source, path, _Samples(), activation_type=QuantType.QUInt8, per_channel=True)
    else:
        quantize_dynamic(source, path, weight_type=QuantType.QInt8)


class _Samples:
    """Random images for calibration."""

    def __init__(self) -> None:
        generator = np.random.default_rng(0)
        shape = (1, 3, 224, 224)
        self._left = [{"pixel_values": generator.standard_normal(shape, np.float32)} for _ in range(4)]

    def get_next(self) -> dict[str, Any] | None:
        return self._left.pop() if self._left else None


def make(name: str, folder: Path) -> Path:
    """Write one model of any kind and return its path."""
    path = folder / f"{name}.onnx"
    if name in TREES or name in RANDOM_TREES:
        path.write_bytes({**TREES, **RANDOM_TREES}[name]())
    elif name.endswith(("_int8", "_fp16")):
        plain = name[: -len("_int8")]
        source = folder / f"{plain}.onnx"
        source = source if source.exists() else export(plain, folder)
        if name.endswith("_fp16"):
            halve(source, path)
        else:
            quantize(source, path, plain in IMAGES)
    else:
        export(name, folder)
    return path


def main() -> None:
    """Write the named models, or all models."""
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[2:] or [*MODELS, *FAMILIES, *QUANTIZED, *HALVES, *TREES, *RANDOM_TREES]:
        print(make(name, folder), flush=True)


if __name__ == "__main__":
    main()
