"""The tokenizer of a folder as an object of the tokenizers library, from tokenizer.json or a SentencePiece model."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import TokenizerError
from .added_tokens import DeclaredToken, declared_tokens
from .files import (
    CONFIG_NAME,
    TOKENIZER_NAME,
    further_special_tokens,
    read_bytes,
    read_object,
    read_text,
    special_tokens,
)

if TYPE_CHECKING:
    import tokenizers

MODEL_NAMES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
"""Names under which publishers keep a SentencePiece model."""


@dataclass(frozen=True)
class LoadedTokenizer:
    """A tokenizer, and the texts of its special tokens by role, such as {"eos_token": "</s>"}."""

    backend: tokenizers.Tokenizer
    special: Mapping[str, str]


def load_tokenizer(folder: Path) -> LoadedTokenizer:
    """The tokenizer of tokenizer.json, else of a SentencePiece model; without truncation or padding.

    Raises:
        TokenizerError: there is none, or it cannot be used, or tokenizer_config.json contradicts it.
    """
    declared = declared_tokens(folder)
    names = special_tokens(folder)
    text = read_text(folder / TOKENIZER_NAME)
    if text is not None:
        with library_errors(f"{folder / TOKENIZER_NAME}: is not a usable tokenizer"):
            backend = _from_text(text)
    else:
        backend, names = _from_sentencepiece(folder, declared, names)
    with library_errors(f"{folder}: the added tokens of {CONFIG_NAME} cannot be used"):
        _add_tokens(backend, folder, declared)
        _mark_special(backend, {*names.values(), *further_special_tokens(folder)})
    # Files may carry settings of their own, which would cut texts silently or fill them.
    backend.no_truncation()
    backend.no_padding()
    return LoadedTokenizer(backend, names)


def _from_text(text: str) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer as Backend

    return Backend.from_str(text)


def _from_sentencepiece(
    folder: Path, declared: Mapping[int, DeclaredToken], names: Mapping[str, str]
) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    from .sentencepiece_model import ModelFormatError, parse_model
    from .sentencepiece_tokenizer import tokenizer_json

    path = next((folder / name for name in MODEL_NAMES if (folder / name).exists()), None)
    data = read_bytes(path) if path is not None else None
    if path is None or data is None:
        raise TokenizerError(
            f"{folder}: {TOKENIZER_NAME} is missing",
            f"text is encoded with that file, or with a SentencePiece model ({', '.join(MODEL_NAMES)})",
            "copy it from the original model, or save it with transformers' save_pretrained()",
        )
    config = read_object(folder / CONFIG_NAME)
    try:
        model = parse_model(data)
        renamed = {id_: token.content for id_, token in declared.items() if id_ < len(model.pieces)}
        text = tokenizer_json(model, prefix_everywhere=config.get("legacy") is True, renamed=renamed)
    except ModelFormatError as error:
        raise TokenizerError(
            f"{path}: is not a SentencePiece model that can be used",
            str(error),
            f"copy it again, or save {TOKENIZER_NAME} with transformers' save_pretrained()",
        ) from error
    roles = {"bos_token": model.bos_id, "eos_token": model.eos_id}
    pieces = {
        name: renamed.get(id_, model.pieces[id_].text) for name, id_ in roles.items() if 0 <= id_ < len(model.pieces)
    }
    with library_errors(f"{path}: is not a usable tokenizer"):
        backend = _from_text(text)
        _surround(backend, config, {**pieces, **names})
    return backend, {**pieces, **names}


def _surround(backend: tokenizers.Tokenizer, config: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Let add_bos_token and add_eos_token of tokenizer_config.json act where special tokens are added."""
    from tokenizers import processors

    before = [names["bos_token"]] if config.get("add_bos_token") is True and "bos_token" in names else []
    after = [names["eos_token"]] if config.get("add_eos_token") is True and "eos_token" in names else []
    ids = [(token, backend.token_to_id(token)) for token in (*before, *after)]
    if ids:
        backend.post_processor = processors.TemplateProcessing(single=[*before, "$A", *after], special_tokens=ids)


def _add_tokens(backend: tokenizers.Tokenizer, folder: Path, declared: Mapping[int, DeclaredToken]) -> None:
    from tokenizers import AddedToken

    known = _added_contents(backend)
    next_id = backend.get_vocab_size(with_added_tokens=True)
    added = []
    for id_, token in sorted(declared.items()):
        if token.content in known:
            continue
        found = backend.token_to_id(token.content)
        if id_ != (next_id if found is None else found):
            raise TokenizerError(
                f"{folder}: the added token {token.content!r} has the id {id_} in {CONFIG_NAME}",
                f"the tokenizer gives it {f'the next free id, {next_id}' if found is None else found}",
                "copy both files again from the same model",
            )
        next_id += found is None
        added.append(AddedToken(**token.flags, content=token.content))
    backend.add_tokens(added)


def _mark_special(backend: tokenizers.Tokenizer, contents: Collection[str]) -> None:
    """What the files call special is special even where the tokenizer only has it as a word."""
    from tokenizers import AddedToken

    words = sorted(set(contents) - _added_contents(backend))
    backend.add_special_tokens(
        [AddedToken(word, normalized=False, special=True) for word in words if backend.token_to_id(word) is not None]
    )


def _added_contents(backend: tokenizers.Tokenizer) -> set[str]:
    return {token.content for token in backend.get_added_tokens_decoder().values()}


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Turns whatever the tokenizers library raises into a TokenizerError that begins with `what`."""
    try:
        yield
    except TokenizerError:
        raise
    except BaseException as error:
        # The library raises bare Exceptions; a panic of its Rust code is not even that.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        why = f"the tokenizers library says: {error}"
        raise TokenizerError(what, why, f"check {TOKENIZER_NAME}, or copy it again from the original model") from error
