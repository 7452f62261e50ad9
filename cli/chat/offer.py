"""The question of `genai chat` without a model on a terminal: which model to chat with."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from genai.common.memory_limits import format_bytes as size
from genai.common.progress import task
from genai.errors import ModelFolderError

from ..model_names import model_path
from ..terminal import say, typed_line

if TYPE_CHECKING:
    from genai.hub.offers import Offer

_MEASURING_SECONDS = 0.1


def on_terminal() -> bool:
    """Return True if a user can read the question and answer it."""
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))


def choose_model() -> Path | None:
    """Offer models, and return the user's choice; None = the bundled model.

    Raises typer.Exit at the end of the input.
    """
    offers, unreachable = _offers()
    if unreachable:
        say(f"genai: no models can be downloaded now: {unreachable}")
    if not offers:
        say("genai: starting pebble, the bundled model, which is a small demonstration")
        return None
    _show(offers)
    while True:
        typed = typed_line(f"Model [1-{len(offers)}, a name, or Enter for pebble]: ")
        answer = typed.strip()
        if not typed:
            say("\ngenai: no model was chosen")
            raise typer.Exit(1)
        if not answer:
            return None
        if not answer.isascii() or not answer.isdigit():
            if (named := _named(answer)) is not None:
                return named
            continue
        if 1 <= int(answer[:9]) <= len(offers):
            return Path(offers[int(answer) - 1].name)
        say(f"genai: there is no number {answer:.9}; the numbers are 1 to {len(offers)}")


def _named(answer: str) -> Path | None:
    """Return the model that the user typed the name or path of, or None with a message."""
    from genai.hub.local import may_be_model
    from genai.lora.named import split_adapter
    from genai.models.folders import not_a_folder

    try:
        if not may_be_model(split_adapter(answer)[0]):
            raise not_a_folder(Path(answer))
        return model_path(answer)
    except ModelFolderError as error:
        say(f"genai: {error.what}: {error.why}; {error.fix}")
        return None


def _offers() -> tuple[list[Offer], str]:
    """Return the models that fit in memory, and the reason if the hub cannot be reached."""
    from genai.common.memory_limits import available_memory
    from genai.hub.offers import cached_offers, lookup, new_offers
    from genai.hub.references import endpoint, offline

    lookups = lookup()  # runs while the cache is read
    with task("Reading the cache"):
        offers = [offer for offer in cached_offers() if not _is_encoder(offer.name)]
    with task("Reading the cache" if offline() else f"Looking up models at {endpoint()}"):
        new, unreachable = new_offers(lookups.results())
    free = available_memory()
    fitting = [offer for offer in (*offers, *new) if offer.memory_bytes < free]
    if hidden := len(offers) + len(new) - len(fitting):
        say(f"genai: {hidden} {'model needs' if hidden == 1 else 'models need'} more memory than the {size(free)} free")
    return fitting, unreachable


def _is_encoder(name: str) -> bool:
    from genai.convert.encoders.build import is_encoder_checkpoint
    from genai.hub.local import pulled_model

    pulled = pulled_model(name)
    return pulled is not None and is_encoder_checkpoint(pulled.path)


def _show(offers: list[Offer]) -> None:
    bandwidth = _bandwidth()
    say("genai: choose a model to chat with:")
    for number, offer in enumerate(offers, 1):
        good_for = f": {offer.good_for}" if offer.good_for else ""
        say(f"{number:>3}  {offer.name}{good_for}")
        figures = [f"download {size(offer.download_bytes)}" if offer.download_bytes else "in the cache"]
        figures.append(f"memory {size(offer.memory_bytes)}")
        if bandwidth:
            figures.append(f"about {_rounded(bandwidth / offer.size_bytes)} tokens/s")
        say(f"     {', '.join([*figures, *([offer.note] if offer.note else [])])}")
    say("Enter: pebble, the bundled model, which is a small demonstration: simple questions in English, no download")
    if bandwidth:
        say(
            f"Speeds are estimates for int4 weights on this CPU: its memory bandwidth, measured now "
            f"({bandwidth / 1e9:.0f} GB/s), divided by the bytes that a token reads. The real speed is lower."
        )


def _bandwidth() -> float:
    """Return the memory bandwidth in bytes per second; 0 if there is too little memory to measure it."""
    from genai.common.memory_limits import available_memory

    with task("Measuring the memory bandwidth"):
        from genai.doctor.processor import read_processor
        from genai.doctor.speeds import buffer_size, measure_bandwidth

        buffer = buffer_size(read_processor().last_level_cache, available_memory())
        if buffer < 1 << 20:
            return 0.0
        return measure_bandwidth(buffer, seconds=_MEASURING_SECONDS).bytes_per_second


def _rounded(speed: float) -> str:
    """Format a speed with at most two digits, because it is an estimate."""
    return f"{speed:.1f}" if speed < 10 else f"{int(float(f'{speed:.2g}')):,}"
