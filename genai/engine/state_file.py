"""Files that hold a sequence: its tokens, its keys and values, what its sampler remembers, and notes of the caller.

    8 bytes       b"genai-st"
    8 bytes       length of the header
    header        JSON: format, model, numerics, adapter, tokens, stored, arrays, sampler, notes
    4 bytes each  token ids
    1 byte each   numerics (none, or one per token)
    arrays        one after the other, as the header lists them
    32 bytes      SHA-256 of all before

Numbers are little-endian. A file is written beside its place, synced, and renamed: it is there whole, or not at all. It
is read as data of a stranger: nothing in it is executed, and its sizes must be those that the model and the number of
tokens settle, and the file's own, before any memory is taken.
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


@dataclass(frozen=True)
class Identity:
    """What a state depends on besides its tokens and adapters.

    Attributes:
        model: hash of the files that the model was loaded from. numerics: how it computes and keeps keys and values.
        vocab_size, context_size: of the model; no state has another token, or more of them.
    """

    model: str
    numerics: str
    vocab_size: int
    context_size: int


@dataclass(frozen=True)
class SavedState:
    """What a file holds besides keys and values.

    Attributes:
        adapter: names and weights of the adapters that the tokens went through, as the caller knows them.
        adapter_key: what tells them from others, in hexadecimal; "" = none.
        sampler: what chooses the next tokens; None = nothing was generated.
        notes: of the caller, JSON.
    """

    adapter: Mapping[str, float] = field(default_factory=dict)
    adapter_key: str = ""
    sampler: SamplerState | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)


def state_path(path: Any) -> Path:
    """Where a state is to be, with `~` for the home folder. Raises StateFileError: it names no file."""
    try:
        target = expanded(path)
        if "\0" in str(target):
            raise ValueError("it has a NUL character")
    except (TypeError, ValueError) as error:
        raise StateFileError(f"{path!r:.200} is no path", str(error), "give the name of a file") from None
    return target


# --- writing -----------------------------------------------------------------------------------------------------


def write_state(path: Path, decoder: Decoder, sequence: DecoderSequence, identity: Identity, saved: SavedState) -> int:
    """Write a sequence to a file, which takes the place of one that is there; returns its bytes.

    Raises:
        StateFileError: it cannot be written, such as where the disk is full. StateError: see Decoder.stored_arrays.
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
    }
    text = json.dumps(header, ensure_ascii=False).encode()
    if len(text) > _MOST_HEADER:
        raise StateFileError(
            f"{path}: what is to be saved beside the tokens takes {len(text)} bytes",
            f"at most {_MOST_HEADER} are read back",
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
            "choose another place, or make room; what was there before is as it was",
        ) from error


def _num_stored(decoder: Decoder, sequence: DecoderSequence, arrays: list[StoredArray]) -> int:
    """How many tokens' state the arrays hold."""
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
    """The sequence of a file, in the decoder's cache, and what else was saved with it.

    Args:
        adapters: what the tokens go through from now on, by what the file says of it; it is compared with the file's.

    Raises:
        StateFileError: there is none, it is damaged, or none of ours. StateMismatchError: it is of another model,
            format, type of cache, or of other adapters.
        CacheCapacityError: there is no room for it.
    """
    if path.exists() and not path.is_file():
        raise StateFileError(f"{path}: the state cannot be read", "it is a folder, a pipe or a device", "give a file")
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
                raise _damaged(path, "it is shorter than it was a moment ago")
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
        raise _damaged(path, f"its header does not say how to go on: {error}") from error
    num_tokens, num_stored = header["tokens"], header["stored"]
    if num_stored % decoder.block_size:
        raise _damaged(path, f"{num_stored} of its tokens are no whole number of blocks of {decoder.block_size}")
    arrays, earlier = decoder.arrays_for(num_stored), decoder.earlier_arrays_for(num_stored)
    is_earlier = header["arrays"] == _as_json(earlier) != _as_json(arrays)
    if is_earlier:
        arrays = earlier
    elif header["arrays"] != _as_json(arrays):
        raise StateMismatchError(
            f"{path}: its keys and values have another form than this model's",
            f"it has {str(header['arrays'])[:200]}, this model {str(_as_json(arrays))[:200]}",
            "load the model as it was when the state was saved, or read the text again",
        )
    # Numerics are there for each token or, where there is no difference between them, not at all.
    num_numerics = num_tokens if decoder.has_numerics else 0
    expected = file.tell() + 4 * num_tokens + num_numerics + sum(array.nbytes for array in arrays) + _DIGEST_BYTES
    if size != expected:
        raise _damaged(path, f"it has {size} bytes, and what its header lists takes {expected}")
    mix = adapters(saved)
    if ("" if mix is None else mix.key.hex()) != saved.adapter_key:
        raise StateMismatchError(
            f"{path}: the state went through {_adapters_said(saved)}",
            "the adapters that are loaded under these names are others",
            "load those that it was saved with",
        )
    tokens = np.frombuffer(take(4 * num_tokens), "<i4")
    numerics = take(num_numerics)
    if num_tokens and not 0 <= int(tokens.min()) <= int(tokens.max()) < identity.vocab_size:
        raise _damaged(path, f"it has tokens from {tokens.min()} to {tokens.max()}")
    if numerics.strip(b"\0\1"):
        raise _damaged(path, "it says neither of a token that it has prefill numerics nor that it has not")
    stored = StoredTokens(tokens.tolist(), numerics, num_stored)
    try:
        sequence = decoder.restore(stored, fill, mix, earlier=is_earlier)
    except CacheCapacityError as error:
        fix = "give the model a larger cache (cache_bytes=…), or close what holds it"
        raise CacheCapacityError(f"{path}: {error.what}", error.why, fix) from error
    if file.read(_DIGEST_BYTES + 1) != digest.digest():
        sequence.close()
        raise _damaged(path, "its content does not have the digest at its end")
    return sequence, saved


def _as_json(arrays: Sequence[StoredArray]) -> list[list[object]]:
    """As a header lists them."""
    return [[array.name, array.dtype, [*array.shape]] for array in arrays]


def _header(path: Path, size: int, take: Callable[[int], bytes]) -> dict[str, Any]:
    beginning = len(_MAGIC) + _LENGTH.size
    if size < beginning + _DIGEST_BYTES or take(len(_MAGIC)) != _MAGIC:
        raise StateFileError(f"{path}: not a saved state", "it does not begin as one", "give a file of save_state")
    (length,) = _LENGTH.unpack(take(_LENGTH.size))
    if length > min(_MOST_HEADER, size - beginning - _DIGEST_BYTES):
        raise _damaged(path, f"its header would have {length} bytes, and the file has {size}")
    try:
        header = json.loads(take(length))
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its header is not JSON: {error}") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        found = header.get("format") if isinstance(header, dict) else header
        raise StateMismatchError(
            f"{path}: a state of format {found!r:.40}",
            f"this version reads format {FORMAT}",
            "save it anew with this version: read the text again",
        )
    whole = all(type(header.get(name)) is int and 0 <= header[name] < 2**31 for name in ("tokens", "stored"))
    texts = all(isinstance(header.get(name), str) for name in ("model", "numerics"))
    adapter = header.get("adapter")
    if (
        set(header) != _KEYS
        or not (whole and texts and isinstance(adapter, dict) and isinstance(header["notes"], dict))
        or not (isinstance(adapter.get("key"), str) and isinstance(adapter.get("weights"), dict))
        or header["stored"] > header["tokens"]
    ):
        raise _damaged(path, "its header has other entries than a state has")
    return header


def _check_fits(path: Path, header: Mapping[str, Any], identity: Identity) -> None:
    for name, ours, fix in (
        ("model", identity.model, "load the model that it was saved with"),
        ("numerics", identity.numerics, "load the model with the same kv_dtype, accuracy, device and GENAI_CPU_ISA"),
    ):
        if header[name] != ours:
            raise StateMismatchError(
                f"{path}: the state is of another {'model' if name == 'model' else 'way to compute'}",
                f"its {name}: {header[name]:.80}; of the model that is loaded: {ours}",
                f"{fix}, or read the text again",
            )
    if header["tokens"] > identity.context_size:
        raise StateMismatchError(
            f"{path}: the state has {header['tokens']} tokens",
            f"the context of the model, as it is loaded, holds {identity.context_size}",
            "load it with a larger context_size or cache_bytes",
        )


def _adapters_said(saved: SavedState) -> str:
    names = ", ".join(f"{name} ({weight})" for name, weight in saved.adapter.items())
    return f"the adapters {names[:200]}" if saved.adapter_key else "no adapter"


def _damaged(path: Path, why: str) -> StateFileError:
    return StateFileError(f"{path}: the saved state is damaged", why, "save it again: read the text anew")
