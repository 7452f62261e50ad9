"""Write tests/text/goldens: how transformers and sentencepiece tokenise difficult text, per model family.

    python tools/make_text_goldens.py [--train]

Existing vocabularies are reused unless --train is given. Newly trained vocabularies differ from run to run.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import transformers

from tools.text_goldens import sentencepiece_models
from tools.text_goldens.families import FAMILIES, Family, Json
from tools.text_goldens.layout import family_files, read_templates, write_folder
from tools.text_goldens.texts import CONVERSATIONS, TORTURE
from tools.text_goldens.vocabularies import train_all

GOLDENS = Path(__file__).resolve().parent.parent / "tests" / "text" / "goldens"


def main() -> None:
    """Write all goldens."""
    transformers.utils.logging.set_verbosity_error()
    if "--train" in sys.argv[1:]:
        _write("vocabularies", train_all())
        sentencepiece_models.train_all(GOLDENS / "sentencepiece")
    vocabularies = json.loads((GOLDENS / "vocabularies.json").read_text(encoding="utf-8"))
    _write("texts", {"torture": TORTURE, "conversations": CONVERSATIONS})
    models = sorted((GOLDENS / "sentencepiece").glob("*.model"))
    _write("sentencepiece", {path.stem: sentencepiece_models.golden(path) for path in models})
    for family in FAMILIES:
        golden = family_golden(family, vocabularies)
        _write(family.name, golden)
        print(f"{family.name}: AutoTokenizer rebuilds {len(golden['rebuilt'])} of {len(TORTURE)} texts differently")


def family_golden(family: Family, vocabularies: dict[str, Json]) -> Json:
    """Return a family's files, and transformers' results on every text and conversation."""
    files = family_files(family, vocabularies)
    templates = read_templates(GOLDENS / "templates", family.name)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / family.name
        write_folder(folder, files, vocabularies, templates)
        rebuilt = transformers.AutoTokenizer.from_pretrained(folder)
        # For some classes, AutoTokenizer ignores the file's pipeline and builds the class's own pipeline.
        by_file = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    ids, decoded, others = [], [], {}
    for index, text in enumerate(TORTURE):
        ids.append(by_file.encode(text, add_special_tokens=False))
        decoded.append(by_file.decode(ids[-1], skip_special_tokens=True))
        other = rebuilt.encode(text, add_special_tokens=False)
        if other != ids[-1]:
            others[str(index)] = other
        assert rebuilt.decode(ids[-1], skip_special_tokens=True) == decoded[-1], (family.name, text)
    assert family.name == "gpt_neox" or rebuilt.encode("Hello") == by_file.encode("Hello"), family.name
    with_specials = by_file.encode("Hello")
    prompts = {name: _prompt(by_file, options) for name, options in CONVERSATIONS.items()} if templates else {}
    everything = {**CONVERSATIONS["tool call"], **CONVERSATIONS["documents"]}
    named = {name: _prompt(by_file, {**everything, "chat_template": name}) for name in templates if name != "default"}
    return {
        "files": files,
        "ids": ids,
        "decoded": [None if text == TORTURE[index] else text for index, text in enumerate(decoded)],
        "decoded_with_special": [
            by_file.decode(row) if by_file.decode(row) != text else None for row, text in zip(ids, decoded, strict=True)
        ],
        "hello_with_specials": with_specials,
        "rebuilt": others,
        "prompts": prompts,
        "named_prompts": named,
    }


def _prompt(tokenizer: Any, options: Json) -> str | None:
    """Return the rendered conversation, or None if the template rejects it."""
    try:
        options = dict(options)
        return str(tokenizer.apply_chat_template(options.pop("messages"), **options, tokenize=False))
    except Exception as error:
        # Templates reject roles and tools that they do not support; the reasons are printed for the user of this tool.
        print(f"    refused: {error}")
        return None


def _write(name: str, value: object) -> None:
    path = GOLDENS / f"{name}.json"
    path.write_text(json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
