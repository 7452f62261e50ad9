"""Streaming: pieces are whole characters and add up to the full decode, for every kind of tokenizer."""

import json
import random
import time
from pathlib import Path

import numpy as np
import pytest
from tokenizers import decoders

from genai.errors import InputError, TokenizerError
from genai.text.detokenizer import Detokenizer, clean_up
from genai.text.tokenizer import Tokenizer


def pieces_of(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = tokenizer.create_stream()
    return [*(stream.decode(id_) for id_ in ids), stream.flush()]


def assert_streams_like_decode(tokenizer: Tokenizer, ids: list[int]) -> None:
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids), (ids, pieces)


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_torture_texts(kind_folder, torture, skip_special_tokens):
    tokenizer = Tokenizer(kind_folder)
    tokenizer.update_options(skip_special_tokens=skip_special_tokens)
    for text in torture:
        assert_streams_like_decode(tokenizer, tokenizer.encode(text).tolist())
    assert_streams_like_decode(tokenizer, [id_ for text in torture for id_ in tokenizer.encode(text).tolist()])


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_random_ids_with_invalid_byte_sequences(kind_folder, skip_special_tokens):
    tokenizer = Tokenizer(kind_folder)
    tokenizer.update_options(skip_special_tokens=skip_special_tokens)
    rng = random.Random(0)
    vocabulary = json.loads((kind_folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    tokens = [entry[0] for entry in vocabulary] if isinstance(vocabulary, list) else list(vocabulary)
    # Bytes are single characters in byte-level vocabularies and <0x..> in the others.
    single = [tokenizer.to_token_id(token) for token in tokens if len(token) == 1 or token.startswith("<0x")]
    for length in [*range(12), *(rng.randrange(40) for _ in range(400))]:
        source = single if rng.random() < 0.5 else range(tokenizer.vocab_size)
        assert_streams_like_decode(tokenizer, rng.choices(source, k=length))


def test_every_sequence_of_two_byte_tokens(folder_of):
    """All pairs of byte values: each kind of invalid UTF-8 gives as many U+FFFD as the full decode."""
    tokenizer = Tokenizer(folder_of("byte_level"))
    single = [id_ for id_ in range(tokenizer.vocab_size) if len(tokenizer._backend.id_to_token(id_)) == 1]
    assert len(single) >= 256
    for first in single[::4]:
        for second in single[::7]:
            assert_streams_like_decode(tokenizer, [first, second, single[0]])


def test_byte_level_pieces_come_as_soon_as_a_character_is_whole(folder_of):
    tokenizer = Tokenizer(folder_of("byte_level"))
    ids = [tokenizer.to_token_id(character) for character in "HðŁĺĤé"[:5]] + tokenizer.encode("i").tolist()
    assert pieces_of(tokenizer, ids) == ["H", "", "", "", "😂", "i", ""]


def test_fallback_bytes_wait_for_the_end_of_their_run(folder_of):
    """One stray byte invalidates the whole run in the full decode, so no part of a run is certain before its end."""
    tokenizer = Tokenizer(folder_of("llama"))
    euro = [tokenizer.to_token_id(f"<0x{byte:02X}>") for byte in "€".encode()]
    word = tokenizer.encode("cat").tolist()
    assert pieces_of(tokenizer, [*euro, *word])[:3] == ["", "", ""]
    assert "".join(pieces_of(tokenizer, [*euro, *word])).startswith("€")
    assert pieces_of(tokenizer, [*euro, euro[1]])[-1] == "\ufffd" * 4


def test_an_unfinished_character_comes_with_flush_and_a_new_text_begins(folder_of):
    tokenizer = Tokenizer(folder_of("metaspace"))
    stream = tokenizer.create_stream()
    ids = tokenizer.encode("the cat").tolist()
    first = [*(stream.decode(id_) for id_ in ids), stream.flush()]
    second = [*(stream.decode(id_) for id_ in ids), stream.flush()]
    assert "".join(first) == "the cat"
    assert second == first
    tokenizer = Tokenizer(folder_of("byte_level"))
    stream = tokenizer.create_stream()
    assert stream.decode(tokenizer.to_token_id("ð")) == ""
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_streaming_never_decodes_the_whole_text_again(kind_folder):
    """Each token has the same cost: the stream looks up one vocabulary entry and keeps no list of tokens."""
    tokenizer = Tokenizer(kind_folder)
    ids = tokenizer.encode("the cat sat on the mat 漢 ").tolist() * 200
    expected = tokenizer.decode(ids)

    class LookupOnly:
        def __init__(self, backend):
            self.id_to_token = backend.id_to_token
            self.decoder = backend.decoder

    tokenizer._backend = LookupOnly(tokenizer._backend)
    assert "".join(pieces_of(tokenizer, ids)) == expected


def test_a_stream_keeps_the_options_it_was_made_with(model_folder):
    tokenizer = Tokenizer(model_folder)
    stream = tokenizer.create_stream()
    tokenizer.update_options(skip_special_tokens=False)
    end = tokenizer.to_token_id("<|im_end|>")
    assert stream.decode(end) == ""
    assert tokenizer.create_stream().decode(end) == "<|im_end|>"


def test_ids_of_numpy_are_integers_too(model_folder):
    tokenizer = Tokenizer(model_folder)
    assert tokenizer.create_stream().decode(tokenizer.encode("Hi")[0]) == tokenizer.decode(tokenizer.encode("Hi")[:1])


def test_padded_ids_of_the_model_have_no_text(model_folder):
    tokenizer = Tokenizer(model_folder)
    assert tokenizer.vocab_size < 512
    assert tokenizer.create_stream().decode(511) == ""
    assert tokenizer.decode([511]) == ""


@pytest.mark.parametrize("token", [-1, 512, 2**40, 1.0, "1", None, [1], np.float32(1)])
def test_what_is_not_an_id_of_the_model_is_an_error(model_folder, token):
    with pytest.raises(InputError, match=r"TokenizerStream\.decode"):
        Tokenizer(model_folder).create_stream().decode(token)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("tokens", [["xxaxx", "xxbx"], ["xxxxx", "xaxx", "xxxx"], ["a", "x", "x", "x"], ["ax", "bxx"]])
def test_strips_at_both_ends(fused, tokens):
    """Each token here is longer than the stripped part, because the library cannot strip the end of a shorter one."""
    strip = decoders.Strip("x", 1, 2)
    reference = decoders.Sequence([decoders.Fuse(), strip] if fused else [strip])
    tokens = tokens if fused else [token for token in tokens if len(token) > 3]
    detokenizer = Detokenizer(json.loads(reference.__getstate__()))
    assert "".join([*map(detokenizer.feed, tokens), detokenizer.flush()]) == reference.decode(tokens)


@pytest.mark.parametrize("old", ["ab", "aab", "aa", "abab"])
def test_a_replacement_in_the_whole_text(old):
    """After "Fuse", the replaced text may cross token boundaries."""
    reference = decoders.Sequence([decoders.Fuse(), decoders.Replace(old, "<>")])
    rng = random.Random(1)
    for _ in range(200):
        tokens = ["".join(rng.choices("ab", k=rng.randrange(4))) for _ in range(rng.randrange(8))]
        detokenizer = Detokenizer(json.loads(reference.__getstate__()))
        pieces = [*map(detokenizer.feed, tokens), detokenizer.flush()]
        assert "".join(pieces) == (reference.decode(tokens) if tokens else "")


def test_cleaned_up_pieces_are_the_cleaned_up_text():
    rng = random.Random(2)
    parts = [" ", ".", "'", " n't", "n", "'s", " '", "re", "do", " not", "?", " ' ", "\u00a0", "x"]
    for _ in range(20_000):
        tokens = rng.choices(parts, k=rng.randrange(12))
        detokenizer = Detokenizer({"type": "Fuse"}, cleanup=True)
        assert "".join([*map(detokenizer.feed, tokens), detokenizer.flush()]) == clean_up("".join(tokens))


def test_a_copy_of_a_stream_goes_its_own_way(kind_folder):
    tokenizer = Tokenizer(kind_folder)
    ids = tokenizer.encode("the cat 漢😂 é sat . 'm").tolist()
    for cut in range(len(ids)):
        stream = tokenizer.create_stream()
        before = "".join(map(stream.decode, ids[:cut]))
        other = stream.copy()
        ends = ["".join([*map(each.decode, ids[cut:]), each.flush()]) for each in (stream, other)]
        assert [before + end for end in ends] == [tokenizer.decode(ids)] * 2


def test_the_text_of_a_token(model_folder):
    tokenizer = Tokenizer(model_folder)
    assert tokenizer.token_text(tokenizer.to_token_id("<|im_end|>")) == "<|im_end|>"
    assert tokenizer.token_text(511) == ""
    with pytest.raises(InputError, match="token_text"):
        tokenizer.token_text(512)


def test_kept_special_tokens_are_shown_and_others_are_not(model_folder):
    tokenizer = Tokenizer(model_folder)
    ids = tokenizer.encode("<|im_start|>a<|im_end|>").tolist()
    stream = tokenizer.create_stream(keep=["<|im_end|>", "no token of this tokenizer"])
    assert "".join([*map(stream.decode, ids), stream.flush()]) == "a<|im_end|>"
    assert pieces_of(tokenizer, ids) == ["", "a", "", ""]


@pytest.mark.parametrize("keep", ["<|im_end|>", [1], None, [b"x"], 5])
def test_what_is_kept_is_a_list_of_texts(model_folder, keep):
    with pytest.raises(InputError, match="keep"):
        Tokenizer(model_folder).create_stream(keep=keep)


@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True},
        {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "BPEDecoder", "suffix": "</w>"}]},
        {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteFallback"}]},
        {
            "type": "Sequence",
            "decoders": [{"type": "Fuse"}, {"type": "Replace", "pattern": {"Regex": "a+b"}, "content": "c"}],
        },
    ],
)
def test_a_decoder_that_needs_the_whole_text_is_refused(decoder):
    with pytest.raises(TokenizerError, match="does not support incremental decoding"):
        Detokenizer(decoder)


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_a_stream_after_a_prompt_gives_what_its_tokens_add(kind_folder, torture, skip_special_tokens):
    """The text of prompt and output is the text of the prompt and the pieces, wherever the ids are cut."""
    tokenizer = Tokenizer(kind_folder)
    tokenizer.update_options(skip_special_tokens=skip_special_tokens)
    rng = random.Random(1)
    compared = 0
    rows = [[id_ for text in rng.sample(torture, 2) for id_ in tokenizer.encode(text).tolist()] for _ in range(40)]
    rows += [[rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(1, 40))] for _ in range(200)]
    for ids in rows:
        cut = rng.randrange(len(ids) + 1)
        before, whole = tokenizer.decode(ids[:cut]), tokenizer.decode(ids)
        if not whole.startswith(before):  # the output completes a character, or the clean-up changes the prompt
            continue
        compared += 1
        stream = tokenizer.create_stream(after=ids[:cut])
        assert before + "".join([*map(stream.decode, ids[cut:]), stream.flush()]) == whole, (ids, cut)
    assert compared > 60


def test_an_output_that_completes_the_last_character_of_a_prompt(kind_folder):
    tokenizer = Tokenizer(kind_folder)
    first, second = (tokenizer.to_token_id(token) for token in ("<0xC3>", "<0xA9>"))
    if first < 0 or second < 0:
        return
    stream = tokenizer.create_stream(after=[*tokenizer.encode("the cat"), first])
    text = tokenizer.encode("the").tolist()[-1]
    assert "".join([*map(stream.decode, [second, text]), stream.flush()]).startswith("é")
    # A prompt that ends with a long run of bytes.
    whole = [first, second] * 40
    stream = tokenizer.create_stream(after=whole[:-2])
    assert "".join([*map(stream.decode, [*whole[-2:], text]), stream.flush()]).startswith("é")


@pytest.mark.parametrize("after", ["text", [1.5], [[1, 2]], [10**7]])
def test_ids_before_a_stream_that_are_no_ids(folder_of, after):
    with pytest.raises(InputError):
        Tokenizer(folder_of("byte_level")).create_stream(after=after)


def test_the_text_of_single_tokens(kind_folder):
    """A token in the middle of a text: decode() of a prompt and the token, without decode() of the prompt."""
    tokenizer = Tokenizer(kind_folder)
    ids = tokenizer.encode("the cat sat on the mat").tolist()
    alone = tokenizer.decode_each(ids)
    assert tokenizer.decode_each([]) == []
    for index, text in enumerate(alone[1:], 1):
        before, whole = tokenizer.decode(ids[:index]), tokenizer.decode(ids[: index + 1])
        if whole.startswith(before):
            assert text == whole[len(before) :] or text.strip() == whole[len(before) :].strip()


@pytest.mark.oracle
def test_the_pieces_equal_onnxruntime_genai(model_folder: Path, torture):
    og = pytest.importorskip("onnxruntime_genai")
    theirs, ours = og.Tokenizer(str(model_folder)), Tokenizer(model_folder)
    for text in torture[:-2]:
        ids = ours.encode(text).tolist()
        stream, reference = ours.create_stream(), theirs.create_stream()
        assert [stream.decode(id_) for id_ in ids] == [reference.decode(id_) for id_ in ids], text


def test_a_token_costs_less_than_20_microseconds(kind_folder):
    tokenizer = Tokenizer(kind_folder)
    ids = tokenizer.encode("the cat sat on the mat, the dog ran! 漢字 café " * 20).tolist()

    def microseconds() -> float:
        stream = tokenizer.create_stream()
        begin = time.thread_time()
        for id_ in ids:
            stream.decode(id_)
        return (time.thread_time() - begin) / len(ids) * 1e6

    assert min(microseconds() for _ in range(10)) < 20
