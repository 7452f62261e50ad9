"""The composition of a model's step time on a GPU: a stage of tools/gpu_day.py.

All kernels with the same name are captured as a separate graph, which is timed. The graph contains the kernels of all
layers, so that no weight stays in a cache.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from genai.bench.speed import prefill_seconds
from genai.compat.onnxruntime_genai.generator import Generator, GeneratorParams
from genai.engine.paged import PagedDecoder
from genai.kernels.cuda.executor import CudaStep
from genai.models.model import Model

_WARM_STEPS, _STEPS, _PROMPTS, _LEAST_SHARE = 8, 64, 5, 0.01
Seconds = Callable[[Any, Callable[[], None]], float]
"""A function that returns the time that a driver's work takes on the GPU, by the GPU's clock."""


class _Counted:
    """A driver that counts its launches."""

    def __init__(self, driver: Any) -> None:
        self._driver, self.launches = driver, 0

    def launch(self, *arguments: Any) -> None:
        self.launches += 1
        self._driver.launch(*arguments)


def measured_steps(
    folder: Path | None, device: str, seconds: Seconds, *, batches: tuple[int, ...], context: int,
    prompts: tuple[int, ...] = (),
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Measure steps of `batches` sequences with `context` tokens: the whole step on the host, its graph, and kernels.

    For each length in `prompts`, also measure the time from a whole prompt to its logits.
    """
    longest = max([context + _WARM_STEPS + _STEPS, *prompts])
    with Model(folder, device=device, quiet=True, context_size=longest + 1) as model:
        decoder = model.decoder
        assert isinstance(decoder, PagedDecoder) and isinstance(decoder.run, CudaStep)
        for batch in batches:
            with _generator(model, batch, context) as generator:
                for _ in range(_WARM_STEPS):
                    generator.generate_next_token()
                begin = time.perf_counter()
                for _ in range(_STEPS):
                    generator.generate_next_token()
                whole = (time.perf_counter() - begin) / _STEPS
                yield from _rows(decoder.run, seconds, f"steps of {batch}", whole, batch)
        for tokens in prompts:
            taken = float(np.median([prefill_seconds(model, tokens) for _ in range(1 + _PROMPTS)][1:]))
            yield {"what": f"a prompt of {tokens}", "us": taken * 1e6, "tok/s": tokens / taken}


def _generator(model: Model, batch: int, context: int) -> Generator:
    length = context + _WARM_STEPS + _STEPS + 1
    params = GeneratorParams(model)
    params.set_search_options(do_sample=False, batch_size=batch, max_length=length, min_length=length)
    generator = Generator(model, params)
    ids = np.random.default_rng(batch).integers(0, model.config.model.vocab_size, (batch, context))
    generator.append_tokens(ids.tolist())
    return generator


def _rows(run: CudaStep, seconds: Seconds, what: str, whole: float, batch: int) -> Iterator[dict[str, Any]]:
    driver, starts, functions, counts = run.launched()
    kinds = defaultdict(list)
    for start in starts:
        kinds[" + ".join(sorted({kernel.name for kernel in start.kernels}))].append(start)

    def captured(ones: list[Any]) -> tuple[Any, int]:
        counted = _Counted(driver)
        graph = driver.capture(lambda: [one.start(counted, functions, counts) for one in ones] and None)
        return graph, counted.launches

    graph, launches = captured(list(starts))
    total = seconds(driver, lambda: driver.launch_graph(graph))
    yield {
        "what": what, "us": whole * 1e6, "tok/s": batch / whole, "us of its graph": total * 1e6,
        "tok/s of its graph": batch / total, "kernels": launches,
    }  # fmt: skip
    for name, ones in kinds.items():
        graph, launches = captured(ones)
        if not launches:
            continue
        taken = seconds(driver, lambda graph=graph: driver.launch_graph(graph))  # type: ignore[misc]
        if taken >= _LEAST_SHARE * total:
            yield {"what": f"{what}: {name}", "kernels": launches, "us": taken * 1e6, "us each": taken * 1e6 / launches}
