"""The tokenizer: text to token ids and back, and conversations to prompts, based on Hugging Face's tokenizer.json."""

from __future__ import annotations

import copy
import hashlib
import json
import operator
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..common.progress import task
from ..errors import GenaiError, InputError, OptionError, TokenizerError, kind_of
from ..models.folders import folder_errors
from .backend import Encoder, library_errors, load_tokenizer
from .chat_template import ChatTemplates, RenderedText
from .detokenizer import Detokenizer, clean_up
from .files import cleans_up, configured_ids, find_files, folder_ids
from .literal import LiteralEncoder, MarkedText, added_control_tokens, can_be_control
from .tool_functions import Tool

if TYPE_CHECKING:
    from ..models.config import Config
    from ..models.model import Model
    from ..models.side_files import LoadedFolder, SideFiles


# Length of the first prefix that is encoded, in characters per token of the limit. Common texts have four or five
# characters per token.
_CHARACTERS_JUDGED = 16
# The number of tokens that determine the state of a stream after a prompt, and a token that stands for a byte.
_MOST_REMEMBERED = 16
# The number of sets of control tokens (usually one, and one for each chat template) whose encoder is kept.
_MOST_LITERAL = 4
_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")


class Tokenizer:
    """Encodes text, decodes token ids, and formats chats.

    Args:
        source: a Model, a Config, or a folder with tokenizer.json or another format (docs/reference/text.md). With a
            Model, the files are those that the model was loaded with. The special ids are read from the folder's
            genai_config.json if there is one, else from generation_config.json, config.json and tokenizer_config.json.

    Raises:
        ModelFolderError: the folder does not exist.
        TokenizerError: the tokenizer's files are missing or cannot be used.
        ConfigError: genai_config.json is invalid.
    """

    _streams_continue = False  # True if a stream without preceding ids continues a text

    def __init__(self, source: Model | LoadedFolder | Config | str | Path) -> None:
        files, config = find_files(source)
        self.folder = files.folder
        with folder_errors(self.folder), task("Loading the tokenizer"):
            self._load(files, config)

    def _load(self, files: SideFiles, config: Config | None) -> None:
        loaded = load_tokenizer(files)
        self._backend, names = loaded.backend, loaded.special
        self._encoder = Encoder(self._backend)
        self._ids = configured_ids(config) if config is not None else folder_ids(files, loaded.id_of)
        added = self._backend.get_added_tokens_decoder()
        self._special = frozenset(token.content for token in added.values() if token.special)
        self._control = added_control_tokens(self._backend, {self._ids.bos, *self._ids.eos})
        self._splits = loaded.splits
        self._literal: dict[frozenset[str], LiteralEncoder] = {}
        sizes = (config.model.vocab_size if config is not None else 0, self.vocab_size, *(id_ + 1 for id_ in added))
        # A model's vocabulary is often padded beyond the tokenizer's vocabulary. The additional ids are valid and have
        # no text.
        self._num_ids = max(sizes)
        self._cleanup = cleans_up(files, self._backend)
        known = frozenset(token.content for token in added.values() if can_be_control(token.content))
        self._templates = ChatTemplates(files, names, self._control, known)
        self._options = {"add_special_tokens": False, "skip_special_tokens": True}

    @property
    def backend(self) -> Any:
        """The object of the tokenizers library."""
        return self._backend

    @property
    def vocab_size(self) -> int:
        """The number of entries in the tokenizer's vocabulary, with special tokens. The model's count may be larger."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def bos_token_id(self) -> int | None:
        """The id at the start of a text; None if the model has no such id."""
        return self._ids.bos

    @property
    def eos_token_ids(self) -> NDArray[np.int32]:
        """The ids that end a generation; the array may be empty."""
        return np.asarray(self._ids.eos, np.int32)

    @property
    def pad_token_id(self) -> int | None:
        """The padding id for short rows of a batch: the configured id, else the first of eos_token_ids, else None."""
        return self._ids.pad

    def update_options(self, **options: bool) -> None:
        """Change options of later calls.

        Args:
            options: add_special_tokens (encode adds the special tokens of the tokenizer's post-processor, such as BOS;
                default False), skip_special_tokens (decode omits special tokens; default True).

        Raises:
            OptionError: no option is given, an option is unknown, or a value is not a boolean.
        """
        if not options:
            raise OptionError("update_options: no option is given", "there is nothing to change", self._known_options())
        checked = {}
        for name, value in options.items():
            if name not in self._options:
                raise OptionError(
                    f"unknown tokenizer option {name!r} = {value!r}",
                    "the tokenizer has no option with this name",
                    self._known_options(),
                )
            if not isinstance(value, bool):
                raise OptionError(f"{name} = {value!r}", "True or False is expected", "pass True or False")
            checked[name] = value
        self._options |= checked

    def _known_options(self) -> str:
        return f"set one of these options: {', '.join(self._options)}"

    @property
    def is_literal(self) -> bool:
        """True if special tokens in texts are ordinary text by default (split_special_tokens in tokenizer_config.json).

        The default applies to raw texts and to the contents of messages.
        """
        return self._splits

    def encode(
        self, text: str, *, add_special_tokens: bool | None = None, literal: bool | None = None
    ) -> NDArray[np.int32]:
        """Return the token ids of text, int32 [L].

        Args:
            text: the text.
            add_special_tokens: True to add the special tokens of the tokenizer's post-processor, such as BOS; None =
                the option of update_options.
            literal: True to encode special tokens in the text, such as "<|im_end|>", as ordinary text; False to encode
                them as their ids. None = `is_literal`. A text of apply_chat_template determines this itself.

        Raises:
            InputError: the text is not a str, or contains lone surrogates or NUL.
            OptionError: `literal` is not a boolean, or the text was written by a chat template.
            TokenizerError: the tokenizer has no ids for the text, or encoding takes too long.
        """
        (ids,) = self._encoded("encode", [text], add_special_tokens, literal)
        return ids

    def encode_all(
        self, texts: Sequence[str], *, add_special_tokens: bool | None = None, literal: bool | None = None
    ) -> list[NDArray[np.int32]]:
        """Encode several texts, faster than one by one. If one text causes an error, the error is raised.

        Raises:
            GenaiError: as for encode.
        """
        return self._encoded("encode_all", texts, add_special_tokens, literal)

    def _encoded(
        self, call: str, texts: Sequence[str], add_special_tokens: bool | None, literal: bool | None
    ) -> list[NDArray[np.int32]]:
        adds = self._options["add_special_tokens"] if add_special_tokens is None else add_special_tokens
        for text in texts:
            _check_text(text, call)
        marked = {index: one for index, text in enumerate(texts) if (one := self._marked(text, literal)) is not None}
        plain = [text for index, text in enumerate(texts) if index not in marked]
        which = f"one of {len(texts)} texts" if call == "encode_all" else "this text"
        with library_errors(f"{call}: the tokenizer in {self.folder} cannot encode {which}"):
            rows = iter(self._encoder.encode_all(plain, add_special_tokens=adds) if plain else ())
            found = [
                self._with_specials(self._literal_ids(marked[index]), adds) if index in marked else next(rows)
                for index in range(len(texts))
            ]
        return [np.asarray(ids, np.int32) for ids in found]

    def _marked(self, text: str, literal: bool | None) -> MarkedText | None:
        """Return the text with marks in control tokens that are ordinary text; None if there is no such text."""
        is_literal = self._literal_of(literal)
        if isinstance(text, RenderedText):
            if literal is not None:
                raise OptionError(
                    f"literal = {literal} with the text of a chat template",
                    "the text has the special tokens of the template; the messages determine which texts are literal",
                    "pass literal where the conversation is rendered, such as to apply_chat_template or LLM.render",
                )
            return text.marked
        return MarkedText(text, "", self._control) if is_literal else None

    def _literal_of(self, literal: bool | None) -> bool:
        """Return the value of the option `literal`, or its default."""
        if literal is not None and not isinstance(literal, bool):
            raise OptionError(f"literal = {literal!r:.40}", "True, False or None is expected", "leave literal out")
        return self._splits if literal is None else literal

    def _literal_ids(self, marked: MarkedText) -> list[int]:
        encoder = self._literal.get(marked.control)
        if encoder is None:
            if len(self._literal) >= _MOST_LITERAL:
                self._literal.clear()
            encoder = self._literal[marked.control] = LiteralEncoder(self._backend, self._encoder, marked.control)
        return encoder.encode(marked)

    def _with_specials(self, ids: list[int], adds: bool) -> list[int]:
        before, after = self._surrounding if adds else ([], [])
        return [*before, *ids, *after]

    def encode_prompt(
        self, text: str, *, add_special_tokens: bool | None = None, literal: bool | None = None
    ) -> NDArray[np.int32]:
        """Return the token ids of a text as the prompt of a model, int32 [L]; the option of update_options is ignored.

        A raw text gets the special tokens that the tokenizer adds to texts, such as BOS, as in transformers. A text
        that already begins with them gets none, so that BOS is never doubled.

        Args:
            text: a raw text, or the result of apply_chat_template or chat_prompt.
            add_special_tokens: True to add the special tokens; False to add none; None = True for a raw text, False for
                a text that a chat template wrote, because the template writes the special tokens that the model needs.
            literal: see encode.

        Raises:
            GenaiError: as for encode.
        """
        ids = self.encode(text, add_special_tokens=False, literal=literal)
        return self.as_prompt(text, ids, add_special_tokens)

    def as_prompt(self, text: str, ids: NDArray[np.int32], add_special_tokens: bool | None = None) -> NDArray[np.int32]:
        """Return encode_prompt(text), given the ids of the text without added special tokens."""
        adds = not isinstance(text, RenderedText) if add_special_tokens is None else add_special_tokens
        before, after = self._surrounding if adds else ([], [])
        if before and ids[: len(before)].tolist() == before:
            return ids
        return np.concatenate([before, ids, after]).astype(np.int32)

    @cached_property
    def _surrounding(self) -> tuple[list[int], list[int]]:
        """The ids that the post-processor puts before and after every text."""
        plain, whole = (self._encoder.encode("a", add_special_tokens=adds) for adds in (False, True))
        starts = range(len(whole) - len(plain) + 1)
        start = next((start for start in starts if whole[start : start + len(plain)] == plain), 0)
        return whole[:start], whole[start + len(plain) :]

    def too_many_tokens(self, text: str, limit: int) -> int:
        """Return the number of tokens in a prefix of the text if it has far more than `limit`; else 0.

        If the result is 0, the whole text must be encoded to count its tokens. This method avoids encoding a long text
        only to learn that it is too long: it encodes prefixes of doubling length. A prefix with more than twice the
        limit is conclusive, whatever the rest of the text.

        Raises:
            GenaiError: as for encode.
        """
        length = _CHARACTERS_JUDGED * limit
        while length < len(text):
            count = len(self.encode(str(text[:length]), add_special_tokens=False))
            if count > 2 * limit:
                return count
            length *= 2
        return 0

    def decode(self, tokens: ArrayLike) -> str:
        """Return the text of token ids [L] (a list, a NumPy array of integers, or one id).

        Raises:
            InputError: the ids are not integers, are not one-dimensional, or are not in the model's vocabulary.
        """
        return self._decode(self._checked_ids(tokens, "decode"))

    def _decode(self, ids: NDArray[np.int64]) -> str:
        with library_errors(f"decode: the tokenizer in {self.folder} cannot decode these ids"):
            text = self._encoder.decode(ids.tolist(), skip_special_tokens=self._options["skip_special_tokens"])
        return clean_up(text) if self._cleanup else text

    def encode_batch(self, texts: Sequence[str]) -> NDArray[np.int32]:
        """Return the token ids of several texts, int32 [B, L]. Short rows are padded on the right with pad_token_id.

        Raises:
            InputError: `texts` is empty or is not a list of strings.
            TokenizerError: the rows have different lengths, and there is no padding id.
        """
        return self._filled(self._encoded_rows(texts))

    def _encoded_rows(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        if isinstance(texts, (str, bytes)) or not isinstance(texts, Sequence):
            raise InputError(
                f"encode_batch: the argument is {kind_of(texts)}",
                "a list of strings is expected",
                "pass a list, such as [text]",
            )
        if not texts:
            raise InputError(
                "encode_batch: the list is empty", "a batch has at least one text", "pass at least one text"
            )
        return [self.encode(text) for text in texts]

    def _filled(self, rows: Sequence[NDArray[np.int32]]) -> NDArray[np.int32]:
        length = max(map(len, rows))
        if self._ids.pad is None and any(len(row) < length for row in rows):
            raise TokenizerError(
                "encode_batch: the texts have different lengths, and the model has no pad_token_id",
                "shorter rows must be padded",
                "set model.pad_token_id in genai_config.json, or encode each text separately with encode()",
            )
        batch = np.full((len(rows), length), self._ids.pad or 0, np.int32)
        for target, row in zip(batch, rows, strict=True):
            target[: len(row)] = row
        return batch

    def decode_batch(self, batch: ArrayLike | Sequence[ArrayLike]) -> list[str]:
        """Return the texts of token ids [B, L], or of a list of rows of different lengths.

        Raises:
            InputError: as for decode, or `batch` is not a batch.
        """
        rows: Any = np.asarray(batch) if hasattr(batch, "__array__") else batch
        if not isinstance(rows, (np.ndarray, list, tuple)) or (isinstance(rows, np.ndarray) and rows.ndim != 2):
            shape = f" of shape {list(rows.shape)}" if isinstance(rows, np.ndarray) else ""
            raise InputError(
                f"decode_batch: the argument is {kind_of(rows)}{shape}",
                "token ids [batch, length] are expected",
                "to decode a single row, use decode()",
            )
        return [self._decode(self._checked_ids(row, f"decode_batch, row {index}")) for index, row in enumerate(rows)]

    def to_token_id(self, token: str) -> int:
        """Return the id of a vocabulary entry such as "<|im_end|>"; -1 if there is none."""
        _check_text(token, "to_token_id")
        token_id = self._backend.token_to_id(token)
        return -1 if token_id is None else int(token_id)

    def is_special(self, token: str) -> bool:
        """Return True if a text is a special token, which decode omits."""
        return token in self._special

    def token_text(self, token: int) -> str:
        """Return the vocabulary entry of an id, as written in the tokenizer's files; "" if there is no entry.

        Raises:
            InputError: the id is not in the model's vocabulary.
        """
        self._check_id(token, "token_text")
        return self._backend.id_to_token(token) or ""

    def apply_chat_template(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        template_str: str | None = None,
        template_name: str | None = None,
        tools: str | Sequence[Tool] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | str = False,
        literal: bool | None = None,
        **variables: Any,
    ) -> str:
        """Return the prompt text of a conversation, written by the model's chat template.

        Args:
            messages: a list of {"role", "content"} messages, or its JSON text.
            template_str: a jinja2 template that replaces the folder's; "" = none.
            template_name: name of a template in the folder; None = "tool_use" if there are tools and the folder has a
                template with this name, else "default".
            tools: tools that the model may call: a list of JSON schemas and functions, or the JSON text of a list of
                schemas; empty = none.
            add_generation_prompt: True to end the text with the start of the assistant's reply; None = True unless
                continue_final_message is set.
            continue_final_message: True to end the text inside the last message, so that the model continues the
                message. If the value is the name of a field (such as "reasoning_content"), that field is continued
                instead of "content".
            literal: True to keep special tokens in the messages, tools and variables, such as "<|im_end|>", as ordinary
                text when the result is encoded; None = `is_literal`. The key "literal" of a message or of a part of its
                content overrides this value for its texts. The result must be passed to `encode` or `encode_prompt`
                unchanged: other str operations lose this information.
            variables: further variables of the template, such as documents or enable_thinking.

        Raises:
            InputError: messages, tools or variables are of a type that templates cannot read.
            OptionError: `literal` is not a boolean.
            ChatTemplateError: there is no template, or the template is invalid, rejected the messages, failed, or took
                too long; or it takes literal texts apart.
        """
        return self._templates.render(
            messages,
            template_str=template_str or None,
            template_name=template_name,
            tools=tools or None,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
            literal=self._literal_of(literal),
        )

    def chat_prompt(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        tools: str | Sequence[Tool] | None = None,
        literal: bool | None = None,
        **variables: Any,
    ) -> str:
        """Call apply_chat_template, and raise an error if the template leaves out a message, the tools or a variable.

        Args:
            messages, tools, literal, variables: as for apply_chat_template.

        Raises:
            ChatTemplateError: as for apply_chat_template; also if the template does not support tools, or omits a
                message, as templates do for unknown roles.
            InputError: as for apply_chat_template.
            OptionError: the template does not read one of the variables.
        """
        how = {"complete": True, "literal": self._literal_of(literal)}
        return self._templates.render(messages, tools=tools or None, variables=variables, **how)

    def chat_prompts(self, conversations: Sequence[Mapping[str, Any]]) -> list[str | GenaiError]:
        """Call `chat_prompt` for several conversations, faster than one by one. Return each prompt or error.

        Args:
            conversations: the arguments of each call by name: messages, tools, literal, variables.
        """
        return self._templates.render_all(
            [{**one, "complete": True, "literal": self._literal_of(one.get("literal"))} for one in conversations]
        )

    @property
    def chat_template(self) -> str:
        """The source of the chat template for conversations without tools; "" if there is none."""
        return self._templates.text()

    def template_text(self, *, template_name: str | None = None, with_tools: bool = False) -> str:
        """Return the jinja2 source that apply_chat_template would use, for `genai.text.parsing.detect`.

        Raises:
            ChatTemplateError: the folder has no template with this name, or no template at all.
        """
        return self._templates.source(None, template_name, with_tools=with_tools).text

    def template_variables(self, *, with_tools: bool = False) -> tuple[str, ...]:
        """Return the names of the variables that the chat template reads, such as "enable_thinking".

        Messages, tools, special tokens and `add_generation_prompt` are left out, because every conversation has them.

        Args:
            with_tools: True for the template of conversations with tools.

        Raises:
            ChatTemplateError: there is no template, or it cannot be read within the limits of templates.
        """
        return self._templates.variables(with_tools=with_tools)

    def check_template_variables(self, variables: Iterable[str], *, with_tools: bool = False) -> None:
        """Raise an error if the chat template does not read one of the variables.

        Raises:
            OptionError: a variable is not read, or is one that every conversation has; the error names the variables
                that are read.
            ChatTemplateError: see `template_variables`.
        """
        self._templates.check_variables(variables, with_tools=with_tools)

    def content_key(self) -> str:
        """Return a hash of the loaded tokenizer, its special ids and its options. It does not depend on the files."""
        contents = [self._ids, self._num_ids, self._cleanup, sorted(self._special), sorted(self._options.items())]
        contents += [self._splits] if self._splits else []
        return hashlib.sha256(f"{self._backend.to_str()}\0{contents}".encode()).hexdigest()

    def templates_key(self) -> str:
        """Return a hash of the chat templates and their special tokens."""
        return self._templates.key()

    def create_stream(
        self, *, keep: Collection[str] = (), cleans_up: bool = True, after: ArrayLike | None = None
    ) -> TokenizerStream:
        """Return a stream that decodes one token at a time, with the current options.

        Args:
            keep: special tokens that are kept even if skip_special_tokens is set, such as the markers of a reply
                parser. Strings that are not special tokens of this tokenizer are ignored.
            cleans_up: True to apply the clean-up of spaces that tokenizer_config.json requests; pass False for text
                that must match a grammar.
            after: token ids that precede the tokens of the stream, such as a prompt. The pieces are what the tokens of
                the stream add to the text of these ids. None = the first token starts a text; many tokenizers drop a
                space at the start of a text. With genai.Tokenizer, as in onnxruntime-genai, None = the first token
                continues a text, unless it is a skipped special token such as BOS.

        Raises:
            InputError: `keep` is not a list of strings, or `after` is not a row of ids.
            TokenizerError: the tokenizer's decoder needs the whole text.
        """
        is_list = isinstance(keep, (list, tuple, set, frozenset))
        if not is_list or not all(isinstance(token, str) for token in keep):
            raise InputError(
                f"create_stream: keep = {keep!r}",
                "a list of special tokens is expected",
                "pass a list of strings, such as [token]",
            )
        stream = TokenizerStream(self, frozenset(keep), cleans_up=cleans_up)
        stream.continues = self._streams_continue and after is None
        if after is not None:
            stream._follow(self._checked_ids(after, "create_stream").tolist())
        return stream

    def decode_each(self, tokens: ArrayLike) -> list[str]:
        """Return the text of each of the token ids [L] in the middle of a text, where a leading space is kept.

        Raises:
            InputError: as for decode.
            TokenizerError: the tokenizer's decoder needs the complete text.
        """
        stream, texts = TokenizerStream(self), []
        for token in self._checked_ids(tokens, "decode_each").tolist():
            stream.proceed()
            texts.append(stream.decode(token) + stream.flush())
        return texts

    def _checked_ids(self, tokens: ArrayLike, call: str) -> NDArray[np.int64]:
        try:
            ids = np.asarray(tokens)
        except (ValueError, TypeError, OverflowError) as error:
            raise InputError(
                f"{call}: the token ids are not an array", str(error), "pass a list of integers"
            ) from error
        if ids.ndim > 1:
            raise InputError(
                f"{call}: the ids have shape {list(ids.shape)}",
                "a single row of ids is expected",
                "to decode several rows, use decode_batch()",
            )
        if ids.size and ids.dtype.kind not in "iu":
            raise InputError(
                f"{call}: the ids have the type {ids.dtype}", "token ids must be whole numbers", "pass integers"
            )
        ids = ids.reshape(-1)
        for id_ in ids[(ids < 0) | (ids >= self._num_ids)].tolist():
            self._check_id(id_, call)
        return ids.astype(np.int64)

    def _check_id(self, id_: int, call: str) -> None:
        # Vocabularies can have gaps, so the number of entries on its own does not determine the valid ids.
        if not (0 <= id_ < self._num_ids or (0 <= id_ < 2**32 and self._backend.id_to_token(id_) is not None)):
            raise InputError(
                f"{call}: token id {id_} is not in the vocabulary",
                f"valid ids are 0 to {self._num_ids - 1}",
                "pass ids from the vocabulary of this model",
            )

    def __repr__(self) -> str:
        return f"Tokenizer({str(self.folder)!r}, vocab_size={self.vocab_size})"


class TokenizerStream:
    """Decodes a generation token by token. Tokenizer.create_stream creates it.

    Attributes:
        continues: True if the first token after the creation or after flush() continues an unknown text, unless it is
            a skipped special token.
    """

    continues = False

    def __init__(self, tokenizer: Tokenizer, keep: frozenset[str] = frozenset(), *, cleans_up: bool = True) -> None:
        decoder = tokenizer._backend.decoder
        self._tokenizer = tokenizer
        self._skipped = tokenizer._special - keep if tokenizer._options["skip_special_tokens"] else frozenset()
        state = None if decoder is None else json.loads(decoder.__getstate__())
        self._detokenizer = Detokenizer(state, cleanup=cleans_up and tokenizer._cleanup)
        self._is_first = True
        self._num_unfinished = 0  # the number of U+FFFD after them, unless the coming tokens complete a character
        self._num_shown = 0  # the number of coming characters that belong to the preceding tokens

    def _follow(self, ids: Sequence[int]) -> None:
        """Continue the text of these ids. A decoder's state depends on the last ids only, so the others are ignored."""
        last: list[str] = []
        for id_ in reversed(ids):
            text = self._tokenizer._backend.id_to_token(id_)
            if text is not None and text not in self._skipped:
                last.append(text)
                # A run of bytes is decoded as a whole.
                if len(last) >= _MOST_REMEMBERED and not _BYTE.fullmatch(text):
                    break
        for text in reversed(last):
            self._detokenizer.feed(text)
        # The end of the preceding text that is not certain yet. If the new tokens complete its last character, the
        # character belongs to the new text.
        pending = self.pending()
        certain = pending.rstrip("\ufffd") if self._detokenizer.is_inside_character else pending
        self._num_shown, self._num_unfinished = len(certain), len(pending) - len(certain)

    def proceed(self) -> None:
        """Treat the next token as the continuation of a text, even if no token with a text precedes it."""
        self._detokenizer.proceed()

    def _shown(self, text: str) -> str:
        """Return new text, without the characters that belong to the preceding tokens."""
        shown, self._num_shown = text[self._num_shown :], max(0, self._num_shown - len(text))
        if shown and self._num_unfinished:
            invalid = min(self._num_unfinished, len(shown) - len(shown.lstrip("\ufffd")))
            shown, self._num_unfinished = shown[invalid:], 0
        return shown

    def hides(self, token: int) -> bool:
        """Return True if the stream skips a special token."""
        return bool(self._skipped) and self._tokenizer._backend.id_to_token(token) in self._skipped

    def symbols(self, text: str) -> str | list[str | int]:
        """Return a text as characters and, for the skipped special tokens that it names, their ids.

        A text that names none is returned unchanged.
        """
        symbols: list[str | int] = []
        names = sorted((name for name in self._skipped if name and name in text), key=len, reverse=True)
        if not names:
            return text
        for part in re.split(f"({'|'.join(map(re.escape, names))})", text):
            symbols += [self._tokenizer.to_token_id(part)] if part in self._skipped else part
        return symbols

    def pending(self) -> str:
        """Return the text that flush() would return."""
        return self.copy().flush()

    def copy(self) -> TokenizerStream:
        """Return an independent stream in the same state."""
        other = copy.copy(self)
        other._detokenizer = copy.deepcopy(self._detokenizer)
        return other

    def decode(self, token: SupportsIndex) -> str:
        """Return the text that later tokens cannot change: whole characters, or "" until one is complete.

        The concatenated pieces, including the result of the final flush(), are the same as Tokenizer.decode() of all
        tokens.

        Raises:
            InputError: the token is not an integer, or not in the model's vocabulary.
        """
        try:
            id_ = operator.index(token)
        except TypeError as error:
            raise InputError(
                f"TokenizerStream.decode: the argument is {kind_of(token)}",
                "one integer is expected",
                "pass one token id",
            ) from error
        self._tokenizer._check_id(id_, "TokenizerStream.decode")
        text = self._tokenizer._backend.id_to_token(id_)
        is_skipped = text is None or text in self._skipped
        if self._is_first and self.continues and not is_skipped:
            self.proceed()
        self._is_first = False
        return "" if text is None or is_skipped else self._shown(self._detokenizer.feed(text))

    def flush(self) -> str:
        """Return the rest of the text; an unfinished character becomes U+FFFD. The next token starts a new text."""
        rest, self._is_first = self._shown(self._detokenizer.flush()), True
        self._num_shown = self._num_unfinished = 0
        return rest


def _check_text(text: object, call: str) -> None:
    if not isinstance(text, str):
        raise InputError(f"{call}: the text is {kind_of(text)}", "a string is expected", "pass a str")
    if "\0" in text:
        raise InputError(
            f"{call}: the text has a NUL character at position {text.index(chr(0))}",
            "a NUL character usually means binary data, or text in another encoding such as UTF-16",
            "decode the data with the right encoding, or remove the character",
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{call}: the text has half a surrogate pair at position {error.start}",
            "half a surrogate pair is not valid Unicode; the usual cause is bytes decoded with "
            "errors='surrogateescape'",
            "decode the bytes with errors='replace'",
        ) from error
