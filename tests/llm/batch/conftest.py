"""A fake model that is only a function, so that tests of batch runs are fast."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from genai.errors import GenaiError
from genai.llm.batch.settings import ModelSettings
from genai.llm.completion import Completion, Timings
from genai.llm.mapping import Answer, MapFigures


class FakeLLM:
    """Replies to each prompt with the prompt reversed. Of ten lines in the window, the last one finishes first."""

    model = SimpleNamespace(folder=Path("/models/fake"))
    tokenizer = SimpleNamespace(decode=lambda ids: f"<{ids[0]}>", templates_key=lambda: "no template")

    def settings(self) -> ModelSettings:
        return ModelSettings("fake", "none")

    def params(self, **options: Any) -> None:
        pass

    def map(
        self, items: Iterable[Any], ask: Callable[[Any], Mapping[str, Any]], *, in_order: bool, window: int,
        progress: Callable[[MapFigures], object], **options: Any,
    ) -> Iterator[Answer[Any]]:  # fmt: skip
        ahead: list[Answer[Any]] = []
        figures = MapFigures()
        for index, item in enumerate(items):
            try:
                prompt = str(ask(item).get("prompt"))
                done = Completion(prompt[::-1], tuple(range(len(prompt))), "stop", 2, 3, 1, Timings(), 7)
                ahead.append(Answer(index, item, (done,)))
            except GenaiError as error:
                ahead.append(Answer(index, item, error=error))
            figures = MapFigures(index + 1, 0, 3 * index, index, 5 * index, 0.1 * (index + 1))
            progress(figures)
            if len(ahead) == 10:
                yield from ahead if in_order else reversed(ahead)
                ahead = []
        yield from ahead


@pytest.fixture
def fake() -> FakeLLM:
    return FakeLLM()


if __name__ == "__main__":  # a process that can be killed: INPUT OUTPUT BEGIN
    from genai.llm.batch.lines import open_lines
    from genai.llm.batch.run import run_batch

    run_batch(FakeLLM(), open_lines(Path(sys.argv[1])), Path(sys.argv[2]), begin=sys.argv[3])  # type: ignore[arg-type]
