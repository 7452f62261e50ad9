"""`genai run`: runs any ONNX model on arrays from files, or on random inputs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from genai.common.progress import task
from genai.errors import GenaiError, OptionError, did_you_mean, whole_number

from .model_names import graph_path
from .options import check_apart
from .terminal import emit, emit_line, say

if TYPE_CHECKING:
    from genai.onnx.ir import Value
    from genai.session.config import SessionConfig
    from genai.session.session import Session

Named = list[str] | None
# The parameter is not named "model", because GENAI_MODEL (a model folder) would then be its default.
ModelFile = Annotated[Path, typer.Argument(metavar="MODEL.onnx", help="ONNX file.", parser=graph_path)]
# The number of missing inputs that an error lists.
_INPUTS_SHOWN = 3


def run(
    file: ModelFile,
    inputs: Annotated[
        Named, typer.Option("-i", "--input", help="NAME=FILE.npy, or an .npz file of named arrays.")
    ] = None,
    random: Annotated[bool, typer.Option("--random", help="Generate random values for missing inputs.")] = False,
    dims: Annotated[
        Named, typer.Option("--dim", help="NAME=EXTENT or INPUT:AXIS=EXTENT: size of a dimension of random inputs.")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the results to an .npz file.")] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Print the time per operator, and write a Chrome trace.")
    ] = False,
    compare: Annotated[str | None, typer.Option("--compare", help='Compare the results with "onnxruntime".')] = None,
    level: Annotated[str, typer.Option("--level", help="Graph optimisation: none, basic, extended or all.")] = "all",
    threads: Annotated[
        int | None, typer.Option("-t", "--threads", min=1, help="CPU threads [default: physical cores].")
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed for --random.", min=0)] = 0,
) -> None:
    """Run any ONNX model that is not a chat model: an encoder, a classifier, a vision or audio model, or a pipeline."""
    from genai.devices import compile_seconds
    from genai.session.arrays import PEERS, Peer, differences, peer_module, save_arrays
    from genai.session.session import Session

    _check_choice("--compare", compare, (None, *PEERS))
    if compare is not None:
        peer_module()  # before anything that takes long
    for given in (str(file), *(item.partition("=")[2] or item for item in inputs or [])):
        check_apart([("an input file", Path(given)), ("--output", output)])
    if output is not None and output.suffix.lower() != ".npz":
        raise OptionError(
            f"--output {output}: unknown ending {output.suffix!r}",
            "the results are written as arrays in an .npz file of NumPy",
            f"choose a name that ends in .npz, such as {output.with_suffix('.npz')}",
        )
    with task(f"Loading {file.name}"):
        session = Session(file, _config(level, threads or 0, profile))

    feed = _Feed(session, _given(inputs or []), random, extents(dims or []), seed, file)
    began, compiled = time.perf_counter(), compile_seconds()
    with task(f"Running {file.name}"):
        results = feed.run()
    took, compiling = time.perf_counter() - began, compile_seconds() - compiled
    say(
        f"{(took - compiling) * 1e3:.1f} ms"
        + (f", plus {compiling:.1f} s to compile kernels (once)" if compiling else "")
    )
    for name, value in results.items():
        emit_line(f"{name}: {_summary(value)}")
    if output is not None:
        save_arrays(output, results)
    if compare is not None:
        with task("Running onnxruntime"):
            expected = Peer(str(file), threads or 0).run(feed.arrays)
        emit("largest differences from onnxruntime:", "\n")
        for name, absolute, relative in differences(results, expected):
            emit_line(f"  {name}: {absolute:.3g} ({relative:.2g} relative to the largest value)")
    if session.profiler is not None:
        totals = session.profiler.totals()
        width = max(map(len, totals), default=0)
        for name, (calls, nanoseconds) in totals.items():
            emit(f"{name:<{width}} {calls:>6} calls {nanoseconds / 1e6:>10.3f} ms", "\n")
        say(f"trace: {session.profiler.write()}")


def _config(level: str, threads: int, profile: bool) -> SessionConfig:
    from genai.optimize.base import Level
    from genai.session.config import SessionConfig

    levels = {known.name.lower(): known for known in Level}
    _check_choice("--level", level, tuple(levels))
    return SessionConfig(level=levels[level], threads=threads, profile_prefix="genai_profile" if profile else None)


def _check_choice(flag: str, value: str | None, choices: tuple[str | None, ...]) -> None:
    if value not in choices:
        known = ", ".join(choice for choice in choices if choice)
        raise OptionError(f"{flag} is {value!r}", f"allowed: {known}", "use one of these values")


def extents(dims: list[str]) -> dict[str, int]:
    """Parse NAME=EXTENT flags into a dictionary."""
    sizes = {}
    for item in dims:
        name, _, digits = item.rpartition("=")
        extent = whole_number(digits)
        if name and digits.startswith("-") and whole_number(digits[1:]) is not None:
            raise OptionError(f"--dim is {item!r:.200}", "a size cannot be negative", "use a whole number from 0")
        if not name or extent is None:
            raise OptionError(
                f"--dim is {item!r:.200}",
                "the form NAME=EXTENT is expected; an unnamed dimension is INPUT:AXIS",
                "for example, use --dim batch=4 or --dim image:0=4",
            )
        sizes[name] = extent
    return sizes


def _given(inputs: list[str]) -> dict[str, Any]:
    """Return the arrays of --input."""
    from genai.session.arrays import load_arrays

    feed: dict[str, Any] = {}
    for item in inputs:
        name, equals, path = item.partition("=")
        if equals:
            arrays = load_arrays(Path(path))
            if len(arrays) != 1:
                raise OptionError(
                    f"--input {item!r} is ambiguous",
                    f"the file has {len(arrays)} arrays",
                    "pass the .npz file without NAME=",
                )
            feed[name] = next(iter(arrays.values()))
        else:
            feed.update(load_arrays(Path(item)))
    return feed


class _Feed:
    """The arrays of a run: those of --input, and random ones for the other inputs."""

    def __init__(
        self, session: Session, given: dict[str, Any], random: bool, dims: dict[str, int], seed: int, file: Path
    ) -> None:
        from genai.session.arrays import random_feed
        from genai.session.dimensions import Sizes, sizes_in

        found = session.head_sizes | sizes_in(session.inputs, given)
        self._session, self._given, self._sizes = session, given, Sizes(session.inputs, dims, found)
        if dims and not random:
            raise OptionError(
                "--dim cannot be used without --random",
                "--dim sets the size of random inputs",
                "add --random, or remove --dim",
            )
        _check_names(given, [value.name for value in (*session.inputs, *session.overridable)], file)
        self._random = [value for value in session.inputs if value.name not in given]
        if self._random and not random:
            raise _no_values(self._random, file)
        self.arrays = {**random_feed(self._random, self._sizes, seed, session.table_sizes), **given}

    def run(self) -> dict[str, Any]:
        """Return the results. An error names the random inputs, unless it concerns an input of --input."""
        from genai.session.arrays import with_chosen_sizes

        try:
            return self._session.run(self.arrays)
        except GenaiError as error:
            if not self._random or any(repr(name) in error.what for name in self._given):
                raise
            raise with_chosen_sizes(error, self._random, self.arrays, self._sizes) from error


def _check_names(given: Iterable[str], names: Sequence[str], file: Path) -> None:
    """Raise OptionError if --input names an input that the model does not have."""
    for name in given:
        if name not in names:
            raise OptionError(
                f"--input {name}: {file} has no input {name!r}",
                f"the inputs are {', '.join(names)}"[:500] if names else "the model has no inputs",
                did_you_mean(name, names, "use one of these names" if names else "remove --input"),
            )


def _no_values(missing: list[Value], file: Path) -> OptionError:
    from genai.session.arguments import shape_of

    shown = [f"{one.name} {one.type or ''}{shape_of(one)}" for one in missing[:_INPUTS_SHOWN]]
    rest = f" and {len(missing) - len(shown)} more (`genai info {file}`)" if missing[_INPUTS_SHOWN:] else ""
    chat = f"; to chat with the model that the file belongs to, use `genai chat {file.parent}`"
    fix = "add --input NAME=FILE.npy or --random" + chat * (file.parent / "genai_config.json").is_file()
    return OptionError(f"no value for input {', '.join(shown)}{rest}", "every input needs a value", fix)


def _summary(value: Any) -> str:
    import numpy as np

    if not isinstance(value, np.ndarray):
        return f"{type(value).__name__} of {len(value)}" if isinstance(value, list | dict) else repr(value)
    text = f"{value.dtype.name}{list(value.shape)}"
    if value.dtype.kind in "fiu" and value.size:
        text += f" min {value.min():.6g} mean {value.mean():.6g} max {value.max():.6g}"
    return text
