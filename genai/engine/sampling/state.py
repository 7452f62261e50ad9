"""The state of a sequence's sampler, without the tokens: enough to continue with identical results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import StateError
from .params import SamplingParams
from .plan import RowSampler


@dataclass(frozen=True)
class SamplerState:
    """A sampler's state between two tokens. Random numbers need no state: they depend only on seed, row and position.

    Attributes:
        params: the request's sampling options.
        seed, row: keys of the sampler's random numbers.
        prompt_length: number of prompt tokens.
        surprise_limit: Mirostat's limit, in bits.
        forbidden: token ids that may not come next.
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
        """Return the state of a row."""
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
        """Restore the state in a row that already has the tokens."""
        row.restore(self.surprise_limit if self.params.mirostat else None, self.forbidden)
        row.padding = self.padding

    def as_json(self) -> dict[str, Any]:
        """Return the state as JSON values.

        Raises:
            StateError: the request has logits processors, which a file cannot hold.
        """
        if self.params.logits_processors:
            raise StateError(
                "a sampler with logits_processors cannot be saved",
                "logits processors are Python functions, and a state file never contains code",
                "save the state without logits_processors, and pass the processors again when you continue",
            )
        usual = SamplingParams().as_dict()
        options = {name: value for name, value in self.params.as_dict().items() if value != usual[name]}
        return {**vars(self), "params": options, "forbidden": list(self.forbidden)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any], num_tokens: int) -> SamplerState:
        """Create a state from the result of `as_json`, for a sequence of `num_tokens` tokens.

        Raises:
            ValueError, TypeError, KeyError: the content is invalid. OptionError is a ValueError.
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
        # Validated like options from a caller.
        params = SamplingParams.from_options(options)
        return cls(params, surprise_limit=limit, forbidden=forbidden, **whole)
