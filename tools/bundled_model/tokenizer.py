"""Train and load Pebble's tokenizer: byte-level BPE in the format of Qwen2, single digits, ChatML markers.

The pre-tokenizer is exactly Qwen2's, so that every runtime that supports Qwen2 produces the same ids. Qwen2's NFC
normaliser is omitted, because onnxruntime-genai 0.18 does not apply it: ids would differ for decomposed letters.
"""

import json
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE

from .mixture import draw_pair
from .tasks import MIXTURE
from .tasks.facts import FACTS
from .tasks.small_talk import tell_and_ask_favourite, tell_and_ask_name
from .turn import draw

VOCAB_SIZE = 1536
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PAD_ID, IM_START_ID, IM_END_ID = 0, 1, 2
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_LETTER_TASKS = ("spell", "reverse", "first_letter", "last_letter", "letter_count", "sort")
_SAMPLES_PER_TASK = 3000


def _training_text(rng: Random) -> Iterator[str]:
    """Yield text for learning merges, without the words of the letter tasks, so that rare words stay in pieces."""
    for _ in range(_SAMPLES_PER_TASK):
        yield from ("system\nYou are Pebble, a small helpful assistant.", "user\n", "assistant\n")
        yield "-".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=6))
    for name, (sampler, _) in MIXTURE.items():
        samples = [draw(sampler, rng) for _ in range(_SAMPLES_PER_TASK)]
        if name in _LETTER_TASKS:
            yield from (turn.question.split()[0] for turn in samples)
        else:
            yield from (text for turn in samples for text in (turn.question, turn.reply))
    for ask in (tell_and_ask_name, tell_and_ask_favourite):
        ask_real = partial(ask, made_up_share=0.0)
        for _ in range(300):
            yield from (text for turn in draw_pair(ask_real, rng) for text in (turn.question, turn.reply))
    for fact in FACTS:
        yield from (fact.reply, *fact.things, *fact.actions, *fact.questions)


def train_tokenizer(seed: int) -> Tokenizer:
    """Return Pebble's tokenizer, with VOCAB_SIZE ids."""
    return train_bpe(_training_text(Random(seed)), VOCAB_SIZE)


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a `tokenizers.Tokenizer` with `vocab_size` ids on `texts`; the special tokens are ids 0, 1 and 2."""
    tokenizer = Tokenizer(BPE(fuse_unk=False, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {str(i): {"content": token, **special} for i, token in enumerate(SPECIAL_TOKENS)},
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 1024,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def load_tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def chat_prompt(messages: list[dict[str, str]]) -> str:
    """Return the text of a conversation with the generation prompt, as CHAT_TEMPLATE writes it."""
    turns = "".join(f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages)
    return turns + "<|im_start|>assistant\n"
