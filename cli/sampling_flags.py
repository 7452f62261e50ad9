"""The flags for sampling, declared once and given to every command that generates.

One table says flag, option and type; from it come the flags of `genai chat` and `genai generate`, their GENAI_*
variables, and the values that `/set` understands.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from .flag_groups import with_flags


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
        annotation = Annotated[kind, typer.Option(*self.names, help=self.help, show_default=False)]
        return inspect.Parameter(self.option, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)

    def value(self, given: Any) -> Any:
        """The option's value from what typer gives."""
        if self.read is None:
            return tuple(given) if self.repeated else given
        return tuple(map(self.read, given)) if self.repeated else self.read(given)


def _unescaped(text: str) -> str:
    r"""A text in which \n, \r, \t and \\ were written as on a command line."""
    for written, meant in (("\\\\", "\0"), ("\\n", "\n"), ("\\r", "\r"), ("\\t", "\t"), ("\0", "\\")):
        text = text.replace(written, meant)
    return text


def _bias(text: str) -> tuple[int, float]:
    from genai.errors import OptionError

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
    Flag("temperature", ("--temperature",), float, "Divides the logits; 0 = greedy [default: the model's]."),
    Flag("top_k", ("--top-k",), int, "Keep the k most likely tokens; 0 = all."),
    Flag("top_p", ("--top-p",), float, "Keep the most likely tokens up to this probability; 1 = all."),
    Flag("min_p", ("--min-p",), float, "Keep tokens at least this many times as likely as the likeliest; 0 = all."),
    Flag("typical_p", ("--typical-p",), float, "Keep tokens of typical surprise up to this probability; 1 = all."),
    Flag("top_n_sigma", ("--top-n-sigma",), float, "Keep logits within n deviations of the largest; 0 = all."),
    Flag("xtc_probability", ("--xtc-probability",), float, "How often XTC removes the likeliest tokens."),
    Flag("xtc_threshold", ("--xtc-threshold",), float, "XTC removes tokens of at least this probability but one."),
    Flag("repetition_penalty", ("--repeat-penalty",), float, "Above 1, tokens that occurred become less likely."),
    Flag("presence_penalty", ("--presence-penalty",), float, "Subtracted from logits of tokens already generated."),
    Flag("frequency_penalty", ("--frequency-penalty",), float, "Subtracted once per time a token was generated."),
    Flag("penalty_last_n", ("--penalty-last-n",), int, "How many tokens back the penalties look [default: all]."),
    Flag("no_repeat_ngram_size", ("--no-repeat-ngram",), int, "No n-gram of this size comes twice; 0 = any may."),
    Flag("dry_multiplier", ("--dry-multiplier",), float, "Strength of DRY, which penalises repetitions; 0 = off."),
    Flag("dry_base", ("--dry-base",), float, "How fast DRY's penalty grows with the length."),
    Flag("dry_allowed_length", ("--dry-allowed-length",), int, "Repetitions shorter than this cost nothing."),
    Flag("dry_last_n", ("--dry-last-n",), int, "How many tokens back DRY looks [default: all]."),
    Flag("dry_sequence_breakers", ("--dry-breaker",), str, "DRY does not reach across this text.", True, _unescaped),
    Flag("mirostat", ("--mirostat",), int, "2 = Mirostat 2.0 instead of truncation; 0 = off."),
    Flag("mirostat_tau", ("--mirostat-tau",), float, "Mirostat's target surprise in bits."),
    Flag("mirostat_eta", ("--mirostat-eta",), float, "Mirostat's learning rate."),
    Flag("samplers", ("--samplers",), str, "The samplers in order, joined by semicolons."),
    Flag("seed", ("--seed",), int, "Seed of the random numbers; same seed, same text."),
    Flag("stop", ("--stop",), str, r"End before this text (\n and \t are understood).", True, _unescaped),
    Flag("stop_token_ids", ("--stop-token",), int, "End at this token id.", True),
    Flag("banned_strings", ("--ban",), str, "Never write this text: go back and take another way.", True, _unescaped),
    Flag("logit_bias", ("--logit-bias",), str, "ID=NUMBER: added to that token's logit; -inf forbids it.", True, _bias),
    Flag("min_tokens", ("--min-tokens",), int, "Tokens before the end may come."),
    Flag("ignore_eos", ("--ignore-eos",), bool, "Go on past the end-of-sequence token."),
)


def sampling_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command all sampling flags. Those that were used arrive in its argument `sampling`, by option name."""
    return with_flags(command, "sampling", [flag.parameter for flag in FLAGS], _used)


def _used(given: Mapping[str, Any]) -> dict[str, Any]:
    return {flag.option: flag.value(given[flag.option]) for flag in FLAGS if given[flag.option] not in (None, [])}


def read_setting(name: str, text: str) -> tuple[str, Any]:
    """The option and value that `/set NAME TEXT` means; "default" is None.

    Raises:
        OptionError: no such setting, or a text that is no value of it.
    """
    from genai.errors import OptionError

    wanted = name.removeprefix("--").replace("-", "_")
    flag = next((flag for flag in FLAGS if wanted in (flag.option, flag.setting.replace("-", "_"))), None)
    if flag is None:
        names = ", ".join(flag.setting for flag in FLAGS)
        raise OptionError(f"/set {name}", "there is no such setting", f"settings are {names}")
    if text == "default":
        return flag.option, None
    try:
        if flag.repeated:
            return flag.option, flag.value([flag.kind(part) for part in text.split(",")])
        if flag.kind is bool:
            return flag.option, {"on": True, "true": True, "off": False, "false": False}[text]
        return flag.option, flag.value(flag.kind(text))
    except (ValueError, KeyError):
        expected = "on or off" if flag.kind is bool else f"a value of type {flag.kind.__name__}"
        raise OptionError(
            f"/set {name} {text}", f"{expected} is expected", f'"/set {name} default" undoes it'
        ) from None
