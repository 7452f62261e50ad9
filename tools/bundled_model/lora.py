"""Train a LoRA adapter (Hu et al., arXiv:2106.09685) on the frozen float checkpoint and save it in PEFT's format.

The data are conversations, one JSON object per line: {"messages": [{"role": ..., "content": ...}, ...]}.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from .checkpoint import CHECKPOINT, load_checkpoint
from .mixture import Conversation
from .model import Pebble, Projection
from .packing import encode, pack
from .train import sample_loss
from .turn import Turn

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LoraProjection(nn.Module):
    """y = W x + (alpha / rank) B A x, with W frozen; initially A is random and B is zero."""

    def __init__(self, base: Projection, rank: int, alpha: float) -> None:
        super().__init__()
        self.base, self.scaling = base, alpha / rank
        self.lora_A = nn.Parameter(torch.randn(rank, base.in_features) * base.in_features**-0.5)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scaling * F.linear(F.linear(x, self.lora_A), self.lora_B)


def add_adapters(model: Pebble, rank: int, alpha: float, targets: tuple[str, ...] = TARGETS) -> None:
    """Freeze the model and wrap each target projection."""
    model.requires_grad_(False)
    for layer in model.model.layers:
        for block in (layer.self_attn, layer.mlp):
            for name, module in list(block.named_children()):
                if name in targets:
                    setattr(block, name, LoraProjection(module, rank, alpha))


def adapters(model: Pebble) -> Iterator[tuple[str, LoraProjection]]:
    """Yield (path of the projection, adapter) for every wrapped projection."""
    for name, module in model.named_modules():
        if isinstance(module, LoraProjection):
            yield name, module


def read_conversations(path: Path) -> list[Conversation]:
    return [_conversation(json.loads(line)["messages"]) for line in path.read_text(encoding="utf-8").splitlines()]


def _conversation(messages: list[dict[str, str]]) -> Conversation:
    system = messages[0]["content"] if messages[0]["role"] == "system" else None
    talk = messages if system is None else messages[1:]
    roles = [message["role"] for message in talk]
    if not talk or roles != ["user", "assistant"] * (len(talk) // 2):
        raise ValueError(f"messages must alternate user and assistant and end with assistant, got roles {roles}")
    pairs = zip(talk[::2], talk[1::2], strict=True)
    return Conversation(tuple(Turn(asked["content"], reply["content"]) for asked, reply in pairs), system)


def train_adapter(model: Pebble, examples: list[tuple[list[int], list[float]]], options: argparse.Namespace) -> float:
    """Train only the adapters with AdamW; return the last loss."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(parameters, lr=options.rate, weight_decay=0.0)
    rng = Random(options.seed)
    length = max(len(ids) for ids, _ in examples)
    loss = torch.tensor(0.0)
    for step in range(options.steps):
        rows = pack(rng.sample(examples, min(options.batch, len(examples))), length)
        loss = sample_loss(
            model,
            torch.from_numpy(rows.ids).long(),
            torch.from_numpy(rows.documents).long(),
            torch.from_numpy(rows.weights),
        )
        optimiser.param_groups[0]["lr"] = options.rate * (1.0 - step / options.steps)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return float(loss.detach())


def save_adapter(
    model: Pebble,
    folder: Path,
    rank: int,
    alpha: float,
    targets: tuple[str, ...] = TARGETS,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write adapter_config.json and adapter_model.safetensors in the format of PEFT 0.17."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "base_model_name_or_path": "pebble",
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": sorted(targets),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {}
    for name, adapter in adapters(model):
        tensors[f"base_model.model.{name}.lora_A.weight"] = adapter.lora_A.detach().to(dtype).contiguous()
        tensors[f"base_model.model.{name}.lora_B.weight"] = adapter.lora_B.detach().to(dtype).contiguous()
    save_file(tensors, str(folder / "adapter_model.safetensors"), metadata={"format": "pt"})
    (folder / "adapter_model.safetensors").chmod(0o644)  # safetensors writes files that only the owner can read


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bundled_model.lora", description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--base", type=Path, default=CHECKPOINT)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--alpha", type=float, default=16.0)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)
    model, tokenizer = load_checkpoint(options.base)
    add_adapters(model, options.rank, options.alpha)
    examples = encode(tokenizer, read_conversations(options.data), model.config.context_length)
    print(f"last loss {train_adapter(model, examples, options):.4f}")
    save_adapter(model, options.out, options.rank, options.alpha)


if __name__ == "__main__":
    main()
