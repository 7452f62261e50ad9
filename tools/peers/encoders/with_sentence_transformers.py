"""sentence-transformers: `encode`, which sorts texts by length and pads batches of 32."""

from __future__ import annotations

from typing import Any

import sentence_transformers
import torch
from serving import Embed, serve


def load(path: str, threads: int) -> tuple[Embed, dict[str, str]]:
    """Return the function that embeds texts."""
    torch.set_num_threads(threads)
    model = sentence_transformers.SentenceTransformer(path, device="cpu", model_kwargs={"dtype": torch.float32})

    def embed(texts: list[str], _: list[list[int]]) -> Any:
        return model.encode(texts, batch_size=32, show_progress_bar=False)

    return embed, {"sentence-transformers": sentence_transformers.__version__, "torch": str(torch.__version__)}


if __name__ == "__main__":
    serve(load)
