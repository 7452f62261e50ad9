"""Options that several commands share: declared once, they arrive in a command as one argument."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from genai.common.paths import expanded
from genai.errors import GenaiError, OptionError, did_you_mean

from .build import model_folder
from .help_page import ADVANCED, MODEL, OUTPUT, SAMPLING
from .terminal import Voice, interrupts_end_the_process

if TYPE_CHECKING:
    from genai.llm.llm import LLM
    from genai.llm.speculation import Speculation
    from genai.models.model import Model

model_option = functools.partial(typer.Option, rich_help_panel=MODEL)
output_option = functools.partial(typer.Option, rich_help_panel=OUTPUT)
ModelArgument = Annotated[Path | None, typer.Argument(help="Model folder, or org/name; without it, the bundled model.")]
Build = Annotated[
    bool,
    model_option(
        "--build/--no-build", help="If MODEL is a Hugging Face checkpoint or a GGUF file, build a model from it once."
    ),
]
Precision = Annotated[
    str | None, model_option(help="Build MODEL's checkpoint with weights of int4, int8, fp16 or fp32 [default: int4].")
]
Yes = Annotated[bool, model_option("--yes", help="If MODEL has to be downloaded, do not ask.")]
ThreadsOption = Annotated[int | None, model_option("-t", "--threads", help="CPU threads [default: physical cores].")]
Accuracy = Annotated[str, model_option(help='Activations: "auto" as the model says, "fp32" or "int8".')]
_DEVICE_HELP = (
    '"cpu", "cuda" or "cuda:1": a GPU, "auto", or "reference": NumPy, slow '
    "[default: what MODEL's genai_config.json asks for, else cpu]."
)
Device = Annotated[str | None, model_option(help=_DEVICE_HELP)]
_KV_HELP = "Cached keys and values: auto, fp16, fp32, int8 or int4; on a GPU also bf16 or fp8."
KvType = Annotated[str, model_option("--kv-type", help=_KV_HELP)]
KvForce = Annotated[bool, model_option("--kv-force", help="Take int4 keys and values whatever they cost.")]
CtxSize = Annotated[
    int | None, model_option("-c", "--ctx-size", help="Context in tokens [default: what fits in half of free memory].")
]
Lora = Annotated[
    list[str] | None,
    model_option("--lora", help="NAME=PATH[:SCALE]: use this adapter; may be given several times."),
]
PrefixCache = Annotated[
    Path | None,
    model_option("--prefix-cache", help="Keep beginnings of prompts in this folder, for later runs and others."),
]
PrefixCacheSize = Annotated[
    float | None, model_option("--prefix-cache-size", help="Most GiB that --prefix-cache takes [default: 4].")
]
Draft = Annotated[
    str | None, model_option("--draft", help="A smaller model with the same vocabulary that guesses tokens ahead.")
]
Speculate = Annotated[
    str | None,
    model_option(
        "--speculate", help="Guess tokens from what came before: lookup, off, or auto (where it is possible)."
    ),
]
LookupFile = Annotated[
    Path | None, model_option("--lookup-file", help="A text in which guesses are looked up as well.")
]
DumpPrompt = Annotated[bool, output_option("--dump-prompt", help="Show the exact prompt and its tokens on stderr.")]
CtxShift = Annotated[
    bool,
    model_option(
        "--ctx-shift", help="Where the context is full, forget the older half of it but its beginning, and go on."
    ),
]
CtxKeep = Annotated[
    int | None, model_option("--ctx-keep", help="With --ctx-shift: first tokens that stay [default: 32].", min=1)
]
Stats = Annotated[bool | None, output_option("--stats/--no-stats", help="Show figures after each reply, on stderr.")]
AsJson = Annotated[bool, output_option("--json", help="Print the result as JSON.")]
Quiet = Annotated[bool, output_option("-q", "--quiet", help="Print nothing on stderr but warnings and errors.")]
Verbose = Annotated[bool, output_option("-v", "--verbose", help="Print more on stderr.")]


@dataclass(frozen=True)
class ModelFlags:
    """How a model computes."""

    threads: ThreadsOption = None
    accuracy: Accuracy = "auto"
    kv_type: KvType = "auto"
    kv_force: KvForce = False
    device: Device = None

    def load(self, folder: Path | None, *, lora: bool = False) -> Model:
        """Load a model folder, a Hugging Face checkpoint (built into the cache if need be), or the bundled model."""
        from genai.models.kv_types import check_here
        from genai.models.model_options import check_model_options

        check_model_options(**self.options)  # before a model is fetched or built
        from genai.models.model import Model

        with interrupts_end_the_process():
            check_here(self.device, self.kv_type)
            return Model(folder_of(folder), lora=lora, **self.options)

    @property
    def options(self) -> dict[str, Any]:
        """What genai.Model takes."""
        return {
            "threads": self.threads,
            "accuracy": self.accuracy,
            "kv_dtype": self.kv_type,
            "kv_dtype_force": self.kv_force,
            "device": self.device,
        }


def folder_of(model: Path | None, *, build: bool = True, precision: str | None = None, yes: bool = False) -> Path:
    """The model folder that MODEL stands for: pulled and built if need be, or that of the bundled model."""
    from genai.models.folders import bundled_model

    if model is None and precision is not None:
        raise OptionError(
            f"--precision {precision} without MODEL", "the bundled model is built already", "name a checkpoint"
        )
    return model_folder(model, build=build, precision=precision, yes=yes) if model else bundled_model()


@dataclass(frozen=True)
class EngineFlags(ModelFlags):
    """What all commands share that generate."""

    ctx_size: CtxSize = None
    build: Build = True
    precision: Precision = None
    yes: Yes = False
    lora: Lora = None
    prefix_cache: PrefixCache = None
    prefix_cache_size: PrefixCacheSize = None
    draft: Draft = None
    speculate: Speculate = None
    lookup_file: LookupFile = None
    quiet: Quiet = False
    verbose: Verbose = False

    @property
    def adapter(self) -> dict[str, float] | None:
        """What requests go through: all that --lora names, or None."""
        return {name: 1.0 for name, _, _ in map(read_lora, self.lora or ())} or None

    def speculation(self) -> Speculation | str:
        """What genai.LLM takes."""
        from genai.llm.speculation import WAYS, Speculation

        if self.speculate is not None and self.speculate not in WAYS:
            fix = did_you_mean(self.speculate, WAYS, "leave it out")
            raise OptionError(f"--speculate {self.speculate!r}", f"allowed: {', '.join(WAYS)}", fix)
        named = [name for name, given in (("--draft", self.draft), ("--lookup-file", self.lookup_file)) if given]
        if not named:
            return self.speculate or "off"
        if self.speculate == "off":
            raise OptionError(f"{named[0]} with --speculate off", "it guesses tokens", "leave one of the two out")
        draft = folder_of(Path(self.draft), build=self.build) if self.draft else None
        return Speculation(lookup_file=self.lookup_file, draft=draft)

    @property
    def prefix_options(self) -> dict[str, Any]:
        """What LLM takes of the prefix cache on disk."""
        size = self.prefix_cache_size
        if size is not None and not 0 < size < 2**20:
            raise OptionError(f"--prefix-cache-size {size}", "a number of GiB above 0 is expected", "such as 4")
        options = {"prefix_cache_dir": self.prefix_cache, "prefix_cache_bytes": size and max(1, int(size * 2**30))}
        return {name: value for name, value in options.items() if value is not None}

    @property
    def voice(self) -> Voice:
        """What is said besides the text."""
        return Voice(quiet=self.quiet, verbose=self.verbose)

    def folder_of(self, model: Path | None) -> Path:
        """The model folder that MODEL stands for; a GPU that is asked for is looked for first."""
        from genai.models.kv_types import check_here

        check_here(self.device, self.kv_type)
        return folder_of(model, build=self.build, precision=self.precision, yes=self.yes)

    def load_llm(self, folder: Path | None, *, alone: bool = True, **options: Any) -> LLM:
        """Load a model folder, a checkpoint (unless `build` is off, built if need be) or the bundled model.

        Where nothing else is going on (`alone`), Ctrl-C may end the process. `options` are further ones of LLM.
        """
        from genai.llm.llm import LLM
        from genai.lora.parameters import adapter_path
        from genai.models.model_options import check_model_options

        check_model_options(**self.options, context_size=self.ctx_size)
        adapters = [read_lora(text) for text in self.lora or ()]
        for _, path, _ in adapters:
            adapter_path(path)  # what is mistyped is said before the model is loaded
        folder = self.folder_of(folder)
        options["speculation"] = self.speculation()
        with interrupts_end_the_process() if alone else nullcontext():
            llm = LLM(
                folder,
                context_size=self.ctx_size,
                quiet=self.quiet,
                lora=bool(adapters),
                **self.options,
                **self.prefix_options,
                **options,
            )
        try:
            for name, path, scale in adapters:
                llm.load_adapter(path, name, scale)
        except BaseException:
            llm.close()
            raise
        model, voice = llm.model, self.voice
        voice.detail(f"{model.folder}: {model.info.parameters:,} parameters, cache {model.info.kv_dtype}")
        if model.config.ignored_keys:
            voice.detail(f"config keys without effect here: {', '.join(model.config.ignored_keys)}")
        return llm


@dataclass(frozen=True)
class TextFlags(EngineFlags):
    """What all commands share that show the text which is generated."""

    show_prompt: DumpPrompt = False
    stats: Stats = None
    ctx_shift: CtxShift = False
    ctx_keep: CtxKeep = None

    @property
    def shift(self) -> bool | int:
        """What requests take as ctx_shift."""
        return shift_of(self.ctx_shift, self.ctx_keep)


def shift_of(ctx_shift: bool, ctx_keep: int | None) -> bool | int:
    """What --ctx-shift and --ctx-keep say together."""
    if ctx_keep is not None and not ctx_shift:
        raise OptionError(f"--ctx-keep {ctx_keep} without --ctx-shift", "nothing is forgotten", "add --ctx-shift")
    return ctx_keep or ctx_shift


def read_lora(text: str) -> tuple[str, Path, float]:
    """Name, path and scale of NAME=PATH[:SCALE]; a path that itself ends in a colon and a number wants a scale, too."""
    name, _, rest = text.partition("=")
    path, colon, number = rest.rpartition(":")
    scale = _scale(number) if colon else None
    source = rest if scale is None else path
    if not name or not source:
        raise OptionError(
            f"--lora {text!r:.80}",
            "NAME=PATH or NAME=PATH:SCALE is expected",
            "such as --lora pirate=adapters/pirate:0.8",
        )
    if name == _NO_ADAPTER:
        raise OptionError(f"--lora {text!r:.80}", f"/lora {name} goes on without adapters", "choose another name")
    return name, expanded(source), 1.0 if scale is None else scale


_NO_ADAPTER = "off"


def _scale(text: str) -> float | None:
    """A number as people write it down; None where it is none, so that it belongs to the path."""
    try:
        return None if "_" in text or text != text.strip() else float(text)
    except ValueError:
        return None


CommandFunction = Callable[..., None]


def flag_groups(command: CommandFunction) -> CommandFunction:
    """Decorator: an argument whose type is a dataclass stands for one flag per field."""
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        if isinstance(parameter.annotation, type) and dataclasses.is_dataclass(parameter.annotation):
            command = _with_group(command, name, parameter.annotation)
    return command


def _with_group(command: CommandFunction, name: str, group: Any) -> CommandFunction:
    types = get_type_hints(group, include_extras=True)
    flags = [declared(field.name, types[field.name], field.default) for field in dataclasses.fields(group)]
    return with_flags(command, name, flags, lambda given: group(**given))


def declared(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    """A parameter of a command, as typer understands it."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def with_flags(
    command: CommandFunction, name: str, flags: Sequence[inspect.Parameter], gather: Callable[[Mapping[str, Any]], Any]
) -> CommandFunction:
    """The command with flags where it has the argument `name`, which `gather` makes of their values."""
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        parameters += flags if parameter.name == name else [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)]

    @functools.wraps(command)
    def expanded(**arguments: Any) -> None:
        values = {flag.name: arguments.pop(flag.name) for flag in flags}
        command(**arguments, **{name: gather(values)})

    expanded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    expanded.__annotations__ = {flag.name: flag.annotation for flag in parameters}
    return expanded


@dataclass(frozen=True)
class Flag:
    """One flag.

    Attributes:
        option: the name in SamplingParams.
        names: of the flag, the long one last.
        kind: type of its value; of each value where it may be repeated.
        help: what it does.
        repeated: whether it may be given several times.
        read: how a text given to it becomes the option's value.
    """

    option: str
    names: tuple[str, ...]
    kind: type
    help: str
    repeated: bool = False
    read: Callable[[str], Any] | None = None

    @property
    def setting(self) -> str:
        """Its name in `/set`."""
        return self.names[-1].removeprefix("--")

    @property
    def parameter(self) -> inspect.Parameter:
        """The flag as a parameter that typer understands."""
        kind: Any = list[self.kind] | None if self.repeated else self.kind | None  # type: ignore[name-defined]
        panel = SAMPLING if self.option in _COMMON else ADVANCED
        annotation = Annotated[kind, typer.Option(*self.names, help=self.help, rich_help_panel=panel)]
        return declared(self.option, annotation, None)

    def value(self, argument: Any) -> Any:
        """The option's value from what typer gives."""
        if self.read is None:
            return tuple(argument) if self.repeated else argument
        return tuple(map(self.read, argument)) if self.repeated else self.read(argument)


def _unescaped(text: str) -> str:
    r"""A text in which \n, \r, \t and \\ were written as on a command line."""
    for written, meant in (("\\\\", "\0"), ("\\n", "\n"), ("\\r", "\r"), ("\\t", "\t"), ("\0", "\\")):
        text = text.replace(written, meant)
    return text


def _file_text(path: str) -> str:
    from genai.common.reading import read_text_file

    return read_text_file(Path(path))


def _bias(text: str) -> tuple[int, float]:
    token, separator, bias = text.partition("=")
    try:
        if separator:
            return int(token), float(bias)
    except ValueError:
        pass
    raise OptionError(
        f"--logit-bias {text!r}", "ID=NUMBER is expected, such as 17=-5 or 17=-inf", "give a token id and a number"
    )


FLAGS = (
    Flag("max_tokens", ("-n", "--max-tokens"), int, "Most tokens to generate [default: what the context holds]."),
    Flag("temperature", ("--temperature",), float, "Higher is more varied; 0 = greedy [default: the model's]."),
    Flag("top_k", ("--top-k",), int, "Keep the k most likely tokens; 0 = all."),
    Flag("top_p", ("--top-p",), float, "Keep the most likely tokens up to this probability; 1 = all."),
    Flag("min_p", ("--min-p",), float, "Keep tokens at least this many times as likely as the likeliest; 0 = all."),
    Flag("typical_p", ("--typical-p",), float, "Keep tokens of typical surprise up to this probability; 1 = all."),
    Flag("top_n_sigma", ("--top-n-sigma",), float, "Keep logits within n standard deviations of the largest; 0 = all."),
    Flag("xtc_probability", ("--xtc-probability",), float, "How often XTC removes the likeliest tokens; 0 = never."),
    Flag("xtc_threshold", ("--xtc-threshold",), float, "Of tokens at least this probable XTC keeps one."),
    Flag("repetition_penalty", ("--repeat-penalty",), float, "Above 1, tokens that occurred become less likely."),
    Flag("presence_penalty", ("--presence-penalty",), float, "Subtracted from logits of tokens already generated."),
    Flag("frequency_penalty", ("--frequency-penalty",), float, "Subtracted once per time a token was generated."),
    Flag("penalty_last_n", ("--penalty-last-n",), int, "How many tokens back the penalties look [default: all]."),
    Flag("no_repeat_ngram_size", ("--no-repeat-ngram",), int, "No n-gram of this size comes twice; 0 = any may."),
    Flag("dry_multiplier", ("--dry-multiplier",), float, "Strength of DRY, which penalises repetitions; 0 = off."),
    Flag("dry_base", ("--dry-base",), float, "How fast DRY's penalty grows with the repetition."),
    Flag("dry_allowed_length", ("--dry-allowed-length",), int, "DRY ignores shorter repetitions than this."),
    Flag("dry_last_n", ("--dry-last-n",), int, "How many tokens back DRY looks [default: all]."),
    Flag("dry_sequence_breakers", ("--dry-breaker",), str, "DRY sees no repetition across this.", True, _unescaped),
    Flag("mirostat", ("--mirostat",), int, "2 = Mirostat 2.0 in place of top-k, top-p and the like; 0 = off."),
    Flag("mirostat_tau", ("--mirostat-tau",), float, "Mirostat's target surprise in bits."),
    Flag("mirostat_eta", ("--mirostat-eta",), float, "Mirostat's learning rate."),
    Flag("samplers", ("--samplers",), str, 'The samplers in order, such as "top_k;temperature".'),
    Flag("seed", ("--seed",), int, "Seed of the random numbers; same seed, same text."),
    Flag("stop", ("--stop",), str, r"End before this text (\n and \t are understood).", True, _unescaped),
    Flag("stop_token_ids", ("--stop-token",), int, "End at this token id.", True),
    Flag("banned_strings", ("--ban",), str, "Never write this: go back, choose other tokens.", True, _unescaped),
    Flag("logit_bias", ("--logit-bias",), str, "ID=NUMBER: added to that token's logit; -inf forbids it.", True, _bias),
    Flag("json_schema", ("--json-schema",), str, "A file: the reply is JSON of this schema.", read=_file_text),
    Flag("regex", ("--regex",), str, "The reply matches this expression, as a whole."),
    Flag("grammar", ("--grammar",), str, "A file: the reply matches this grammar (Lark or GBNF).", read=_file_text),
    Flag("choice", ("--choice",), str, "The reply is this text, or another one that is given so.", True),
    Flag("min_tokens", ("--min-tokens",), int, "Fewest tokens to generate before the end."),
    Flag("ignore_eos", ("--ignore-eos",), bool, "Go on past the end-of-sequence token."),
)


# What most people want to set; help shows the rest further down.
_COMMON = frozenset(
    "max_tokens temperature top_k top_p min_p repetition_penalty presence_penalty frequency_penalty seed stop "
    "json_schema regex grammar choice".split()
)


def sampling_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command all sampling flags. Those that were used arrive in its argument `sampling`, by option name."""

    def used(values: Mapping[str, Any]) -> dict[str, Any]:
        return {flag.option: flag.value(values[flag.option]) for flag in FLAGS if values[flag.option] not in (None, [])}

    return with_flags(command, "sampling", [flag.parameter for flag in FLAGS], used)


def find_flag(name: str) -> Flag:
    """The flag that a setting's name means."""
    option = name.removeprefix("--").replace("-", "_")
    match = next((flag for flag in FLAGS if option in (flag.option, flag.setting.replace("-", "_"))), None)
    if match is None:
        close = difflib.get_close_matches(name, [flag.setting for flag in FLAGS], 2)
        fix = f"did you mean {' or '.join(close)}? /set lists them" if close else "/set lists them"
        raise OptionError(f"/set {name}", "there is no such setting", fix)
    return match


def read_setting(name: str, text: str) -> tuple[str, Any]:
    """The option and value that `/set NAME TEXT` means; "default" is None."""
    flag = find_flag(name)
    if text == "default":
        return flag.option, None
    try:
        if flag.repeated:
            return flag.option, flag.value([flag.kind(part) for part in text.split(",")])
        if flag.kind is bool:
            return flag.option, {"on": True, "true": True, "off": False, "false": False}[text]
        return flag.option, flag.value(flag.kind(text))
    except GenaiError:  # which says what is wrong with the value, and is a ValueError, too
        raise
    except (ValueError, KeyError):
        expected = "on or off" if flag.kind is bool else f"a value of type {flag.kind.__name__}"
        raise OptionError(
            f"/set {name} {text}",
            f"{expected} is expected",
            f'nothing was changed; "/set {name} default" takes the default',
        ) from None


def check_apart(named: Sequence[tuple[str, Path | None]]) -> None:
    """Raise OptionError if one of the files of a command, by what errors call them, is the same as one before it."""
    for index, (name, path) in enumerate(named):
        for other, another in named[:index]:
            if path is None or another is None:
                continue
            if path.absolute() == another.absolute() or (path.exists() and another.exists() and path.samefile(another)):
                raise OptionError(f"{name} {path} is {other} too", "it would be overwritten", "give another name")
