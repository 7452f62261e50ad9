"""What a sequence's sampler remembers, apart from its tokens: enough to go on as if nothing had come between."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import StateError
from .params import SamplingParams
from .plan import RowSampler


@dataclass(frozen=True)
class SamplerState:
    """A sampler between two tokens. Random numbers depend on seed, row and position alone: there is no state of them.

    Attributes:
        params: what the request asked for.
        seed, row: of its random numbers.
        prompt_length: so many of the tokens are the prompt.
        surprise_limit: Mirostat's, in bits. forbidden: ids that may not come next.
        padding: see RowSampler.
    """

    params: SamplingParams
    seed: int
    row: int
    prompt_length: int
    surprise_limit: float = 0.0
    forbidden: tuple[int, ...] = ()
    padding: int = 0

    @classmethod
    def of(cls, row: RowSampler) -> SamplerState:
        """That of a row."""
        return cls(
            row.plan.params,
            row.seed,
            row.row,
            row.prompt_length,
            row.surprise_limit if row.plan.params.mirostat else 0.0,
            row.forbidden_now,
            row.padding,
        )

    def put_into(self, row: RowSampler) -> None:
        """Let a row, whose tokens are there, go on from here."""
        row.restore(self.surprise_limit if self.params.mirostat else None, self.forbidden)
        row.padding = self.padding

    def as_json(self) -> dict[str, Any]:
        """Values that JSON has.

        Raises:
            StateError: the request has functions, which a file cannot hold.
        """
        if self.params.logits_processors:
            raise StateError(
                "a sampler with logits_processors cannot be saved",
                "they are functions of this process, and nothing in a state file is ever executed",
                "save a state without them, and give them again when it goes on",
            )
        usual = SamplingParams().as_dict()
        options = {name: value for name, value in self.params.as_dict().items() if value != usual[name]}
        return {**vars(self), "params": options, "forbidden": list(self.forbidden)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any], num_tokens: int) -> SamplerState:
        """From what `as_json` gave; of a sequence of so many tokens.

        Raises:
            ValueError, TypeError, KeyError: it says something else. OptionError is one of them.
        """
        options = {**content["params"]}
        if "logits_processors" in options:
            raise ValueError("functions")
        whole = {name: content[name] for name in ("seed", "row", "prompt_length", "padding")}
        limits = {"seed": 2**64, "row": 2**31, "prompt_length": num_tokens + 1, "padding": 2**31}
        forbidden = tuple(content["forbidden"])
        for name, value in [*whole.items(), *(("forbidden", token) for token in forbidden)]:
            if type(value) is not int or not 0 <= value < limits.get(name, 2**31):
                raise ValueError(f"{name} = {value!r:.40}")
        limit = float(content["surprise_limit"])
        if not abs(limit) < 1e9:
            raise ValueError(f"surprise_limit = {limit}")
        # Checked like any that a caller gives.
        params = SamplingParams.from_options(options)
        return cls(params, surprise_limit=limit, forbidden=forbidden, **whole)
