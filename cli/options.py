"""Options that several commands share. Each group is declared once and is passed to a command as one argument."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self, get_type_hints

import typer

from genai.common.paths import expanded
from genai.errors import GenaiError, OptionError, did_you_mean

from .build import model_folder
from .help_page import ADVANCED, MODEL, OTHER_OPTIONS, OUTPUT, SAMPLING
from .model_names import model_path
from .terminal import Voice, interrupts_end_the_process

if TYPE_CHECKING:
    from genai.llm.llm import LLM
    from genai.llm.speculation import Speculation
    from genai.models.model import Model

model_option = functools.partial(typer.Option, rich_help_panel=MODEL)
output_option = functools.partial(typer.Option, rich_help_panel=OUTPUT)
_MODEL_HELP = "Short name, org/name, folder or GGUF file of a model [default: the bundled model]."
ModelArgument = Annotated[Path | None, typer.Argument(help=_MODEL_HELP, parser=model_path)]
Build = Annotated[
    bool,
    model_option(
        "--build/--no-build",
        help="If MODEL is a Hugging Face checkpoint or a GGUF file, build a model and cache it.",
    ),
]
Precision = Annotated[
    str | None,
    model_option(
        help="Weight precision when building MODEL: int4, int8, fp16 or fp32 [default: int4]; or of its graph, as q4."
    ),
]
Yes = Annotated[bool, model_option("--yes", help="Download MODEL without confirmation.")]
ThreadsOption = Annotated[int | None, model_option("-t", "--threads", help="CPU threads [default: physical cores].")]
Accuracy = Annotated[
    str, model_option(help="Activation precision in matmuls: auto (the model's setting), fp32 or int8.")
]
_DEVICE_HELP = (
    "Device: cpu, cuda or cuda:1 (a GPU), auto, or reference (NumPy, slow) "
    "[default: from MODEL's genai_config.json, otherwise cpu]."
)
Device = Annotated[str | None, model_option(help=_DEVICE_HELP)]
_KV_HELP = "KV cache type: auto, fp16, fp32, int8 or int4; on a GPU also bf16 or fp8."
KvType = Annotated[str, model_option("--kv-type", help=_KV_HELP)]
KvForce = Annotated[
    bool, model_option("--kv-force", help="Use an int4 KV cache even if it makes the model less accurate.")
]
CtxSize = Annotated[
    int | None,
    model_option(
        "-c", "--ctx-size", help="Context size in tokens [default: as many as fit in half of the free memory]."
    ),
]
Lora = Annotated[
    list[str] | None,
    model_option("--lora", help="NAME=PATH[:SCALE]: use this adapter; may be given several times."),
]
PrefixCache = Annotated[
    Path | None,
    model_option("--prefix-cache", help="Cache prompt prefixes in this folder for later and concurrent runs."),
]
PrefixCacheSize = Annotated[
    float | None, model_option("--prefix-cache-size", help="Maximum size of --prefix-cache in GiB [default: 4].")
]
Draft = Annotated[
    str | None, model_option("--draft", help="Draft model for speculative decoding, with the same vocabulary as MODEL.")
]
Speculate = Annotated[
    str | None,
    model_option(
        "--speculate",
        help="Speculative decoding: lookup (prompt lookup), mtp (the model's MTP head), auto (both, if possible), off "
        "[default: off].",
    ),
]
LookupFile = Annotated[
    Path | None, model_option("--lookup-file", help="Additional text file for prompt lookup to search.")
]
SpecialTokens = Annotated[
    bool | None,
    typer.Option(
        "--special-tokens/--no-special-tokens",
        help="Add the tokenizer's special tokens, such as BOS, to prompts [default: to raw prompts].",
    ),
]
Literal = Annotated[
    bool | None,
    typer.Option(
        "--literal/--no-literal",
        help="Treat special tokens in texts, such as <|im_end|>, as ordinary text [default: the model's setting].",
    ),
]
Greedy = Annotated[
    bool,
    typer.Option("--greedy", help="Always choose the most likely token: temperature 0.", rich_help_panel=SAMPLING),
]
DumpPrompt = Annotated[bool, output_option("--dump-prompt", help="Print the exact prompt and its token ids to stderr.")]
CtxShift = Annotated[
    bool,
    model_option(
        "--ctx-shift", help="When the context is full, drop its older half, except the first tokens, and continue."
    ),
]
CtxKeep = Annotated[
    int | None,
    model_option("--ctx-keep", help="With --ctx-shift: number of initial tokens to keep [default: 32].", min=1),
]
Stats = Annotated[bool | None, output_option("--stats/--no-stats", help="Print statistics to stderr after each reply.")]
AsJson = Annotated[bool, output_option("--json", help="Print the result as JSON.")]
Quiet = Annotated[bool, output_option("-q", "--quiet", help="Print only warnings and errors to stderr.")]
Verbose = Annotated[bool, output_option("-v", "--verbose", help="Print more details to stderr.")]


@dataclass(frozen=True)
class ModelFlags:
    """Options that control how a model computes."""

    threads: ThreadsOption = None
    accuracy: Accuracy = "auto"
    kv_type: KvType = "auto"
    kv_force: KvForce = False
    device: Device = None

    def load(self, folder: Path | None, *, lora: bool = False, mtp: bool = False) -> Model:
        """Load a model folder, a Hugging Face checkpoint (built into the cache if needed), or the bundled model.

        Args:
            folder: the folder; None = the bundled model.
            lora, mtp: see genai.Model.
        """
        from genai.models.kv_types import check_here
        from genai.models.model_options import check_model_options

        check_model_options(**self.options)  # before a model is fetched or built
        from genai.models.model import Model

        with interrupts_end_the_process():
            check_here(self.device, self.kv_type)
            return Model(folder_of(folder), lora=lora, mtp=mtp, **self.options)

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of genai.Model."""
        return {
            "threads": self.threads,
            "accuracy": self.accuracy,
            "kv_dtype": self.kv_type,
            "kv_dtype_force": self.kv_force,
            "device": self.device,
        }


def folder_of(model: Path | None, *, build: bool = True, precision: str | None = None, yes: bool = False) -> Path:
    """Return the folder of MODEL, which is pulled and built if needed, or of the bundled model."""
    from genai.models.folders import bundled_model

    if model is None and precision is not None:
        raise OptionError(
            f"--precision {precision} cannot be used without MODEL",
            "the bundled model is built",
            "pass a checkpoint as MODEL",
        )
    return model_folder(model, build=build, precision=precision, yes=yes) if model else bundled_model()


@dataclass(frozen=True)
class EngineFlags(ModelFlags):
    """Options of every command that generates text."""

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

    def with_adapter(self, model: Path | None) -> tuple[Path | None, Self]:
        """Split MODEL of the form base+adapter: return the base model, and the options with the adapter as --lora."""
        from genai.lora.named import split_adapter

        if model is None or "+" not in str(model):
            return model, self
        base, adapter = split_adapter(model)
        if adapter is None:
            return model, self
        name, path = adapter
        return Path(base), dataclasses.replace(self, lora=[*(self.lora or ()), f"{name}={path}:1.0"])

    @property
    def adapter(self) -> dict[str, float] | None:
        """The adapters of every request: all adapters that --lora names, or None."""
        return {name: 1.0 for name, _, _ in map(read_lora, self.lora or ())} or None

    def speculation(self) -> Speculation | str:
        """Return the `speculation` argument of genai.LLM."""
        from genai.llm.speculation import WAYS, Speculation

        if self.speculate is not None and self.speculate not in WAYS:
            fix = did_you_mean(self.speculate, WAYS, "omit --speculate")
            raise OptionError(f"--speculate is {self.speculate!r}", f"allowed: {', '.join(WAYS)}", fix)
        named = [name for name, given in (("--draft", self.draft), ("--lookup-file", self.lookup_file)) if given]
        if not named:
            return self.speculate or "off"
        if self.speculate == "off":
            raise OptionError(
                f"{named[0]} cannot be used with --speculate off",
                "this option applies only to speculation",
                "remove one of the two",
            )
        if self.speculate == "mtp" and self.draft:
            raise OptionError(
                "--draft cannot be used with --speculate mtp",
                "either the MTP head or the draft model proposes tokens",
                "remove one of the two",
            )
        draft = folder_of(Path(self.draft), build=self.build) if self.draft else None
        only_head = self.speculate == "mtp"
        with_head = {"mtp": True, "lookup": False}.get(self.speculate or "")
        return Speculation(lookup=not only_head, lookup_file=self.lookup_file, draft=draft, mtp=with_head)

    @property
    def prefix_options(self) -> dict[str, Any]:
        """The arguments of genai.LLM for the prefix cache on disk."""
        size = self.prefix_cache_size
        if size is not None and not 0 < size < 2**20:
            raise OptionError(
                f"--prefix-cache-size is {size}",
                "a size in GiB above 0 is expected",
                "for example, use --prefix-cache-size 4",
            )
        options = {"prefix_cache_dir": self.prefix_cache, "prefix_cache_bytes": size and max(1, int(size * 2**30))}
        return {name: value for name, value in options.items() if value is not None}

    @property
    def voice(self) -> Voice:
        """The writer of messages on stderr."""
        return Voice(quiet=self.quiet, verbose=self.verbose)

    def folder_of(self, model: Path | None) -> Path:
        """Return the model folder for MODEL, after checking that the requested device exists."""
        from genai.models.kv_types import check_here

        check_here(self.device, self.kv_type)
        return folder_of(model, build=self.build, precision=self.precision, yes=self.yes)

    def load_llm(self, folder: Path | None, *, alone: bool = True, **options: Any) -> LLM:
        """Load a model folder, a checkpoint (built if needed, unless `build` is off) or the bundled model.

        Set `alone` if no other work is in progress: Ctrl-C may then kill the process. `options` are further arguments
        of LLM.
        """
        from genai.llm.llm import LLM
        from genai.lora.parameters import adapter_path
        from genai.models.model_options import check_model_options

        check_model_options(**self.options, context_size=self.ctx_size)
        adapters = [read_lora(text) for text in self.lora or ()]
        for _, path, _ in adapters:
            adapter_path(path)  # reports a mistyped path before the model is loaded
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
            voice.detail(f"ignored config keys: {', '.join(model.config.ignored_keys)}")
        return llm


@dataclass(frozen=True)
class TextFlags(EngineFlags):
    """Options of every command that prints generated text."""

    show_prompt: DumpPrompt = False
    stats: Stats = None
    ctx_shift: CtxShift = False
    ctx_keep: CtxKeep = None

    @property
    def shift(self) -> bool | int:
        """The `ctx_shift` argument of requests."""
        return shift_of(self.ctx_shift, self.ctx_keep)


def shift_of(ctx_shift: bool, ctx_keep: int | None) -> bool | int:
    """Combine --ctx-shift and --ctx-keep into one value."""
    if ctx_keep is not None and not ctx_shift:
        raise OptionError(
            f"--ctx-keep {ctx_keep} cannot be used without --ctx-shift",
            "only --ctx-shift drops tokens",
            "add --ctx-shift",
        )
    return ctx_keep or ctx_shift


def read_lora(text: str) -> tuple[str, Path, float]:
    """Return the name, the path and the scale in NAME=PATH[:SCALE].

    If the path itself ends in a colon and a number, the scale is required.
    """
    name, _, rest = text.partition("=")
    path, colon, number = rest.rpartition(":")
    scale = _scale(number) if colon else None
    source = rest if scale is None else path
    if not name or not source:
        from genai.hub.local import exists
        from genai.models.folders import bundled_adapter

        given = Path(text)
        if text.isidentifier() and not exists(given):
            given = bundled_adapter(text)
        is_path = "=" not in text and exists(given)
        named = f"name the adapter: --lora {given.resolve().stem}={given}" if is_path else ""
        raise OptionError(
            f"--lora is {text!r:.80}",
            "NAME=PATH or NAME=PATH:SCALE is expected",
            named or "for example, use --lora pirate=adapters/pirate:0.8",
        )
    if name == _NO_ADAPTER:
        raise OptionError(f"--lora is {text!r:.80}", f"/lora {name} disables adapters", "give the adapter another name")
    return name, expanded(source), 1.0 if scale is None else scale


_NO_ADAPTER = "off"


def _scale(text: str) -> float | None:
    """Parse a plain decimal number. Return None for any other text, because it belongs to the path."""
    try:
        return None if "_" in text or text != text.strip() else float(text)
    except ValueError:
        return None


CommandFunction = Callable[..., None]


def flag_groups(command: CommandFunction) -> CommandFunction:
    """Decorator: replace each argument whose type is a dataclass with one flag per field."""
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        if isinstance(parameter.annotation, type) and dataclasses.is_dataclass(parameter.annotation):
            command = _with_group(command, name, parameter.annotation)
    return command


def _with_group(command: CommandFunction, name: str, group: Any) -> CommandFunction:
    types = get_type_hints(group, include_extras=True)
    flags = [declared(field.name, types[field.name], field.default) for field in dataclasses.fields(group)]
    return with_flags(command, name, flags, lambda given: group(**given))


def declared(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    """Return a command's parameter in the form that typer reads."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def with_flags(
    command: CommandFunction, name: str, flags: Sequence[inspect.Parameter], gather: Callable[[Mapping[str, Any]], Any]
) -> CommandFunction:
    """Replace the argument `name` of a command with flags; `gather` computes the argument from their values."""
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
    """A command-line flag for a sampling option.

    Attributes:
        option: the name in SamplingParams.
        names: the names of the flag, with the long name last.
        kind: the type of the value, or of each value if the flag may be repeated.
        help: the help text.
        repeated: True if the flag may be given several times.
        read: a function that converts the text on the command line to the option's value.
    """

    option: str
    names: tuple[str, ...]
    kind: type
    help: str
    repeated: bool = False
    read: Callable[[str], Any] | None = None

    @property
    def setting(self) -> str:
        """The name in `/set`."""
        return self.names[-1].removeprefix("--")

    @property
    def parameter(self) -> inspect.Parameter:
        """The flag as a parameter that typer reads."""
        kind: Any = list[self.kind] | None if self.repeated else self.kind | None  # type: ignore[name-defined]
        panel = SAMPLING if self.option in _COMMON else ADVANCED
        annotation = Annotated[kind, typer.Option(*self.names, help=self.help, rich_help_panel=panel)]
        return declared(self.option, annotation, None)

    def value(self, argument: Any) -> Any:
        """Convert the value that typer parsed to the option's value."""
        if self.read is None:
            return tuple(argument) if self.repeated else argument
        return tuple(map(self.read, argument)) if self.repeated else self.read(argument)


def _unescaped(text: str) -> str:
    r"""Decode the escapes \n, \r, \t and \\ in a value on the command line."""
    for written, meant in (("\\\\", "\0"), ("\\n", "\n"), ("\\r", "\r"), ("\\t", "\t"), ("\0", "\\")):
        text = text.replace(written, meant)
    return text


def _file_text(path: str) -> str:
    from genai.common.reading import read_text_file

    if "{" in path or "::=" in path or "\n" in path:
        try:
            is_file = Path(path).exists()
        except OSError:  # too long for a path
            is_file = False
        if not is_file:
            raise OptionError(
                f"{path!r:.60} is not a file", "the option takes a file", "write the text to a file, and pass its path"
            )
    return read_text_file(Path(path))


def _bias(text: str) -> tuple[int, float]:
    token, separator, bias = text.partition("=")
    try:
        if separator:
            return int(token), float(bias)
    except ValueError:
        pass
    raise OptionError(
        f"--logit-bias is {text!r}", "ID=NUMBER is expected, such as 17=-5 or 17=-inf", "pass a token id and a number"
    )


def _sequence_bias(text: str) -> tuple[tuple[int, ...], float]:
    tokens, separator, bias = text.partition("=")
    try:
        if separator:
            return tuple(int(token) for token in tokens.split(":")), float(bias)
    except ValueError:
        pass
    raise OptionError(
        f"--sequence-bias is {text!r}",
        "ID:ID=NUMBER is expected, such as 17:4=-5 or 17:4=-inf",
        "pass token ids joined by colons, and a number",
    )


def greedy_options(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return the option that --greedy sets."""
    if "temperature" in sampling:
        raise OptionError(
            f"--greedy cannot be used with --temperature {sampling['temperature']}",
            "--greedy sets the temperature to 0",
            "remove one of the two",
        )
    return {"temperature": 0.0}


FLAGS = (
    Flag(
        "max_tokens", ("-n", "--max-tokens"), int, "Maximum number of tokens to generate [default: fill the context]."
    ),
    Flag("temperature", ("--temperature",), float, "Sampling temperature; 0 = greedy [default: the model's]."),
    Flag("top_k", ("--top-k",), int, "Keep the k most likely tokens; 0 = all."),
    Flag("top_p", ("--top-p",), float, "Keep the most likely tokens up to this total probability; 1 = all."),
    Flag("min_p", ("--min-p",), float, "Minimum probability relative to that of the most likely token; 0 = off."),
    Flag("typical_p", ("--typical-p",), float, "Keep locally typical tokens up to this total probability; 1 = all."),
    Flag("top_n_sigma", ("--top-n-sigma",), float, "Keep logits within n standard deviations of the maximum; 0 = all."),
    Flag("xtc_probability", ("--xtc-probability",), float, "Probability of applying XTC at each token; 0 = never."),
    Flag(
        "xtc_threshold",
        ("--xtc-threshold",),
        float,
        "Probability above which XTC removes all tokens but one [default: 0.1].",
    ),
    Flag("repetition_penalty", ("--repeat-penalty",), float, "Penalty on tokens that already occurred; 1 = off."),
    Flag(
        "presence_penalty",
        ("--presence-penalty",),
        float,
        "Subtract this number from the logits of generated tokens; 0 = off.",
    ),
    Flag(
        "frequency_penalty",
        ("--frequency-penalty",),
        float,
        "Subtract this number from a token's logit once per occurrence; 0 = off.",
    ),
    Flag(
        "penalty_last_n",
        ("--penalty-last-n",),
        int,
        "Number of recent tokens that the penalties apply to [default: all].",
    ),
    Flag(
        "no_repeat_ngram_size", ("--no-repeat-ngram",), int, "Never repeat an n-gram of this number of tokens; 0 = off."
    ),
    Flag("dry_multiplier", ("--dry-multiplier",), float, "Strength of the DRY repetition penalty; 0 = off."),
    Flag("dry_base", ("--dry-base",), float, "Base of the exponential growth of DRY's penalty [default: 1.75]."),
    Flag(
        "dry_allowed_length",
        ("--dry-allowed-length",),
        int,
        "Minimum number of repeated tokens that DRY penalises [default: 2].",
    ),
    Flag("dry_last_n", ("--dry-last-n",), int, "Number of recent tokens that DRY searches [default: all]."),
    Flag("dry_sequence_breakers", ("--dry-breaker",), str, "Text at which DRY ends a repetition.", True, _unescaped),
    Flag("mirostat", ("--mirostat",), int, "2 = Mirostat 2.0 instead of top-k, top-p and similar; 0 = off."),
    Flag("mirostat_tau", ("--mirostat-tau",), float, "Mirostat's target surprise in bits [default: 5]."),
    Flag("mirostat_eta", ("--mirostat-eta",), float, "Mirostat's learning rate [default: 0.1]."),
    Flag("samplers", ("--samplers",), str, 'Samplers in order, such as "top_k;temperature".'),
    Flag("seed", ("--seed",), int, "Random seed; the same seed produces the same text."),
    Flag("stop", ("--stop",), str, r"Stop before this text; \n and \t are escapes.", True, _unescaped),
    Flag("stop_token_ids", ("--stop-token",), int, "Stop at this token id.", True),
    Flag("banned_strings", ("--ban",), str, "Never generate this text; backtrack instead.", True, _unescaped),
    Flag(
        "logit_bias", ("--logit-bias",), str, "ID=NUMBER: add NUMBER to this token's logit; -inf = never.", True, _bias
    ),
    Flag(
        "sequence_bias",
        ("--sequence-bias",),
        str,
        "ID:ID=NUMBER: add NUMBER to the last token's logit after the other tokens; -inf = never.",
        True,
        _sequence_bias,
    ),
    Flag("begin_suppress_tokens", ("--begin-suppress",), int, "Never begin with this token id.", True),
    Flag("json_schema", ("--json-schema",), str, "File with a JSON schema for the reply.", read=_file_text),
    Flag("regex", ("--regex",), str, "Regular expression that the whole reply must match."),
    Flag("grammar", ("--grammar",), str, "File with a grammar (Lark or GBNF) for the reply.", read=_file_text),
    Flag("choice", ("--choice",), str, "Allowed reply; may be given several times.", True),
    Flag("min_tokens", ("--min-tokens",), int, "Minimum number of tokens to generate."),
    Flag("ignore_eos", ("--ignore-eos",), bool, "Continue past the end-of-sequence token."),
)


# The most common options. Help pages show the remaining options further down.
_COMMON = frozenset(
    "max_tokens temperature top_k top_p min_p repetition_penalty presence_penalty frequency_penalty seed stop "
    "json_schema regex grammar choice".split()
)


def sampling_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Decorator: add all sampling flags. The command's argument `sampling` receives the options that are set."""

    def used(values: Mapping[str, Any]) -> dict[str, Any]:
        return {flag.option: flag.value(values[flag.option]) for flag in FLAGS if values[flag.option] not in (None, [])}

    return with_flags(command, "sampling", [flag.parameter for flag in FLAGS], used)


def find_flag(name: str) -> Flag:
    """Return the flag that a setting's name refers to."""
    option = name.removeprefix("--").replace("-", "_")
    match = next((flag for flag in FLAGS if option in (flag.option, flag.setting.replace("-", "_"))), None)
    if match is None:
        settings = [flag.setting for flag in FLAGS]
        other = OTHER_OPTIONS.get(f"--{option.replace('_', '-')}", "").removeprefix("--")
        close = [other] if other in settings else difflib.get_close_matches(name, settings, 2)
        fix = f"did you mean {' or '.join(close)}? /set lists the settings" if close else "/set lists the settings"
        if option == "ctx_size" or other == "ctx-size":
            fix = "the context is set when the model is loaded: start the chat again with --ctx-size"
        elif option == "system":
            fix = "type /system TEXT"
        elif option == "parameter":
            fix = "omit this word: type /set temperature 0.7"
        raise OptionError(f"/set {name}: unknown setting", "no setting has this name", fix)
    return match


def read_setting(name: str, text: str) -> tuple[str, Any]:
    """Return the option and the value of `/set NAME TEXT`. The value is None if TEXT is "default"."""
    flag = find_flag(name)
    if text == "default":
        return flag.option, None
    try:
        if flag.repeated:
            return flag.option, flag.value([flag.kind(part) for part in text.split(",")])
        if flag.kind is bool:
            return flag.option, {"on": True, "true": True, "off": False, "false": False}[text]
        return flag.option, flag.value(flag.kind(text))
    except GenaiError as error:  # a GenaiError already says what is wrong, and may also be a ValueError
        if flag.names[-1] not in error.what:
            raise
        raise OptionError(error.what.replace(flag.names[-1], f"/set {name}"), error.why, error.fix) from None
    except (ValueError, KeyError):
        expected = "on or off" if flag.kind is bool else f"a value of type {flag.kind.__name__}"
        raise OptionError(
            f"/set {name} {text}: invalid value",
            f"{expected} is expected",
            f'type another value, or "/set {name} default" to restore the default',
        ) from None


def check_apart(named: Sequence[tuple[str, Path | None]]) -> None:
    """Raise OptionError if two of a command's files are the same. Each path is paired with its name for the error."""
    for index, (name, path) in enumerate(named):
        for other, another in named[:index]:
            if path is None or another is None:
                continue
            if path.absolute() == another.absolute() or (path.exists() and another.exists() and path.samefile(another)):
                raise OptionError(
                    f"{name} {path} is the same file as {other}",
                    "the file would be overwritten",
                    "pass two different files",
                )
