"""Greedy replies of the PyTorch model to batches of questions: the reference for every exported format."""

from collections.abc import Iterator

import torch
from tokenizers import Tokenizer

from .held_out import Question
from .model import Past, Pebble
from .tokenizer import IM_END_ID, PAD_ID, chat_prompt

_BATCH = 64


def _batches(questions: list[Question], lengths: list[int]) -> Iterator[list[int]]:
    order = sorted(range(len(questions)), key=lambda i: (questions[i].get("max_tokens", 32), lengths[i]))
    for start in range(0, len(order), _BATCH):
        yield order[start : start + _BATCH]


@torch.inference_mode()
def greedy_continuations(model: Pebble, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Continue each prompt until <|im_end|>. Prompts are padded on the left; the padding is a separate document."""
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD_ID] * (width - len(prompt)) + prompt for prompt in prompts])
    documents = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    replies: list[list[int]] = [[] for _ in prompts]
    alive = torch.ones(len(prompts), dtype=torch.bool)
    past = [Past() for _ in model.model.layers]
    for _ in range(max_tokens):
        best = model.logits(model(ids, documents, past)[:, -1]).argmax(-1)
        alive &= best != IM_END_ID
        if not alive.any():
            break
        for row in alive.nonzero()[:, 0].tolist():
            replies[row].append(int(best[row]))
        ids = best[:, None]
        documents = torch.cat((documents, torch.ones_like(ids)), 1)
    return replies


def torch_replies(model: Pebble, tokenizer: Tokenizer, questions: list[Question]) -> list[str]:
    """Return one reply per question, in order, computed in float32."""
    prompts = [tokenizer.encode(chat_prompt(question["messages"])).ids for question in questions]
    replies = [""] * len(questions)
    for batch in _batches(questions, [len(prompt) for prompt in prompts]):
        limit = max(questions[i].get("max_tokens", 32) for i in batch)
        for i, tokens in zip(batch, greedy_continuations(model, [prompts[i] for i in batch], limit), strict=True):
            replies[i] = tokenizer.decode(tokens[: questions[i].get("max_tokens", 32)])
    return replies
