"""The texts that a model is calibrated and measured with: a file's, or what the model itself writes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.common.memory_limits import available_memory, format_bytes

from ..common.reading import read_text_file
from ..errors import GenaiError, InputError, kind_of
from ..text.tokenizer import Tokenizer
from .streaming import StreamedDecoder, Tokens, step_of

Progress = Callable[[int, int], None]
# Sequences that are written together, so that the weights are read once for all of them.
_WRITTEN_TOGETHER = 32


@dataclass(frozen=True)
class CalibrationText:
    """Sequences of tokens.

    Attributes:
        tokens: int64 [count, length].
        origin: where they come from, in words.
    """

    tokens: Tokens
    origin: str

    @property
    def identity(self) -> str:
        """Changes with the tokens."""
        return hashlib.sha256(np.ascontiguousarray(self.tokens).tobytes()).hexdigest()[:16]


def read_text(
    path: Path, tokenizer: Tokenizer, *, count: int, length: int, least: int, vocab_size: int, rng: np.random.Generator
) -> CalibrationText:
    """Sequences of a file: text, or JSON lines with "text", "messages" (a chat) or "prompt" and "completion".

    Its tokens are cut into sequences, of which as many as are wanted are drawn.

    Args:
        count, length: sequences wanted, and tokens of each. least: tokens without which nothing can be said.

    Raises:
        InputError: the file cannot be read, is empty, or has too few tokens.
    """
    tokens = [_encoded(tokenizer, where, text) for where, text in _documents(path, tokenizer)]
    stream = np.concatenate(tokens) if tokens else np.empty(0, np.int64)
    if not len(stream):
        raise InputError(
            f"{path}: there is no text in it", "calibration needs text", f"give at least {least} tokens of text"
        )
    if int(stream.max()) >= vocab_size:
        raise InputError(
            f"{path}: has token {int(stream.max())}, the model's vocabulary ends at {vocab_size - 1}",
            "the tokenizer knows tokens that the model does not",
            "use the tokenizer.json that belongs to the model",
        )
    if len(stream) < max(least, 2):
        raise InputError(
            f"{path}: has {len(stream)} tokens, too few",
            f"at least {least} are needed, and {count * length} are wanted ({count} sequences of {length})",
            "give a longer text, or leave --calib out: then the model writes one itself",
        )
    length = min(length, len(stream))
    whole = stream[: len(stream) // length * length].reshape(-1, length)
    chosen = np.sort(rng.permutation(len(whole))[:count])
    return CalibrationText(whole[chosen], f"{path} ({len(chosen)} of {len(whole)} sequences of {length} tokens)")


def _documents(path: Path, tokenizer: Tokenizer) -> Iterator[tuple[str, str]]:
    """Where each is, and its text."""
    text = read_text_file(path)
    if path.suffix not in (".jsonl", ".ndjson"):
        if text.strip():
            yield str(path), text
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            where = f"{path}, line {number}"
            yield where, _document(where, line, tokenizer)


def _document(where: str, line: str, tokenizer: Tokenizer) -> str:
    try:
        item: Any = json.loads(line)
    except ValueError as error:
        raise _not_a_text(where, f"it is not JSON: {error}") from error
    except RecursionError as error:
        raise _not_a_text(where, "it is nested too deeply") from error
    if not isinstance(item, dict):
        raise _not_a_text(where, f"it is {kind_of(item)}")
    if "messages" in item:
        messages = item["messages"]
        if not isinstance(messages, list):
            raise _not_a_text(where, f"messages is {kind_of(messages)}")
        if isinstance(item.get("answer"), str):  # as the bundled questions have it
            messages = [*messages, {"role": "assistant", "content": item["answer"]}]
        with _located(where):
            return str(tokenizer.apply_chat_template(messages))
    names = ("text",) if "text" in item else ("prompt", "completion")
    for name in names:
        if name not in item:
            raise _not_a_text(where, f"it has no {name}; its keys are {', '.join(map(str, item)):.200}")
        if not isinstance(item[name], str):
            raise _not_a_text(where, f"{name} is {kind_of(item[name])}")
    return "".join(item[name] for name in names)


def _not_a_text(where: str, why: str) -> InputError:
    formats = '{"text": …}, {"messages": [{"role": …, "content": …}, …]} or {"prompt": …, "completion": …}'
    return InputError(f"{where}: not a text", why, f"write {formats}")


@contextmanager
def _located(where: str) -> Iterator[None]:
    """Errors inside say in which file and line."""
    try:
        yield
    except GenaiError as error:
        raise InputError(f"{where}: {error.what}", error.why, error.fix) from error


def _encoded(tokenizer: Tokenizer, where: str, text: str) -> NDArray[np.int64]:
    with _located(where):
        return np.asarray(tokenizer.encode(text), np.int64)


def written_text(
    decoder: StreamedDecoder, tokenizer: Tokenizer, *, count: int, length: int, seed: int,
    progress: Progress = lambda done, total: None,
) -> CalibrationText:  # fmt: skip
    """Sequences that the float model writes itself.

    A model with a chat template begins where a user's message does, and writes the message and the reply (Xu et al.
    2024, Magpie); another one begins with BOS, or with a token drawn at random (Liu et al. 2023, LLM-QAT). Every next
    token is drawn from the model's own distribution; after one that ends a text another text begins. The same seed
    gives the same text, on any number of threads.

    Raises:
        InputError: the float model does not fit into memory.
    """
    needed = sum(4 * site.elements for site in decoder.source.sites)
    if needed > available_memory() // 2:
        raise InputError(
            f"the float model takes {format_bytes(needed)}, and {format_bytes(available_memory())} are free",
            "a model that is to write its own calibration text is in memory as a whole",
            "give a text: --calib FILE and --eval-file FILE",
        )
    tokens = np.empty((count, length), np.int64)
    together = min(_WRITTEN_TOGETHER, count)
    room = together * (-(-length // 32) * 32)
    beginnings = _Beginnings(decoder, tokenizer)
    with decoder.running(decoder.whole, tokens=room) as running:
        for first in range(0, count, together):
            rows = tokens[first : first + together]
            rng = np.random.Generator(np.random.Philox(key=[seed, first]))
            turns = [0] * len(rows)
            queues = [beginnings.draw(rng, 0) for _ in rows]  # tokens that are given, not drawn
            for position in range(length):
                if position:
                    logits = running.step(step_of(rows[:, position - 1, None], position - 1, length), {})[
                        decoder.logits
                    ]
                    drawn = (logits + rng.gumbel(size=logits.shape))[:, : beginnings.known].argmax(axis=1)
                for row, queue in enumerate(queues):
                    if not queue and position and int(rows[row, position - 1]) in beginnings.ends:
                        turns[row] += 1
                        queue += beginnings.draw(rng, turns[row])
                    rows[row, position] = queue.pop(0) if queue else drawn[row]
                progress(first * length + (position + 1) * len(rows), count * length)
    how = beginnings.how
    return CalibrationText(
        tokens, f"written by the model itself, {how} (seed {seed}, {count} sequences of {length} tokens)"
    )


class _Beginnings:
    """How texts begin.

    Attributes:
        known: ids below it have a meaning. ends: tokens after which another text begins. how: in words.
    """

    def __init__(self, decoder: StreamedDecoder, tokenizer: Tokenizer) -> None:
        self.known = min(decoder.vocab_size, tokenizer.vocab_size)
        self.ends = {int(token) for token in tokenizer.eos_token_ids}
        self._starts = [token for token in range(self.known) if token not in self.ends]
        chat, bos = _around_message(tokenizer, self.ends), tokenizer.bos_token_id
        self._prompts = chat or ([[]] if bos is None else [[bos]])
        self.how = "as chats" if chat else "from random tokens" if bos is None else "from the beginning of a text"

    def draw(self, rng: np.random.Generator, turn: int) -> list[int]:
        """The tokens that begin a text, or the next turn of one; at least one."""
        return list(self._prompts[turn % len(self._prompts)]) or [int(rng.choice(self._starts))]


def _around_message(tokenizer: Tokenizer, ends: Collection[int]) -> list[list[int]]:
    """What the chat template puts before a user's message, and between its end and the reply; empty without one."""
    mark = "MESSAGE"
    try:
        text = str(tokenizer.apply_chat_template([{"role": "user", "content": mark}], add_generation_prompt=True))
    except GenaiError:
        return []
    before, separator, after = text.partition(mark)
    turns = [[int(token) for token in tokenizer.encode(part)] for part in (before, after)]
    if turns[1] and turns[1][0] in ends:  # the model has written it
        del turns[1][0]
    return turns if separator and all(turns) else []
