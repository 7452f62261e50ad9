"""Write the GGUF file of a sentence-transformers folder with llama.cpp's own converter, without a vocabulary.

usage: write_gguf.py LLAMA_CPP FOLDER FILE TYPE, where LLAMA_CPP is llama.cpp's source folder, and TYPE is f32 or f16
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def main() -> None:
    """Write the file."""
    source, folder, file, kind = sys.argv[1:]
    sys.path[:0] = [source, str(Path(source) / "gguf-py")]
    import gguf
    from conversion import ModelType, get_model_architecture, get_model_class
    from conversion.base import ModelBase

    config = ModelBase.load_hparams(Path(folder), False)
    kinds: Any = gguf.LlamaFileType
    architecture = get_model_class(get_model_architecture(config, ModelType.TEXT))

    class WithoutVocabulary(architecture):  # type: ignore[misc, valid-type]
        """The converter knows only published tokenizers, and the comparison passes token ids."""

        model_arch = architecture.model_arch

        def set_vocab(self) -> None:
            self.gguf_writer.add_tokenizer_model("none")
            self.gguf_writer.add_vocab_size(self.hparams["vocab_size"])
            self.gguf_writer.add_token_type_count(self.hparams.get("type_vocab_size") or 1)

    types = {"f32": kinds.ALL_F32, "f16": kinds.MOSTLY_F16}
    WithoutVocabulary(Path(folder), types[kind], Path(file)).write()


if __name__ == "__main__":
    main()
