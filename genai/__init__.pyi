"""The public names and their modules. `__init__.py` reads this file, and loads each name on first use.

`__all__` lists the toolkit's own names. The remaining names are those of onnxruntime and onnxruntime-genai, which code
written for these libraries uses after `import genai as ort` or `import genai as og`.
"""

from .compat.onnxruntime.adapter_format import AdapterFormat as AdapterFormat, LoraAdapter as LoraAdapter
from .compat.onnxruntime.assignment import (
    OrtEpAssignedNode as OrtEpAssignedNode,
    OrtEpAssignedSubgraph as OrtEpAssignedSubgraph,
)
from .compat.onnxruntime.binding import IOBinding as IOBinding, SessionIOBinding as SessionIOBinding
from .compat.onnxruntime.custom_ops import register_op as register_op
from .compat.onnxruntime.errors import (
    EngineError as EngineError,
    EPFail as EPFail,
    ExternalDataFail as ExternalDataFail,
    Fail as Fail,
    InvalidArgument as InvalidArgument,
    InvalidGraph as InvalidGraph,
    InvalidProtobuf as InvalidProtobuf,
    ModelLoadCanceled as ModelLoadCanceled,
    ModelLoaded as ModelLoaded,
    NoModel as NoModel,
    NoSuchFile as NoSuchFile,
    NotImplemented as NotImplemented,
    RuntimeException as RuntimeException,
)
from .compat.onnxruntime.inference_session import InferenceSession as InferenceSession
from .compat.onnxruntime.model_info import ModelMetadata as ModelMetadata, NodeArg as NodeArg
from .compat.onnxruntime.module import (
    cuda_version as cuda_version,
    disable_telemetry_events as disable_telemetry_events,
    enable_telemetry_events as enable_telemetry_events,
    get_build_info as get_build_info,
    get_version_string as get_version_string,
    has_collective_ops as has_collective_ops,
    package_name as package_name,
    preload_dlls as preload_dlls,
    print_debug_info as print_debug_info,
    set_default_logger_severity as set_default_logger_severity,
    set_default_logger_verbosity as set_default_logger_verbosity,
    set_global_thread_pool_sizes as set_global_thread_pool_sizes,
    set_seed as set_seed,
)
from .compat.onnxruntime.options import (
    ExecutionMode as ExecutionMode,
    ExecutionOrder as ExecutionOrder,
    GraphOptimizationLevel as GraphOptimizationLevel,
    RunOptions as RunOptions,
    SessionOptions as SessionOptions,
)
from .compat.onnxruntime.providers import (
    get_all_providers as get_all_providers,
    get_available_providers as get_available_providers,
    get_device as get_device,
)
from .compat.onnxruntime.values import (
    OrtAllocatorType as OrtAllocatorType,
    OrtDevice as OrtDevice,
    OrtDeviceMemoryType as OrtDeviceMemoryType,
    OrtDeviceVendorId as OrtDeviceVendorId,
    OrtMemoryInfo as OrtMemoryInfo,
    OrtMemoryInfoDeviceType as OrtMemoryInfoDeviceType,
    OrtMemType as OrtMemType,
    OrtValue as OrtValue,
    copy_tensors as copy_tensors,
)
from .compat.onnxruntime_genai.config import Config as Config
from .compat.onnxruntime_genai.engine import (
    Engine as Engine,
    EngineCapabilities as EngineCapabilities,
    EngineErrorCode as EngineErrorCode,
    EngineEvent as EngineEvent,
    EngineEventBuffer as EngineEventBuffer,
    EngineEventFlags as EngineEventFlags,
    FinishReason as FinishReason,
    Request as Request,
    TurnUsage as TurnUsage,
)
from .compat.onnxruntime_genai.generator import Generator as Generator, GeneratorParams as GeneratorParams
from .compat.onnxruntime_genai.llm import LLM as LLM
from .compat.onnxruntime_genai.log import set_log_callback as set_log_callback, set_log_options as set_log_options
from .compat.onnxruntime_genai.model import Model as Model
from .compat.onnxruntime_genai.tensor import NamedTensors as NamedTensors, Tensor as Tensor
from .compat.onnxruntime_genai.tokenizer import Tokenizer as Tokenizer
from .compat.onnxruntime_genai.turn_options import RequestOptions as RequestOptions, TurnOptions as TurnOptions
from .compat.refused import (
    Audios as Audios,
    Images as Images,
    ModelCompiler as ModelCompiler,
    ModelPackage as ModelPackage,
    ModelPackageComponentContext as ModelPackageComponentContext,
    ModelPackageContext as ModelPackageContext,
    ModelPackageOptions as ModelPackageOptions,
    ModelPackageWriteMode as ModelPackageWriteMode,
    MtpGenerator as MtpGenerator,
    MultiModalProcessor as MultiModalProcessor,
    OrtArenaCfg as OrtArenaCfg,
    OrtCompileApiFlags as OrtCompileApiFlags,
    OrtEpContextData as OrtEpContextData,
    OrtEpContextDataBuffer as OrtEpContextDataBuffer,
    OrtEpDevice as OrtEpDevice,
    OrtExecutionProviderDevicePolicy as OrtExecutionProviderDevicePolicy,
    OrtExternalInitializerInfo as OrtExternalInitializerInfo,
    OrtHardwareDevice as OrtHardwareDevice,
    OrtHardwareDeviceType as OrtHardwareDeviceType,
    OrtSparseFormat as OrtSparseFormat,
    OrtSyncStream as OrtSyncStream,
    SparseTensor as SparseTensor,
    StreamingProcessor as StreamingProcessor,
    create_and_register_allocator as create_and_register_allocator,
    create_and_register_allocator_v2 as create_and_register_allocator_v2,
    get_current_gpu_device_id as get_current_gpu_device_id,
    get_ep_devices as get_ep_devices,
    is_cuda_available as is_cuda_available,
    is_dml_available as is_dml_available,
    is_openvino_available as is_openvino_available,
    is_qnn_available as is_qnn_available,
    is_webgpu_available as is_webgpu_available,
    register_execution_provider_library as register_execution_provider_library,
    set_current_gpu_device_id as set_current_gpu_device_id,
    set_default_logger_callback as set_default_logger_callback,
    unregister_execution_provider_library as unregister_execution_provider_library,
)
from .convert.resolve import pull as pull
from .embed.embedder import Embedder as Embedder
from .embed.reranker import RankedDocument as RankedDocument, Reranker as Reranker
from .engine.sampling.params import SamplingOptions as SamplingOptions, SamplingParams as SamplingParams
from .engine.sampling.search_options import SearchOptions as SearchOptions
from .errors import (
    AccessError as AccessError,
    ArgumentError as ArgumentError,
    CacheCapacityError as CacheCapacityError,
    ChatTemplateError as ChatTemplateError,
    ConfigError as ConfigError,
    ContextOverflowError as ContextOverflowError,
    DamagedTemplateError as DamagedTemplateError,
    DeadlineError as DeadlineError,
    DeviceError as DeviceError,
    DownloadError as DownloadError,
    ExternalDataError as ExternalDataError,
    GenaiError as GenaiError,
    GrammarError as GrammarError,
    GraphError as GraphError,
    InputError as InputError,
    InternalError as InternalError,
    LoadCancelledError as LoadCancelledError,
    LogitsProcessorError as LogitsProcessorError,
    MissingPackageError as MissingPackageError,
    ModelFolderError as ModelFolderError,
    ModelOutputError as ModelOutputError,
    NodeError as NodeError,
    NotSupportedYetError as NotSupportedYetError,
    OptionError as OptionError,
    OutOfMemoryError as OutOfMemoryError,
    ProtobufError as ProtobufError,
    ProviderError as ProviderError,
    ReplyFormatError as ReplyFormatError,
    RequestError as RequestError,
    RunStopped as RunStopped,
    SamplingError as SamplingError,
    SourceTypeError as SourceTypeError,
    StateError as StateError,
    StateFileError as StateFileError,
    StateMismatchError as StateMismatchError,
    StepInterrupted as StepInterrupted,
    TokenizerError as TokenizerError,
    UnreachableError as UnreachableError,
    UnsupportedModelError as UnsupportedModelError,
    UnsupportedOpError as UnsupportedOpError,
    VocabularyMismatchError as VocabularyMismatchError,
)
from .llm.completion import ChatReply as ChatReply, Completion as Completion
from .llm.llm import ChatOptions as ChatOptions
from .llm.speculation import Speculation as Speculation
from .llm.states import TextState as TextState
from .llm.stats import Stats as Stats
from .lora.store import Adapters as Adapters
from .models.model_options import ModelOptions as ModelOptions
from .text.tokenizer import TokenizerStream as TokenizerStream

__version__: str
__all__ = [
    "AccessError",
    "ArgumentError",
    "CacheCapacityError",
    "ChatOptions",
    "ChatReply",
    "ChatTemplateError",
    "Completion",
    "ConfigError",
    "ContextOverflowError",
    "DamagedTemplateError",
    "DeadlineError",
    "DeviceError",
    "DownloadError",
    "Embedder",
    "ExternalDataError",
    "GenaiError",
    "GrammarError",
    "GraphError",
    "InputError",
    "InternalError",
    "LLM",
    "LoadCancelledError",
    "LogitsProcessorError",
    "MissingPackageError",
    "ModelFolderError",
    "ModelOptions",
    "ModelOutputError",
    "NodeError",
    "NotSupportedYetError",
    "OptionError",
    "OutOfMemoryError",
    "ProtobufError",
    "ProviderError",
    "RankedDocument",
    "ReplyFormatError",
    "Reranker",
    "RunStopped",
    "RequestError",
    "SamplingError",
    "SamplingOptions",
    "SamplingParams",
    "SearchOptions",
    "SourceTypeError",
    "Speculation",
    "StateError",
    "StateFileError",
    "StateMismatchError",
    "Stats",
    "StepInterrupted",
    "TextState",
    "TokenizerError",
    "UnreachableError",
    "UnsupportedModelError",
    "UnsupportedOpError",
    "VocabularyMismatchError",
    "__version__",
    "pull",
    "register_op",
]
