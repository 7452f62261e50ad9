"""Tokenizer: the core class, with batches as Tensors, marker ids, and options that may be strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...errors import TokenizerError
from ...models.config import Config
from ...models.side_files import SideFiles
from ...text import tokenizer as core
from .tensor import Tensor


def _marker(name: str, marks: str) -> property:
    """Create a property for a token id that genai_config.json may define."""

    def read(self: Tokenizer) -> int:
        if name not in self._markers:
            raise TokenizerError(
                f"{name} is not defined for this model",
                "the key is missing from the model section of genai_config.json",
                "add the key to this section, or look up the token id with to_token_id()",
            )
        return self._markers[name]

    read.__doc__ = f"The id that {marks}.\n\nRaises:\n    TokenizerError: genai_config.json does not define the id."
    return property(read)


_MARKERS = ("bot_token_id", "eot_token_id", "bor_token_id", "eor_token_id")
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


def _as_bool(value: Any) -> Any:
    """Convert the text of a boolean to a bool. Return other values unchanged; they are checked later."""
    return _BOOLEANS.get(value.lower(), value) if isinstance(value, str) else value


class Tokenizer(core.Tokenizer):
    __doc__ = core.Tokenizer.__doc__
    _streams_continue = True  # as in onnxruntime-genai

    def _load(self, files: SideFiles, config: Config | None) -> None:
        super()._load(files, config)
        model = config.raw["model"] if config is not None else {}
        self._markers = {name: int(model[name]) for name in _MARKERS if model.get(name, -1) >= 0}

    bot_token_id = _marker("bot_token_id", "begins a tool call")
    eot_token_id = _marker("eot_token_id", "ends a tool call")
    bor_token_id = _marker("bor_token_id", "begins reasoning")
    eor_token_id = _marker("eor_token_id", "ends reasoning")

    def update_options(self, **options: bool | str) -> None:
        """Set options of later calls.

        Args:
            options: add_special_tokens (encode adds the special tokens of the tokenizer's post-processor, such as BOS;
                default False), skip_special_tokens (decode omits special tokens; default True). Values are booleans,
                or the strings "true" and "false".

        Raises:
            OptionError: no option was passed, an option is unknown, or a value is not a boolean.
        """
        super().update_options(**{name: _as_bool(value) for name, value in options.items()})

    def encode_batch(self, texts: Sequence[str]) -> Tensor:  # type: ignore[override]  # a Tensor, as scripts expect it
        """Return the token ids of several texts, int32 [B, L], with short rows padded on the right with pad_token_id.

        Raises:
            InputError: texts is empty or is not a list of strings.
            TokenizerError: rows differ in length and there is no padding id.
        """
        rows = self._encoded_rows(texts)
        tensor = Tensor(self._filled(rows))
        tensor.row_lengths = tuple(map(len, rows))
        return tensor
