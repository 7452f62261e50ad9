"""The choice of a repository's files: the files of one model, in the most suitable format.

The first rule that applies decides: the part after the colon; a folder that onnxruntime-genai's builder wrote for CPUs;
safetensors with a config.json; a GGUF file; the graph of an exporter, such as onnx/model_q4.onnx, with a config.json; a
folder that the builder wrote for NVIDIA GPUs, DirectML, WebGPU or TensorRT-RTX, whose graph also runs on CPUs. If a
precision is requested, safetensors come first, because only safetensors can be quantised to that precision.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import PurePosixPath
from shlex import quote

from ..errors import DownloadError, did_you_mean
from ..onnx.layouts import PRECISIONS, DecoderVariant, data_files, decoder_variants, named_variant
from .listing import Listing, RemoteFile

CHECKPOINT, GGUF, ONNX = "checkpoint", "gguf", "onnx"
GENAI_CONFIG, CONFIG, SINGLE, INDEX = (
    "genai_config.json",
    "config.json",
    "model.safetensors",
    "model.safetensors.index.json",
)
# Words in a folder's name that mark a model for NVIDIA GPUs, or for another device.
_NVIDIA = frozenset({"cuda", "gpu"})
# The devices whose graphs consist of operators that also run on CPUs, and all devices other than CPUs.
_PORTABLE = _NVIDIA | frozenset("directml dml webgpu tensorrt trt nvtensorrt nvtensorrtrtx rtx".split())
_OTHER_DEVICES = _PORTABLE | frozenset("npu qnn openvino rocm migraphx vitisai coreml".split())
# Precisions that only the graph of an exporter can have.
_ONLY_OF_GRAPHS = frozenset(PRECISIONS) - {"int8", "fp16", "fp32"}
# Files of a checkpoint in addition to its weights.
_BESIDE = re.compile(
    r"(?:config|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|chat_template|"
    r"quantize_config|quant_config|"
    r"tekken)\.json|merges\.txt|vocab\.txt|chat_template\.jinja|additional_chat_templates/[^/]+\.jinja|"
    r"tokenizer\.model(?:\.v\w+)?|spiece\.model|sentencepiece\.bpe\.model|[^/]+\.tiktoken|tiktoken\.model|"
    # sentence-transformers: the modules of an encoder, each with a folder of settings and weights.
    r"(?:modules|sentence_bert_config|config_sentence_transformers)\.json|"
    r"[0-9]+_\w+/(?:config\.json|model\.safetensors)"
)
# Files in an ONNX folder that no model reads.
_NOT_OF_ONNX = re.compile(
    r".*\.(?:md|png|jpe?g|gif|svg|webp|mp4|py|ipynb|pt|pth|pkl|pickle|ckpt|h5|msgpack|safetensors|gguf|zip|gz|tar)|"
    r"pytorch_model.*|\.git.*|LICEN[CS]E.*",
    re.IGNORECASE,
)
_PICKLES = re.compile(r".*\.(?:bin|pt|pth|ckpt|pkl)", re.IGNORECASE)
# Common names of GGUF quantisations, in order of preference.
_QUANTISATIONS = "Q4_K_M Q4_K_S Q4_0 Q4_K_L Q5_K_M Q5_K_S IQ4_NL IQ4_XS Q6_K Q8_0 Q3_K_M BF16 F16 FP16 F32".split()
_QUANTISED = re.compile(r"(?:^|[-._ (])((?:I?Q\d\w*|TQ\d_\d|BF16|F16|FP16|F32|MXFP4\w*))(?=[-._ )]|$)", re.IGNORECASE)
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)


@dataclass(frozen=True)
class FileChoice:
    """The files of one model.

    Attributes:
        kind: "checkpoint", "gguf" or "onnx".
        root: folder of the model in the repository, "" = the repository itself; for GGUF, the first file of the model.
        files: the files to download.
        why: description of the choice and of the alternatives.
        precision: precision of the graph of an exporter, such as "q4"; "" = another kind of model.
    """

    kind: str
    root: str
    files: tuple[RemoteFile, ...]
    why: str
    precision: str = ""


def choose(listing: Listing, *, precision: str | None = None) -> FileChoice:
    """Choose the files of the model that a listing's reference names.

    Args:
        listing: the files in the repository.
        precision: the precision of the weights that the user requests; None = no request.

    Raises:
        DownloadError: if no model in the repository can run here, or several models match the reference.
    """
    part = listing.reference.part or (listing.files[0].path if listing.reference.url else "")
    if part:
        return _choose_named(listing, part)
    exported = partial(_best_exported, precision=precision)
    choosers: list[Callable[[Listing], FileChoice | None]] = [_best_onnx, _checkpoint]
    if precision:
        choosers.reverse()
    if precision in _ONLY_OF_GRAPHS:
        choosers.insert(0, exported)
    choosers += [_best_gguf, exported, _onnx_for_nvidia, _onnx_for_others]
    for chooser in choosers:
        if (choice := chooser(listing)) is not None:
            return choice
    raise _nothing_to_run(listing)


def _choose_named(listing: Listing, part: str) -> FileChoice:
    """Return the files that the part after the colon selects: a GGUF file, a quantisation, an ONNX graph or folder."""
    ggufs, folders = _ggufs(listing), _onnx_folders(listing)
    wanted_name = part.lower()
    exact = [name for name in ggufs if name.lower() == wanted_name]
    named = exact or [name for name in ggufs if wanted_name in (_quantisation(name).lower(), _stem(name).lower())]
    if len(named) == 1:
        return _gguf(ggufs, named[0], f"{named[0]}, as requested")
    inside = [folder for folder in folders if wanted_name in (folder.lower(), PurePosixPath(folder).name.lower())]
    if len(inside) == 1 and not named:
        return _onnx(listing, inside[0], f"the ONNX folder {inside[0]}, as requested")
    variants = _exported(listing)
    variant = named_variant(variants, part) or next((one for one in variants if one.decoder == part), None)
    if variant is not None and not named and not inside:
        return _of_exporter(listing, variant, f"the graph {variant.decoder}, as requested")
    name = listing.reference.name
    if several := [*named, *inside]:
        raise DownloadError(
            f"{name}: several models match",
            _name_list(several),
            f"use the full name of one: {_command(listing, several[0])}",
        )
    if any(file.path == part for file in listing.files):
        raise DownloadError(
            f"{name}: the file is only a part of a model",
            "only a GGUF file or a whole repository can be downloaded",
            _command(listing),
        )
    known = [*sorted({_quantisation(name) or name for name in ggufs}), *folders, *(one.precision for one in variants)]
    why = f"the repository has {_name_list(known)}" if known else "the repository has no GGUF file and no ONNX folder"
    near = did_you_mean(part, known, "choose another part")
    raise DownloadError(
        f"{name}: there is no {part!r}", why, f"{near}, or omit the part after the colon: {_command(listing)}"
    )


def _checkpoint(listing: Listing) -> FileChoice | None:
    present = {file.path for file in listing.files}
    if CONFIG not in present:
        return None
    if SINGLE in present:
        weights = [SINGLE]
    elif INDEX in present:
        weights = [INDEX, *(name for name in present if "/" not in name and _is_shard(name))]
    else:
        return None
    files = [file for file in listing.files if file.path in weights or _BESIDE.fullmatch(file.path)]
    shards = sum(name.endswith(".safetensors") for name in weights)
    return FileChoice(CHECKPOINT, "", tuple(files), f"safetensors ({shards} {'file' if shards == 1 else 'files'})")


def _is_shard(name: str) -> bool:
    return name.endswith(".safetensors") and not name.startswith(("consolidated", "adapter", "mmproj"))


def _onnx_folders(listing: Listing) -> list[str]:
    """Return the folders with a genai_config.json and a graph, the most suitable for this machine first."""
    folders = {_folder(file.path) for file in listing.files if PurePosixPath(file.path).name == GENAI_CONFIG}
    graphs = {_folder(file.path) for file in listing.files if file.path.endswith(".onnx")}
    return sorted(folders & graphs, key=_suitability)


def _suitability(folder: str) -> tuple[bool, bool, bool, bool, int, str]:
    words = _words(folder)
    return (
        bool(words & _OTHER_DEVICES),
        not words & {"cpu", "mobile"},
        "int4" not in words,
        "acc-level-4" not in folder.lower(),  # level 4 quantises activations, which makes matmuls fast
        len(folder),
        folder,
    )


def _words(folder: str) -> set[str]:
    return set(re.split(r"[/\-_. ]+", folder.lower()))


def _best_onnx(listing: Listing) -> FileChoice | None:
    folders = [folder for folder in _onnx_folders(listing) if not _words(folder) & _OTHER_DEVICES]
    if not folders:
        return None
    others = f"; others: {_name_list(folders[1:])}" if folders[1:] else ""
    return _onnx(listing, folders[0], f"the ONNX folder {folders[0] or 'at its root'}, written for CPUs{others}")


def _onnx_for_nvidia(listing: Listing) -> FileChoice | None:
    """Return the files of the best folder for NVIDIA GPUs (and no other devices), or None."""
    folders = [folder for folder in _onnx_folders(listing) if _words(folder) & _OTHER_DEVICES <= _NVIDIA]
    if not folders:
        return None
    others = f"; others: {_name_list(folders[1:])}" if folders[1:] else ""
    return _onnx(listing, folders[0], f"the ONNX folder {folders[0]}, written for NVIDIA GPUs{others}")


def _onnx_for_others(listing: Listing) -> FileChoice | None:
    """Return the files of the best folder for another device whose graphs run on CPUs, or None."""
    folders = [folder for folder in _onnx_folders(listing) if _words(folder) & _OTHER_DEVICES <= _PORTABLE]
    if not folders:
        return None
    others = f"; others: {_name_list(folders[1:])}" if folders[1:] else ""
    return _onnx(listing, folders[0], f"the ONNX folder {folders[0]}, written for another device{others}")


def _exported(listing: Listing) -> list[DecoderVariant]:
    """Return the graphs that an exporter wrote, the most suitable for this machine first.

    Decoders have a generation_config.json. The other models are encoders, which are small, so the graph without loss
    comes first.
    """
    paths = [file.path for file in listing.files]
    if CONFIG not in paths:
        return []
    variants = decoder_variants(paths)
    if "generation_config.json" in paths or any(one.embedding or "decoder" in one.decoder for one in variants):
        return variants
    return sorted(variants, key=lambda one: one.precision != "fp32")


def _best_exported(listing: Listing, *, precision: str | None) -> FileChoice | None:
    """Return the graph of an exporter in a precision, or the most suitable one; None if there is none."""
    variants = _exported(listing)
    if not variants or (precision and listing.reference.url):
        return None
    if any(PurePosixPath(file.path).name.startswith("encoder_model") for file in listing.files):
        raise DownloadError(
            f"{listing.reference.name}: the repository has no model that can run here",
            "it is a model of an encoder and a decoder, such as Whisper or T5, which are not supported",
            "choose a model that only has a decoder; to run a single graph, use `genai run`",
        )
    names = [one.precision for one in variants]
    chosen = named_variant(variants, precision) if precision else variants[0]
    if chosen is None:
        if precision in _ONLY_OF_GRAPHS and _checkpoint(listing) is not None:
            return None
        raise DownloadError(
            f"{listing.reference.name}: there is no graph in the precision {precision!r:.40}",
            f"its graphs are in {_name_list(names)}, and a graph is not converted",
            f"choose one of these, for example {_command(listing, names[0])}",
        )
    others = [one.precision for one in variants if one != chosen]
    same = [one.decoder for one in variants if one.precision == chosen.precision]
    if len(same) > 1:
        raise DownloadError(
            f"{listing.reference.name}: there are {len(same)} graphs of the same precision",
            f"they are {_name_list(same)}, and the names do not tell which of them is meant",
            f"choose one: {_command(listing, same[0])}",
        )
    rest = f"; others: {_name_list(others)} ({_command(listing, others[0])})" if others else ""
    return _of_exporter(listing, chosen, f"the graph {chosen.decoder} ({chosen.precision}){rest}")


def _of_exporter(listing: Listing, variant: DecoderVariant, why: str) -> FileChoice:
    paths = [file.path for file in listing.files]
    wanted = {*variant.graphs, *(path for graph in variant.graphs for path in data_files(graph, paths))}
    files = [file for file in listing.files if file.path in wanted or _BESIDE.fullmatch(file.path)]
    return FileChoice(ONNX, "", tuple(files), why, variant.precision)


def _onnx(listing: Listing, folder: str, why: str) -> FileChoice:
    def needed(path: str) -> bool:
        inside = path[len(folder) + 1 :] if folder else path
        if not path.startswith(f"{folder}/" if folder else ""):
            return False
        templates = re.fullmatch(r"additional_chat_templates/[^/]+\.jinja", inside)
        return bool(templates) or ("/" not in inside and not _NOT_OF_ONNX.fullmatch(inside))

    return FileChoice(ONNX, folder, tuple(file for file in listing.files if needed(file.path)), why)


def _ggufs(listing: Listing) -> dict[str, list[RemoteFile]]:
    """Return GGUF models by their first file, without image projectors and importance matrices."""
    files_of: dict[str, list[RemoteFile]] = {}
    for file in listing.files:
        name = PurePosixPath(file.path).name.lower()
        if not name.endswith(".gguf") or name.startswith("imatrix") or "mmproj" in name:
            continue
        split = _SPLIT.fullmatch(file.path)
        first = f"{split[1]}-00001-of-{split[3]}.gguf" if split else file.path
        files_of.setdefault(first, []).append(file)
    return files_of


def _best_gguf(listing: Listing) -> FileChoice | None:
    ggufs = _ggufs(listing)
    if not ggufs:
        return None
    if len(ggufs) == 1:
        (only,) = ggufs
        return _gguf(ggufs, only, only)
    for quantisation in _QUANTISATIONS:
        named = [name for name in ggufs if _quantisation(name) == quantisation]
        if len(named) == 1:
            others = _name_list(sorted({_quantisation(name) or name for name in ggufs} - {quantisation}))
            return _gguf(ggufs, named[0], f"{named[0]}; others: {others}")
    name = listing.reference.name
    raise DownloadError(
        f"{name}: there are several GGUF files", _name_list(list(ggufs)), f"choose one: {_command(listing, min(ggufs))}"
    )


def _gguf(ggufs: dict[str, list[RemoteFile]], first: str, why: str) -> FileChoice:
    files = ggufs[first]
    if split := _SPLIT.fullmatch(first):
        numbers = sorted(int(match[2]) for file in files if (match := _SPLIT.fullmatch(file.path)))
        if numbers != list(range(1, int(split[3]) + 1)):
            raise DownloadError(
                f"{first}: only {len(numbers)} of its {int(split[3])} parts are in the repository",
                "the model needs all of its parts",
                "choose another file: `genai pull ORG/NAME:FILE`",
            )
    return FileChoice(GGUF, first, tuple(files), why)


def _quantisation(name: str) -> str:
    """Return the quantisation that a file's name contains, e.g. Q4_K_M; "" if it contains none."""
    names = _QUANTISED.findall(_stem(name))
    return names[-1].upper() if names else ""


def precision_in(name: str) -> str:
    """Return the weights' precision that a folder's or file's name contains, e.g. "int4" or "Q4_K_M"; "" if none."""
    match = re.search(r"(?:^|[/\-_.])(int4|int8|fp16|fp32|bf16)(?=[/\-_.]|$)", name.lower())
    return _quantisation(name) if name.endswith(".gguf") else match[1] if match else ""


def _stem(name: str) -> str:
    split = _SPLIT.fullmatch(name)
    return PurePosixPath(split[1] if split else name.removesuffix(".gguf")).name


def _folder(path: str) -> str:
    return path.rpartition("/")[0]


def _name_list(names: Sequence[str]) -> str:
    rest = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(name or "the repository's root" for name in names[:8]) + rest


def _nothing_to_run(listing: Listing) -> DownloadError:
    """Return the error for a repository that contains no model that can run here."""
    problem = f"{listing.reference.name}: the repository has no model that can run here"
    paths = [file.path for file in listing.files]
    if folders := _onnx_folders(listing):
        names = _name_list(folders)
        return DownloadError(
            problem,
            f"its ONNX folders are built for other devices ({names})",
            "find the original checkpoint on the model's page, and pull it: `genai pull ORG/NAME`; or try a folder: "
            f"{_command(listing, folders[0])}",
        )
    if "adapter_config.json" in paths:
        return DownloadError(
            problem,
            "it contains an adapter, not a model",
            f"run `hf download {listing.reference.repo} --local-dir adapter`, and then "
            "`genai chat BASE --lora NAME=adapter`, where BASE is the base model given on its page",
        )
    if pickles := list(_matching(_PICKLES, paths)):
        return DownloadError(
            problem,
            f"its weights are pickles ({_name_list(pickles[:3])}), which can execute arbitrary code and are never "
            "opened",
            "look on its page for a pull request that adds safetensors, and pull that revision: "
            f"`genai pull {listing.reference.repo}@refs/pr/NUMBER`",
        )
    if any(path.endswith(".onnx") for path in paths):
        return DownloadError(
            problem,
            f"text generation needs {CONFIG} or {GENAI_CONFIG} beside an ONNX graph of a decoder, such as "
            "onnx/model.onnx, and the repository has none",
            "find the original checkpoint on the model's page, and pull it; to run a single graph, use `genai run`",
        )
    weights = any(path.endswith(".safetensors") for path in paths)
    why = f"it has safetensors, but no {CONFIG}, {SINGLE} or {INDEX} at its root" if weights else "it has no weights"
    if listing.left_out:
        why += f"; file names that are invalid on some systems are skipped: {_name_list(listing.left_out)[:200]!r}"
    return DownloadError(
        problem, why, "find the original model on the repository's page, and pull it: `genai pull ORG/NAME`"
    )


def _command(listing: Listing, part: str = "") -> str:
    """Return the command that downloads the same repository, or a part of the repository."""
    return f"`genai pull {quote(replace(listing.reference, part=part).name)}`"


def _matching(pattern: re.Pattern[str], paths: Iterable[str]) -> Iterator[str]:
    return (path for path in paths if pattern.fullmatch(path))
