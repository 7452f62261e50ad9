"""genai: run generative language models from ONNX graphs.

Public names load lazily, so that `import genai` costs milliseconds; see docs/architecture.md for the rooms.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .session.names import SESSION_NAMES

__version__ = "0.1.0"

# In a checkout the rooms kernels/, kvcache/, quant/, cli/ and configs/ lie beside this folder; installed, inside it.
_here = Path(__file__).resolve().parent
if not (_here / "kernels").is_dir() and (_here.parent / "pyproject.toml").is_file():
    __path__.append(str(_here.parent))

if TYPE_CHECKING:
    from .completion import ChatReply as ChatReply
    from .completion import Completion as Completion
    from .config import Config as Config
    from .errors import GenaiError as GenaiError
    from .generator import Generator as Generator
    from .generator import GeneratorParams as GeneratorParams
    from .later import Adapters as Adapters
    from .later import Audios as Audios
    from .later import Engine as Engine
    from .later import Images as Images
    from .later import MtpGenerator as MtpGenerator
    from .later import is_cuda_available as is_cuda_available
    from .later import register_execution_provider_library as register_execution_provider_library
    from .later import set_log_options as set_log_options
    from .llm import LLM as LLM
    from .model import Model as Model
    from .sampling_params import SamplingParams as SamplingParams
    from .session.binding import IOBinding as IOBinding
    from .session.binding import SessionIOBinding as SessionIOBinding
    from .session.custom_ops import register_op as register_op
    from .session.errors import EngineError as EngineError
    from .session.errors import EPFail as EPFail
    from .session.errors import Fail as Fail
    from .session.errors import InvalidArgument as InvalidArgument
    from .session.errors import InvalidGraph as InvalidGraph
    from .session.errors import InvalidProtobuf as InvalidProtobuf
    from .session.errors import ModelLoaded as ModelLoaded
    from .session.errors import NoModel as NoModel
    from .session.errors import NoSuchFile as NoSuchFile
    from .session.errors import NotImplemented as NotImplemented
    from .session.errors import RuntimeException as RuntimeException
    from .session.inference_session import InferenceSession as InferenceSession
    from .session.machine import disable_telemetry_events as disable_telemetry_events
    from .session.machine import enable_telemetry_events as enable_telemetry_events
    from .session.machine import get_all_providers as get_all_providers
    from .session.machine import get_available_providers as get_available_providers
    from .session.machine import get_build_info as get_build_info
    from .session.machine import get_device as get_device
    from .session.machine import get_version_string as get_version_string
    from .session.machine import set_default_logger_severity as set_default_logger_severity
    from .session.machine import set_default_logger_verbosity as set_default_logger_verbosity
    from .session.metadata import ModelMetadata as ModelMetadata
    from .session.metadata import NodeArg as NodeArg
    from .session.options import ExecutionMode as ExecutionMode
    from .session.options import ExecutionOrder as ExecutionOrder
    from .session.options import GraphOptimizationLevel as GraphOptimizationLevel
    from .session.options import RunOptions as RunOptions
    from .session.options import SessionOptions as SessionOptions
    from .session.values import OrtDevice as OrtDevice
    from .session.values import OrtValue as OrtValue
    from .tensor import Tensor as Tensor
    from .tokenizer import Tokenizer as Tokenizer
    from .tokenizer import TokenizerStream as TokenizerStream

_LAZY = {
    "Adapters": ".later",
    "Audios": ".later",
    "ChatReply": ".completion",
    "Completion": ".completion",
    "Config": ".config",
    "Engine": ".later",
    "GenaiError": ".errors",
    "Generator": ".generator",
    "GeneratorParams": ".generator",
    "Images": ".later",
    "LLM": ".llm",
    "Model": ".model",
    "SamplingParams": ".sampling_params",
    "MtpGenerator": ".later",
    "Tensor": ".tensor",
    "Tokenizer": ".tokenizer",
    "TokenizerStream": ".tokenizer",
    "is_cuda_available": ".later",
    "register_execution_provider_library": ".later",
    "set_log_options": ".later",
    **SESSION_NAMES,
}

__all__ = [*_LAZY, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'genai' has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_LAZY))
