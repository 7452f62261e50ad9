"""Write tests/text/goldens/sources: how the publishers' own libraries tokenise text in 22 scripts.

    python -m tools.make_source_goldens [--train] [--fuzz N]

The tool needs tiktoken, mistral-common, sentencepiece and transformers. Existing vocabularies are reused unless --train
is given. --fuzz compares this toolkit with the libraries on N random texts and writes nothing.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import random
import tempfile
import unicodedata
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import sentencepiece
import tiktoken
import tiktoken_ext.openai_public as openai
import transformers
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from tools.text_goldens.forms import FORMATS, SOURCES, TEKKEN_PATTERN, TOKENS, tokens, write_form
from tools.text_goldens.scripts import CORPUS, SOURCE_TEXTS

Encode = Callable[[str], list[int]]
# The patterns in Meta's tokenizer.py, Qwen's tokenization_qwen.py and Moonshot's tokenization_kimi.py.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_KIMI = "|".join(
    (
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def main() -> None:
    """Write all goldens, or compare this toolkit with the libraries on random texts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--fuzz", type=int, default=0)
    arguments = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    if arguments.train:
        train()
    with tempfile.TemporaryDirectory() as temporary:
        oracles = {name: oracle(name, write_form(name, Path(temporary) / name)) for name in FORMATS}
        if arguments.fuzz:
            fuzz(oracles, Path(temporary), arguments.fuzz)
            return
        ids = {name: [encode(text) for text in SOURCE_TEXTS] for name, encode in oracles.items()}
        bert = transformers.AutoTokenizer.from_pretrained(Path(temporary) / "bert")
        decoded = [bert.decode(row) for row in ids["bert"]]
    golden = {"texts": SOURCE_TEXTS, "ids": ids, "decoded_bert": decoded}
    text = json.dumps(golden, ensure_ascii=False, separators=(",", ":"))
    (SOURCES / "goldens.json").write_text(text.replace('],"', '],\n"') + "\n", encoding="utf-8")
    print(f"{len(ids)} forms, {len(SOURCE_TEXTS)} texts")


def train() -> None:
    """Train a small vocabulary of every kind."""
    SOURCES.mkdir(exist_ok=True)
    ranks, pairs = _byte_level()
    TOKENS.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(ranks)))
    written = [[base64.b64encode(half).decode() for half in pair] for pair in pairs]
    (SOURCES / "merges.json").write_text(json.dumps(written, separators=(",", ":")) + "\n")
    (SOURCES / "vocab.txt").write_text("\n".join([*_words(), ""]), encoding="utf-8")
    plain = {"normalization_rule_name": "identity", "character_coverage": 1.0, "hard_vocab_limit": False}
    fallback = {"byte_fallback": True, "split_digits": True, "remove_extra_whitespaces": False}
    for name, options in {
        "bpe": {"model_type": "bpe", "vocab_size": 900, **fallback},
        "unigram": {"model_type": "unigram", "vocab_size": 700},
    }.items():
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([line for text in CORPUS for line in text.split("\n") if line.strip()]),
            model_writer=model, num_threads=1, minloglevel=2, **{**plain, **options},
        )  # fmt: skip
        (SOURCES / f"{name}.model").write_bytes(model.getvalue())


def _byte_level() -> tuple[list[bytes], list[tuple[bytes, bytes]]]:
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(TEKKEN_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trained.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=800, initial_alphabet=alphabet, show_progress=False)
    )
    byte_of = {character: byte for byte, character in enumerate(map(_character, range(256)))}

    def data(text: str) -> bytes:
        return bytes([byte_of[character] for character in text])

    pairs = [(data(left), data(right)) for left, right in json.loads(trained.to_str())["model"]["merges"]]
    return [*(bytes([byte]) for byte in range(256)), *(left + right for left, right in pairs)], pairs


def _character(byte: int) -> str:
    from tools.text_goldens.forms import characters

    return characters(bytes([byte]))


def _words() -> list[str]:
    trained = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    trained.normalizer = normalizers.BertNormalizer(lowercase=False)
    trained.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    texts = [*CORPUS, *(text.lower() for text in CORPUS)]
    trained.train_from_iterator(
        texts, trainers.WordPieceTrainer(vocab_size=1000, special_tokens=special, show_progress=False)
    )
    vocab = trained.get_vocab()
    return sorted(vocab, key=vocab.__getitem__)


def oracle(name: str, folder: Path) -> Encode:
    """Return the function of a format's own library that tokenises a text, without special tokens."""
    if name.startswith("sentencepiece"):
        (path,) = folder.glob("*.model")
        processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
        return lambda text: list(processor.encode(text))
    if name.startswith("tekken"):
        tekkenizer = Tekkenizer.from_file(folder / "tekken.json")
        return lambda text: tekkenizer.encode(text, bos=False, eos=False)
    if not list(folder.glob("*.tiktoken")) + list(folder.glob("*.model")):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        return lambda text: list(tokenizer.encode(text, add_special_tokens=False))
    encoding = tiktoken.Encoding(
        name, pat_str=_pattern(name), special_tokens={},
        mergeable_ranks={token: rank for rank, token in enumerate(tokens())},
    )  # fmt: skip
    if name == "qwen":
        return lambda text: encoding.encode_ordinary(unicodedata.normalize("NFC", text))
    return encoding.encode_ordinary


def _pattern(name: str) -> str:
    if name in ("llama3", "glm4"):
        return _LLAMA3
    if name in ("qwen", "kimi"):
        return _QWEN if name == "qwen" else _KIMI
    openai.load_tiktoken_bpe = lambda *_, **__: {}  # only the patterns are needed, not the downloaded files
    return str(getattr(openai, name)()["pat_str"])


def fuzz(oracles: dict[str, Encode], folder: Path, count: int) -> None:
    """Compare this toolkit with the libraries on texts that `made_up` yields."""
    import genai

    rng = random.Random(0)
    for name, encode in oracles.items():
        ours = genai.Tokenizer(folder / name)
        wrong = [text for text in made_up(rng, count) if ours.encode(text).tolist() != encode(text)]
        print(f"{name}: {len(wrong)} of {count} texts differ", *(f"\n    {text!r:.200}" for text in wrong[:3]))


def made_up(rng: random.Random, count: int) -> Iterable[str]:
    """Yield texts that are joined from random pieces (one to three characters) of all texts; some pieces repeat."""
    pool = "".join(SOURCE_TEXTS) + "aA1 \n" * 20
    for _ in range(count):
        pieces: list[Any] = []
        for _ in range(rng.randrange(1, 30)):
            begin = rng.randrange(len(pool))
            pieces.append(pool[begin : begin + rng.randrange(1, 4)] * rng.choice((1, 1, 1, 2, 5)))
        yield "".join(pieces).replace("\0", "")


if __name__ == "__main__":
    main()
