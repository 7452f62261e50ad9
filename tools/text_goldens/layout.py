"""Functions that write a family's files, and the golden from which tests recreate the files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .families import Family, Json


def family_files(family: Family, vocabularies: dict[str, Json]) -> Json:
    """Return JSON values by file name; the model in tokenizer.json names its vocabulary instead of containing it."""
    vocab = vocabularies[family.vocabulary]["vocab"]
    ids = {entry[0]: index for index, entry in enumerate(vocab)} if isinstance(vocab, list) else dict(vocab)
    added = []
    for entry in family.added:
        ids.setdefault(entry["content"], len(ids))
        added.append({"id": ids[entry["content"]], **entry})
    added.sort(key=lambda entry: entry["id"])
    kind = {"word_piece": "WordPiece", "unigram": "Unigram"}.get(family.vocabulary, "BPE")
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        **{name: family.pipeline.get(name) for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder")},
        "model": {"type": kind, **family.model, "vocabulary": family.vocabulary},
    }
    _fill_in_ids(tokenizer["post_processor"], ids)
    listed = {str(entry["id"]): {name: entry[name] for name in entry if name != "id"} for entry in added}
    config = {**family.config, "added_tokens_decoder": listed, "model_max_length": 2048}
    return {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": config,
        "config.json": {"model_type": family.model_type},
    }


def _fill_in_ids(processor: Json | None, ids: dict[str, int]) -> None:
    if processor is None:
        return
    for part in processor.get("processors", ()):
        _fill_in_ids(part, ids)
    if "special_tokens" in processor:
        processor["special_tokens"] = {
            name: {"id": name, "ids": [ids[name]], "tokens": [name]} for name in processor["special_tokens"]
        }


def write_folder(folder: Path, files: Json, vocabularies: dict[str, Json], templates: dict[str, str]) -> None:
    """Write the folder of a family in its publisher's layout.

    Args:
        templates: texts by name; "default" becomes chat_template.jinja, others additional_chat_templates/NAME.jinja.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        if name == "tokenizer.json":
            model = {key: item for key, item in value["model"].items() if key != "vocabulary"}
            value = {**value, "model": {**model, **vocabularies[value["model"]["vocabulary"]]}}
        (folder / name).write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")
    for name, text in templates.items():
        path = folder / ("chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


def read_templates(folder: Path, family: str) -> dict[str, str]:
    """Return the templates stored as FAMILY.jinja and FAMILY.NAME.jinja."""
    found: dict[str, str] = {}
    for path in sorted(folder.glob(f"{family}.*jinja")):
        parts: list[Any] = path.name.split(".")
        found["default" if len(parts) == 2 else parts[1]] = path.read_text(encoding="utf-8")
    return found
