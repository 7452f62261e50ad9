"""Measure ik_llama.cpp through the ctypes bindings of ik-llama-cpp-python.

usage: ik_bindings.py ENGINE JOB, with LLAMA_CPP_BINDINGS and IK_LLAMA_CPP_LIB_PATH in the environment
"""

from __future__ import annotations

from typing import Any

from llama_bindings import Llama, bindings, main


class IkLlama(Llama):
    """ik_llama.cpp, which has llama.cpp's functions under older names."""

    def bindings(self) -> Any:
        return bindings("ik_llama_cpp", "_ctypes_api")

    def model_options(self) -> Any:
        options = self.api.llama_model_default_params()
        options.repack_tensors = True  # interleaved formats, as with its option -rtr 1
        options.use_mmap = False
        return options

    def set_more(self, options: Any, batch: int) -> None:
        options.flash_attn = True  # the default of ik_llama.cpp, and its faster choice

    def clear(self) -> None:
        self.api.llama_kv_cache_clear(self.context)


if __name__ == "__main__":
    main(IkLlama)
