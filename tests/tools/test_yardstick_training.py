"""The yardstick's training on a tiny configuration: order of rows, stopping and resuming, export. Needs torch."""

import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import genai  # noqa: E402
from genai.convert import ExportOptions, build_model  # noqa: E402
from genai.engine.decoder import compute  # noqa: E402
from tools.bundled_model.checkpoint import load_checkpoint  # noqa: E402
from tools.bundled_model.model import PebbleConfig  # noqa: E402
from tools.yardstick import data, sources, train  # noqa: E402
from tools.yardstick.export import export  # noqa: E402
from tools.yardstick.stream import TokenStream  # noqa: E402

TINY = PebbleConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
    context_length=64,
    tie_embeddings=False,
)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    data.prepare(folder / "data", list(sources.conversations(0, 60)), vocab_size=TINY.vocab_size)
    return folder


def _trainer(prepared: Path, run: Path) -> train.Trainer:
    run.mkdir(exist_ok=True)
    if not (run / "data").exists():
        (run / "data").symlink_to(prepared / "data")
    return train.Trainer(train.parse([str(run), "--steps", "12", "--threads", "1", "--no-compile"]), TINY)


def test_every_row_comes_once_an_epoch_and_at_the_same_place_again(prepared: Path) -> None:
    stream = TokenStream(prepared / "data", seed=3, length=64)
    count = stream.rows_per_epoch
    first = torch.cat([stream.batch(number, 1) for number in range(count)])
    second = stream.batch(1, count)
    assert torch.equal(TokenStream(prepared / "data", seed=3, length=64).batch(1, count), second)
    assert torch.equal(stream.batch(0, count), first)
    assert not torch.equal(first, second)
    assert not torch.equal(first, TokenStream(prepared / "data", seed=4, length=64).batch(0, count))
    tokens = np.load(prepared / "data" / "train.npy")
    missing = np.bincount(tokens, minlength=512) - np.bincount(first.flatten().numpy(), minlength=512)
    assert missing.min() >= 0 and missing.sum() == len(tokens) - count * 64


def _equal(one: train.Trainer, other: train.Trainer) -> bool:
    pairs = zip(one.model.state_dict().items(), other.model.state_dict().items(), strict=True)
    return all(name == same and torch.equal(a, b) for (name, a), (same, b) in pairs)


def test_a_resumed_run_equals_one_that_was_not_interrupted(prepared: Path, tmp_path: Path) -> None:
    whole, first_part = _trainer(prepared, tmp_path / "whole"), _trainer(prepared, tmp_path / "parts")
    losses = [whole.train_step() for _ in range(6)]
    for _ in range(3):
        first_part.train_step()
    first_part.save()
    first_part.train_step()  # done after the last save, so lost in the kill
    second_part = _trainer(prepared, tmp_path / "parts")
    assert second_part.progress.step == 3
    assert [second_part.train_step() for _ in range(3)] == losses[3:]
    assert _equal(whole, second_part)
    assert losses[-1] < losses[0]


def test_sigterm_in_the_middle_of_a_step_keeps_the_last_whole_one(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "LOG_STEPS", 4)
    monkeypatch.setattr(train, "EVALUATION_STEPS", 6)
    whole, killed = _trainer(prepared, tmp_path / "whole"), _trainer(prepared, tmp_path / "killed")
    calls = 0
    loss = killed.loss

    def interrupted(*arguments: object) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 2 * train.PARTS + 2:  # the second part of the third step
            os.kill(os.getpid(), signal.SIGTERM)
        return loss(*arguments)

    killed.loss = interrupted
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        train.stop_on_signals(killed)
        killed.run()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert calls == 2 * train.PARTS + 2
    resumed = _trainer(prepared, tmp_path / "killed")
    assert resumed.progress.step == 2
    whole.run()
    resumed.run()
    assert resumed.progress.step == whole.progress.step == 12
    assert _equal(whole, resumed)
    lines = [json.loads(line) for line in (tmp_path / "killed" / "log.jsonl").read_text().splitlines()]
    assert {"step": 2, "resumed": True}.items() <= lines[0].items()
    shape = [(line["step"], set(line) - {"step", "seconds"}) for line in lines[1:]]
    assert shape == [
        (4, {"loss"}),
        (6, {"evaluation_loss"}),
        (8, {"loss"}),
        (12, {"loss"}),
        (12, {"evaluation_loss"}),
    ]
    assert lines[-1]["evaluation_loss"] < lines[2]["evaluation_loss"]
    assert lines[-1]["evaluation_loss"] == pytest.approx(whole.evaluation_loss(), abs=1e-4)


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("int4", None)])
def test_the_export_builds_and_fp32_gives_the_logits_of_torch(
    prepared: Path, tmp_path: Path, precision: str, tolerance: float | None
) -> None:
    trainer = _trainer(prepared, tmp_path / "run")
    trainer.train_step()
    trainer.save()
    assert export(tmp_path / "run", tmp_path / "checkpoint") == 1
    build_model(tmp_path / "checkpoint", tmp_path / "built", ExportOptions(precision=precision))
    model, tokenizer = load_checkpoint(tmp_path / "checkpoint")
    text = "<|im_start|>user\nWhat is 12 + 7?<|im_end|>\n"
    ids = tokenizer.encode(text).ids
    with torch.no_grad():
        expected = model.logits(model(torch.tensor([ids]), None))[0, -1].numpy()
    with genai.Model(tmp_path / "built", accuracy="fp32", quiet=True) as built:
        assert genai.Tokenizer(built).encode(text).tolist() == ids
        sequence = built.decoder.open()
        sequence.append(ids)
        (logits,) = compute(built.decoder, [sequence])
    worst = np.abs(logits.reshape(-1) - expected).max()
    assert worst < tolerance if tolerance else 1e-3 < worst < 1.0


def test_the_yardstick_has_the_promised_shape() -> None:
    config = train.yardstick_config(data.VOCAB_SIZE)
    kv_width = config.num_kv_heads * config.head_size
    widths = (config.vocab_size, config.hidden_size, config.intermediate_size, kv_width)
    assert all(width % 256 == 0 for width in widths)
    with torch.device("meta"):
        model = train.Pebble(config)
    assert 33.5e6 < sum(p.numel() for p in model.parameters()) < 33.7e6
