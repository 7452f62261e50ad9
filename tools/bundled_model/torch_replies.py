"""Greedy replies of the PyTorch model, many questions at once; the yardstick for every exported form."""

from collections.abc import Iterator

import torch
from tokenizers import Tokenizer

from .held_out import Question
from .model import Pebble
from .tokenizer import IM_END_ID, PAD_ID, chat_prompt

_BATCH = 64


def _batches(questions: list[Question], lengths: list[int]) -> Iterator[list[int]]:
    order = sorted(range(len(questions)), key=lambda i: (questions[i].get("max_tokens", 32), lengths[i]))
    for start in range(0, len(order), _BATCH):
        yield order[start : start + _BATCH]


@torch.inference_mode()
def greedy_continuations(model: Pebble, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Continues each prompt until <|im_end|>. Prompts are padded on the left; padding is its own document."""
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD_ID] * (width - len(prompt)) + prompt for prompt in prompts])
    documents = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    replies: list[list[int]] = [[] for _ in prompts]
    alive = torch.arange(len(prompts))
    for _ in range(max_tokens):
        best = model.logits(model(ids[alive], documents[alive])[:, -1]).argmax(-1)
        column = torch.full((len(prompts), 1), PAD_ID)
        column[alive, 0] = best
        ids = torch.cat((ids, column), 1)
        documents = torch.cat((documents, torch.ones_like(column)), 1)
        alive, kept = alive[best != IM_END_ID], best[best != IM_END_ID]
        for row, token in zip(alive.tolist(), kept.tolist(), strict=True):
            replies[row].append(token)
        if not len(alive):
            break
    return replies


def torch_replies(model: Pebble, tokenizer: Tokenizer, questions: list[Question]) -> list[str]:
    """One reply per question, in order; computed in float32."""
    prompts = [tokenizer.encode(chat_prompt(question["messages"])).ids for question in questions]
    replies = [""] * len(questions)
    for batch in _batches(questions, [len(prompt) for prompt in prompts]):
        limit = max(questions[i].get("max_tokens", 32) for i in batch)
        for i, tokens in zip(batch, greedy_continuations(model, [prompts[i] for i in batch], limit), strict=True):
            replies[i] = tokenizer.decode(tokens[: questions[i].get("max_tokens", 32)])
    return replies
