"""What `genai eval kld` and `diff` share: two models, or one model run in two ways; and JSON of results."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options as opt

if TYPE_CHECKING:
    from genai.model import Model

OtherArgument = Annotated[
    Path | None, typer.Argument(help="The other model's folder [default: BASE again].", show_default=False)
]
OtherAccuracy = Annotated[
    str | None, typer.Option(help="--accuracy for OTHER [default: as for BASE].", show_default=False)
]
OtherKvType = Annotated[
    str | None, typer.Option("--other-kv-type", help="--kv-type for OTHER [default: as for BASE].", show_default=False)
]
Bos = Annotated[
    bool | None,
    typer.Option("--bos/--no-bos", help="Begin with BOS [default: as the tokenizer does].", show_default=False),
]


@dataclasses.dataclass(frozen=True)
class Side:
    """A model folder (None = the bundled one) and how its engine is to compute."""

    folder: Path | None
    flags: opt.ModelFlags

    def load(self) -> Model:
        """The model."""
        return self.flags.load(self.folder)


def sides(
    base: Path | None, other: Path | None, flags: opt.ModelFlags, other_accuracy: str | None, other_kv_type: str | None
) -> tuple[Side, Side]:
    """Both sides; what is not said of OTHER is as for BASE."""
    other_flags = dataclasses.replace(
        flags,
        accuracy=flags.accuracy if other_accuracy is None else other_accuracy,
        kv_type=flags.kv_type if other_kv_type is None else other_kv_type,
    )
    return Side(base, flags), Side(base if other is None else other, other_flags)


@contextmanager
def loaded(base: Side, other: Side) -> Iterator[tuple[Model, Model]]:
    """Both models; equal sides are loaded once."""
    with ExitStack() as stack:
        first = stack.enter_context(base.load())
        if other == base:
            yield first, first
        else:
            yield first, stack.enter_context(other.load())


def to_json(result: Any, **more: Any) -> str:
    """A result dataclass as one line of JSON; numbers that JSON cannot hold (NaN, infinity) become null."""
    return json.dumps(_plain(dataclasses.asdict(result) | more))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
