"""This toolkit: `Embedder.embed` of a list of texts."""

from __future__ import annotations

from typing import Any

from serving import Embed, serve

import genai


def load(path: str, threads: int) -> tuple[Embed, dict[str, str]]:
    """Return the function that embeds texts."""
    embedder = genai.Embedder(path, threads=threads)

    def embed(texts: list[str], _: list[list[int]]) -> Any:
        return embedder.embed(texts)

    return embed, {"genai": genai.__version__}


if __name__ == "__main__":
    serve(load)
