"""Options that several commands share, declared once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from genai.model import Model

ModelArgument = Annotated[
    Path | None, typer.Argument(help="Model folder; without it, the bundled model.", show_default=False)
]
Build = Annotated[
    bool,
    typer.Option("--build/--no-build", help="Build a model where MODEL is a Hugging Face checkpoint, the first time."),
]
Threads = Annotated[
    int | None, typer.Option("-t", "--threads", help="CPU threads [default: physical cores].", show_default=False)
]
Accuracy = Annotated[str, typer.Option(help='"auto" obeys the model; "fp32" keeps activations and cache in fp32.')]
KvType = Annotated[str, typer.Option("--kv-type", help="Type of cached keys and values: auto, fp16 or fp32.")]
MaxTokens = Annotated[
    int | None,
    typer.Option("-n", "--max-tokens", help="Most tokens per reply [default: what fits].", show_default=False),
]
Temperature = Annotated[
    float | None,
    typer.Option(help="Sample at this temperature; 0 = greedy [default: the model's].", show_default=False),
]
TopK = Annotated[int | None, typer.Option(help="Sample among the k most likely tokens; 0 = all.", show_default=False)]
TopP = Annotated[
    float | None,
    typer.Option(help="Sample among the most likely tokens up to this probability.", show_default=False),
]
Seed = Annotated[int | None, typer.Option(help="Seed of the random numbers; same seed, same text.", show_default=False)]
RepeatPenalty = Annotated[
    float | None, typer.Option(help="Above 1, tokens that occurred become less likely.", show_default=False)
]
Stats = Annotated[
    bool | None, typer.Option("--stats/--no-stats", help="Figures after each reply, on stderr.", show_default=False)
]


def search_options(
    temperature: float | None, top_k: int | None, top_p: float | None, seed: int | None, repeat_penalty: float | None
) -> dict[str, Any]:
    """Search options from flags; asking for a temperature, top-k, top-p or seed asks for sampling.

    Raises:
        OptionError: flags that contradict each other.
    """
    from genai.errors import OptionError

    asked = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "random_seed": seed}
    options: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    if temperature == 0 and (extra := sorted(set(options) & {"top_k", "top_p"})):
        names = ", ".join(f"--{name.replace('_', '-')}" for name in extra)
        raise OptionError(
            f"--temperature 0 contradicts {names}",
            "temperature 0 is greedy: nothing is sampled",
            "leave one of them out",
        )
    if options:
        options["do_sample"] = temperature != 0
    if repeat_penalty is not None:
        options["repetition_penalty"] = repeat_penalty
    return options


def load(
    folder: Path | None, threads: int | None, accuracy: str = "auto", kv_type: str = "auto", build: bool = True
) -> Model:
    """Load a model folder, a Hugging Face checkpoint (built into the cache unless `build` is False), or our own."""
    from genai.bundled import bundled_model
    from genai.model import Model

    from .checkpoint import model_folder

    path = model_folder(folder, build=build) if folder else bundled_model()
    return Model(path, threads=threads, accuracy=accuracy, kv_dtype=kv_type)
