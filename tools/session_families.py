"""Small versions of well-known families of models, with random weights: for `python -m tools.session_models`.

Detection, segmentation, upscaling, video, OCR, speech, a decoder with past, and trees. The modules have the structure
and the operators of the families, and widths of their small published sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

CLASSES = 20


@dataclass(frozen=True)
class Family:
    """A module to export.

    Attributes:
        module: the module.
        inputs: example inputs by name; their shapes are those of the measurement.
        outputs: names of the outputs.
        axes: names of dynamic dimensions, by input and axis.
        suppress: True to add NonMaxSuppression; the outputs are then the boxes and the scores.
    """

    module: Any
    inputs: dict[str, Any]
    outputs: tuple[str, ...] = ("output",)
    axes: dict[str, dict[int, str]] = field(default_factory=dict)
    suppress: bool = False


def _image(module: Any, *shape: int, **options: Any) -> Family:
    import torch

    return Family(module, {"image": torch.randn(1, *shape)}, axes={"image": {0: "batch"}}, **options)


def _conv(width: int, out: int, size: int = 3, act: str = "ReLU", **options: Any) -> Any:
    from torch import nn

    pad = options.get("dilation", 1) * (size // 2)
    layers = [nn.Conv2d(width, out, size, padding=pad, bias=False, **options), nn.BatchNorm2d(out), getattr(nn, act)()]
    return nn.Sequential(*layers)


def _unet() -> Family:
    import torch
    from torch import nn

    class UNet(nn.Module):
        def __init__(self, widths: tuple[int, ...] = (32, 64, 128, 256)) -> None:
            super().__init__()
            pairs = list(zip((3, *widths), widths, strict=False))
            self.down = nn.ModuleList(nn.Sequential(_conv(a, b), _conv(b, b)) for a, b in pairs)
            back = [(b, a) for a, b in pairs[:0:-1]]
            self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, 2) for a, b in back)
            self.join = nn.ModuleList(nn.Sequential(_conv(2 * b, b), _conv(b, b)) for _, b in back)
            self.head = nn.Conv2d(widths[0], 2, 1)

        def forward(self, x: Any) -> Any:
            kept = []
            for index, block in enumerate(self.down):
                x = block(nn.functional.max_pool2d(x, 2) if index else x)
                kept.append(x)
            kept.pop()
            for up, join in zip(self.up, self.join, strict=True):
                x = join(torch.cat([kept.pop(), up(x)], 1))
            return self.head(x)

    return _image(UNet(), 3, 192, 192)


def _deeplab() -> Family:
    import torch
    from torch import nn

    class DeepLab(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            strides = ((3, 32, 2, 1), (32, 64, 2, 1), (64, 128, 2, 1), (128, 256, 1, 2), (256, 256, 1, 4))
            self.body = nn.Sequential(*(_conv(a, b, stride=s, dilation=d) for a, b, s, d in strides))
            self.parts = nn.ModuleList([_conv(256, 128, 1), *(_conv(256, 128, dilation=d) for d in (6, 12, 18))])
            self.pool, self.join = _conv(256, 128, 1), _conv(640, 128, 1)
            self.head = nn.Conv2d(128, CLASSES, 1)

        def forward(self, x: Any) -> Any:
            body = self.body(x)
            whole = self.pool(body.mean((2, 3), keepdim=True)).expand(-1, -1, *body.shape[2:])
            y = self.head(self.join(torch.cat([*(part(body) for part in self.parts), whole], 1)))
            return nn.functional.interpolate(y, x.shape[2:], mode="bilinear", align_corners=False)

    return _image(DeepLab(), 3, 224, 224)


def _boxes(places: Any) -> Any:
    """Return [N, 4] corners from centres and sizes [N, 4]."""
    import torch

    return torch.cat([places[..., :2] - places[..., 2:] / 2, places[..., :2] + places[..., 2:] / 2], -1)


def _yolo() -> Family:
    import torch
    from torch import nn

    conv = partial(_conv, act="SiLU")

    class Stage(nn.Module):
        def __init__(self, width: int, out: int) -> None:
            super().__init__()
            self.down, self.both, self.join = conv(width, out, stride=2), conv(out, out, 1), conv(out * 3 // 2, out, 1)
            self.inner = nn.Sequential(conv(out // 2, out // 2), conv(out // 2, out // 2))

        def forward(self, x: Any) -> Any:
            a, b = self.both(self.down(x)).chunk(2, 1)
            return self.join(torch.cat([a, b, b + self.inner(b)], 1))

    class Yolo(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            widths = (16, 32, 64, 128, 256)
            self.stem = conv(3, widths[0], stride=2)
            self.stages = nn.ModuleList(Stage(a, b) for a, b in pairwise(widths))
            self.heads = nn.ModuleList(
                nn.Sequential(conv(width, 64), nn.Conv2d(64, 64 + CLASSES, 1)) for width in widths[2:]
            )
            self.pool = nn.MaxPool2d(5, 1, 2)

        def forward(self, x: Any) -> tuple[Any, Any]:
            x, found = self.stem(x), []
            for stage in self.stages:
                x = stage(x)
                found.append(x)
            pooled = self.pool(x)
            found[-1] = x + pooled + self.pool(pooled)
            heads = [head(level).flatten(2) for head, level in zip(self.heads, found[1:], strict=True)]
            sides, scores = torch.cat(heads, 2).split((64, CLASSES), 1)
            bins = torch.arange(16, dtype=torch.float32)
            places = (sides.reshape(1, 4, 16, -1).softmax(2) * bins[:, None]).sum(2).transpose(1, 2)
            return _boxes(places * 20), scores.sigmoid()

    return _image(Yolo(), 3, 320, 320, outputs=("boxes", "scores"), suppress=True)


def _ssd() -> Family:
    import torch
    from torch import nn

    class Ssd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            act = partial(_conv, act="ReLU6")
            layers = []
            for a, b, stride in ((3, 32, 2), (32, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1)):
                layers += [act(a, a, groups=a, stride=stride), act(a, b, 1)] if a > 3 else [act(a, b, stride=stride)]
            self.body = nn.Sequential(*layers)
            self.more = nn.ModuleList([act(256, 512, stride=2), act(512, 256, stride=2), act(256, 256, stride=2)])
            widths = (256, 512, 256, 256)
            self.places = nn.ModuleList(nn.Conv2d(width, 6 * 4, 3, padding=1) for width in widths)
            self.kinds = nn.ModuleList(nn.Conv2d(width, 6 * (CLASSES + 1), 3, padding=1) for width in widths)

        def forward(self, x: Any) -> tuple[Any, Any]:
            levels = [self.body(x)]
            for more in self.more:
                levels.append(more(levels[-1]))

            def rows(heads: Any, size: int) -> Any:
                parts = [h(x).permute(0, 2, 3, 1).reshape(1, -1, size) for h, x in zip(heads, levels, strict=True)]
                return torch.cat(parts, 1)

            scores = rows(self.kinds, CLASSES + 1).softmax(-1)[..., 1:].transpose(1, 2)
            return _boxes(rows(self.places, 4).sigmoid() * 300), scores

    return _image(Ssd(), 3, 300, 300, outputs=("boxes", "scores"), suppress=True)


def _upscaling() -> Family:
    from torch import nn

    class Upscaling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 64, 3, padding=1)
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.PReLU(64), nn.Conv2d(64, 64, 3, padding=1))
                for _ in range(8)
            )
            self.last = nn.Sequential(
                nn.Conv2d(64, 256, 3, padding=1), nn.PixelShuffle(2), nn.Conv2d(64, 3, 3, padding=1)
            )

        def forward(self, x: Any) -> Any:
            y = first = self.first(x)
            for block in self.blocks:
                y = y + block(y)
            return self.last(y + first)

    return _image(Upscaling(), 3, 96, 96)


def _video() -> Family:
    from torch import nn

    def block(width: int, out: int, stride: int) -> Any:
        return nn.Sequential(nn.Conv3d(width, out, 3, stride, 1, bias=False), nn.BatchNorm3d(out), nn.ReLU())

    widths = ((3, 32, (1, 2, 2)), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1))
    body = nn.Sequential(
        *(block(*sizes) for sizes in widths), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(128, 10)
    )
    return _image(body, 3, 8, 112, 112)


def _ocr() -> Family:
    from torch import nn

    class Crnn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            parts = []
            for a, b, pool in ((1, 64, 2), (64, 128, 2), (128, 256, 0), (256, 256, (2, 1)), (256, 256, (2, 1))):
                parts += [_conv(a, b), *([nn.MaxPool2d(pool)] if pool else [])]
            self.body = nn.Sequential(*parts)
            self.lstm = nn.LSTM(512, 128, 2, bidirectional=True, batch_first=True)
            self.head = nn.Linear(256, 97)

        def forward(self, x: Any) -> Any:
            x = self.body(x)
            return self.head(self.lstm(x.permute(0, 3, 1, 2).flatten(2))[0]).log_softmax(-1)

    return _image(Crnn(), 1, 32, 256)


def _wav2vec2() -> Family:
    import torch
    from torch import nn
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Wav2Vec2Model(Wav2Vec2Config(num_hidden_layers=4))

        def forward(self, x: Any) -> Any:
            return self.model(x).last_hidden_state

    return Family(Hidden(), {"audio": torch.randn(1, 16_000)})


def _hifigan() -> Family:
    import torch
    from torch import nn

    class Residual(nn.Module):
        def __init__(self, width: int, size: int) -> None:
            super().__init__()
            self.parts = nn.ModuleList(
                nn.Sequential(
                    nn.LeakyReLU(0.1), nn.Conv1d(width, width, size, dilation=d, padding=d * (size // 2)),
                    nn.LeakyReLU(0.1), nn.Conv1d(width, width, size, padding=size // 2),
                )
                for d in (1, 3, 5)
            )  # fmt: skip

        def forward(self, x: Any) -> Any:
            for part in self.parts:
                x = x + part(x)
            return x

    class Generator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, width = nn.Conv1d(80, 256, 7, padding=3), 256
            self.ups, self.blocks = nn.ModuleList(), nn.ModuleList()
            for rate, size in ((8, 16), (8, 16), (4, 8)):
                self.ups.append(nn.ConvTranspose1d(width, width // 2, size, rate, (size - rate) // 2))
                width //= 2
                self.blocks.append(nn.ModuleList(Residual(width, kernel) for kernel in (3, 7, 11)))
            self.last = nn.Conv1d(width, 1, 7, padding=3)

        def forward(self, x: Any) -> Any:
            x = self.first(x)
            for up, blocks in zip(self.ups, self.blocks, strict=True):
                x = up(nn.functional.leaky_relu(x, 0.1))
                x = sum(block(x) for block in blocks) / 3
            return self.last(nn.functional.leaky_relu(x)).tanh()

    return Family(Generator(), {"mel": torch.randn(1, 80, 32)})


def _decoder() -> Family:
    """Return one step of a T5-like decoder, with cached keys and values of both kinds of attention."""
    import torch
    from torch import nn

    width, heads, layers, past, memory = 512, 8, 6, 64, 64
    size = width // heads

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(width))

        def forward(self, x: Any) -> Any:
            return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * self.scale

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
            self.q2, self.out2 = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
            self.up, self.down = nn.Linear(width, 2048, bias=False), nn.Linear(2048, width, bias=False)
            self.norms = nn.ModuleList(Norm() for _ in range(3))

        def forward(self, x: Any, bias: Any, keys: Any, values: Any, memory: Any) -> Any:
            def split(y: Any) -> Any:
                return y.unflatten(-1, (heads, size)).transpose(1, 2)

            def attend(q: Any, k: Any, v: Any, bias: Any) -> Any:
                return ((q @ k.transpose(2, 3) + bias).softmax(-1) @ v).transpose(1, 2).flatten(2)

            q, k, v = map(split, self.qkv(self.norms[0](x)).chunk(3, -1))
            keys, values = torch.cat([keys, k], 2), torch.cat([values, v], 2)
            x = x + self.out(attend(q, keys, values, bias))
            x = x + self.out2(attend(split(self.q2(self.norms[1](x))), memory, memory, 0.0))
            return x + self.down(self.up(self.norms[2](x)).relu()), keys, values

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.layers = nn.Embedding(32128, width), nn.ModuleList(Layer() for _ in range(layers))
            self.bias = nn.Parameter(torch.randn(heads, 1, 512))

        def forward(self, ids: Any, *caches: Any) -> tuple[Any, ...]:
            x, presents = self.table(ids), []
            bias = self.bias[None, :, :, : caches[0].shape[2] + 1]
            for index, layer in enumerate(self.layers):
                x, keys, values = layer(x, bias, *caches[3 * index : 3 * index + 3])
                presents += [keys, values]
            return (x @ self.table.weight.T, *presents)

    names = [f"{kind}_{layer}" for layer in range(layers) for kind in ("past_keys", "past_values", "memory")]
    lengths = {"past_keys": past, "past_values": past, "memory": memory}
    caches = {name: torch.randn(1, heads, lengths[name.rpartition("_")[0]], size) for name in names}
    axes = {name: {2: "past_length"} for name in names if name.startswith("past")}
    outputs = ("logits", *(f"present_{index}" for index in range(2 * layers)))
    return Family(Decoder(), {"ids": torch.randint(0, 32128, (1, 1)), **caches}, outputs, axes)


FAMILIES: dict[str, Callable[[], Family]] = {
    "unet": _unet,
    "deeplab": _deeplab,
    "yolo_nms": _yolo,
    "ssd_nms": _ssd,
    "upscaling": _upscaling,
    "video_3d": _video,
    "ocr_lstm": _ocr,
    "wav2vec2": _wav2vec2,
    "hifigan": _hifigan,
    "decoder_past": _decoder,
}


def random_trees(count: int, depth: int, features: int = 30, seed: int = 0) -> bytes:
    """Return a TreeEnsembleRegressor of complete trees with random splits, as LightGBM and XGBoost export them."""
    from onnx import TensorProto, helper

    rng = np.random.default_rng(seed)
    inner, size = 2**depth - 1, 2 ** (depth + 1) - 1
    nodes = np.tile(np.arange(size), count)
    leaf = nodes >= inner
    trees = np.repeat(np.arange(count), size)
    attributes = {
        "nodes_treeids": trees,
        "nodes_nodeids": nodes,
        "nodes_featureids": np.where(leaf, 0, rng.integers(0, features, count * size)),
        "nodes_truenodeids": np.where(leaf, 0, 2 * nodes + 1),
        "nodes_falsenodeids": np.where(leaf, 0, 2 * nodes + 2),
        "nodes_values": np.where(leaf, 0, rng.standard_normal(count * size)).astype(np.float32),
        "nodes_missing_value_tracks_true": np.zeros(count * size, np.int64),
        "target_treeids": trees[leaf],
        "target_nodeids": nodes[leaf],
        "target_ids": np.zeros(leaf.sum(), np.int64),
        "target_weights": rng.standard_normal(leaf.sum()).astype(np.float32),
    }
    modes = ["LEAF" if is_leaf else "BRANCH_LT" for is_leaf in leaf]
    node = helper.make_node(
        "TreeEnsembleRegressor", ["rows"], ["values"], domain="ai.onnx.ml", n_targets=1, nodes_modes=modes,
        **{name: value.tolist() for name, value in attributes.items()},
    )  # fmt: skip
    shapes = (("rows", features), ("values", 1))
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", width]) for name, width in shapes]
    graph = helper.make_graph([node], "trees", values[:1], values[1:])
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    return bytes(helper.make_model(graph, opset_imports=imports, ir_version=8).SerializeToString())


RANDOM_TREES = {"trees_random_31": partial(random_trees, 100, 5), "trees_random_64": partial(random_trees, 100, 6)}


def suppressed(model: Any) -> Any:
    """Return a detection model with NonMaxSuppression behind its outputs "boxes" and "scores"."""
    from onnx import TensorProto, helper, numpy_helper

    limits = {"most": np.array([100]), "overlap": np.float32([0.5]), "least": np.float32([0.3])}
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in limits.items())
    model.graph.node.append(helper.make_node("NonMaxSuppression", ["boxes", "scores", *limits], ["selected"]))
    model.graph.output.append(helper.make_tensor_value_info("selected", TensorProto.INT64, ["count", 3]))
    return model
