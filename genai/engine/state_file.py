"""Files that hold a sequence: its tokens, keys and values, sampler state, and the caller's notes.

    8 bytes       b"genai-st"
    8 bytes       length of the header
    header        JSON: format, model, numerics, adapter, tokens, stored, arrays, sampler, notes
    4 bytes each  token ids
    1 byte each   numerics (none, or one per token)
    arrays        in the order of the header
    32 bytes      SHA-256 of everything before

Numbers are little-endian. A file is written under a temporary name, synced and renamed, so it is either complete or
absent. It is read as untrusted input: nothing in it is executed, and before memory is allocated, its sizes must match
the file's size and the sizes that the model and the number of tokens determine.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..common.atomic_files import replacing
from ..common.paths import expanded
from ..errors import CacheCapacityError, StateFileError, StateMismatchError
from .adapter_mix import AdapterMix
from .decoder import Decoder
from .sampling.state import SamplerState
from .sequence import DecoderSequence
from .stored import StoredArray, StoredTokens

FORMAT = 1
_MAGIC = b"genai-st"
_LENGTH = struct.Struct("<Q")
_DIGEST_BYTES = hashlib.sha256().digest_size
_MOST_HEADER = 2**22
_PIECE = 2**20
_KEYS = {"format", "model", "numerics", "adapter", "tokens", "stored", "arrays", "sampler", "notes"}
# A key that files of earlier versions lack.
_NAME = "name"


@dataclass(frozen=True)
class Identity:
    """The properties, other than tokens and adapters, that a state depends on.

    Attributes:
        model: hash of the files that the model was loaded from.
        numerics: a description of how the model computes and stores keys and values.
        vocab_size, context_size: limits of the model for the token ids and the number of tokens in a state.
        name: the model's name in messages.
    """

    model: str
    numerics: str
    vocab_size: int
    context_size: int
    name: str = ""


@dataclass(frozen=True)
class SavedState:
    """The content of a file, except its tokens, keys and values.

    Attributes:
        adapter: names and weights of the adapters that the tokens were computed with, as the caller named them.
        adapter_key: a hash that identifies these adapters, in hexadecimal; "" = none.
        sampler: state of the sampler; None = nothing was generated.
        notes: the caller's notes, as JSON.
    """

    adapter: Mapping[str, float] = field(default_factory=dict)
    adapter_key: str = ""
    sampler: SamplerState | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)


def state_path(path: Any) -> Path:
    """Return the path of a state file, with `~` expanded; raise StateFileError if the value is not a path."""
    try:
        target = expanded(path)
        if "\0" in str(target):
            raise ValueError("the path contains a NUL character")
    except (TypeError, ValueError) as error:
        raise StateFileError(f"{path!r:.200} is not a path", str(error), "pass the path of a file") from None
    return target


# --- writing -----------------------------------------------------------------------------------------------------


def write_state(path: Path, decoder: Decoder, sequence: DecoderSequence, identity: Identity, saved: SavedState) -> int:
    """Write a sequence to a file, replacing an existing one; return the number of bytes written.

    Raises:
        StateFileError: the file cannot be written, for example because the disk is full.
        StateError: see Decoder.stored_arrays.
    """
    arrays = sequence.stored_arrays()
    num_stored = _num_stored(decoder, sequence, [array for array, _ in arrays])
    header = {
        "format": FORMAT,
        "model": identity.model,
        "numerics": identity.numerics,
        "adapter": {"key": saved.adapter_key, "weights": dict(saved.adapter)},
        "tokens": len(sequence.tokens),
        "stored": num_stored,
        "arrays": [list(array) for array, _ in arrays],
        "sampler": None if saved.sampler is None else saved.sampler.as_json(),
        "notes": saved.notes,
        _NAME: identity.name,
    }
    text = json.dumps(header, ensure_ascii=False).encode()
    if len(text) > _MOST_HEADER:
        raise StateFileError(
            f"{path}: the header of the state has {len(text)} bytes",
            f"a header may have at most {_MOST_HEADER} bytes",
            "save fewer options or notes",
        )
    beginning = _MAGIC + _LENGTH.pack(len(text)) + text + np.asarray(sequence.tokens, "<i4").tobytes()
    digest = hashlib.sha256()
    try:
        with replacing(path) as file:
            contents = (piece.data for _, pieces in arrays for piece in pieces)
            everything: Iterator[bytes | memoryview] = chain([beginning, sequence.numerics], contents)
            for piece in everything:
                digest.update(piece)
                file.write(piece)
            file.write(digest.digest())
            return file.tell()
    except OSError as error:
        raise StateFileError(
            f"{path}: the state cannot be saved",
            str(error),
            "choose another folder, or free disk space (an existing file is unchanged)",
        ) from error


def _num_stored(decoder: Decoder, sequence: DecoderSequence, arrays: list[StoredArray]) -> int:
    """Return the number of tokens whose state is in the arrays."""
    num_stored = sequence.num_stored()
    assert arrays == decoder.arrays_for(num_stored)
    return num_stored


# --- reading -----------------------------------------------------------------------------------------------------


def read_state(
    path: Path,
    decoder: Decoder,
    identity: Identity,
    adapters: Callable[[SavedState], AdapterMix | None],
) -> tuple[DecoderSequence, SavedState]:
    """Read a sequence from a file into the decoder's cache. Return the sequence and the other saved data.

    Args:
        path: the file.
        decoder: the decoder that opens the sequence.
        identity: properties of the loaded model, which must match those in the file.
        adapters: returns the adapters for the sequence, based on the saved data; their key must match the key in the
            file.

    Raises:
        StateFileError: the file is missing, damaged, or not a state file.
        StateMismatchError: the state was saved with another model, format, cache type or other adapters.
        CacheCapacityError: the cache has too few free blocks.
    """
    if path.exists() and not path.is_file():
        raise StateFileError(
            f"{path}: the state cannot be read", "the path is a folder, a pipe or a device", "pass the path of a file"
        )
    try:
        with path.open("rb") as file:
            return _read(path, file, decoder, identity, adapters)
    except OSError as error:
        raise StateFileError(f"{path}: the state cannot be read", str(error), "check the path") from error


def _read(
    path: Path,
    file: BinaryIO,
    decoder: Decoder,
    identity: Identity,
    adapters: Callable[[SavedState], AdapterMix | None],
) -> tuple[DecoderSequence, SavedState]:
    size, digest = os.fstat(file.fileno()).st_size, hashlib.sha256()

    def fill(memory: memoryview) -> None:
        for start in range(0, len(memory), _PIECE):
            piece = memory[start : start + _PIECE]
            if file.readinto(piece) != len(piece):  # type: ignore[attr-defined]
                raise _damaged(path, "the file was truncated during the read")
            digest.update(piece)

    def take(count: int) -> bytes:
        taken = bytearray(count)
        fill(memoryview(taken))
        return bytes(taken)

    header = _header(path, size, take)
    _check_fits(path, header, identity)
    try:
        saved = SavedState(
            dict(header["adapter"]["weights"]),
            header["adapter"]["key"],
            None if header["sampler"] is None else SamplerState.from_json(header["sampler"], header["tokens"]),
            header["notes"],
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise _damaged(path, f"the header has invalid entries: {error}") from error
    num_tokens, num_stored = header["tokens"], header["stored"]
    if num_stored % decoder.block_size:
        raise _damaged(path, f"{num_stored} stored tokens are not a multiple of the block size {decoder.block_size}")
    arrays, earlier = decoder.arrays_for(num_stored), decoder.earlier_arrays_for(num_stored)
    is_earlier = header["arrays"] == _as_json(earlier) != _as_json(arrays)
    if is_earlier:
        arrays = earlier
    elif header["arrays"] != _as_json(arrays):
        raise StateMismatchError(
            f"{path}: the saved keys and values have a different layout from this model's",
            f"the file has the arrays {str(header['arrays'])[:200]}, but this model has {str(_as_json(arrays))[:200]}",
            "load the model with the same options as when the state was saved, or process the text again",
        )
    # Numerics are stored for every token, or for no token if the decoder does not distinguish them.
    num_numerics = num_tokens if decoder.has_numerics else 0
    expected = file.tell() + 4 * num_tokens + num_numerics + sum(array.nbytes for array in arrays) + _DIGEST_BYTES
    if size != expected:
        raise _damaged(path, f"the file has {size} bytes, but the header requires {expected} bytes")
    mix = adapters(saved)
    if ("" if mix is None else mix.key.hex()) != saved.adapter_key:
        raise StateMismatchError(
            f"{path}: the state was computed with {_adapters_said(saved)}",
            "the loaded adapters are not the same",
            "load the adapters that the state was saved with",
        )
    tokens = np.frombuffer(take(4 * num_tokens), "<i4")
    numerics = take(num_numerics)
    if num_tokens and not 0 <= int(tokens.min()) <= int(tokens.max()) < identity.vocab_size:
        raise _damaged(path, f"the token ids range from {tokens.min()} to {tokens.max()}")
    if numerics.strip(b"\0\1"):
        raise _damaged(path, "the numerics of a token are neither 0 nor 1")
    stored = StoredTokens(tokens.tolist(), numerics, num_stored)
    try:
        sequence = decoder.restore(stored, fill, mix, earlier=is_earlier)
    except CacheCapacityError as error:
        fix = "load the model with a larger cache (cache_bytes=…), or close other sequences of the model"
        raise CacheCapacityError(f"{path}: {error.what}", error.why, fix) from error
    if file.read(_DIGEST_BYTES + 1) != digest.digest():
        sequence.close()
        raise _damaged(path, "the content does not match the digest at the end of the file")
    return sequence, saved


def _as_json(arrays: Sequence[StoredArray]) -> list[list[object]]:
    """Return the arrays in the format of a file header."""
    return [[array.name, array.dtype, [*array.shape]] for array in arrays]


def _header(path: Path, size: int, take: Callable[[int], bytes]) -> dict[str, Any]:
    beginning = len(_MAGIC) + _LENGTH.size
    if size < beginning + _DIGEST_BYTES or take(len(_MAGIC)) != _MAGIC:
        raise StateFileError(
            f"{path}: the file is not a saved state",
            "the file does not begin with the signature of a saved state",
            "pass a file that was written by save_state",
        )
    (length,) = _LENGTH.unpack(take(_LENGTH.size))
    if length > min(_MOST_HEADER, size - beginning - _DIGEST_BYTES):
        raise _damaged(path, f"the header length is {length} bytes, but the file has only {size} bytes")
    try:
        header = json.loads(take(length))
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"the header is not JSON: {error}") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        found = header.get("format") if isinstance(header, dict) else header
        raise StateMismatchError(
            f"{path}: the state has format {found!r:.40}",
            f"this version reads only format {FORMAT}",
            "process the text again and save the state with this version",
        )
    whole = all(type(header.get(name)) is int and 0 <= header[name] < 2**31 for name in ("tokens", "stored"))
    texts = all(isinstance(header.get(name), str) for name in ("model", "numerics"))
    adapter = header.get("adapter")
    if (
        set(header) - {_NAME} != _KEYS
        or not isinstance(header.get(_NAME, ""), str)
        or not (whole and texts and isinstance(adapter, dict) and isinstance(header["notes"], dict))
        or not (isinstance(adapter.get("key"), str) and isinstance(adapter.get("weights"), dict))
        or header["stored"] > header["tokens"]
    ):
        raise _damaged(path, "the header does not have the entries of a state")
    return header


def _check_fits(path: Path, header: Mapping[str, Any], identity: Identity) -> None:
    if header["model"] != identity.model:
        saved, ours = header.get(_NAME, "")[:80], identity.name or "the loaded model"
        raise StateMismatchError(
            f"{path}: the state was saved with another model",
            f"the state belongs to {saved}, but {ours} is loaded"
            if saved and saved != ours
            else f"the weights or the graph of {ours} are not those that the state was computed with",
            f"load {saved if saved and saved != ours else 'the model that the state was saved with'}, "
            "or process the text again",
        )
    if header["numerics"] != identity.numerics:
        raise StateMismatchError(
            f"{path}: the state was saved with another arithmetic",
            f"numerics: the state has {header['numerics']:.80}, but the loaded model has {identity.numerics}",
            "load the model with the same kv_dtype, accuracy, device and GENAI_CPU_ISA, or process the text again",
        )
    if header["tokens"] > identity.context_size:
        raise StateMismatchError(
            f"{path}: the state has {header['tokens']} tokens",
            f"the context of the loaded model has {identity.context_size} tokens",
            "load the model with a larger context_size or cache_bytes",
        )


def _adapters_said(saved: SavedState) -> str:
    names = ", ".join(f"{name} ({weight})" for name, weight in saved.adapter.items())
    return f"the adapters {names[:200]}" if saved.adapter_key else "no adapter"


def _damaged(path: Path, why: str) -> StateFileError:
    return StateFileError(f"{path}: the saved state is damaged", why, "process the text again and save the state again")
