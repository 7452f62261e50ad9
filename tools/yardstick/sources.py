"""The yardstick's training documents: generated conversations, and the installed standard library."""

import importlib
import importlib.util
import inspect
import pydoc_data.topics
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import ModuleType

from tools.bundled_model.mixture import long_conversation, short_conversation
from tools.bundled_model.tokenizer import chat_prompt

# Folders to skip: third-party packages, tables, and the data that `topics` reads.
LEFT_OUT = ("site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data")
CONVERSATION_FILES, SHORT_PER_FILE, LONG_PER_FILE = 900, 24, 2
END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class Document:
    """A file, or a text that is treated as a file. Its name determines its part of the split."""

    name: str
    text: str


def documents(seed: int, conversation_files: int = CONVERSATION_FILES) -> list[Document]:
    """Return all documents sorted by name; of documents with equal texts, only the first."""
    found = [*library_files(), *topics(), *docstrings(), *conversations(seed, conversation_files)]
    texts: dict[str, Document] = {}
    for document in sorted(found, key=lambda document: document.name):
        if document.text.strip():
            texts.setdefault(document.text, document)
    return list(texts.values())


def library_files(folder: Path | None = None) -> Iterator[Document]:
    """Yield the Python files of the standard library that are UTF-8."""
    root = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    for path in root.rglob("*.py"):
        place = path.relative_to(root)
        if set(place.parts).isdisjoint(LEFT_OUT):
            try:
                yield Document(f"library/{place.as_posix()}", path.read_text(encoding="utf-8"))
            except UnicodeDecodeError:  # Python's own tests of source encodings
                continue


def topics() -> Iterator[Document]:
    """Yield the chapters of the language reference that help() shows."""
    for name, text in pydoc_data.topics.topics.items():
        yield Document(f"topics/{name}", text)


def docstrings() -> Iterator[Document]:
    """Yield the docstrings of modules without Python source."""
    for name in sorted(sys.stdlib_module_names):
        try:
            module = importlib.import_module(name) if _is_compiled(name) else None
        except ImportError:  # Python was built without a library that the module needs
            continue
        if module is not None:
            yield Document(f"docstrings/{name}", "\n\n".join(_described(module)) + "\n")


def _is_compiled(name: str) -> bool:
    spec = None if name == "__main__" else importlib.util.find_spec(name)
    return spec is not None and not (spec.origin or "").endswith(".py") and spec.origin != "frozen"


def _described(module: ModuleType) -> Iterator[str]:
    """Yield name, signature and docstring of a module, its definitions, and its classes' members."""
    yield f"{module.__name__}\n{inspect.getdoc(module) or ''}".strip()
    for name, member in sorted(vars(module).items()):
        if callable(member) and not name.startswith("_"):
            yield _entry(f"{module.__name__}.{name}", member)
            for inner, method in sorted(vars(member).items()) if isinstance(member, type) else ():
                if callable(method) and inspect.getdoc(method):
                    yield _entry(f"{name}.{inner}", method)


def _entry(name: str, member: object) -> str:
    signature = getattr(member, "__text_signature__", None) or ""
    for mark in ("$module, ", "$module", "$"):
        signature = signature.replace(mark, "")
    return f"{name}{signature}\n{inspect.getdoc(member) or ''}".strip()


def conversations(seed: int, files: int) -> Iterator[Document]:
    """Yield files of conversations in the bundled model's format, each drawn from a separate random generator."""
    for number in range(files):
        name = f"conversations/{number:04d}"
        rng = Random(f"yardstick:{seed}:{name}")
        drawn = [short_conversation(rng) for _ in range(SHORT_PER_FILE)]
        drawn += [long_conversation(rng) for _ in range(LONG_PER_FILE)]
        yield Document(name, END_OF_TEXT.join(chat_text(talk.messages()) for talk in drawn))


def chat_text(messages: list[dict[str, str]]) -> str:
    """Return a complete conversation in the format of the chat template."""
    return chat_prompt(messages).removesuffix("<|im_start|>assistant\n")
