"""The training half of the bundled model: packing, rounding, resuming, checkpoints, adapters. Needs torch."""

import json
import sys
from argparse import Namespace
from pathlib import Path
from random import Random

import numpy as np
import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from safetensors.numpy import load_file  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from genai.quant.methods.rtn import quantize_blocks  # noqa: E402
from tools.bundled_model import checkpoint, lora, mixture, packing, train  # noqa: E402
from tools.bundled_model.fake_quant import fake_quantise, quantise_blocks  # noqa: E402
from tools.bundled_model.model import Past, Pebble, PebbleConfig  # noqa: E402
from tools.bundled_model.optimiser import FINAL_SHARE, rate_share  # noqa: E402
from tools.bundled_model.tokenizer import chat_prompt, load_tokenizer, save_tokenizer  # noqa: E402
from tools.bundled_model.torch_replies import greedy_continuations  # noqa: E402

SMALL = PebbleConfig(hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_size=16)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(ROOT / "configs" / "models" / "pebble")


@pytest.fixture
def model() -> Pebble:
    torch.manual_seed(1)
    return Pebble(SMALL).eval()


def _examples(tokenizer: Tokenizer, how_many: int) -> list[tuple[list[int], list[float]]]:
    rng = Random(2)
    return packing.encode(tokenizer, [mixture.short_conversation(rng) for _ in range(how_many)], 256)


def test_training_ids_are_those_of_the_chat_prompt(tokenizer: Tokenizer) -> None:
    talk = mixture.conversation(Random(3), 4)
    ((ids, weights),) = packing.encode(tokenizer, [talk], 1024)
    messages = talk.messages()
    prompt = tokenizer.encode(chat_prompt(messages[:-1])).ids
    reply = tokenizer.encode(messages[-1]["content"] + "<|im_end|>").ids
    assert ids == prompt + reply
    assert weights[-len(reply) :] == [1.0] * len(reply)
    assert len(weights) == len(ids)


def test_a_conversation_that_is_too_long_is_cut_at_a_turn(tokenizer: Tokenizer) -> None:
    talk = mixture.conversation(Random(3), 6)
    ((whole, _),) = packing.encode(tokenizer, [talk], 1024)
    ((cut, _),) = packing.encode(tokenizer, [talk], len(whole) - 1)
    assert cut == whole[: len(cut)]
    assert tokenizer.decode(cut, skip_special_tokens=False).endswith("<|im_end|>")


def test_packed_conversations_do_not_see_each_other(tokenizer: Tokenizer, model: Pebble) -> None:
    examples = _examples(tokenizer, 30)
    rows = packing.pack(examples, 256)
    assert (rows.documents.max(1) > 1).any()
    with torch.no_grad():
        packed = model(torch.from_numpy(rows.ids).long(), torch.from_numpy(rows.documents).long())
        second = rows.documents[0] == 2
        ids = torch.from_numpy(rows.ids[0][second]).long()[None]
        alone = model(ids, torch.ones_like(ids))
    torch.testing.assert_close(packed[0, torch.from_numpy(second)], alone[0], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("length", [100, 256, 700])
def test_whole_rows_are_causal_without_documents(model: Pebble, length: int) -> None:
    ids = torch.randint(0, SMALL.vocab_size, (2, length))
    with torch.no_grad():
        torch.testing.assert_close(model(ids, None), model(ids, torch.ones_like(ids)), atol=2e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="`past` needs `documents`"):
        model(ids, None, [Past() for _ in model.model.layers])


def test_batches_depend_only_on_seed_and_number(tokenizer: Tokenizer) -> None:
    def stream() -> packing.RowStream:
        return packing.RowStream(tokenizer, mixture.short_conversation, "s", 4, 256)

    forward = stream()
    batches = [forward.batch(number) for number in range(40)]
    np.testing.assert_array_equal(stream().batch(37).ids, batches[37].ids)
    assert not np.array_equal(batches[0].ids, batches[37].ids)


@pytest.mark.parametrize("bits", [4, 8])
def test_rounding_in_training_is_the_rounding_of_the_export(bits: int) -> None:
    weight = np.random.default_rng(0).standard_normal((48, 128)).astype(np.float32)
    weight[3, 32:64] = 0
    blocks = quantize_blocks(weight, bits=bits, block_size=32)
    exported = blocks.dequantize()
    np.testing.assert_allclose(quantise_blocks(torch.from_numpy(weight), bits).numpy(), exported, atol=1e-6)


def test_the_gradient_goes_straight_through_the_rounding() -> None:
    weight = torch.randn(4, 64, requires_grad=True)
    fake_quantise(weight, 4).sum().backward()
    assert torch.equal(weight.grad, torch.ones_like(weight))


def test_left_padding_does_not_change_a_reply(model: Pebble) -> None:
    prompts = [[5, 6, 7, 8, 9, 10, 11], [40, 41, 42]]
    together = greedy_continuations(model, prompts, 6)
    assert together == [greedy_continuations(model, [prompt], 6)[0] for prompt in prompts]


def test_the_rate_warms_up_and_falls_to_almost_nothing() -> None:
    assert rate_share(0, 0.0) < 0.05
    assert rate_share(1000, 0.2) == 1.0
    assert rate_share(1000, 1.0) == pytest.approx(FINAL_SHARE)


def test_a_checkpoint_comes_back_within_float16(tokenizer: Tokenizer, model: Pebble, tmp_path: Path) -> None:
    checkpoint.save_checkpoint(model, tokenizer, tmp_path)
    again, same_tokenizer = checkpoint.load_checkpoint(tmp_path)
    assert again.config == SMALL
    assert same_tokenizer.to_str() == tokenizer.to_str()
    for name, tensor in again.state_dict().items():
        torch.testing.assert_close(tensor, model.state_dict()[name], atol=1e-4, rtol=1e-3)


@pytest.mark.slow
def test_a_resumed_run_equals_one_that_was_not_interrupted(tokenizer: Tokenizer, tmp_path: Path) -> None:
    def trainer(folder: str) -> train.Trainer:
        save_tokenizer(tokenizer, tmp_path / folder / "tokenizer")
        return train.Trainer(train.parse(["--out", str(tmp_path / folder), "--steps", "10", "--no-compile"]))

    whole, first_part = trainer("whole"), trainer("parts")
    losses = [whole.train_step(0.0)[0] for _ in range(3)]
    for _ in range(2):
        first_part.train_step(0.0)
    first_part.save()
    second_part = trainer("parts")
    assert second_part.progress.step == 2
    assert second_part.train_step(0.0)[0] == pytest.approx(losses[2], abs=1e-5)


def test_an_adapter_learns_and_is_saved_as_peft_does(tokenizer: Tokenizer, model: Pebble, tmp_path: Path) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    lora.add_adapters(model, rank=4, alpha=8.0)
    data = tmp_path / "talk.jsonl"
    talk = [{"role": "user", "content": "Ping?"}, {"role": "assistant", "content": "Pong!"}]
    data.write_text(json.dumps({"messages": talk}) + "\n")
    examples = packing.encode(tokenizer, lora.read_conversations(data), 256)
    options = Namespace(rate=0.02, seed=0, steps=1, batch=8)
    first = lora.train_adapter(model, examples, options)
    options.steps = 8
    assert lora.train_adapter(model, examples, options) < first - 0.1
    lora.save_adapter(model, tmp_path / "adapter", rank=4, alpha=8.0)
    tensors = load_file(str(tmp_path / "adapter" / "adapter_model.safetensors"))
    assert len(tensors) == 2 * 7 * SMALL.num_layers
    prefix = "base_model.model.model.layers.1.mlp.down_proj"
    assert tensors[f"{prefix}.lora_A.weight"].shape == (4, SMALL.intermediate_size)
    assert tensors[f"{prefix}.lora_B.weight"].shape == (SMALL.hidden_size, 4)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 8.0)
    for name, tensor in model.state_dict().items():
        if "lora" not in name:
            assert torch.equal(tensor, before[name.replace(".base.", ".")])


def test_conversations_for_an_adapter_must_alternate(tmp_path: Path) -> None:
    data = tmp_path / "talk.jsonl"
    data.write_text(json.dumps({"messages": [{"role": "user", "content": "Ping?"}]}) + "\n")
    with pytest.raises(ValueError, match="alternate"):
        lora.read_conversations(data)
