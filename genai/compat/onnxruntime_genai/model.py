"""Model: the core class, plus onnxruntime-genai methods that raise NotSupportedYetError."""

from __future__ import annotations

from ...models import model as core
from ..refused import GENERATING_PAGE, refusing_method
from .config import Config


class Model(core.Model):
    __doc__ = core.Model.__doc__
    config: Config
    _config_class = Config
    _loads_draft = True

    create_multimodal_processor = refusing_method(
        "create_multimodal_processor", "this version runs only text models", GENERATING_PAGE
    )
    create_streaming_processor = refusing_method(
        "create_streaming_processor", "this version runs only text models", GENERATING_PAGE
    )
