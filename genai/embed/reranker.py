"""Rerankers: scores of documents for a query, by a model that reads both together (a cross-encoder)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..common.log import logger
from ..common.single import Single
from ..errors import ConfigError, InputError, OptionError, StateError, UnsupportedModelError, kind_of
from ..models.encoder import EncoderInfo, TokenSequence
from ..models.folders import folder_errors
from ..models.model_options import check_model_options
from .batches import SharedSteps
from .embedder import check_switches, load_parts, named_folder
from .folder import EncoderFolder, chosen_prompt, default_token_score, read_encoder_folder
from .pairs import PairTemplate
from .pooling import ACTIVATIONS, Floats
from .tokens import TextEncoder, each_of, is_whole

_OUTPUTS = ("logits", "scores")
_log = logger(__name__)


def _softmax(logits: Floats) -> Floats:
    powers = np.exp(logits - logits.max())
    found: Floats = powers / powers.sum()
    return found


_ACTIVATIONS = {**ACTIVATIONS, "Softmax": _softmax}


@dataclass(frozen=True)
class RankedDocument:
    """A document and its score.

    Attributes:
        index: the document's index in the call.
        score: its relevance: higher is better; between 0 and 1 if the model's scores pass through a sigmoid.
        document: the text.
    """

    index: int
    score: float
    document: str


class Reranker(Single, AbstractContextManager["Reranker"]):
    """A model that scores a query and a document together. Safe to use from several threads, which share its steps.

    The model is a cross-encoder or a decoder with a classification head, or a decoder that answers whether a document
    is relevant, such as Qwen3-Reranker: its score is the logit of "yes" less the logit of "no". A score does not depend
    on the other documents of a call.

    Args:
        model: a folder with an ONNX graph (onnx/model.onnx or model.onnx) or a checkpoint (*.safetensors) that computes
            logits, and a tokenizer; or the name of a model on the hub.
        file: the graph in the folder [default: onnx/model.onnx or model.onnx].
        activation: function of the logits: "Sigmoid", "Softmax", "Identity" and others [default: as config.json says,
            else Sigmoid for a model with one logit and Identity for others].
        label: index of the logit that is the score, for models with several logits [default: the last].
        max_length, threads, accuracy, device, precision, pull: see Embedder.

    Raises:
        ModelFolderError, ConfigError: a file is missing or malformed.
        OptionError: an argument is out of range.
        UnsupportedModelError: the model cannot run here, or does not classify texts.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        file: str | None = None,
        activation: str | None = None,
        label: int | None = None,
        max_length: int | None = None,
        threads: int | None = None,
        accuracy: str = "auto",
        device: str = "cpu",
        precision: str = "fp32",
        pull: bool = False,
    ) -> None:
        check_model_options(threads=threads, accuracy=accuracy, device=device, max_length=max_length)
        folder = named_folder(model, pull=pull)
        with folder_errors(folder):
            self._description = read_encoder_folder(folder)
            score = self._description.score or default_token_score(self._description)
            self._text, self._encoder = load_parts(
                self._description, _OUTPUTS, file=file, max_length=max_length, threads=threads, accuracy=accuracy,
                device=device, precision=precision, score=score,
            )  # fmt: skip
            self._template = None if score is None else _pair_template(self._description, self._text)
            (logits,) = self._encoder.run([TokenSequence(np.zeros(min(4, self.max_length), np.int64))])
            if len(logits) != 1 or self._encoder.info.output not in _OUTPUTS:
                raise UnsupportedModelError(
                    f"{folder}: the graph's output {self._encoder.info.output!r} is no score of a text",
                    "a reranker computes logits for a pair of texts",
                    "for a model that computes embeddings, use genai.Embedder or `genai embed`",
                )
            self.num_labels = logits.shape[1]
            self.activation = self._activation(activation)
            self._label = self._checked_label(label)
        self._steps = SharedSteps(self._encoder)
        self._is_closed = False

    num_labels: int
    """The number of logits of a pair."""
    activation: str
    """The function of the logits: "Softmax", or a key of `pooling.ACTIVATIONS`."""

    @property
    def folder(self) -> Path:
        """The model's folder."""
        return self._description.folder

    @property
    def info(self) -> EncoderInfo:
        """Facts about the graph."""
        return self._encoder.info

    @property
    def max_length(self) -> int:
        """The maximum number of tokens of a query and a document together."""
        return self._text.max_length

    @property
    def prompts(self) -> dict[str, str]:
        """The model's prompts by name."""
        return dict(self._description.prompts)

    def score(
        self,
        query: str,
        documents: Sequence[str],
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        truncate: bool = True,
    ) -> Floats:
        """Return the score of each document for a query, float32 [documents].

        Args:
            query: the query.
            documents: the documents.
            prompt_name: name of the model's prompt to use [default: as config_sentence_transformers.json says].
            prompt: text of the prompt, instead of a name. For a decoder that answers whether a document is relevant, it
                is the instruction; for other models, it precedes the query.
            truncate: True to truncate pairs that are too long, False to raise an error.

        Raises:
            InputError: a text cannot be scored; the message has the document's index. Or there is no such prompt.
            OptionError: `prompt` and `prompt_name` are both given, or `truncate` is not True or False.
        """
        return self.score_counted(query, documents, prompt_name=prompt_name, prompt=prompt, truncate=truncate)[0]

    def score_counted(
        self,
        query: str,
        documents: Sequence[str],
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        truncate: bool = True,
    ) -> tuple[Floats, list[int]]:
        """Return the score of each document, and the number of tokens of each pair; see `score`."""
        if self._is_closed:
            raise StateError("the reranker is closed", "close() freed its memory", "create a new Reranker")
        if not isinstance(query, str):
            raise InputError(f"query is {kind_of(query)}", "a text is expected", "pass a str")
        if isinstance(documents, str):
            raise InputError("documents is a text", "a list of texts is expected", "pass [document]")
        listed = list(each_of(documents, "documents"))
        instruction = chosen_prompt(self._description, prompt_name, prompt)
        check_switches(truncate=truncate)
        if self._template is not None:
            pairs = self._template.encode(query, listed, instruction, truncate=truncate)
        else:
            pairs = self._text.encode_pairs(instruction + query, listed, truncate=truncate)

        def finish(rows: Floats, index: int) -> Floats:
            scores: Floats = _ACTIVATIONS[self.activation](rows[0])
            if not np.isfinite(scores).all():
                raise UnsupportedModelError(
                    f"the score of document {index} is NaN or infinite",
                    "the model's weights contain such numbers, or its results overflow",
                    "check the checkpoint, or copy it again",
                )
            return scores

        found = self._steps.run(pairs, finish)
        scores = np.array([one[self._label] for one in found], np.float32)
        return scores, [len(pair) for pair in pairs]

    def rank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        truncate: bool = True,
    ) -> list[RankedDocument]:
        """Return the documents in descending order of their scores; equal scores keep the documents' order.

        Args:
            query, documents, prompt_name, prompt, truncate: see `score`.
            top_n: number of documents to return; None = all.

        Raises:
            InputError: see `score`.
            OptionError: `top_n` is not a positive whole number; see also `score`.
        """
        if top_n is not None and (not is_whole(top_n) or top_n < 1):
            raise OptionError(f"top_n = {top_n!r:.80}", "a whole number of at least 1 is expected", "leave top_n out")
        documents = documents if isinstance(documents, str) else list(each_of(documents, "documents"))
        scores = self.score(query, documents, prompt_name=prompt_name, prompt=prompt, truncate=truncate)
        order = np.argsort(-scores, kind="stable")[:top_n]
        return [RankedDocument(int(index), float(scores[index]), documents[index]) for index in order]

    async def arank(self, query: str, documents: Sequence[str], **options: Any) -> list[RankedDocument]:
        """Return the ranked documents without blocking the event loop; see `rank`."""
        return await asyncio.to_thread(partial(self.rank, query, documents, **options))

    def _checked_label(self, label: int | None) -> int:
        if label is None:
            if self.num_labels > 1:
                _log.info(
                    "%s has %d logits per pair: the score is the last one, with the function %s; label and activation "
                    "choose others", self.folder, self.num_labels, self.activation,
                )  # fmt: skip
            return self.num_labels - 1
        if not is_whole(label) or not 0 <= label < self.num_labels:
            raise OptionError(
                f"label = {label!r:.80}", f"the model has the labels 0 to {self.num_labels - 1}", "leave label out"
            )
        return int(label)

    def _activation(self, name: str | None) -> str:
        if name is None:
            config = self._description.config
            ours = config.get("sentence_transformers")
            path = ours.get("activation_fn") if isinstance(ours, dict) else None
            path = path or self._description.activation or config.get("sbert_ce_default_activation_function")
            name = str(path).rpartition(".")[2] if path else "Sigmoid" if self.num_labels == 1 else "Identity"
            if name not in _ACTIVATIONS:
                raise ConfigError(
                    f"{self.folder}: the function of the scores is {path!r:.80}",
                    f"the known functions are {', '.join(_ACTIVATIONS)}",
                    "correct activation_fn in config.json or config_sentence_transformers.json, or choose one with "
                    "activation= in Python or `--activation`",
                )
        if not isinstance(name, str) or name not in _ACTIVATIONS:
            raise OptionError(
                f"activation = {name!r:.80}", f"choose from {', '.join(_ACTIVATIONS)}", "pass one of these names"
            )
        return name

    def close(self) -> None:
        """Free the model's memory."""
        if not self._is_closed:
            self._is_closed = True
            self._encoder.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Reranker({str(self.folder)!r})"


def _pair_template(description: EncoderFolder, text: TextEncoder) -> PairTemplate:
    model_type = str(description.config.get("model_type"))
    return PairTemplate(description.folder, text, description.template_variables, model_type)
