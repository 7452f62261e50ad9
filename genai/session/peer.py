"""onnxruntime beside a session, where it is installed and asked for: to compare results and speed, no more."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from ..errors import InputError

PEERS = ("onnxruntime",)


class Peer:
    """A model in onnxruntime.

    Args:
        source: path or bytes of the model.
        threads: for its kernels; 0 = its default.

    Raises:
        InputError: it is not installed, or refuses the model.
    """

    def __init__(self, source: Any, threads: int = 0) -> None:
        os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
        try:
            module = import_module("onnxruntime")
        except ImportError as error:
            raise InputError("onnxruntime is not installed", str(error), "pip install onnxruntime") from error
        options = module.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = threads
        try:
            self._session = module.InferenceSession(source, options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise InputError("onnxruntime refuses the model", f"{error!s:.300}", "compare another model") from error

    def run(self, feed: Mapping[str, Any]) -> dict[str, Any]:
        """Outputs by name.

        Raises:
            InputError: it fails.
        """
        try:
            values = self._session.run(None, dict(feed))
        except Exception as error:
            raise InputError("onnxruntime fails on these inputs", f"{error!s:.300}", "try other inputs") from error
        return dict(zip((item.name for item in self._session.get_outputs()), values, strict=True))
