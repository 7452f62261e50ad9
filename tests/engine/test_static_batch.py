"""StaticBatch: sequences that advance together, with the same results as alone."""

from __future__ import annotations

import pytest

import genai
from genai.engine.static_batch import StaticBatch, check_batch_size
from genai.errors import CacheCapacityError, StateError
from genai.models.greedy import greedy_batch

PROMPTS = [[5, 6, 7], [9, 10, 11, 12, 13], [3]]


def generated(batch: StaticBatch, prompts: list[list[int]], steps: int) -> list[list[int]]:
    batch.append_tokens(prompts)
    for _ in range(steps):
        if not all(batch.ended):
            batch.step()
    return [list(sequence.tokens) for sequence in batch.sequences]


def test_each_sequence_is_as_it_would_be_alone(bundled: genai.Model) -> None:
    with greedy_batch(bundled, 3) as batch:
        together = generated(batch, PROMPTS, 40)
    for prompt, tokens in zip(PROMPTS, together, strict=True):
        with greedy_batch(bundled, 1) as batch:
            assert generated(batch, [prompt], 40) == [tokens]


def test_what_has_ended_gets_no_more_tokens(bundled: genai.Model) -> None:
    ends = bundled.config.model.eos_token_ids
    with greedy_batch(bundled, 2, min_length=8) as batch:
        batch.append_tokens(PROMPTS[:2])
        while not all(batch.ended):
            before = [len(sequence.tokens) for sequence in batch.sequences]
            going = [index for index, ended in enumerate(batch.ended) if not ended]
            picked = batch.step()
            assert list(picked) == going
            for index, sequence in enumerate(batch.sequences):
                added = index in picked and picked[index] not in ends
                assert len(sequence.tokens) == before[index] + added
                assert batch.ended[index] == (index not in picked or picked[index] in ends)
        assert min(len(sequence.tokens) for sequence in batch.sequences) >= 8


def test_a_rewound_and_a_forked_batch_go_on_alike(bundled: genai.Model) -> None:
    with greedy_batch(bundled, 2) as batch:
        batch.append_tokens(PROMPTS[:2])
        batch.step()
        with batch.fork() as other:
            expected = [other.step() for _ in range(3)]
        kept = [len(sequence.tokens) for sequence in batch.sequences]
        for _ in range(2):
            batch.step()
        batch.rewind(kept)
        assert [batch.step() for _ in range(3)] == expected


def test_it_ends(bundled: genai.Model) -> None:
    free = bundled.decoder.pool.num_free  # type: ignore[union-attr]
    batch = greedy_batch(bundled, 2)
    with pytest.raises(StateError, match="no tokens yet"):
        batch.step()
    batch.append_tokens(PROMPTS[:2])
    assert bundled.decoder.pool.num_free < free  # type: ignore[union-attr]
    batch.close()
    assert not batch.is_open and bundled.decoder.pool.num_free == free  # type: ignore[union-attr]


def test_there_is_no_room_for_any_number(bundled: genai.Model) -> None:
    with pytest.raises(CacheCapacityError, match="batch_size = 1000000000") as caught:
        check_batch_size(bundled.decoder, 10**9)
    assert caught.value.why and caught.value.fix
