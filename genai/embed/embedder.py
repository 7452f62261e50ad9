"""Embeddings: texts to vectors."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ..common.log import logger
from ..common.single import Single
from ..convert.encoders.build import built_encoder, is_encoder_checkpoint
from ..convert.encoders.families import adapter_tasks
from ..convert.encoders.spec import TokenScore
from ..devices import open_executor
from ..errors import ConfigError, InputError, ModelFolderError, OptionError, StateError, UnsupportedModelError, kind_of
from ..models.encoder import Encoder, EncoderInfo, TokenSequence
from ..models.folders import folder_errors
from ..models.identity import LoadedFiles
from ..models.model_options import check_model_options
from .batches import SharedSteps
from .folder import EncoderFolder, checked_poolings, chosen_prompt, find_graph, has_graph, read_encoder_folder
from .heads import MULTI, SPARSE, TokenHead, read_head, token_vectors, token_weights
from .pooling import Floats, normalized, pooled
from .tokens import TextEncoder, each_of, is_whole

Text = str | Sequence[int] | NDArray[np.integer[Any]]
"""A text, or the token ids of a text."""

# Outputs of exported encoders with one row per token, in order of preference.
TOKEN_OUTPUTS = ("last_hidden_state", "token_embeddings")
# Number of texts that `map` encodes and computes at a time.
_MAPPED = 1024
_log = logger(__name__)


class Embedder(Single, AbstractContextManager["Embedder"]):
    """A model that computes a vector for each text. Safe to use from several threads, which share its steps.

    A vector does not depend on the other texts of a call, or of other calls: it is bit-identical for any of them.

    Args:
        model: a folder with an ONNX graph (onnx/model.onnx or model.onnx) or a checkpoint (*.safetensors), a tokenizer,
            and the files of sentence-transformers: modules.json, the settings of its modules, and prompts. The graph of
            a checkpoint is built once and kept in the cache.
        file: the graph in the folder, such as "onnx/model_quantized.onnx" [default: onnx/model.onnx or model.onnx].
        pooling: how rows of tokens become a vector: "mean", "cls", "lasttoken", "max", "weightedmean" or
            "mean_sqrt_len_tokens", or several of them, whose vectors are concatenated [default: as modules.json says].
        normalize: True for vectors of length 1, False for vectors as the modules compute them [default: as
            modules.json says].
        max_length: maximum number of tokens of a text [default: the model's limit].
        threads: CPU threads [default: the physical cores that this process may use].
        accuracy: see genai.Model.
        device: "cpu", or "reference": the computation in plain NumPy, for comparisons.
        precision: storage format of a checkpoint's weights: "fp32", "fp16", "int8" or "int4".
        task: name of the task whose adapter is merged into a checkpoint's weights, for jina-embeddings-v3
            (`embedder.tasks` lists them) [default: no adapter].
        pull: True to download a model that is not cached. If False, nothing is downloaded.

    Raises:
        ModelFolderError, ConfigError: a file is missing or malformed.
        OptionError: an argument is out of range.
        UnsupportedModelError: the model cannot run here, or is not a model for embeddings.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        file: str | None = None,
        pooling: str | Sequence[str] | None = None,
        normalize: bool | None = None,
        max_length: int | None = None,
        threads: int | None = None,
        accuracy: str = "auto",
        device: str = "cpu",
        precision: str = "fp32",
        task: str | None = None,
        pull: bool = False,
    ) -> None:
        check_model_options(threads=threads, accuracy=accuracy, device=device, max_length=max_length)
        check_switches(normalize=normalize)
        folder = named_folder(model, pull=pull)
        with folder_errors(folder):
            self._description = read_encoder_folder(folder)
            self._poolings = self._description.poolings if pooling is None else checked_poolings(pooling)
            if not self._poolings:
                raise _no_pooling(self._description)
            self._files = LoadedFiles(folder, {})
            self._text, self._encoder = load_parts(
                self._description, TOKEN_OUTPUTS, file=file, max_length=max_length, threads=threads, accuracy=accuracy,
                device=device, precision=precision, files=self._files, task=task,
            )  # fmt: skip
            if self._encoder.info.rows != "tokens":
                raise UnsupportedModelError(
                    f"{folder}: the graph's output {self._encoder.info.output!r} has one row per text",
                    "a pooling needs one row per token",
                    "to score texts with a classification head, use genai.Reranker or `genai rerank`",
                )
            self._normalize = self._description.normalizes if normalize is None else normalize
            self._all_dimensions = self._check_modules()
            self.dimensions = self._default_dimensions()
        self._heads: dict[str, TokenHead | None] = {}
        self._steps = SharedSteps(self._encoder)
        self._is_closed = False

    dimensions: int
    """The number of dimensions of a vector."""

    @property
    def folder(self) -> Path:
        """The model's folder."""
        return self._description.folder

    @property
    def info(self) -> EncoderInfo:
        """Facts about the graph."""
        return self._encoder.info

    @property
    def pooling(self) -> tuple[str, ...]:
        """The poolings, in the order in which their vectors are concatenated."""
        return self._poolings

    @property
    def max_length(self) -> int:
        """The maximum number of tokens of a text, special tokens included. Longer texts are truncated."""
        return self._text.max_length

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks that the checkpoint has adapters for; see the argument `task`."""
        return adapter_tasks(self._description.config)

    @property
    def prompts(self) -> dict[str, str]:
        """The texts that the model's files define for use before a text, by name."""
        return dict(self._description.prompts)

    @property
    def similarity(self) -> str:
        """The similarity function that the model was trained for: "cosine", "dot", "euclidean" or "manhattan"."""
        return self._description.similarity

    def embed(
        self,
        texts: Text | Sequence[Text],
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate: bool = True,
    ) -> Floats:
        """Return the vectors of texts.

        Args:
            texts: a text, or a list of texts. A text is a str, or its token ids with special tokens.
            prompt_name: name of one of the model's prompts, such as "query", which precedes every text.
            prompt: a text that precedes every text, instead of a named prompt.
            dimensions: number of dimensions to keep, from the first (Matryoshka embeddings); vectors of length 1 are
                normalised again [default: truncate_dim in config_sentence_transformers.json, else all].
            normalize: True for vectors of length 1 [default: as the embedder was created].
            truncate: True to truncate texts that are too long, False to raise an error.

        Returns:
            float32 [texts, dimensions], or float32 [dimensions] for a single text.

        Raises:
            InputError: a text cannot be embedded; the message has its index.
            OptionError: `dimensions` is out of range, or a switch is not True or False.
        """
        single = isinstance(texts, str) or _is_ids(texts)
        items = [cast(Text, texts)] if single else list(each_of(cast("Sequence[Text]", texts), "texts"))
        vectors, _ = self._embedded(
            items, prompt_name=prompt_name, prompt=prompt, dimensions=dimensions, normalize=normalize, truncate=truncate
        )
        return vectors[0] if single else vectors

    def embed_counted(self, texts: Sequence[Text], **options: Any) -> tuple[Floats, list[int]]:
        """Return the vectors of texts, and the number of tokens of each text, with its prompt and special tokens.

        Args:
            texts: texts, or token ids of texts.
            options: options of `embed`.

        Returns:
            float32 [texts, dimensions], and a number per text.
        """
        return self._embedded(list(each_of(texts, "texts")), **options)

    def embed_sparse(
        self, texts: str | Sequence[str], *, prompt: str = "", truncate: bool = True
    ) -> dict[int, float] | list[dict[int, float]]:
        """Return the weights of the tokens of texts, by token id, for models with a sparse head (BGE-M3).

        `sparse_score` compares two texts. Tokens without a positive weight and special tokens are left out.

        Args:
            texts, prompt, truncate: see `embed`.

        Returns:
            For each text, its weights by token id; for a single text, only its weights.

        Raises:
            UnsupportedModelError: the model has no sparse head.
            InputError: a text cannot be embedded; the message has its index.
        """
        head = self._head(SPARSE, "a sparse head")
        special = frozenset(self._text.special_ids)
        sequences, rows = self._rows(texts, prompt, truncate)
        found = [token_weights(head, row, sequence.ids, special) for sequence, row in zip(sequences, rows, strict=True)]
        return found[0] if isinstance(texts, str) else found

    def embed_multi(
        self, texts: str | Sequence[str], *, prompt: str = "", truncate: bool = True
    ) -> Floats | list[Floats]:
        """Return a vector per token, for models with a multi-vector head (BGE-M3).

        `multi_vector_score` compares two texts.

        Args:
            texts, prompt, truncate: see `embed`.

        Returns:
            For each text, float32 [tokens - 1, dimensions], vectors of length 1; for a single text, only its array.

        Raises:
            UnsupportedModelError: the model has no multi-vector head.
            InputError: a text cannot be embedded; the message has its index.
        """
        head = self._head(MULTI, "a multi-vector head")
        found = [token_vectors(head, row) for row in self._rows(texts, prompt, truncate)[1]]
        return found[0] if isinstance(texts, str) else found

    def _head(self, name: str, what: str) -> TokenHead:
        if name not in self._heads:
            self._heads[name] = read_head(self.folder, name, self._width)
        head = self._heads[name]
        if head is None:
            raise UnsupportedModelError(
                f"{self.folder}: the model has no {what.removeprefix('a ')}",
                f"{what} is in the file {name}.pt or {name}.safetensors",
                "use embed, or a model with this head, such as BGE-M3",
            )
        return head

    def _rows(
        self, texts: str | Sequence[str], prompt: str, truncate: bool
    ) -> tuple[list[TokenSequence], list[Floats]]:
        """Return the tokens and the encoder's rows of each text."""
        if self._is_closed:
            raise StateError("the embedder is closed", "close() freed its memory", "create a new Embedder")
        items = [texts] if isinstance(texts, str) else list(each_of(texts, "texts"))
        sequences = self._sequences(items, prompt, truncate)

        def finish(rows: Floats, index: int) -> Floats:
            if not np.isfinite(rows).all():
                raise _not_finite(index)
            return rows

        return sequences, self._steps.run(sequences, finish)

    async def aembed(self, texts: Text | Sequence[Text], **options: Any) -> Floats:
        """Return the vectors of texts without blocking the event loop; see `embed`."""
        return await asyncio.to_thread(partial(self.embed, texts, **options))

    def map(self, texts: Iterable[Text], **options: Any) -> Iterator[Floats]:
        """Yield the vector of each text, in order. Texts are read as needed, so any number of texts is possible.

        Args:
            texts: texts, or token ids of texts.
            options: options of `embed`.

        Yields:
            float32 [dimensions].
        """
        iterator, first = each_of(texts, "texts"), 0
        while part := list(islice(iterator, _MAPPED)):
            yield from self._embedded(part, first=first, **options)[0]
            first += len(part)

    def identity(self) -> str:
        """Return a hash of all that determines a vector: the graph, the tokenizer, the modules and the arguments."""
        parts = [
            self._files.identity(), self._text.content(), repr((self._poolings, self._normalize, self.max_length)),
            self._encoder.numerics, *(repr(module) for module in self._description.modules),
        ]  # fmt: skip
        arrays = [
            array.tobytes()
            for module in self._description.modules
            for array in vars(module).values()
            if isinstance(array, np.ndarray)
        ]
        return hashlib.sha256(b"\0".join([*(part.encode() for part in parts), *arrays])).hexdigest()

    def count_tokens(self, text: str) -> int:
        """Return the number of tokens of a text, special tokens included, after truncation."""
        return self._text.count(text)

    def _embedded(
        self, items: Sequence[Text], *, prompt_name: str | None = None, prompt: str | None = None,
        dimensions: int | None = None, normalize: bool | None = None, truncate: bool = True, first: int = 0,
    ) -> tuple[Floats, list[int]]:  # fmt: skip
        """Return the vectors and the numbers of tokens of texts. Errors number the texts from `first`."""
        if self._is_closed:
            raise StateError("the embedder is closed", "close() freed its memory", "create a new Embedder")
        before = chosen_prompt(self._description, prompt_name, prompt)
        width = self._checked_dimensions(dimensions)
        check_switches(normalize=normalize, truncate=truncate)
        normalize = self._normalize if normalize is None else normalize
        sequences = self._sequences(items, before, truncate, first)
        excluded = 0 if self._description.include_prompt or not before else self._prompt_tokens(before)

        def finish(rows: Floats, index: int) -> Floats:
            vector = pooled(rows, self._poolings, excluded)[None]
            for module in self._description.modules:
                vector = module(vector)
            vector = vector[:, :width]
            if normalize:
                vector = normalized(vector)
            if not np.isfinite(vector).all():
                raise _not_finite(first + index)
            return cast(Floats, vector[0])

        vectors = self._steps.run(sequences, finish)
        counts = [len(sequence) for sequence in sequences]
        return (np.stack(vectors) if vectors else np.zeros((0, width), np.float32)), counts

    def _sequences(self, items: Sequence[Text], prompt: str, truncate: bool, first: int = 0) -> list[TokenSequence]:
        places = [index for index, item in enumerate(items) if isinstance(item, str)]
        texts = [prompt + cast(str, items[index]) for index in places]
        numbers = [first + index for index in places]
        encoded = dict(zip(places, self._text.encode(texts, truncate=truncate, indices=numbers), strict=True))
        return [
            encoded[index] if index in encoded else self._text.sequence_of(item, first + index, truncate=truncate)
            for index, item in enumerate(items)
        ]

    def _prompt_tokens(self, prompt: str) -> int:
        """Return the number of tokens of a prompt, without a special token at the end."""
        (sequence,) = self._text.encode([prompt])
        return len(sequence) - int(int(sequence.ids[-1]) in self._text.special_ids)

    def _default_dimensions(self) -> int:
        wanted = self._description.dimensions
        if wanted is not None and not 1 <= wanted <= self._all_dimensions:
            raise ConfigError(
                f"{self.folder / 'config_sentence_transformers.json'}: truncate_dim is {wanted}",
                f"vectors have {self._all_dimensions} dimensions",
                "correct the file",
            )
        return wanted or self._all_dimensions

    def _checked_dimensions(self, dimensions: int | None) -> int:
        if dimensions is None:
            return self.dimensions
        most = self._all_dimensions
        if not is_whole(dimensions) or not 1 <= dimensions <= most:
            raise OptionError(
                f"dimensions = {dimensions!r:.80}",
                f"a whole number from 1 to {most} is expected",
                "leave dimensions out for whole vectors",
            )
        return int(dimensions)

    def _check_modules(self) -> int:
        """Return the number of dimensions of a vector, from a trial; raise an error if the modules do not fit."""
        (rows,) = self._encoder.run([TokenSequence(np.zeros(1, np.int64))])
        self._width = int(rows.shape[1])
        if self._description.pooling_width not in (None, self._width):
            _log.warning(
                "%s: the file of the pooling names %d dimensions, but the graph computes %d per token: check that the "
                "file belongs to this model", self.folder, self._description.pooling_width, self._width,
            )  # fmt: skip
        width = self._width * len(self._poolings)
        try:
            for module in self._description.modules:
                width = module.check(width)
        except ValueError as error:
            raise ConfigError(
                f"{self.folder}: the modules do not fit the graph", str(error), "copy the model again"
            ) from error
        return width

    def close(self) -> None:
        """Free the model's memory."""
        if not self._is_closed:
            self._is_closed = True
            self._encoder.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Embedder({str(self.folder)!r}, {self.dimensions} dimensions)"


def named_folder(model: str | Path, *, pull: bool) -> Path:
    """Return the folder of an encoder: a path, or a model in the cache. Download a missing model only if `pull`."""
    from ..convert.resolve import PULLING, encoder_folder  # imported only here, because it loads all architectures

    if not isinstance(model, str | os.PathLike):
        raise InputError(
            f"model is {kind_of(model)}", "a folder or the name of a model is expected", "pass a str or a Path"
        )
    return encoder_folder(model, PULLING if pull else None)


def load_parts(
    description: EncoderFolder, outputs: Sequence[str], *, file: str | None, max_length: int | None,
    threads: int | None, accuracy: str, device: str, precision: str, files: LoadedFiles | None = None,
    score: TokenScore | None = None, task: str | None = None,
) -> tuple[TextEncoder, Encoder]:  # fmt: skip
    """Load the tokenizer and the graph of an encoder's folder; see `build_encoder` for `score` and `task`."""
    folder = description.folder
    if file is not None and not isinstance(file, str | os.PathLike):
        raise OptionError(f"file = {file!r:.80}", "the path of a graph in the model's folder is expected", "pass a str")
    limit = description.max_length if max_length is None else max_length
    if limit > description.longest:
        raise OptionError(
            f"max_length = {limit}",
            f"the model has positions for {description.longest} tokens",
            f"pass at most {description.longest}",
        )
    if device not in ("cpu", "reference"):
        raise OptionError(
            f"device = {device!r}",
            "encoders run on the CPU only, because GPUs have no kernels for attention to later tokens yet",
            'use device="cpu"',
        )
    is_checkpoint = file is None and (score is not None or is_encoder_checkpoint(folder))
    if task is not None and not (is_checkpoint and isinstance(task, str)):
        raise OptionError(
            f"task = {task!r:.80}",
            "an adapter is merged into the weights when the graph of a checkpoint (*.safetensors) is built",
            "leave task out, or pass a folder with a checkpoint",
        )
    if is_checkpoint and (task or not has_graph(folder)):
        graph = find_graph(built_encoder(folder, precision, score=score, task_name=task or ""))
    elif precision != "fp32":
        raise OptionError(
            f"precision = {precision!r:.80}",
            f"{folder} has a graph, whose weights are not converted",
            "leave precision out, or pass a checkpoint without a graph"
            + (f": `genai build {folder} -o FOLDER --precision ...` writes one" if is_checkpoint else ""),
        )
    else:
        graph = find_graph(folder, file)
    text = TextEncoder(
        folder, limit, lower_case=description.lower_case, keeps_end=description.keeps_end,
        has_types=description.has_types,
    )  # fmt: skip
    encoder = Encoder(graph, open_executor(device, threads), outputs, limit, accuracy=accuracy, files=files)
    return text, encoder


def _not_finite(index: int) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"the vector of text {index} contains NaN or infinite numbers",
        "the model's weights contain such numbers, or its results overflow",
        "check the checkpoint, or copy it again",
    )


def check_switches(**values: object) -> None:
    """Raise OptionError for a value other than True, False and None."""
    for name, value in values.items():
        if value is not None and not isinstance(value, bool | np.bool_):
            raise OptionError(
                f"{name} = {value!r:.80}", "True or False is expected", f"leave {name} out for the default"
            )


def _is_ids(value: object) -> bool:
    """Return True for token ids of a single text: an array or list of whole numbers."""
    if isinstance(value, np.ndarray):
        return value.ndim == 1 and value.dtype.kind in "iu"
    return isinstance(value, Sequence) and bool(value) and isinstance(value[0], int | np.integer)


def _no_pooling(description: EncoderFolder) -> ModelFolderError:
    if description.is_classifier:
        return ModelFolderError(
            f"{description.folder}: the model classifies texts, and has no pooling",
            f"its architecture is {', '.join(map(str, description.config['architectures']))}",
            "to score documents for a query, use genai.Reranker or `genai rerank`",
        )
    return ModelFolderError(
        f"{description.folder}: the pooling is unknown",
        "modules.json, which names it, is missing or names none",
        'choose one: pooling="mean" (most models), "cls" (BGE and others) or "lasttoken" (decoders); on the command '
        "line --pooling",
    )
