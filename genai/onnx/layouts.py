"""The graphs of a decoder that an exporter wrote, by the names of their files.

Optimum and the scripts of transformers.js write one graph per precision, in the model's folder or in its folder
`onnx/`: `model.onnx`, `model_q4.onnx`, `decoder_model_merged_fp16.onnx`. The part after the last underscore is the
precision of the weights; without it, the weights are not quantised.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath

FOLDERS = ("onnx", "")
"""Folders of graphs, relative to the model's folder."""

PRECISIONS = (
    "q4", "q4f16", "int8", "quantized", "q8", "uint8", "fp16", "fp32", "bnb4", "q2", "q2f16", "q1", "q1f16"
)  # fmt: skip
"""The precisions of decoders in the order of preference: the fastest on a CPU with a small loss first."""

SAME_PRECISION = {
    "int4": ("q4", "q4f16", "bnb4"),
    "int8": ("int8", "quantized", "q8", "uint8"),
    "q8": ("q8", "quantized", "int8", "uint8"),
}
"""The precisions of graphs that a name of a precision also stands for, in order of preference."""

# The names of decoders, the most suitable first. `decoder_model.onnx` has no cache.
_STEMS = ("decoder_model_merged", "model", "decoder_with_past_model", "decoder_model")
_DECODER = re.compile(rf"({'|'.join(_STEMS)})(?:_({'|'.join(PRECISIONS)}))?\.onnx")
# The names of graphs of which no decoder is made alone.
_PART = re.compile(
    r"(?:.*_)?(?:embed_tokens|embeddings?|encoder|encoder_model|projector|vision|vision_model|head)(?:_.*)?"
)
_ANY = re.compile(rf"(.+?)(?:[_.-]({'|'.join(PRECISIONS)}))?\.onnx")
_EMBEDDING = "embed_tokens"


@dataclass(frozen=True)
class DecoderVariant:
    """A decoder in one precision.

    Attributes:
        precision: one of PRECISIONS; "fp32" if the name of the file has none.
        decoder: path of the decoder's graph, relative to the model's folder.
        embedding: path of the graph that computes token embeddings; "" = none.
        without_past: path of the graph that computes a prompt, for a decoder of later tokens; "" = none.
    """

    precision: str
    decoder: str
    embedding: str = ""
    without_past: str = ""

    @property
    def graphs(self) -> tuple[str, ...]:
        """The paths of the graphs that the decoder needs."""
        return tuple(filter(None, (self.decoder, self.embedding, self.without_past)))


def decoder_variants(paths: Iterable[str]) -> list[DecoderVariant]:
    """Return the decoders among the files of a model, the most suitable first.

    Args:
        paths: the paths of the files, relative to the model's folder.
    """
    graphs = {path for path in paths if path.endswith(".onnx") and _folder(path) in FOLDERS}
    found = [variant for folder in FOLDERS for variant in _in_folder(folder, graphs)]
    return sorted(found, key=lambda variant: PRECISIONS.index(variant.precision))


def named_variant(variants: Iterable[DecoderVariant], precision: str) -> DecoderVariant | None:
    """Return the decoder that a precision stands for, such as "q4" or "int4"; None if there is none."""
    by_name = {variant.precision: variant for variant in variants}
    wanted = precision.lower()
    return next((by_name[name] for name in (wanted, *SAME_PRECISION.get(wanted, ())) if name in by_name), None)


def data_files(graph: str, paths: Iterable[str]) -> list[str]:
    """Return the files of weights of a graph, such as `model.onnx_data` and `model.onnx_data_1`."""
    return sorted(path for path in paths if path.startswith(graph) and re.fullmatch(r"[._].*", path[len(graph) :]))


def _in_folder(folder: str, graphs: Iterable[str]) -> list[DecoderVariant]:
    names = {PurePosixPath(path).name: path for path in graphs if _folder(path) == folder}
    by_precision: dict[str, dict[str, str]] = {}
    for name, path in names.items():
        if match := _DECODER.fullmatch(name):
            by_precision.setdefault(match[2] or "fp32", {})[match[1]] = path
    if not by_precision:
        others = [(match, names[name]) for name in sorted(names) if (match := _ANY.fullmatch(name))]
        return [DecoderVariant(match[2] or "fp32", path) for match, path in others if not _PART.fullmatch(match[1])]
    variants = []
    for precision, found in by_precision.items():
        stem = next(stem for stem in _STEMS if stem in found)
        before = found.get("decoder_model", "") if stem == "decoder_with_past_model" else ""
        variants.append(DecoderVariant(precision, found[stem], _embedding(precision, names), before))
    return variants


def _embedding(precision: str, names: dict[str, str]) -> str:
    """Return the graph of token embeddings of the same precision, or else of the precision with the smallest loss."""
    for name in (precision, *(("fp16",) if precision.endswith("f16") else ()), "fp32", "fp16", *PRECISIONS):
        suffix = "" if name == "fp32" else f"_{name}"
        if found := names.get(f"{_EMBEDDING}{suffix}.onnx"):
            return found
    return ""


def _folder(path: str) -> str:
    return path.rpartition("/")[0]
