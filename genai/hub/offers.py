"""Models to choose from: the models in the cache, and models of the table that the hub offers for download."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import AccessError, DownloadError, GenaiError
from .built import BUILT_DECODER, BuiltModel, built_models
from .choosing import choose
from .client import page_of
from .known import PROCESS_BYTES, KnownModel, known_models
from .listing import Listing, read_listing
from .references import Reference, offline
from .store import PulledModel, bytes_below, find, models

# Time to wait for the hub's responses, in seconds.
_LONGEST_LOOKUP = 5.0


@dataclass(frozen=True)
class Offer:
    """A model to choose.

    Attributes:
        name: the name to pass as MODEL.
        good_for: a line about the model; "" = unknown.
        download_bytes: number of bytes to download; 0 = the model is in the cache.
        size_bytes: number of bytes that one token reads: the size of the model at its quantisation.
        memory_bytes: an estimate of the memory that the model needs.
        note: a condition of the download, such as a licence to accept, or the source of a built model; "" = none.
    """

    name: str
    good_for: str
    download_bytes: int
    size_bytes: int
    memory_bytes: int
    note: str = ""


class Lookup:
    """A concurrent request to the hub for the file list of each model; starts when it is created.

    Args:
        wanted: the models to look up.
    """

    def __init__(self, wanted: Sequence[KnownModel]) -> None:
        self._found: dict[str, Listing | GenaiError] = {}
        # Daemon threads do not delay the end of the process if the hub does not respond.
        self._threads = [threading.Thread(target=self._read, args=(model,), daemon=True) for model in wanted]
        for thread in self._threads:
            thread.start()

    def _read(self, model: KnownModel) -> None:
        try:
            self._found[model.repository] = read_listing(Reference(model.repository), lambda text: None)
        except GenaiError as error:
            self._found[model.repository] = error

    def results(self, seconds: float = _LONGEST_LOOKUP) -> dict[str, Listing | GenaiError]:
        """Return the responses by repository, after at most this number of seconds. Missing entries are unanswered."""
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return dict(self._found)


def lookup() -> Lookup:
    """Look up the offered models that are not in the cache; none if the network is disabled."""
    return Lookup([] if offline() else [model for model in _offered() if find(model.repository) is None])


def cached_offers() -> list[Offer]:
    """Return an offer for each model in the cache: pulled models, and decoders that were built from local files."""
    built = [model for model in built_models() if model.kind == BUILT_DECODER]
    return [*map(_cached_offer, models()), *map(_built_offer, built)]


def new_offers(results: dict[str, Listing | GenaiError]) -> tuple[list[Offer], str]:
    """Return the offers for models that are not in the cache, and the reason if the hub cannot be reached.

    Models that the hub denies, or whose repositories have no files that run here, are left out.
    """
    if offline():
        return [], "HF_HUB_OFFLINE disables network access"
    wanted = [model for model in _offered() if find(model.repository) is None]
    refused = [result for result in results.values() if isinstance(result, GenaiError)]
    unreachable = [error for error in refused if not isinstance(error, AccessError)]
    if wanted and len(unreachable) == len(wanted):
        return [], f"the hub cannot be reached: {unreachable[0].why}"
    if wanted and not results:
        return [], "the hub cannot be reached: it does not respond"
    offers = [_new_offer(model, results.get(model.repository)) for model in wanted]
    return [offer for offer in offers if offer is not None], ""


def _offered() -> list[KnownModel]:
    return [model for model in known_models().values() if model.offered]


def _cached_offer(model: PulledModel) -> Offer:
    by_repository = {known.repository: known for known in known_models().values()}
    if (known := by_repository.get(model.name)) is not None:
        return Offer(known.name, known.good_for, 0, known.size_bytes, known.memory_bytes)
    built = model.built()
    size = bytes_below(built[0] if built else model.path) or sum(file.size for file in model.files)
    return Offer(model.name, "", 0, size, size + PROCESS_BYTES)


def _built_offer(model: BuiltModel) -> Offer:
    size = bytes_below(model.folder)
    return Offer(
        model.name, "", 0, size, size + PROCESS_BYTES, f"built from {Path(model.source).name}" if model.source else ""
    )


def _new_offer(model: KnownModel, result: Listing | GenaiError | None) -> Offer | None:
    size, gated = model.download_bytes, model.gated
    if isinstance(result, GenaiError):
        return None
    if result is not None:
        try:
            size = sum(file.size for file in choose(result).files)
        except DownloadError:
            return None
        gated = result.gated
    has_token = False
    with suppress(ImportError):
        from huggingface_hub import get_token

        has_token = bool(get_token())
    note = ""
    if gated:
        note = f"gated: first accept the licence at {page_of(model.repository)}" + (
            "" if has_token else ", and set HF_TOKEN"
        )
    return Offer(model.name, model.good_for, size, model.size_bytes, model.memory_bytes, note)
