"""Engine and Request: the events of onnxruntime-genai, and its conversations."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import genai
from genai.errors import ContextOverflowError, InputError, NotSupportedYetError, OptionError, StateError

QUESTION = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
NEXT = "\n" + QUESTION


def drive(og: Any, engine: Any, buffer: Any) -> list[tuple[Any, ...]]:
    """What happened until nothing runs: turn, token, flags, reason, tokens counted."""
    seen: list[tuple[Any, ...]] = []
    while engine.has_pending_requests():
        engine.run(buffer)
        for index in range(len(buffer)):
            event = buffer[index]
            usage = event.usage.prompt_tokens, event.usage.generated_tokens
            seen.append((event.turn_id, event.token, int(event.flags.value), event.finish_reason.name, usage))
    return seen


def conversation(og: Any, folder: Path) -> list[Any]:
    """Turns that end with EOS, are taken back, run into limits, and are cancelled."""
    model = og.Model(str(folder))
    tokenizer, engine = og.Tokenizer(model), og.Engine(model)
    buffer, seen = engine.create_event_buffer(16), []

    def ids(text: str) -> Any:
        return np.asarray(tokenizer.encode(text), np.int32)

    request = engine.create_request()
    seen.append(request.begin_turn(ids(QUESTION.format("What is 12 + 7?"))))
    seen.append(drive(og, engine, buffer))
    request.begin_turn(ids(NEXT.format("Spell the word cat.")))
    seen.append(drive(og, engine, buffer))
    request.rewind_to_start_of_turn(2)
    request.begin_turn(ids(NEXT.format("Spell the word dog.")))
    seen.append([event[1:] for event in drive(og, engine, buffer)])
    options = og.TurnOptions(request)
    options.set_max_generated_tokens(2)
    request.begin_turn(ids(NEXT.format("What is 20 - 5?")), options)
    seen.append([event[1:] for event in drive(og, engine, buffer)])
    for guidance in (
        ("regex", "[a-z]{3,5}"),
        ("json_schema", '{"enum": [17, "seven"]}'),
        ("lark_grammar", 'start: "yes" | "no"'),
    ):
        guided = og.TurnOptions(request)
        guided.set_guidance(*guidance)
        request.begin_turn(ids(NEXT.format("Is 12 larger than 7?")), guided)
        seen.append([event[1:] for event in drive(og, engine, buffer)])
        guided.clear_guidance()
    request.begin_turn(ids(NEXT.format("What is 2 + 2?")), guided)
    seen.append([event[1:] for event in drive(og, engine, buffer)])
    other, another = engine.create_request(), engine.create_request()
    for one in (other, another):
        one.begin_turn(ids(QUESTION.format("Tell me a story about Luna and Tom.")))
    engine.run(buffer)
    seen.append([other.cancel_turn(1), other.cancel_turn(5)])
    ends = [event for event in drive(og, engine, buffer) if event[2] & 2]
    seen.append(sorted(event[3] for event in ends))
    other.close()
    other.close()
    return seen


@pytest.mark.oracle
def test_events_are_those_of_onnxruntime_genai(bundled_folder: Path, teacher_forcing: Any) -> None:
    assert conversation(genai, bundled_folder) == conversation(teacher_forcing.other_library, bundled_folder)


@pytest.fixture
def engine(bundled: genai.Model) -> Iterator[genai.Engine]:
    yield genai.Engine(bundled)


def finished(engine: genai.Engine) -> list[genai.EngineEvent]:
    buffer, events = engine.create_event_buffer(3), []
    while engine.has_pending_requests():
        events += list(engine.run(buffer))
    return events


def test_a_second_turn_computes_only_what_is_new(engine: genai.Engine, bundled: genai.Model) -> None:
    tokenizer = genai.Tokenizer(bundled)
    request = engine.create_request()
    request.begin_turn(tokenizer.encode(QUESTION.format("My name is Nora.")))
    first = [event.token for event in finished(engine) if event.token is not None]
    request.begin_turn(tokenizer.encode(NEXT.format("What is my name?")))
    second = [event.token for event in finished(engine) if event.token is not None]
    assert tokenizer.decode(second) == "Your name is Nora."
    whole = engine.create_request()
    prompt = [*tokenizer.encode(QUESTION.format("My name is Nora.")), *first]
    whole.begin_turn([*prompt, *tokenizer.encode(NEXT.format("What is my name?"))])
    assert [event.token for event in finished(engine) if event.token is not None] == second
    pool = bundled.decoder.pool
    assert pool is not None
    free = pool.num_free
    request.close()
    assert pool.num_free > free
    with pytest.raises(StateError, match="closed request"):
        request.begin_turn([5])


def test_stop_strings_seeds_and_limits(engine: genai.Engine, bundled: genai.Model) -> None:
    tokenizer = genai.Tokenizer(bundled)
    request = engine.create_request()
    options = genai.TurnOptions(request)
    options.set_stop_strings(["zzz", "4"])
    request.begin_turn(tokenizer.encode(QUESTION.format("Count from 3 to 7.")), options)
    last = finished(engine)[-1]
    assert (last.finish_reason.name, last.matched_stop_string_index) == ("STOP_STRING", 1)
    options = genai.RequestOptions()
    options.set_max_session_tokens(40)
    short = engine.create_request(options=options)
    turn = genai.TurnOptions(short)
    turn.set_min_generated_tokens(30)
    short.begin_turn([5] * 20, turn)
    events = finished(engine)
    assert events[-1].finish_reason.name == "MAX_SESSION_TOKENS" and events[-1].usage.generated_tokens == 20
    with pytest.raises(ContextOverflowError, match="at most 40 tokens"):
        short.begin_turn([5])
    drawn = []
    for seed in (1, 1, 2):
        one = engine.create_request()
        turn = genai.TurnOptions(one)
        turn.set_do_sample(True)
        turn.set_top_k(50)
        turn.set_seed(seed)
        turn.set_max_generated_tokens(12)
        turn.set_min_generated_tokens(12)
        one.begin_turn([30, 31, 32], turn)
        drawn.append([event.token for event in finished(engine)])
    assert drawn[0] == drawn[1] != drawn[2]


def test_bad_calls(engine: genai.Engine, bundled: genai.Model) -> None:
    request = engine.create_request()
    turn = genai.TurnOptions(request)
    calls: list[tuple[Any, type[Exception], str]] = [
        (lambda: genai.Engine("model"), InputError, "Model"),  # type: ignore[arg-type]
        (lambda: engine.create_event_buffer(0), OptionError, "capacity"),
        (lambda: engine.run([]), InputError, "EngineEventBuffer"),  # type: ignore[arg-type]
        (lambda: request.begin_turn([]), InputError, "no tokens"),
        (lambda: request.begin_turn([10**6]), InputError, "vocabulary"),
        (lambda: request.begin_turn([5], 5), InputError, "turn_options"),  # type: ignore[arg-type]
        (lambda: request.rewind_to_start_of_turn(77), InputError, "unknown Turn ID 77"),
        (lambda: request.set_draft_tokens([1]), NotSupportedYetError, "set_draft_tokens"),
        (lambda: turn.set_guidance("xml", "a+"), OptionError, "Unsupported guidance type: 'xml'"),
        (lambda: turn.set_guidance("regex", ""), OptionError, "must be provided together"),
        (lambda: turn.set_temperature(-1.0), OptionError, "temperature"),
        (lambda: turn.set_stop_strings([""]), OptionError, "stop strings"),
        (lambda: turn.set_stop_strings(["a"] * 17), OptionError, "17 stop strings"),
        (lambda: turn.set_max_generated_tokens(-1), OptionError, "max_generated_tokens"),
        (lambda: genai.TurnOptions(None), InputError, "Request"),  # type: ignore[arg-type]
    ]
    for call, kind, said in calls:
        with pytest.raises(kind, match=said) as raised:
            call()
        assert isinstance(raised.value, genai.GenaiError) and raised.value.why and raised.value.fix
    turn.set_top_p(0.5)
    with pytest.raises(OptionError, match="does not sample"):
        request.begin_turn([5], turn)
    turn.reset()
    turn.set_do_sample(True)
    turn.set_top_k(0)
    turn.set_top_p(0.0)
    with pytest.raises(OptionError, match="neither top_k nor top_p"):
        request.begin_turn([5], turn)
    request.begin_turn([5])
    with pytest.raises(StateError, match="BeginTurn is only valid"):
        request.begin_turn([5])
    caught: list[BaseException] = []

    def elsewhere() -> None:
        try:
            engine.has_pending_requests()
            engine.run(engine.create_event_buffer(1))
        except StateError as error:
            caught.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "owner thread" in str(caught[0])
    assert request.cancel_turn(1)
    assert finished(engine)[-1].finish_reason.name == "CANCELLED"
