"""Model: the core's, with the calls that it refuses."""

from __future__ import annotations

from ...models import model as core
from ..refused import GENERATING_PAGE, refusing_method


class Model(core.Model):
    __doc__ = core.Model.__doc__

    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        """The core's models, such as LLM.model, count as this class."""
        return core.Model in other.__mro__ if cls is Model else NotImplemented

    create_multimodal_processor = refusing_method(
        "create_multimodal_processor", "this version runs text models", GENERATING_PAGE
    )
    create_streaming_processor = refusing_method(
        "create_streaming_processor", "this version runs text models", GENERATING_PAGE
    )
