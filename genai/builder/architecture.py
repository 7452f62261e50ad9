"""What a file of architectures/ says: the decoder as data, and where its weights lie in a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from .hf_config import HFConfig
from .spec import DecoderSpec

# Cuts one weight or bias out of the tensor that holds it: (spec, tensor, *numbers that the rule's pattern caught).
View = Callable[..., NDArray[Any]]


@dataclass(frozen=True)
class Rule:
    """Where a tensor lies: `pattern`, found in our name, is replaced by `replacement` (as re.sub does).

    A view then cuts it out of the tensor found there. With `stack`, the replacement ends in "{}" before what follows,
    and tensors numbered from 0 are put one after the other. `when` says which decoders it is for.
    """

    pattern: str
    replacement: str
    view: View | None = None
    stack: Callable[[DecoderSpec], int] | None = None
    when: Callable[[DecoderSpec], bool] = lambda spec: True


@dataclass(frozen=True)
class Source:
    """The tensors that one of ours is made of, and how."""

    names: tuple[str, ...]
    view: Callable[[NDArray[Any]], NDArray[Any]] | None = None


@dataclass(frozen=True)
class Architecture:
    """One model_type.

    Attributes:
        model_type: as config.json names it.
        title: for people.
        describe: reads config.json.
        rules: applied in order to each of our tensor names, which are those of Llama, Qwen and Gemma 2.
        family: what genai_config.json calls it: a type that onnxruntime-genai knows, "decoder" for any.
    """

    model_type: str
    title: str
    describe: Callable[[HFConfig], DecoderSpec]
    rules: tuple[Rule, ...] = ()

    def source(self, spec: DecoderSpec, name: str) -> Source:
        """Where the tensor that we call `name` lies."""
        view: Callable[[NDArray[Any]], NDArray[Any]] | None = None
        names: tuple[str, ...] = (name,)
        for rule in self.rules:
            match = re.search(rule.pattern, names[0])
            if match is None or not rule.when(spec):
                continue
            renamed = re.sub(rule.pattern, rule.replacement, names[0], count=1)
            names = tuple(renamed.format(i) for i in range(rule.stack(spec))) if rule.stack else (renamed,)
            if rule.view is not None:
                view = _bound(rule.view, spec, match)
        return Source(names, view)


def _bound(view: View, spec: DecoderSpec, match: re.Match[str]) -> Callable[[NDArray[Any]], NDArray[Any]]:
    numbers = tuple(int(group) for group in match.groups())
    return lambda tensor: view(spec, tensor, *numbers)
