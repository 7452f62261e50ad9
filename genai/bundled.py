"""Where the files that ship with the package lie."""

from __future__ import annotations

from pathlib import Path

BUNDLED_MODEL = "pebble"


def configs_folder() -> Path:
    """The installed configs/ folder."""
    import genai.configs

    return Path(next(iter(genai.configs.__path__)))


def bundled_model() -> Path:
    """The folder of the model that ships with the package."""
    return configs_folder() / "models" / BUNDLED_MODEL


def bundled_tasks() -> Path:
    """The held-out questions of the bundled model, JSON lines."""
    return configs_folder() / "tasks" / f"{BUNDLED_MODEL}.jsonl"
