"""Typed errors. Every message has three parts: what is wrong, why, and what to do.

`GenaiError` derives from RuntimeError so that scripts written for onnxruntime-genai still catch these errors. This
module imports no other module of the toolkit, so that every package above the kernels can use it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy
from typing import Literal, TypeVar

InPlace = Literal["", "graph", "encoder"]


class GenaiError(RuntimeError):
    """Base of every error that this toolkit raises on purpose.

    Args:
        what: what is wrong, with the names and values involved.
        why: the reason, or the rule that was broken.
        fix: what the user can do about it.

    Attributes:
        about: what was given in place of a model that generates text: "graph" = another ONNX graph, "encoder" = the
            checkpoint of an encoder; "" for all other errors.
    """

    about: InPlace = ""

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


Error = TypeVar("Error", bound=GenaiError)


def located(error: Error, where: str) -> Error:
    """Return a copy of an error whose message names the place of the cause first."""
    made = copy(error)
    made.what = f"{where}: {error.what}"
    made.args = (made.what, *error.args[1:])
    made.__cause__ = error.__cause__
    return made


def about(kind: InPlace, error: Error) -> Error:
    """Return an error that says what was given in place of a model that generates text."""
    error.about = kind
    return error


_BELOW_A_PART = " " * len("  why: ")


def _hanging(part: str) -> str:
    """Indent all lines of a part except the first, for parts of several lines such as a compiler's output."""
    first, *more = part.splitlines() or [""]
    return "\n".join([first, *(f"{_BELOW_A_PART}{line}".rstrip() for line in more)])


class ModelFolderError(GenaiError):
    """The model folder, or a file that it must contain, is missing or unreadable."""


class ConfigError(GenaiError, ValueError):
    """genai_config.json has an unknown key, a wrong type or a value out of range."""


class OptionError(GenaiError, ValueError):
    """An option given by the caller is unknown, of the wrong type or out of range."""


class GrammarError(OptionError):
    """A schema, pattern or grammar is malformed, matches nothing, or takes too much time or memory."""


class InputError(GenaiError, ValueError):
    """Data given by the caller (tokens, messages, arrays) cannot be used."""


class ContextOverflowError(InputError):
    """The requested tokens exceed the model's context or the generator's max_length."""


class SourceTypeError(InputError, TypeError):
    """A model cannot be read from an object of this kind."""


class ArgumentError(InputError):
    """An argument of a session or run is unknown, has the wrong type or shape, or contains values out of range."""


class GraphError(GenaiError):
    """The ONNX model is malformed: it is not protobuf, is not a valid graph, or contradicts itself."""


class ProtobufError(GraphError):
    """The model is not a protobuf message, or has no graph."""


class ExternalDataError(GraphError):
    """External tensor data is missing, truncated or points outside the model folder."""


class UnsupportedOpError(GraphError):
    """The graph needs an operator for which no kernel exists."""


class UnsupportedModelError(GraphError):
    """The model is valid, but of a form that this engine cannot run."""


class NodeError(GenaiError):
    """A node of a graph failed, or is certain to fail."""


class RunStopped(GenaiError):
    """A session's run was stopped from outside."""


class LoadCancelledError(GenaiError):
    """The loading of a model was cancelled from outside."""


class InternalError(GenaiError):
    """An unforeseen error, caused by a model or its inputs. The original error is set as the cause of this error."""


class DeviceError(GenaiError):
    """The requested device cannot be used on this machine or in this process."""


class ProviderError(GenaiError):
    """An execution provider cannot be set up, or failed."""


class OutOfMemoryError(GenaiError):
    """The machine or a device has too little memory to load or run a graph."""


class NotSupportedYetError(GenaiError, NotImplementedError):
    """This version does not implement a documented feature of the API."""


class TokenizerError(GenaiError):
    """The tokenizer is missing or unreadable, or cannot do what was requested."""


class ChatTemplateError(TokenizerError):
    """The chat template is missing, invalid, or raised while rendering."""


class DamagedTemplateError(ChatTemplateError):
    """The chat template has an error, so that it writes no prompt, whatever the messages."""


class CacheCapacityError(GenaiError):
    """The KV cache, or the memory, is too small for the requested data."""


class StateError(GenaiError):
    """A call was made in an invalid order (for example, for logits before any token)."""


class StateFileError(GenaiError):
    """The file of a saved state is missing or damaged, or cannot be written."""


class StateMismatchError(StateFileError):
    """A saved state is intact, but its model, format or cache type differs from that of the object that loads it."""


class DeadlineError(GenaiError, TimeoutError):
    """The deadline of a request passed before the first token of the reply."""


class SamplingError(GenaiError):
    """No token can be chosen, because the logits contain NaN or infinity, or because every token is masked."""


class LogitsProcessorError(SamplingError):
    """A logits processor raised, or did not return logits."""


class ReplyFormatError(GenaiError):
    """A reply lacks the requested format, because it was truncated or a class rejects what the schema allows."""


class ModelOutputError(GenaiError):
    """A model's output is not a distribution, because it contains NaN or infinity, or only -inf."""


class VocabularyMismatchError(InputError):
    """Two models do not have the same tokens, although they are compared or one drafts tokens for the other."""


class RequestError(GenaiError):
    """A server refuses an HTTP request.

    Args:
        status: the HTTP status.
        code: a short name that programs compare, such as "model_not_found".
        param: the field of the request that is wrong.
        headers: further headers of the response.
    """

    def __init__(
        self,
        status: int,
        what: str,
        why: str = "",
        fix: str = "",
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(what, why, fix)
        self.status, self.code, self.param, self.headers = status, code, param, dict(headers or {})


class DownloadError(GenaiError):
    """A model cannot be downloaded because of the connection, the name, a file, a checksum or the disk space."""


class UnreachableError(DownloadError):
    """A model cannot be downloaded because the server does not answer, or its name is unknown."""


class AccessError(DownloadError):
    """A model cannot be downloaded without a token, or before its licence is accepted."""


class MissingPackageError(GenaiError):
    """An optional package that an operation needs is not installed."""


class StepInterrupted(GenaiError):
    """A step was abandoned because no request waits for its results any more. Its sequences are unchanged."""


def kind_of(value: object) -> str:
    """Return the type of a value with an article: the JSON type, such as "an object", or else such as "a set"."""
    known: tuple[tuple[type | tuple[type, ...], str], ...] = (
        (type(None), "null"), (bool, "a boolean"), (str, "a string"), ((int, float), "a number"),
        ((list, tuple), "a list"), (dict, "an object"),
    )  # fmt: skip
    for kinds, said in known:
        if isinstance(value, kinds):
            return said
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"


_LONGEST_NAME = 200


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return the fix for an unknown name: the most similar known name, or `otherwise` if none is similar."""
    from difflib import get_close_matches

    # A longer name is not a typo, and the comparison takes many times its memory.
    close = get_close_matches(name, list(known), 1) if len(name) <= _LONGEST_NAME else []
    return f"did you mean {close[0]!r}?" if close else otherwise


# No count, size or device number has more digits. Python itself accepts 4,300 digits, and raises ValueError for more.
_MOST_DIGITS = 20


def whole_number(text: str) -> int | None:
    """Return the number in a text of plain digits; None if the text has other characters or too many digits."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS else None


def malformed(what: str, why: str) -> GraphError:
    """Return the error for a model that was exported incorrectly, or was damaged since then."""
    return GraphError(what, why, "export the model again")


def no_threads(error: Exception) -> StateError:
    """Return the error for a thread that the system refused to start."""
    return StateError(
        "a thread cannot be started",
        str(error),
        "use fewer threads (threads=…), or raise the process limit (ulimit -u, or the container's limit)",
    )


def out_of_memory(where: str, error: MemoryError) -> OutOfMemoryError:
    """Return the error for too little memory, on the host or on a GPU."""
    return OutOfMemoryError(
        f"out of memory {where}",
        str(error) or "an allocation failed",
        "use smaller inputs or a smaller model, or delete values that are no longer needed",
    )


def gpu_failed(where: str, error: Exception) -> DeviceError:
    """Return the error for a GPU that failed while values were copied."""
    return DeviceError(
        f"the GPU failed in {where}",
        str(error),
        "create the sessions and values again; to check the GPU, run genai doctor",
    )
