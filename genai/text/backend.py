"""Loads a folder's tokenizer as an object of the tokenizers library, and makes its calls interruptible."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from genai.common.interrupts import Task, ThreadsRefused

from ..errors import TokenizerError, no_threads
from ..models.side_files import ADDED_NAME, CONFIG_NAME, TOKENIZER_NAME, SideFiles
from . import files
from .prefix_space import apply_prefix_space
from .sources.choosing import convert_folder
from .sources.parts import Conversion
from .tokenizer_limits import check_rules

if TYPE_CHECKING:
    import tokenizers


@dataclass(frozen=True)
class LoadedTokenizer:
    """A tokenizer.

    Attributes:
        backend: the object of the tokenizers library.
        special: the special tokens by role, such as {"eos_token": "</s>"}.
        splits: True if special tokens in texts are ordinary text (split_special_tokens in tokenizer_config.json).
    """

    backend: tokenizers.Tokenizer
    special: Mapping[str, str]
    splits: bool = False

    def id_of(self, role: str) -> int | None:
        """Return the id of the special token with a role, such as "eos_token"; None if there is no such token."""
        return self.backend.token_to_id(self.special[role]) if role in self.special else None


def load_tokenizer(source: Path | SideFiles) -> LoadedTokenizer:
    """Load tokenizer.json, or else a tokenizer in another format, without truncation, padding or dropout.

    Args:
        source: the tokenizer's folder or its files.

    Raises:
        TokenizerError: there is no tokenizer, the tokenizer cannot be used, or tokenizer_config.json contradicts it.
    """
    from tokenizers import Tokenizer as Backend

    side_files, conversion = SideFiles.of(source), None
    folder, facts, path = side_files.folder, files.read_facts(side_files), side_files.path(TOKENIZER_NAME)
    declared, names, text = facts.declared, facts.special, files.read_text(side_files, TOKENIZER_NAME)
    if text is None:
        path, conversion = convert_folder(facts)
        text, names = conversion.text, {**conversion.special, **names}
    check_rules(text, path)
    with library_errors(f"{path}: the file is not a usable tokenizer"):
        backend = Backend.from_str(text)
    with library_errors(f"{folder}: the added tokens of {CONFIG_NAME} cannot be used"):
        _add_tokens(backend, folder, declared, override="added_tokens_decoder" in facts.config)
        _mark_special(backend, names, files.further_special_tokens(side_files), files.special_token_flags(side_files))
        if conversion is not None:
            _surround(backend, facts, conversion)
        else:
            apply_prefix_space(backend, facts)
    # The settings in a file could silently truncate or pad texts, or encode texts randomly.
    backend.no_truncation()
    backend.no_padding()
    if getattr(backend.model, "dropout", None) is not None:
        backend.model.dropout = None
    return LoadedTokenizer(backend, names, files.splits_special_tokens(facts))


def first_difference(
    one: tokenizers.Tokenizer, other: tokenizers.Tokenizer, folder: Path, other_folder: Path
) -> str | None:
    """Return the first difference (by token id) between the vocabularies of two folders; None if there is none."""
    mine, theirs = (
        {id_: text for text, id_ in backend.get_vocab(with_added_tokens=True).items()} for backend in (one, other)
    )
    different = [id_ for id_ in mine.keys() | theirs.keys() if mine.get(id_) != theirs.get(id_)]
    if not different:
        return None
    first = min(different)
    texts = (f"{words[first]!r}" if first in words else "no token" for words in (mine, theirs))
    return f"token {first} is {next(texts)} in {folder} and {next(texts)} in {other_folder}"


def _surround(backend: tokenizers.Tokenizer, facts: files.FolderFacts, conversion: Conversion) -> None:
    """Apply add_bos_token and add_eos_token of tokenizer_config.json to encoding with special tokens."""
    from tokenizers import processors

    names = {**conversion.special, **facts.special}
    options = [facts.config.get(name) for name in ("add_bos_token", "add_eos_token")]
    begins = conversion.begins if options[0] is None else options[0] is True
    before = [names["bos_token"]] if begins and "bos_token" in names else []
    after = [names["eos_token"]] if options[1] is True and "eos_token" in names else []
    ids = [(token, backend.token_to_id(token)) for token in (*before, *after)]
    if ids:
        backend.post_processor = processors.TemplateProcessing(single=[*before, "$A", *after], special_tokens=ids)


def _add_tokens(
    backend: tokenizers.Tokenizer, folder: Path, declared: Mapping[int, Mapping[str, Any]], *, override: bool
) -> None:
    """Add the tokens that the files beside a tokenizer declare.

    Args:
        override: True if the flags of declared tokens replace the flags in tokenizer.json, as in transformers.
    """
    from tokenizers import AddedToken

    known = _added_contents(backend)
    next_id = backend.get_vocab_size(with_added_tokens=True)
    added = []
    for id_, token in sorted(declared.items()):
        if token["content"] in known:
            # The library ignores a token whose flags are the same.
            added += [AddedToken(**token)] if override else []
            continue
        token_id = backend.token_to_id(token["content"])
        if id_ != (next_id if token_id is None else token_id):
            raise TokenizerError(
                f"{folder}: the added token {token['content']!r} has the id {id_} in "
                f"{CONFIG_NAME if override else ADDED_NAME}",
                f"the tokenizer assigns {f'the next free id, {next_id}' if token_id is None else token_id} to the "
                "token",
                "copy both files again from the same model",
            )
        next_id += token_id is None
        added.append(AddedToken(**token))
    backend.add_tokens(added)


_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def _mark_special(
    backend: tokenizers.Tokenizer,
    names: Mapping[str, str],
    further: Collection[str],
    flags: Mapping[str, Mapping[str, bool]],
) -> None:
    """Mark the files' special tokens as special, and add those that the tokenizer lacks, as transformers does.

    Tokens without a name keep the flags of tokenizer.json if they are listed there as added tokens.
    """
    from tokenizers import AddedToken

    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    roles = [name for name in _ROLES if name in names]
    named = [names[name] for name in [*roles, *(name for name in names if name not in roles)]]
    special = []
    for content in dict.fromkeys([*named, *further]):
        token = known.get(content)
        if token is None:
            special.append(AddedToken(content, special=True, **{"normalized": False, **flags.get(content, {})}))
        elif content in named and not token.special:
            same = {name: getattr(token, name) for name in ("single_word", "lstrip", "rstrip", "normalized")}
            special.append(AddedToken(content, special=True, **same))
    backend.add_special_tokens(special)


def _added_contents(backend: tokenizers.Tokenizer) -> set[str]:
    return {token.content for token in backend.get_added_tokens_decoder().values()}


@contextmanager
def library_errors(subject: str) -> Iterator[None]:
    """Convert exceptions of the tokenizers library to a TokenizerError with `subject` as its first part, or to a
    StateError if the system cannot start threads.
    """
    try:
        yield
    except TokenizerError:
        raise
    except BaseException as error:
        # The library raises plain Exceptions, and a panic of its Rust code is only a BaseException.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        why = f"the tokenizers library reports: {error}"
        if "ThreadPoolBuildError" in why:
            raise no_threads(RuntimeError(why)) from error
        raise TokenizerError(
            subject, why, f"check {TOKENIZER_NAME}, or copy it again from the original model"
        ) from error


SECONDS = 2.0
"""The time limit for a text of any length, in seconds."""
ITEMS_PER_SECOND = 20_000
"""The minimum speed in characters or tokens per second: 1/50 of a slow tokenizer on a slow machine."""


class Encoder:
    """Encodes and decodes on a separate thread, so that calls can be interrupted and have a time limit.

    The tokenizers library holds the GIL while it encodes a single text, which blocks all other Python code, even
    Ctrl-C. The library releases the GIL while it encodes a list of texts. A regular expression in a tokenizer.json can
    run practically forever. An Encoder is safe to use from several threads.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._stuck: threading.Thread | None = None
        # Decoders without regular expressions are fast, and streams decode few tokens at a time.
        self._decodes_at_once = backend.decoder is None or b'"Regex"' not in backend.decoder.__getstate__()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of a text.

        Raises:
            TokenizerError: encoding takes too long, or an earlier text is still being encoded.
            BaseException: any exception of the library, including a panic of its Rust code.
        """
        (ids,) = self.encode_all([text], add_special_tokens=add_special_tokens)
        return ids

    def encode_all(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Return the ids of several texts, with a single thread start. An error in one text is raised for all."""
        encodings = self._run(
            lambda: self._backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens), sum(map(len, texts))
        )
        return [encoding.ids for encoding in encodings]

    def encodings(self, texts: Sequence[Any], *, add_special_tokens: bool) -> list[Any]:
        """Return the library's encodings of texts, or of pairs of texts. Raises the same errors as `encode`."""
        size = sum(len(text) if isinstance(text, str) else sum(map(len, text)) for text in texts)
        return self._run(lambda: self._backend.encode_batch(texts, add_special_tokens=add_special_tokens), size)

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        """Return the text of ids. Raises the same errors as `encode`."""
        if self._decodes_at_once:
            return str(self._backend.decode(ids, skip_special_tokens=skip_special_tokens))
        (text,) = self._run(
            lambda: self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens), len(ids)
        )
        return str(text)

    def _run(self, work: Callable[[], list[Any]], size: int) -> list[Any]:
        if self._stuck is not None and self._stuck.is_alive():
            raise _too_slow("the tokenizer is still processing an earlier text")
        seconds = SECONDS + size / ITEMS_PER_SECOND
        try:
            task = Task(work, "genai-tokenizer")
            finished = task.wait(seconds)
        except ThreadsRefused as error:
            raise no_threads(error) from error
        except BaseException:
            _leave_the_pool()
            raise
        if not finished:
            self._stuck = task.thread
            _leave_the_pool()
            raise _too_slow(f"{size} characters or tokens took more than {seconds:.0f} seconds")
        return task.result()


def _leave_the_pool() -> None:
    """Disable the library's thread pool, because abandoned work still occupies it and later calls must not wait."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _too_slow(reason: str) -> TokenizerError:
    return TokenizerError(
        "the tokenizer takes too long",
        reason,
        "check the regular expressions in tokenizer.json, or copy the file again from the original model",
    )
