"""Speculative decoding options of an LLM, and the resources that they require: a lookup text and a draft model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from genai.common.progress import quietly, task

from ..common.reading import read_text_file
from ..engine.sampling.batch import BatchSampler
from ..engine.speculation.draft import DraftModel
from ..engine.speculation.lookup import LookupText
from ..engine.speculation.mtp import MtpProposer
from ..engine.speculation.speculator import DEFAULT_MOST_TOKENS, Speculator
from ..errors import InputError, OptionError, UnsupportedModelError, VocabularyMismatchError, kind_of
from ..models.config import Config
from ..models.model import Model
from ..text.backend import first_difference
from ..text.tokenizer import Tokenizer

WAYS = ("off", "auto", "lookup", "mtp")
MOST_SPECULATIVE_TOKENS = 64
# The number of characters of a lookup text to encode at a time, and the maximum size of the text (16 bytes of memory
# per token).
_PIECE, _MOST_CHARACTERS = 2**16, 2**25
# Memory limit for the logits rows of one step.
_LOGITS_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Speculation:
    """Options of speculative decoding, which changes the speed but never the output.

    Args:
        lookup: True to propose the tokens that followed an earlier occurrence of the last tokens, in the prompt or the
            reply.
        lookup_file: a UTF-8 text that is also searched, at most 32 Mi characters long.
        draft: a smaller model with the same vocabulary and special ids, which also proposes tokens: a folder or a
            loaded Model.
        mtp: True to propose tokens with the MTP head of the folder, False to leave it out; None = True if the folder
            has a head and there is no draft model.
        num_speculative_tokens: maximum number of proposed tokens per sequence and step. Each step chooses the actual
            number.

    Raises:
        OptionError: an argument is out of range, or there is no source of proposals.

    >>> import genai
    >>> with genai.LLM(speculation=genai.Speculation(num_speculative_tokens=8)) as llm:
    ...     print(llm.chat("Count from 3 to 7.").text)
    3, 4, 5, 6, 7
    """

    lookup: bool = True
    lookup_file: str | Path | None = None
    draft: str | Path | Model | None = None
    mtp: bool | None = None
    num_speculative_tokens: int = DEFAULT_MOST_TOKENS

    def __post_init__(self) -> None:
        most = self.num_speculative_tokens
        if not isinstance(most, int) or isinstance(most, bool) or not 1 <= most <= MOST_SPECULATIVE_TOKENS:
            raise OptionError(
                f"num_speculative_tokens = {most!r}",
                f"a whole number from 1 to {MOST_SPECULATIVE_TOKENS} is expected",
                "leave num_speculative_tokens out",
            )
        for name, kinds in (("lookup_file", str | Path), ("draft", str | Path | Model)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kinds):
                raise OptionError(f"{name} is {kind_of(value)}", "a path is expected", "pass the path")
        if not isinstance(self.lookup, bool):
            raise OptionError(f"lookup = {self.lookup!r}", "True or False is expected", "leave lookup out for True")
        if self.mtp is not None and not isinstance(self.mtp, bool):
            raise OptionError(f"mtp = {self.mtp!r:.80}", "True, False or None is expected", "leave mtp out")
        if self.mtp and self.draft is not None:
            raise OptionError(
                "mtp = True cannot be used with a draft",
                "either the MTP head or the draft model proposes tokens",
                "leave one of the two out",
            )
        if not self.lookup and self.lookup_file is None and self.draft is None and not self.mtp:
            raise OptionError(
                "lookup = False needs a lookup_file, a draft or mtp = True",
                "without prompt lookup, only a lookup_file, a draft model or an MTP head can propose tokens",
                "pass a lookup_file, a draft or mtp=True",
            )

    @property
    def reads_head(self) -> bool:
        """True if an MTP head is used if the folder has one."""
        return self.draft is None and self.mtp is not False


SpeculationChoice: TypeAlias = Speculation | str
"""A Speculation, or a name. "lookup": prompt lookup only. "auto": "lookup" if the model supports it, with the draft
model or the MTP head that the folder describes, if any; else "off". "mtp": the MTP head only. "off": no speculative
decoding."""


def loads_head(choice: object) -> bool:
    """Return True if the folder's MTP head is to be loaded with the model; see LLM for `choice`."""
    return choice in ("auto", "mtp") or (isinstance(choice, Speculation) and choice.reads_head)


class SpeculationResources:
    """The lookup text and the draft model of an LLM, which are created and closed with the LLM.

    Args:
        model: the LLM's model.
        tokenizer: the LLM's tokenizer.
        choice: see LLM.
        options: model options that the draft model is loaded with.
        max_sequences: see LLM.

    Raises:
        The same errors as LLM.
    """

    def __init__(
        self, model: Model, tokenizer: Tokenizer, choice: SpeculationChoice, options: dict[str, Any], max_sequences: int
    ) -> None:
        self._model, self._max_sequences = model, max_sequences
        self._speculation = speculation = _resolve(model, choice)
        self._text: LookupText | None = None
        self._draft: Model | None = None
        self._owns_draft = False
        if speculation is None:
            return
        if speculation.lookup_file is not None:
            with quietly(bool(options.get("quiet"))):
                self._text = _read(Path(speculation.lookup_file), tokenizer)
        if speculation.draft is not None:
            self._owns_draft = not isinstance(speculation.draft, Model)
            self._draft = (
                speculation.draft
                if isinstance(speculation.draft, Model)
                else _load_draft(speculation.draft, model, options)
            )
            try:
                _check_draft(model, tokenizer, self._draft)
            except BaseException:
                self.close()
                raise

    @property
    def is_on(self) -> bool:
        """True if speculative decoding is on."""
        return self._speculation is not None

    def speculator(self) -> Speculator | None:
        """Return the engine's source of proposals; None if speculative decoding is off."""
        speculation, vocab_size = self._speculation, self._model.decoder.vocab_size
        if speculation is None:
            return None
        draft: DraftModel | None = None
        sizes = {"context_size": self._model.context_size, "vocab_size": vocab_size}
        if self._draft is not None:
            sizes["context_size"] = self._draft.context_size
            draft = DraftModel(self._draft.decoder, self._draft.sampler, **sizes)
        elif self._model.head is not None and speculation.reads_head:
            draft = MtpProposer(self._model.head, BatchSampler(vocab_size, self._model.decoder.executor), **sizes)
        most_rows = max(self._max_sequences, _LOGITS_BYTES // (4 * vocab_size))
        return Speculator(
            lookup=speculation.lookup,
            text=self._text,
            draft=draft,
            most_tokens=speculation.num_speculative_tokens,
            most_rows=min(most_rows, self._model.decoder.token_budget),
        )

    def close(self) -> None:
        """Close the draft model, unless the caller passed a loaded model."""
        if self._draft is not None and self._owns_draft:
            self._draft.close()


def _resolve(model: Model, choice: SpeculationChoice) -> Speculation | None:
    if isinstance(choice, str) and choice in WAYS:
        if choice == "off" or (choice == "auto" and not model.decoder.verifies):
            return None
        choice = {
            "auto": Speculation(draft=model.draft),
            "lookup": Speculation(mtp=False),
            "mtp": Speculation(lookup=False, mtp=True),
        }[choice]
    if not isinstance(choice, Speculation):
        raise OptionError(
            f"speculation = {choice!r:.80}",
            f"a Speculation or one of {', '.join(map(repr, WAYS))} is expected",
            'leave speculation out for "off"',
        )
    if not model.decoder.verifies:
        raise UnsupportedModelError(
            f"{model.folder}: proposed tokens cannot be verified with this model",
            "its graph runs as exported, and a token's logits may round differently when several tokens share a step",
            "leave speculation out, or export a graph that can be flattened (info.reason gives the obstacle)",
        )
    if choice.mtp and model.head is None:
        raise UnsupportedModelError(
            f"{model.folder}: there is no MTP head that could propose tokens",
            "model.mtp in genai_config.json describes none, or the Model was loaded without it",
            "choose other proposers, such as prompt lookup; a Model needs Model(folder, mtp=True)",
        )
    return choice


def _load_draft(folder: str | Path, model: Model, options: dict[str, Any]) -> Model:
    """Load a draft model with the target model's device and the given options. Its context size may be smaller."""
    if options.get("device") is None:
        options = {**options, "device": model.decoder.executor.device}
    config, context = Config(folder), options.get("context_size")
    if context is not None:
        options = {**options, "context_size": min(context, config.model.context_length)}
    return Model(config, **options)


def _read(path: Path, tokenizer: Tokenizer) -> LookupText:
    text = read_text_file(path)
    if len(text) > _MOST_CHARACTERS:
        raise InputError(
            f"{path}: the file has {len(text):,} characters",
            f"the limit is {_MOST_CHARACTERS:,} characters",
            "use a part of the file",
        )
    tokens: list[int] = []
    with task(f"Reading {path.name}", len(text)) as reading:
        for piece in _pieces(text):
            tokens += tokenizer.encode(piece, add_special_tokens=False).tolist()
            reading.add(len(piece))
    return LookupText(tokens)


def _pieces(text: str) -> Iterator[str]:
    """Yield text in pieces of limited size. The pieces end at line ends where possible."""
    begin = 0
    while begin < len(text):
        end = text.rfind("\n", begin + 1, begin + _PIECE) + 1 or begin + _PIECE
        yield text[begin:end]
        begin = end


def _check_draft(model: Model, tokenizer: Tokenizer, draft: Model) -> None:
    """Raise VocabularyMismatchError if any token has a different meaning in the two models."""
    if draft.loaded_folder.same_as(model.loaded_folder):
        return
    other = Tokenizer(draft)
    difference = first_difference(tokenizer.backend, other.backend, model.folder, draft.folder)
    ids = (
        ("bos_token_id", tokenizer.bos_token_id, other.bos_token_id),
        ("eos_token_id", sorted(tokenizer.eos_token_ids.tolist()), sorted(other.eos_token_ids.tolist())),
    )
    for name, mine, theirs in ids:
        if difference is None and mine != theirs:
            difference = f"{name} is {mine} in {model.folder} and {theirs} in {draft.folder}"
    if difference is not None:
        raise VocabularyMismatchError(
            f"the draft model has a different vocabulary: {difference}",
            "a proposal is a token id, so every token id must mean the same in both models",
            "use a smaller model of the same family, with the same tokenizer, as the draft",
        )
