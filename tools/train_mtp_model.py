"""Train a small model of Qwen 3.5's architecture with an MTP head, to measure how often proposals are accepted.

    python tools/train_mtp_model.py FOLDER [--minutes 20]

The tool needs torch and transformers. The model has about two million weights, and learns the conversations of the
bundled model (tools/bundled_model) with its tokenizer. The head is trained together with the model, with the vectors
and the tokens of the same rows. FOLDER is a checkpoint that `genai build FOLDER -o OUTPUT --mtp` converts. It is
written once a minute, so that an interrupted run leaves a usable checkpoint.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, Qwen3_5TextModel

from tools.bundled_model.mixture import short_conversation
from tools.bundled_model.packing import RowStream

TOKENIZER = Path(__file__).resolve().parent / "bundled_model" / "checkpoint"
ROWS, LENGTH, PEAK_RATE, HEAD_SHARE = 24, 64, 4e-3, 0.5
SIZES: dict[str, Any] = {
    "vocab_size": 1536, "hidden_size": 192, "intermediate_size": 448, "num_hidden_layers": 4, "num_attention_heads": 3,
    "num_key_value_heads": 1, "head_dim": 64, "full_attention_interval": 2, "linear_num_key_heads": 4,
    "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 48, "tie_word_embeddings": True,
    "max_position_embeddings": 1024, "bos_token_id": None, "eos_token_id": [2, 0], "pad_token_id": 0,
    "mtp_num_hidden_layers": 1,
}  # fmt: skip


class Head(torch.nn.Module):
    """An MTP head: a layer that reads a projection of the embeddings and of the vectors of the previous tokens."""

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        super().__init__()
        sizes = config.to_dict() | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
        self.body = Qwen3_5TextModel(Qwen3_5TextConfig(**sizes))
        del self.body.embed_tokens
        norm = type(self.body.norm)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = norm(config.hidden_size), norm(config.hidden_size)
        self.fc = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)

    def forward(self, embeddings: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        both = torch.cat([self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(vectors)], -1)
        rows: torch.Tensor = self.body(inputs_embeds=self.fc(both), use_cache=False).last_hidden_state
        return rows

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by their names in a checkpoint."""
        return {f"mtp.{name.removeprefix('body.')}": value.contiguous() for name, value in self.state_dict().items()}


def loss_of(logits: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    losses = F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


def save(model: Qwen3_5ForCausalLM, head: Head, folder: Path) -> None:
    """Write a checkpoint beside the folder, then replace the folder."""
    new = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    model.save_pretrained(new)
    save_file(load_file(new / "model.safetensors") | head.tensors(), new / "model.safetensors", {"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(TOKENIZER / name, new / name)
    shutil.rmtree(folder, ignore_errors=True)
    new.rename(folder)


def train(folder: Path, minutes: float, threads: int) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    config = Qwen3_5TextConfig(**SIZES)
    model, tokenizer = Qwen3_5ForCausalLM(config), Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    head = Head(config)
    parameters = [*model.parameters(), *head.parameters()]
    optimiser = torch.optim.AdamW(parameters, lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.05)
    rows = RowStream(tokenizer, short_conversation, "0:short", ROWS, LENGTH)
    start = saved = time.monotonic()
    step = 0
    while (share := (time.monotonic() - start) / (60 * minutes)) < 1:
        batch = rows.batch(step)
        ids, weights = torch.from_numpy(batch.ids).long(), torch.from_numpy(batch.weights)
        vectors = model.model(ids, use_cache=False).last_hidden_state
        loss = loss_of(model.lm_head(vectors[:, :-1]), ids[:, 1:], weights[:, 1:])
        drafted = head(model.model.embed_tokens(ids[:, 1:-1]), vectors[:, :-2])
        further = loss_of(model.lm_head(drafted), ids[:, 2:], weights[:, 2:])
        (loss + HEAD_SHARE * further).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        rate = PEAK_RATE * min(1.0, (step + 1) / 20) * (0.05 + 0.95 * (1 + math.cos(math.pi * share)) / 2)
        for group in optimiser.param_groups:
            group["lr"] = rate
        optimiser.step()
        optimiser.zero_grad()
        step += 1
        now = time.monotonic()
        if step % 10 == 0:
            line = {"step": step, "seconds": round(now - start), "loss": loss.item(), "head": further.item()}
            print(json.dumps(line), flush=True)
        if now - saved > 60:
            save(model, head, folder)
            saved = now
    save(model, head, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    os.nice(19 - os.getpriority(os.PRIO_PROCESS, 0))
    options.folder.parent.mkdir(parents=True, exist_ok=True)
    train(options.folder, options.minutes, options.threads)


if __name__ == "__main__":
    main()
