"""The tokenizers and templates of model families, with the ids, texts and prompts of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

GOLDENS = Path(__file__).parent / "goldens"
FAMILIES = sorted({path.stem for path in GOLDENS.glob("*.json")} - {"vocabularies", "texts", "sentencepiece"})


def read(name: str) -> Any:
    """Return the contents of a file in the folder of goldens."""
    return json.loads((GOLDENS / f"{name}.json").read_text(encoding="utf-8"))
