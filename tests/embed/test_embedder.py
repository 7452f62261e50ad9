"""Options of embedders and rerankers, threads, and errors."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import genai
from genai import Embedder, Reranker
from genai.embed.pairs import PairTemplate
from genai.embed.tokens import TextEncoder
from tests.embed.conftest import MODELS

Copied = Callable[[str], Path]


@pytest.fixture(scope="module")
def embedder() -> Iterator[Embedder]:
    with Embedder(MODELS / "bert", threads=1) as made:
        yield made


@pytest.mark.parametrize("kind", [Embedder, Reranker])
def test_a_model_that_is_no_name(kind: Any) -> None:
    with pytest.raises(genai.InputError, match="model is null"):
        kind(None)


def test_whole_numbers_of_numpy(embedder: Embedder) -> None:
    width: Any = np.int64(4)
    assert embedder.embed("the cat", dimensions=width).shape == (4,)


def test_models_without_positions(copied: Copied) -> None:
    folder = copied("t5")
    (folder / "tokenizer_config.json").unlink()
    with Embedder(folder, threads=1) as made:
        assert made.embed("cat " * 600).shape == (12,) and made.count_tokens("cat " * 600) > 600
        assert made.max_length == 4096
    with Embedder(folder, threads=1, max_length=5000) as made:
        assert made.count_tokens("cat " * 9000) == 5000


def test_shapes_and_kinds_of_texts(embedder: Embedder) -> None:
    assert embedder.dimensions == 24 and embedder.max_length == 16 and embedder.pooling == ("mean",)
    one = embedder.embed("the cat")
    assert one.shape == (24,) and one.dtype == np.float32
    assert embedder.embed(["the cat"]).shape == (1, 24) and embedder.embed([]).shape == (0, 24)
    ids = [2, *embedder._text._backend.encode("the cat", add_special_tokens=False).ids, 3]
    np.testing.assert_array_equal(embedder.embed(ids), one)
    np.testing.assert_array_equal(embedder.embed(np.array(ids)), one)
    np.testing.assert_array_equal(embedder.embed([ids, "the cat"]), [one, one])
    assert embedder.count_tokens("the cat") == len(ids) and embedder.count_tokens("the " * 99) == 16


def test_lazily_over_any_number(embedder: Embedder) -> None:
    read: list[int] = []

    def texts() -> Iterator[str]:
        for index in range(5000):
            read.append(index)
            yield f"cat {index % 7}"

    found = embedder.map(texts())
    first = next(found)
    assert len(read) < 5000
    np.testing.assert_array_equal(first, embedder.embed("cat 0"))
    assert sum(1 for _ in found) == 4999 and len(read) == 5000


def test_dimensions_are_cut_and_normalised_again(embedder: Embedder) -> None:
    whole, part = embedder.embed("red dog"), embedder.embed("red dog", dimensions=7)
    np.testing.assert_allclose(part, whole[:7] / np.linalg.norm(whole[:7]), rtol=1e-6)
    plain = embedder.embed("red dog", dimensions=7, normalize=False)
    np.testing.assert_array_equal(plain, whole[:7])
    for wrong in (0, 25, -1, True, 2.0, "7"):
        with pytest.raises(genai.OptionError, match="from 1 to 24"):
            embedder.embed("x", dimensions=wrong)  # type: ignore[arg-type]


def test_normalising_can_be_chosen() -> None:
    with Embedder(MODELS / "mpnet", threads=1) as plain, Embedder(MODELS / "mpnet", threads=1, normalize=True) as unit:
        vector = plain.embed("red dog")
        assert abs(np.linalg.norm(vector) - 1) > 0.01
        np.testing.assert_allclose(unit.embed("red dog"), vector / np.linalg.norm(vector), rtol=1e-6)


def test_prompts() -> None:
    with Embedder(MODELS / "xlm_roberta", threads=1) as made:
        assert made.prompts == {"query": "the query ", "document": ""}
        by_name = made.embed("cat", prompt_name="query")
        np.testing.assert_array_equal(by_name, made.embed("the query cat"))
        np.testing.assert_array_equal(by_name, made.embed("cat", prompt="the query "))
        with pytest.raises(genai.InputError, match="prompts are document, query") as caught:
            made.embed("cat", prompt_name="qery")
        assert "did you mean 'query'" in caught.value.fix
        with pytest.raises(genai.OptionError, match="contradict"):
            made.embed("cat", prompt_name="query", prompt="a ")
        with pytest.raises(genai.InputError, match="prompt is"):
            made.embed("cat", prompt=3)  # type: ignore[arg-type]


def test_a_default_prompt(copied: Copied) -> None:
    folder = copied("xlm_roberta")
    path = folder / "config_sentence_transformers.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "default_prompt_name": "query"}))
    with Embedder(folder, threads=1) as made:
        np.testing.assert_array_equal(made.embed("cat"), made.embed("cat", prompt_name="query"))


def test_from_several_threads_and_coroutines(embedder: Embedder) -> None:
    texts = ["dog " * (index % 13) for index in range(200)]
    expected, found = embedder.embed(texts), {}

    def work(number: int) -> None:
        found[number] = embedder.embed(texts[number::6])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for number in range(6):
        np.testing.assert_array_equal(found[number], expected[number::6])

    async def all_at_once() -> Any:
        return await asyncio.gather(*(embedder.aembed(text) for text in texts[:20]))

    np.testing.assert_array_equal(asyncio.run(all_at_once()), expected[:20])


def test_an_error_reaches_only_its_own_caller(embedder: Embedder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are shared, so a text that fails must not fail the texts beside it."""
    run = embedder._encoder.run

    def failing(sequences: Any) -> Any:
        if any(len(sequence) == 9 for sequence in sequences):
            raise genai.InputError("nine tokens", "a trial", "none")
        return run(sequences)

    monkeypatch.setattr(embedder._encoder, "run", failing)
    bad, errors, good = "dog " * 7, [], []

    def work(text: str) -> None:
        try:
            good.append(embedder.embed([text, "cat"]))
        except genai.InputError as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(text,)) for text in (bad, "dog", "red", bad, "park")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(errors) == 2 and len(good) == 3


def test_an_interrupted_step_is_computed_again(embedder: Embedder, monkeypatch: pytest.MonkeyPatch) -> None:
    run, interrupts = embedder._encoder.run, [KeyboardInterrupt()]

    def interrupted(sequences: Any) -> Any:
        if interrupts:
            raise interrupts.pop()
        return run(sequences)

    expected = embedder.embed("cat")
    monkeypatch.setattr(embedder._encoder, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        embedder.embed("cat")
    np.testing.assert_array_equal(embedder.embed("cat"), expected)
    assert not embedder._steps._calls and not embedder._steps._is_busy


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a \ud800", "not valid Unicode: character 2"),
        ([2, 96], "token id 96"),
        ([-1], "token id -1"),
        ([[1.5]], "a list"),
        ([None], "expected"),
        ([[]], "no tokens"),
        ([[1, [2]]], "text 0 is a list"),
        ([[2, 3], "a \ud800"], "text 1 is not valid Unicode"),
    ],
)
def test_texts_that_cannot_be_embedded(embedder: Embedder, text: Any, message: str) -> None:
    with pytest.raises(genai.InputError, match=message):
        embedder.embed(text)


@pytest.mark.parametrize("texts", [None, 3, {"text": "red"}, {"red", "dog"}])
def test_what_is_no_list_of_texts(embedder: Embedder, texts: Any) -> None:
    with pytest.raises(genai.InputError, match="texts is "):
        embedder.embed(texts)
    for call in (lambda: next(embedder.map(texts)), lambda: embedder.embed_counted(texts)):
        with pytest.raises(genai.InputError, match="texts is "):
            call()


def test_one_text_is_no_list_of_texts(embedder: Embedder) -> None:
    for call in (lambda: next(embedder.map("red")), lambda: embedder.embed_counted("red")):
        with pytest.raises(genai.InputError, match="texts is a string"):
            call()


def test_errors_of_many_texts_have_the_number_of_the_text(embedder: Embedder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("genai.embed.embedder._MAPPED", 2)
    for bad, message in (("\ud800", "text 3 is not valid Unicode"), ([2, 96], "text 3 has the token id 96")):
        with pytest.raises(genai.InputError, match=message):
            list(embedder.map(["a", [2, 3], "b", bad]))


@pytest.mark.parametrize("name", ["normalize", "truncate"])
def test_switches_that_are_no_booleans(embedder: Embedder, name: str) -> None:
    options: Any = {name: "no"}
    with pytest.raises(genai.OptionError, match=f"{name} = 'no'"):
        embedder.embed("red", **options)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (Embedder, {"normalize": "yes"}, "normalize = 'yes'"),
        (Embedder, {"pooling": [["mean"]]}, "pooling = "),
        (Embedder, {"file": 3}, "file = 3"),
        (Reranker, {"activation": ["Sigmoid"]}, "activation = "),
    ],
)
def test_options_of_other_types(kind: Any, options: Any, message: str) -> None:
    with pytest.raises(genai.OptionError, match=message):
        kind(MODELS / ("bert" if kind is Embedder else "bert_reranker"), threads=1, **options)


def test_a_prompt_name_that_is_no_text(embedder: Embedder) -> None:
    names: Any = ["query"]
    with pytest.raises(genai.InputError, match="prompt_name is a list"):
        embedder.embed("red", prompt_name=names)


def test_documents_of_any_iterable() -> None:
    with Reranker(MODELS / "bert_reranker", threads=1) as made:
        found = made.rank("red", (text for text in ["a dog", "red dog"]))  # type: ignore[arg-type]
        assert {one.document for one in found} == {"a dog", "red dog"}
        wrong: Any = {"a": 1}
        with pytest.raises(genai.InputError, match="documents is an object"):
            made.rank("red", wrong)


def test_long_texts(embedder: Embedder) -> None:
    """A text of ten megabytes is cut before it is encoded; its first tokens are those of the whole text."""
    words = "the cat and the dog " * 500_000
    np.testing.assert_array_equal(embedder.embed(words), embedder.embed(words[:2000]))
    spaced = " " * 5_000_000 + words[:2000]
    np.testing.assert_array_equal(embedder.embed(spaced), embedder.embed(words[:2000]))
    with pytest.raises(genai.InputError, match=r"text 1 has \d+ tokens or more") as caught:
        embedder.embed(["cat", words], truncate=False)
    assert "truncate=True" in caught.value.fix
    np.testing.assert_array_equal(embedder.embed("cat", truncate=False), embedder.embed("cat"))


@pytest.mark.parametrize("keeps_end, character", [(False, "a"), (True, "a"), (False, " "), (True, " ")])
def test_endless_words(embedder: Embedder, monkeypatch: pytest.MonkeyPatch, keeps_end: bool, character: str) -> None:
    """A word or space of any length is cut before it is encoded, and the words around it are not."""
    encoder = embedder._text
    monkeypatch.setattr(encoder, "keeps_end", keeps_end)
    sizes: list[int] = []
    encodings = encoder._encoder.encodings

    def counted(texts: Any, **options: Any) -> Any:
        sizes.extend(map(len, texts))
        return encodings(texts, **options)

    monkeypatch.setattr(encoder._encoder, "encodings", counted)
    found, short = (embedder.embed(f"the cat {character * size} sits") for size in (3_000_000, 1000))
    np.testing.assert_array_equal(found, short)
    assert sum(sizes) < 400_000


@pytest.mark.parametrize("limit", [1, 2, 4])
def test_limits_shorter_than_the_lengths_that_are_compared(embedder: Embedder, limit: int) -> None:
    ids = [2, 5, 6, 3][:limit]
    with Embedder(MODELS / "bert", threads=1, max_length=limit) as made:
        np.testing.assert_allclose(made.embed(ids), embedder.embed(ids), rtol=0, atol=1e-6)
        assert not made.info.flattened and "several lengths" in made.info.reason
    with Reranker(MODELS / "bert_reranker", threads=1, max_length=limit) as ranker:
        assert ranker.score("the cat", ["a dog"]).shape == (1,)


def test_a_length_limit() -> None:
    with Embedder(MODELS / "bert", threads=1, max_length=5) as made:
        assert made.count_tokens("one two three four five") == 5
        np.testing.assert_array_equal(made.embed("the cat sits on a mat"), made.embed("the cat sits"))
    with pytest.raises(genai.OptionError, match="positions for 60 tokens"):
        Embedder(MODELS / "bert", max_length=61)
    with pytest.raises(genai.OptionError, match="max_length"):
        Embedder(MODELS / "bert", max_length=0)


@pytest.mark.parametrize(("first", "second", "limit"), [(3, 50, 20), (50, 3, 20), (50, 50, 21), (4, 4, 7), (9, 30, 19)])
def test_pairs_are_truncated_as_the_library_does(first: int, second: int, limit: int) -> None:
    """Against the truncation of the tokenizers library."""
    from tokenizers import Tokenizer

    library = Tokenizer.from_file(str(MODELS / "bert" / "tokenizer.json"))
    library.enable_truncation(limit, strategy="longest_first")
    one, two = "cat " * first, "dog " * second
    expected = library.encode(one, two)
    (found,) = TextEncoder(MODELS / "bert", limit).encode_pairs(one, [two])
    assert found.ids.tolist() == expected.ids
    assert found.types is not None and found.types.tolist() == expected.type_ids


def test_after_close() -> None:
    made = Embedder(MODELS / "bert", threads=1)
    made.close()
    made.close()
    with pytest.raises(genai.StateError, match="closed"):
        made.embed("cat")


def test_weights_that_are_not_finite(copied: Copied) -> None:
    import onnx
    from onnx import numpy_helper

    folder = copied("bert")
    model = onnx.load(folder / "onnx" / "model.onnx")
    for tensor in model.graph.initializer:
        if tensor.name.endswith("word_embeddings.weight"):
            array = numpy_helper.to_array(tensor).copy()
            array[60] = np.nan
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    onnx.save(model, folder / "onnx" / "model.onnx")
    with Embedder(folder, threads=1) as made:
        assert np.isfinite(made.embed([2, 61, 3])).all()
        with pytest.raises(genai.UnsupportedModelError, match="text 1 contains NaN"):
            made.embed([[2, 61, 3], [2, 60, 3]])


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_a_classifier_is_no_embedder_and_the_reverse(name: str, copied: Copied) -> None:
    with pytest.raises(genai.ModelFolderError, match="classifies texts") as caught:
        Embedder(MODELS / f"{name}_reranker")
    assert "genai rerank" in caught.value.fix
    with pytest.raises(genai.UnsupportedModelError, match="is no score") as other:
        Reranker(MODELS / name)
    assert "genai embed" in other.value.fix


def test_a_folder_without_a_pooling(copied: Copied) -> None:
    folder = copied("bert")
    (folder / "modules.json").unlink()
    with pytest.raises(genai.ModelFolderError, match="pooling is unknown") as caught:
        Embedder(folder)
    assert 'pooling="mean"' in caught.value.fix and "--pooling" in caught.value.fix
    with Embedder(folder, pooling="mean", normalize=True, max_length=16, threads=1) as made:
        with Embedder(MODELS / "bert", threads=1) as whole:
            np.testing.assert_array_equal(made.embed("red dog"), whole.embed("red dog"))
    with Embedder(folder, pooling=["cls", "last"], threads=1) as made:
        assert made.dimensions == 48 and made.pooling == ("cls", "lasttoken")
    with pytest.raises(genai.OptionError, match="choose from cls, max, mean"):
        Embedder(folder, pooling="average")


def _edited(folder: Path, file: str, **changes: Any) -> None:
    path = folder / file
    values = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**values, **changes}))


@pytest.mark.parametrize(
    ("file", "changes", "error", "message"),
    [
        ("1_Pooling/config.json", {"pooling_mode": "average"}, genai.ConfigError, "pooling_mode is"),
        ("1_Pooling/config.json", {"pooling_mode": 7}, genai.ConfigError, "pooling_mode is"),
        ("1_Pooling/config.json", {"include_prompt": "no"}, genai.ConfigError, "include_prompt is 'no'"),
        (
            "1_Pooling/config.json",
            {"pooling_mode": None, "pooling_mode_max_tokens": "no"},
            genai.ConfigError,
            "pooling_mode_max_tokens is 'no'",
        ),
        ("config_sentence_transformers.json", {"similarity_fn_name": "near"}, genai.ConfigError, "cosine, dot"),
        ("config_sentence_transformers.json", {"default_prompt_name": "q"}, genai.ConfigError, "prompts are"),
        ("config_sentence_transformers.json", {"prompts": {"a": 3}}, genai.ConfigError, "prompts.a is 3"),
        ("config_sentence_transformers.json", {"prompts": [1]}, genai.ConfigError, "prompts is"),
        ("sentence_bert_config.json", {"max_seq_length": "many"}, genai.ConfigError, "max_seq_length is 'many'"),
        ("sentence_bert_config.json", {"max_seq_length": -3}, genai.ConfigError, "max_seq_length is -3"),
        ("config.json", {"max_position_embeddings": 0}, genai.ConfigError, "max_position_embeddings"),
        ("config.json", {"model_type": ["bert"]}, genai.ConfigError, r"model_type is \['bert'\]"),
    ],
)
def test_malformed_files(copied: Copied, file: str, changes: Any, error: Any, message: str) -> None:
    folder = copied("bert")
    if file == "config.json":
        changes = {**changes, "n_positions": None}
    _edited(folder, file, **changes)
    if "max_position_embeddings" in changes:
        return  # 0 counts as "not named"
    with pytest.raises(error, match=message):
        Embedder(folder)


@pytest.mark.parametrize(
    ("modules", "error", "message"),
    [
        ([{"path": "", "type": "a.Transformer"}, {"path": "x", "type": "a.WordWeights"}], genai.UnsupportedModelError,
         "the module .WordWeights."),
        ([{"path": "../x", "type": "a.Pooling"}], genai.ConfigError, "path is"),
        ([{"path": "/etc", "type": "a.Dense"}], genai.ConfigError, "path is"),
        ([{"path": "0_Transformer", "type": "a.Transformer"}], genai.UnsupportedModelError, "in the folder"),
        ([{"path": "", "type": "a.Transformer"}, {"path": "9_Pooling", "type": "a.Pooling"}], genai.ModelFolderError,
         "9_Pooling/config.json: the file is missing"),
        ([{"path": "", "type": "a.Transformer"}, {"path": "1_Pooling", "type": "a.Pooling"},
          {"path": "2_Dense", "type": "a.Dense"}], genai.ModelFolderError, "model.safetensors: the file is missing"),
        ({"a": 1}, genai.ConfigError, "a list of modules"),
        ([{"path": "", "type": "a.Transformer"}, {"path": "", "type": "a.Normalize"},
          {"path": "1_Pooling", "type": "a.Pooling"}], genai.ConfigError, "the Pooling comes after"),
        ([{"path": "1_Pooling", "type": "a.Pooling"}, {"path": "", "type": "a.Transformer"}], genai.ConfigError,
         "the Transformer comes after"),
    ],
)  # fmt: skip
def test_malformed_modules(copied: Copied, modules: Any, error: Any, message: str) -> None:
    folder = copied("bert")
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(error, match=message):
        Embedder(folder)


def test_a_pooling_of_another_width(copied: Copied, caplog: pytest.LogCaptureFixture) -> None:
    """As in sentence-transformers, the number is not used, and vectors are as wide as the graph's rows."""
    folder = copied("bert")
    _edited(folder, "1_Pooling/config.json", embedding_dimension=32)
    with Embedder(folder, threads=1) as made:
        assert made.embed("red").shape == (24,)
    assert "names 32 dimensions, but the graph computes 24" in caplog.text
    (folder / "1_Pooling" / "config.json").write_text("{}")
    with pytest.raises(genai.ModelFolderError, match="the file has no settings"):
        Embedder(folder, threads=1)


def test_modules_that_do_not_fit(copied: Copied) -> None:
    folder = copied("mpnet")
    (dense,) = folder.glob("*_Dense")
    weights = {"linear.weight": np.zeros((10, 23), np.float32), "linear.bias": np.zeros(10, np.float32)}
    save_file(weights, dense / "model.safetensors")
    with pytest.raises(genai.ConfigError, match="in_features is 24"):
        Embedder(folder)
    _edited(dense, "config.json", in_features=23)
    with pytest.raises(genai.ConfigError, match="a Dense module has 23 inputs, but vectors have 24 numbers"):
        Embedder(folder)
    save_file({**weights, "linear.bias": np.zeros(9, np.float32)}, dense / "model.safetensors")
    with pytest.raises(genai.ConfigError, match=r"linear\.bias has 9 numbers"):
        Embedder(folder)
    _edited(dense, "config.json", activation_function="evil.module.Run", in_features=24)
    save_file({"linear.weight": np.zeros((10, 24), np.float32), "linear.bias": weights["linear.bias"]},
              dense / "model.safetensors")  # fmt: skip
    with pytest.raises(genai.UnsupportedModelError, match="activation function 'Run'"):
        Embedder(folder)


@pytest.mark.parametrize("width", [24, 10])
def test_a_dense_module_with_a_residual(copied: Copied, width: int) -> None:
    folder = copied("mpnet")
    (dense,) = folder.glob("*_Dense")
    random = np.random.default_rng(0)
    arrays = {name: random.normal(size=(width, 24)).astype(np.float32) for name in ("linear", "residual")}
    arrays = {f"{name}.weight": array for name, array in arrays.items() if name == "linear" or width != 24}
    save_file(arrays, dense / "model.safetensors")
    _edited(dense, "config.json", bias=False, in_features=24, out_features=width,
            activation_function="torch.nn.modules.linear.Identity", use_residual=True)  # fmt: skip
    entries = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps([one for one in entries if "Normalize" not in one["type"]]))
    with Embedder(folder, threads=1) as made:
        found = made.embed("red dog")
    (folder / "modules.json").write_text(json.dumps(entries[:2]))
    with Embedder(folder, threads=1) as made:
        pooled = made.embed("red dog")
    residual = arrays["residual.weight"] @ pooled if width != 24 else pooled
    np.testing.assert_allclose(found, arrays["linear.weight"] @ pooled + residual, atol=1e-5)


def test_a_residual_that_does_not_fit(copied: Copied) -> None:
    folder = copied("mpnet")
    (dense,) = folder.glob("*_Dense")
    weights = {"linear.weight": np.zeros((10, 24), np.float32), "linear.bias": np.zeros(10, np.float32)}
    save_file(weights, dense / "model.safetensors")
    _edited(dense, "config.json", use_residual=True)
    with pytest.raises(genai.ConfigError, match=r"residual\.weight is missing"):
        Embedder(folder)
    save_file({**weights, "residual.weight": np.zeros((10, 23), np.float32)}, dense / "model.safetensors")
    with pytest.raises(genai.ConfigError, match=r"residual\.weight is \[10, 23\]"):
        Embedder(folder)


@pytest.mark.parametrize("kind", ["Dense", "Normalize"])
@pytest.mark.parametrize("name", ["module_input_name", "module_output_name"])
def test_modules_of_other_rows(copied: Copied, kind: str, name: str) -> None:
    folder = copied("mpnet")
    entries = json.loads((folder / "modules.json").read_text())
    entries.append({"path": "3_Normalize", "type": "a.Normalize"})
    (folder / "modules.json").write_text(json.dumps(entries))
    place = folder / next(one["path"] for one in entries if kind in one["type"])
    place.mkdir(exist_ok=True)
    _edited(place, "config.json", **{name: "token_embeddings"})
    with pytest.raises(genai.UnsupportedModelError, match=f"{name} is 'token_embeddings'"):
        Embedder(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_input_names": ["input_ids", "attention_mask"]},
        {"model_input_names": None, "tokenizer_class": "TokenizersBackend"},
    ],
)
def test_token_types_that_the_tokenizer_does_not_compute(copied: Copied, changes: Any) -> None:
    folder = copied("bert_reranker")
    with Reranker(folder, threads=1) as made:
        expected = made.score("red dog", ["the cat sits"])
    _edited(folder, "tokenizer_config.json", **changes)
    with Reranker(folder, threads=1) as made:
        assert made.score("red dog", ["the cat sits"]) != expected
    template = json.loads((folder / "tokenizer.json").read_text())
    for piece in template["post_processor"]["pair"]:
        next(iter(piece.values()))["type_id"] = 0
    (folder / "tokenizer.json").write_text(json.dumps(template))
    with Reranker(folder, threads=1) as made:
        without = made.score("red dog", ["the cat sits"])
    _edited(folder, "tokenizer_config.json", model_input_names=["token_type_ids"])
    with Reranker(folder, threads=1) as made:
        np.testing.assert_array_equal(made.score("red dog", ["the cat sits"]), without)


def test_scores_of_texts_of_equal_length_do_not_depend_on_each_other() -> None:
    documents = [f"the {word} sits" for word in ("cat", "dog", "mat", "red", "park", "a", "on", "in")]
    with Reranker(MODELS / "deberta_v2_reranker", threads=1) as made:
        assert not made.info.flattened
        alone = [made.score("red dog", [document])[0] for document in documents]
        np.testing.assert_array_equal(made.score("red dog", documents), alone)


def test_a_tokenizer_with_more_tokens_than_the_graph(copied: Copied) -> None:
    folder = copied("bert")
    content = json.loads((folder / "tokenizer.json").read_text())
    rows = json.loads((folder / "config.json").read_text())["vocab_size"]
    flags = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized", "special"], False)
    content["added_tokens"] += [
        {"id": id_, "content": "zebra" if id_ == rows else f"filler{id_}", **flags}
        for id_ in range(len(content["model"]["vocab"]), rows + 1)
    ]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with Embedder(folder, threads=1) as made:
        with pytest.raises(genai.InputError, match="a text has the token id") as caught:
            made.embed(["red dog", "zebra"])
        assert "embeddings of the ids 0 to" in caught.value.why
        assert made.embed("red dog").shape == (24,)


def test_malformed_input_names(copied: Copied) -> None:
    folder = copied("bert_reranker")
    _edited(folder, "tokenizer_config.json", model_input_names="input_ids")
    with pytest.raises(genai.ConfigError, match="model_input_names is 'input_ids'"):
        Reranker(folder)


def test_a_checkpoint_that_cannot_be_built(copied: Copied) -> None:
    folder = copied("bert")
    shutil.rmtree(folder / "onnx")
    _edited(folder, "config.json", model_type="bart", architectures=["BartModel"])
    with pytest.raises(genai.ModelFolderError, match="there is no ONNX graph") as caught:
        Embedder(folder)
    assert "a checkpoint of a type" in caught.value.fix


def test_graphs(copied: Copied) -> None:
    folder = copied("bert")
    (folder / "model.safetensors").unlink()
    (folder / "onnx" / "model.onnx").rename(folder / "onnx" / "model_fp32.onnx")
    with Embedder(folder, threads=1) as made:  # the only graph
        assert made.dimensions == 24
    with Embedder(folder, file="onnx/model_fp32.onnx", threads=1) as made:
        assert made.dimensions == 24
    with pytest.raises(genai.ModelFolderError, match="outside the folder"):
        Embedder(folder, file="../bert/onnx/model_fp32.onnx")
    (folder / "onnx" / "model_fp32.onnx").rename(folder / "onnx" / "model_int8.onnx")
    (folder / "onnx" / "model_q4.onnx").write_bytes((folder / "onnx" / "model_int8.onnx").read_bytes())
    with pytest.raises(genai.ModelFolderError, match=r"its graphs are onnx/model_int8\.onnx, onnx/model_q4") as caught:
        Embedder(folder)
    assert "--file onnx/model_int8.onnx" in caught.value.fix
    for name in ("int8", "q4"):
        (folder / "onnx" / f"model_{name}.onnx").unlink()
    with pytest.raises(genai.ModelFolderError, match="no ONNX graph") as caught:
        Embedder(folder)
    assert "export one with Optimum" in caught.value.fix
    with pytest.raises(genai.ModelFolderError, match="there is no such folder"):
        Embedder(folder / "nothing")
    with pytest.raises(genai.OptionError, match="CPU only"):
        Embedder(MODELS / "bert", device="cuda")


def test_reranker_options(copied: Copied, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with Reranker(MODELS / "deberta_v2_reranker", threads=1, label=0, activation="Sigmoid") as made:
        assert made.num_labels == 3
        assert 0 < made.score("cat", ["dog"])[0] < 1
        assert made.rank("cat", []) == []
        for top_n in (0, -1, True, 1.5):
            with pytest.raises(genai.OptionError, match="top_n"):
                made.rank("cat", ["dog"], top_n=top_n)  # type: ignore[arg-type]
        with pytest.raises(genai.InputError, match="a list of texts is expected"):
            made.score("cat", "dog")
        nothing: Any = None
        with pytest.raises(genai.InputError, match="query is null"):
            made.score(nothing, ["dog"])
        with pytest.raises(genai.OptionError, match="truncate = 'no'"):
            made.score("cat", ["dog"], truncate="no")  # type: ignore[arg-type]
        made.activation, parts = "Softmax", []
        for made._label in range(3):
            parts.append(made.score("cat", ["dog"])[0])
        assert sum(parts) == pytest.approx(1)
        assert made._checked_label(None) == 2
        assert "has 3 logits per pair: the score is the last one, with the function Softmax" in caplog.text
        with pytest.raises(genai.InputError, match="text 1 is not valid Unicode"):
            made.score("cat", ["dog", "\udcff"])
    with pytest.raises(genai.OptionError, match="labels 0 to 2"):
        Reranker(MODELS / "deberta_v2_reranker", label=3)
    with pytest.raises(genai.OptionError, match="choose from Identity"):
        Reranker(MODELS / "bert_reranker", activation="tanhh")
    config = json.loads((MODELS / "bert_reranker" / "config.json").read_text())
    (folder := copied("bert_reranker")).joinpath("config.json").write_text(
        json.dumps({**config, "sentence_transformers": {"activation_fn": "torch.nn.Evil"}})
    )
    with pytest.raises(genai.ConfigError, match=r"the function of the scores is 'torch.nn.Evil'"):
        Reranker(folder, threads=1)
    with Reranker(folder, threads=1, activation="Sigmoid") as other:
        assert other.activation == "Sigmoid"
    with pytest.raises(genai.StateError, match="closed"):
        made.score("cat", ["dog"])


def _edited(folder: Path, file: str, **changes: Any) -> Path:
    path = folder / file
    values = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**values, **changes}))
    return folder


def test_the_side_that_is_truncated(tmp_path: Path) -> None:
    """truncation_side of tokenizer_config.json: with "left", the last tokens of a text remain."""
    folder = Path(shutil.copytree(MODELS / "roberta", tmp_path / "model"))
    _edited(folder, "tokenizer_config.json", truncation_side="left")
    with Embedder(folder, threads=1, max_length=6) as embedder:
        np.testing.assert_array_equal(embedder.embed("a dog runs in the red park"), embedder.embed("in the red park"))
        np.testing.assert_array_equal(
            embedder.embed("dog " * 9000 + "in the red park"), embedder.embed("in the red park")
        )
    _edited(folder, "tokenizer_config.json", truncation_side="top")
    with pytest.raises(genai.ConfigError, match="truncation_side is 'top'"):
        Embedder(folder)


def test_the_side_that_rerankers_truncate(tmp_path: Path) -> None:
    long, end = "dog runs " * 30 + "the cat sits", "the cat sits"
    folder = Path(shutil.copytree(MODELS / "xlm_roberta_reranker", tmp_path / "model"))
    _edited(folder, "tokenizer_config.json", truncation_side="left")
    with genai.Reranker(folder, threads=1, max_length=9) as reranker:  # <s> a cat </s> </s> the cat sits </s>
        np.testing.assert_array_equal(*(reranker.score("a cat", [text]) for text in (long, end)))
    folder = Path(shutil.copytree(MODELS / "llama_generator", tmp_path / "generator"))
    _edited(folder, "tokenizer_config.json", truncation_side="left")
    templates = [PairTemplate(folder, TextEncoder(folder, size, keeps_end=True), {}, "llama") for size in (8, 400)]
    cut, whole = (template.encode("a cat", [long], "")[0].ids for template in templates)
    assert len(cut) == 8 and cut.tolist() == whole[-8:].tolist()


def test_lower_case_keeps_special_tokens(tmp_path: Path) -> None:
    """do_lower_case of sentence_bert_config.json concerns the text between special tokens, as sentence-transformers."""
    folder = Path(shutil.copytree(MODELS / "bert", tmp_path / "model"))
    with Embedder(folder, threads=1) as embedder:
        expected = embedder.embed(["the cat [SEP] the", "the cat"])
    _edited(folder, "sentence_bert_config.json", do_lower_case=True)
    text = (folder / "tokenizer.json").read_text()
    assert '"normalizer":{"type":"Lowercase"}' in text.replace(" ", "").replace("\n", "")
    with Embedder(folder, threads=1) as embedder:
        np.testing.assert_array_equal(embedder.embed(["The CAT [SEP] the", "THE cat"]), expected)
    content = json.loads(text)
    (folder / "tokenizer.json").write_text(json.dumps({**content, "normalizer": None}))
    with Embedder(folder, threads=1) as embedder:
        np.testing.assert_array_equal(embedder.embed(["The CAT [SEP] the", "THE cat"]), expected)


def test_dimensions_of_the_files(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(MODELS / "bert", tmp_path / "model"))
    _edited(folder, "config_sentence_transformers.json", truncate_dim=5)
    with Embedder(folder, threads=1) as embedder:
        assert embedder.dimensions == 5
        whole = embedder.embed("a dog", dimensions=24, normalize=False)
        assert whole.shape == (24,)
        first = whole[:5] / np.linalg.norm(whole[:5])
        np.testing.assert_allclose(embedder.embed("a dog"), first, rtol=0, atol=1e-6)
        with pytest.raises(genai.OptionError, match="from 1 to 24"):
            embedder.embed("a dog", dimensions=25)
    _edited(folder, "config_sentence_transformers.json", truncate_dim=25)
    with pytest.raises(genai.ConfigError, match="truncate_dim is 25"):
        Embedder(folder)
