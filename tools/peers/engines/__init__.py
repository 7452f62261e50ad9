"""The compared engines: how to install each engine, make its model and run it. One file per engine."""

from __future__ import annotations

from .base import Engine
from .genai_toolkit import GenaiToolkit
from .ik_llama import IkLlama
from .llama_cpp import LlamaCpp, LlamaCppWithoutAmx
from .onnxruntime_genai import OnnxRuntimeGenai
from .openvino_genai import OpenVinoGenai

OURS = GenaiToolkit()
PEERS: tuple[Engine, ...] = (OnnxRuntimeGenai(), OpenVinoGenai(), LlamaCpp(), LlamaCppWithoutAmx(), IkLlama())
ENGINES: dict[str, Engine] = {engine.name: engine for engine in (OURS, *PEERS)}
