"""Typed errors. Every message has three parts: what is wrong, why, and what to do.

`GenaiError` derives from RuntimeError so that scripts written for onnxruntime-genai still catch it.
This module imports nothing of ours, so that every room above the kernels can raise from it.
"""

from __future__ import annotations

from collections.abc import Iterable


class GenaiError(RuntimeError):
    """Base of every error this toolkit raises on purpose.

    Args:
        what: what is wrong, with the names and values involved.
        why: the reason, or the rule that was broken.
        fix: what the user can do about it.
    """

    def __init__(self, what: str, why: str = "", fix: str = "") -> None:
        super().__init__(what, why, fix)
        self.what = what
        self.why = why
        self.fix = fix

    def __str__(self) -> str:
        lines = [_hanging(self.what)]
        if self.why:
            lines.append(f"  why: {_hanging(self.why)}")
        if self.fix:
            lines.append(f"  fix: {_hanging(self.fix)}")
        return "\n".join(lines)


_BELOW_A_PART = " " * len("  why: ")


def _hanging(part: str) -> str:
    """A part of a message; where it has several lines, such as a compiler's, those behind the first stand below it."""
    first, *more = part.splitlines() or [""]
    return "\n".join([first, *(f"{_BELOW_A_PART}{line}".rstrip() for line in more)])


class ModelFolderError(GenaiError):
    """The model folder, or a file that it must hold, is missing or unreadable."""


class ConfigError(GenaiError, ValueError):
    """genai_config.json has an unknown key, a wrong type or a value out of range."""


class OptionError(GenaiError, ValueError):
    """An option given by the caller is unknown, of the wrong type or out of range."""


class GrammarError(OptionError):
    """A schema, pattern or grammar is malformed, matches nothing, or takes too much time or memory."""


class InputError(GenaiError, ValueError):
    """Data given by the caller (tokens, messages, arrays) cannot be used as it is."""


class ContextOverflowError(InputError):
    """The tokens asked for do not fit the model's context or the generator's max_length."""


class SourceTypeError(InputError, TypeError):
    """A model cannot be read from an object of this kind."""


class ArgumentError(InputError):
    """An argument of a session or of its run is unknown, of the wrong type or shape, or holds values out of range."""


class GraphError(GenaiError):
    """The ONNX model is malformed: not protobuf, not a valid graph, or contradictory."""


class ProtobufError(GraphError):
    """The model is no protobuf message, or one without a graph."""


class ExternalDataError(GraphError):
    """External tensor data is missing, truncated or points outside the model folder."""


class UnsupportedOpError(GraphError):
    """The graph needs an operator for which no kernel exists."""


class UnsupportedModelError(GraphError):
    """The model is valid, but of a form that this engine cannot run."""


class NodeError(GenaiError):
    """A node of a graph failed while running, or is sure to."""


class RunStopped(GenaiError):
    """A session's run was stopped from outside."""


class LoadCancelledError(GenaiError):
    """The loading of a model was cancelled from outside."""


class InternalError(GenaiError):
    """A model or its inputs led to an error that was not foreseen, which is the cause of this one."""


class DeviceError(GenaiError):
    """The device asked for cannot be used on this machine, or in this process."""


class ProviderError(GenaiError):
    """An execution provider cannot be set up, or failed."""


class OutOfMemoryError(GenaiError):
    """The memory of the machine, or of a device, does not suffice to load or run a graph."""


class NotSupportedYetError(GenaiError, NotImplementedError):
    """A documented feature of the API that this version does not have yet."""


class TokenizerError(GenaiError):
    """The tokenizer is missing, unreadable, or cannot do what was asked."""


class ChatTemplateError(TokenizerError):
    """The chat template is missing, invalid, or raised while rendering."""


class CacheCapacityError(GenaiError):
    """The KV cache has no room for the tokens asked for."""


class StateError(GenaiError):
    """A call came in an order that has no meaning (for example logits before any token)."""


class StateFileError(GenaiError):
    """A file with a saved state is missing, damaged, or cannot be written."""


class StateMismatchError(StateFileError):
    """A saved state is whole, but of another model, format, or type of cache than what it is loaded into."""


class DeadlineError(GenaiError, TimeoutError):
    """The time that a request was given was over before it had a single token."""


class SamplingError(GenaiError):
    """No token can be chosen: the logits hold NaN or infinity, or every token is masked."""


class LogitsProcessorError(SamplingError):
    """A logits processor raised, or did not return logits."""


class ReplyFormatError(GenaiError):
    """A reply is not what was asked for: it was cut, or a class refuses what its own schema allows."""


class ModelOutputError(GenaiError):
    """A model computed something that is no distribution: NaN, infinity, or nothing but -inf."""


class VocabularyMismatchError(InputError):
    """Two models of which one is compared with the other, or drafts for it, do not have the same tokens."""


class DownloadError(GenaiError):
    """A model cannot be fetched: no connection, no such name or file, a wrong checksum, a full disk."""


class AccessError(DownloadError):
    """A model cannot be fetched without a token, or before its licence is accepted."""


class MissingPackageError(GenaiError):
    """A comparison needs a package that is not installed."""


class StepInterrupted(GenaiError):
    """A step was given up because nobody waits for its results any more; its sequences are as they were before."""


def kind_of(value: object) -> str:
    """What a value is, in JSON's words where it has one, with its article: "null", "a number", "an object", "a set"."""
    known: tuple[tuple[type | tuple[type, ...], str], ...] = (
        (type(None), "null"), (bool, "a boolean"), (str, "a text"), ((int, float), "a number"),
        ((list, tuple), "a list"), (dict, "an object"),
    )  # fmt: skip
    for kinds, said in known:
        if isinstance(value, kinds):
            return said
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"


_LONGEST_NAME = 200


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """What to do about a name that is not known: use the one that looks most like it, or `otherwise` if none does."""
    from difflib import get_close_matches

    # What is longer is no typo, and comparing takes many times its memory.
    close = get_close_matches(name, list(known), 1) if len(name) <= _LONGEST_NAME else []
    return f"did you mean {close[0]!r}?" if close else otherwise


# No count, size or number of a device has more; Python itself reads 4,300, and raises on those behind them.
_MOST_DIGITS = 20


def whole_number(text: str) -> int | None:
    """The number that a text says in plain digits; None where it has others, or more of them than any count has."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS else None


def malformed(what: str, why: str) -> GraphError:
    """The error of a model that its exporter got wrong, or that was damaged since."""
    return GraphError(what, why, "export the model again")


def no_threads(error: Exception) -> StateError:
    """The error for a thread that the system would not start."""
    return StateError(
        "a thread cannot be started",
        str(error),
        "use fewer threads (threads=…), or raise the limit of processes (ulimit -u, or that of the container)",
    )


def out_of_memory(where: str, error: MemoryError) -> OutOfMemoryError:
    """The error of memory, of the host or of a GPU, that does not suffice."""
    return OutOfMemoryError(
        f"out of memory {where}",
        str(error) or "an allocation failed",
        "use smaller inputs or a smaller model, or let go of values that are not needed any more",
    )


def gpu_failed(where: str, error: Exception) -> DeviceError:
    """The error of a GPU that failed while values were copied."""
    return DeviceError(
        f"the GPU failed in {where}",
        str(error),
        "make sessions and values again; genai doctor shows what is there",
    )
