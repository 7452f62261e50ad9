"""generation_config.json and the sampling defaults of GGUF files: every key is obeyed, harmless or named."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import genai
from genai.convert import DecoderSpec, ExportOptions, write_model_folder
from genai.convert.folder import copy_tokenizer
from genai.convert.gguf.tokenizer import sampling_of
from genai.doctor.model_info import describe
from genai.engine.sampling.generation_config import IDS, NOT_SUPPORTED, OBEYED, WITHOUT_EFFECT, unsupported
from genai.engine.sampling.params import model_defaults, with_defaults
from genai.errors import ConfigError, TokenizerError
from genai.text.files import generation_defaults
from tools.make_beam_goldens import EOS, SPEC
from tools.make_generation_config_goldens import PATH
from tools.random_weights import RandomWeights

# The attributes of GenerationConfig in transformers 5.24 and 4.57, and the keys that to_dict adds. Print those of the
# installed version with: python -c "from transformers import GenerationConfig as G; print(*sorted(vars(G())))"
KEYS = """
_commit_hash _from_model_config assistant_confidence_threshold assistant_early_exit assistant_ensemble_weight
assistant_lookbehind bad_words_ids begin_suppress_tokens bos_token_id cache_config cache_implementation compile_config
constraints continuous_batching_config decoder_start_token_id disable_compile diversity_penalty do_sample dola_layers
early_stopping encoder_no_repeat_ngram_size encoder_repetition_penalty eos_token_id epsilon_cutoff eta_cutoff
exponential_decay_length_penalty force_words_ids forced_bos_token_id forced_eos_token_id guidance_scale is_assistant
length_penalty low_memory max_cache_len max_length max_matching_ngram_size max_new_tokens max_time min_length
min_new_tokens min_p no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule num_beam_groups num_beams
num_return_sequences output_attentions output_hidden_states output_logits output_scores pad_token_id penalty_alpha
prefill_chunk_size prompt_lookup_num_tokens remove_invalid_values renormalize_logits repetition_penalty
return_dict_in_generate sequence_bias speculation_type stop_strings suppress_tokens target_lookbehind temperature
token_healing top_h top_k top_p transformers_version typical_p use_cache use_mtp watermarking_config
""".split()
INF = float("inf")
PROMPT = "One evening he met"


def test_every_key_is_in_one_class() -> None:
    classes = [*OBEYED, *IDS, *NOT_SUPPORTED, *WITHOUT_EFFECT]
    assert sorted(classes) == sorted(KEYS)


def test_every_key_of_the_installed_transformers() -> None:
    config = pytest.importorskip("transformers").GenerationConfig()
    assert set(vars(config)) <= set(KEYS)
    assert unsupported(vars(config)) == ()  # its defaults do nothing


@pytest.fixture
def folder(bundled_folder: Path, tmp_path: Path) -> Path:
    made = shutil.copytree(bundled_folder, tmp_path / "model")
    config = json.loads((made / "genai_config.json").read_text())
    (made / "genai_config.json").write_text(json.dumps({**config, "search": {"do_sample": False}}))
    return made


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("genai")
    log.addHandler(handler)
    yield found
    log.removeHandler(handler)


def write(folder: Path, **values: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


# values of generation_config.json, and options that they become
BECOME: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"min_new_tokens": 2, "max_new_tokens": 5}, {"min_tokens": 2, "max_tokens": 5}),
    ({"min_new_tokens": 9, "max_new_tokens": 5}, {"min_tokens": 5, "max_tokens": 5}),
    ({"min_length": 7}, {"min_length": 7}),
    ({"stop_strings": "END"}, {"stop": "END"}),
    ({"stop_strings": ["a", "b"]}, {"stop": ("a", "b")}),
    ({"suppress_tokens": [3, 4, 10**6]}, {"logit_bias": {3: -INF, 4: -INF}}),
    # 2 is EOS, which transformers leaves out.
    ({"bad_words_ids": [[5], [6, 7], [2]]}, {"logit_bias": {5: -INF}, "sequence_bias": {(6, 7): -INF}}),
    ({"bad_words_ids": [[3, 2], [4, 10**6]]}, {"sequence_bias": {(3, 2): -INF}}),
    ({"sequence_bias": [[[8], 1.5], [[9, 1], 2.0]]}, {"logit_bias": {8: 1.5}, "sequence_bias": {(9, 1): 2.0}}),
    ({"sequence_bias": [[[9, 1], 2.0]], "bad_words_ids": [[9, 1]]}, {"sequence_bias": {(9, 1): -INF}}),
    ({"begin_suppress_tokens": [2, 7, 10**6]}, {"begin_suppress_tokens": (2, 7)}),
    ({"begin_suppress_tokens": []}, {}),
    ({"sequence_bias": [[[8], 1.5]], "suppress_tokens": [8]}, {"logit_bias": {8: -INF}}),
    ({"xtc_probability": 0.5, "do_sample": True}, {"temperature": 1.0, "xtc_probability": 0.5}),
    ({"xtc_probability": 0.5, "xtc_threshold": 0.2}, {}),
    ({"mirostat": 2, "top_k": 4, "do_sample": True}, {"temperature": 1.0, "mirostat": 2}),
    ({"repetition_penalty": 1.2, "penalty_last_n": 9}, {"repetition_penalty": 1.2, "penalty_last_n": 9}),
    ({"repetition_penalty": 1.2, "penalty_last_n": 0}, {}),
    ({"penalty_last_n": 9}, {}),
]


@pytest.mark.parametrize(("values", "options"), BECOME, ids=str)
def test_keys_that_become_defaults(values: dict[str, Any], options: dict[str, Any]) -> None:
    found = with_defaults(model_defaults(values, 1000, (2,)), {})
    assert found == genai.SamplingParams(**{"temperature": 0.0, **options})


LIMITS = {"min_new_tokens": 4, "max_new_tokens": 8, "stop_strings": ["x"], "suppress_tokens": [3], "mirostat": 2,
          "mirostat_tau": 3.0, "repetition_penalty": 1.2, "penalty_last_n": 9, "do_sample": True,
          "bad_words_ids": [[4, 5]], "begin_suppress_tokens": [6]}  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"max_tokens": 2}, {"max_tokens": 2, "min_tokens": 0}),
        ({"min_tokens": 20}, {"max_tokens": None, "min_tokens": 20}),
        ({"max_tokens": None}, {"max_tokens": None}),
        ({"stop": ()}, {"stop": ()}),
        ({"banned_strings": "xy"}, {"stop": ()}),
        ({"logit_bias": {7: 1.0}}, {"logit_bias": ((3, -INF), (7, 1.0))}),
        ({"logit_bias": {3: 1.0}}, {"logit_bias": ((3, 1.0),)}),
        ({"logit_bias": {}}, {"logit_bias": ()}),
        ({"stop_token_ids": [3]}, {"logit_bias": (), "stop_token_ids": (3,)}),
        ({"sequence_bias": {(4, 5): 1.0}}, {"sequence_bias": (((4, 5), 1.0),), "logit_bias": ((3, -INF),)}),
        ({"sequence_bias": {}}, {"sequence_bias": (), "begin_suppress_tokens": (6,)}),
        ({"begin_suppress_tokens": ()}, {"begin_suppress_tokens": (), "sequence_bias": (((4, 5), -INF),)}),
        ({"top_k": 4}, {"mirostat": 0, "top_k": 4, "mirostat_tau": 5.0}),
        ({"temperature": 0}, {"mirostat": 0, "mirostat_tau": 5.0}),
        ({"repetition_penalty": 1.0}, {"penalty_last_n": None}),
    ],
    ids=str,
)
def test_the_way_back(asked: dict[str, Any], expected: dict[str, Any]) -> None:
    """A request wins over each default, without an error about an option that it does not name."""
    found = with_defaults(model_defaults(LIMITS, 1000), asked).as_dict()
    assert {name: found[name] for name in expected} == expected


def test_samplers_of_a_model_and_a_request() -> None:
    known = model_defaults({"do_sample": True, "top_k": 9, "top_p": 0.5, "samplers": "top_k;temperature"}, 1000)
    assert with_defaults(known, {}) == genai.SamplingParams(top_k=9, samplers="top_k;temperature")
    assert with_defaults(known, {"min_p": 0.1}) == genai.SamplingParams(top_k=9, min_p=0.1)


def test_replies_obey_the_defaults(folder: Path) -> None:
    with genai.LLM(write(folder)) as llm:
        (free,) = llm.generate(PROMPT, max_tokens=12, ignore_eos=True)
    first = free.token_ids[0]
    with genai.LLM(write(folder, suppress_tokens=[first], max_new_tokens=9)) as llm:
        (held,) = llm.generate(PROMPT, ignore_eos=True)
        assert len(held.token_ids) == 9 and first not in held.token_ids
        (same,) = llm.generate(PROMPT, logit_bias={}, max_tokens=12, ignore_eos=True)
        assert same.token_ids == free.token_ids
    second = held.token_ids[0]
    write(folder, suppress_tokens=[first], bad_words_ids=[[second]], max_length=300, stop_strings=held.text[-1])
    with genai.LLM(folder) as llm:
        (other,) = llm.generate(PROMPT, max_tokens=9)
        assert not {first, second} & set(other.token_ids) and held.text[-1] not in other.text
        beams = llm.generate(PROMPT, num_beams=2, max_tokens=3)
        assert not {first, second} & {token for beam in beams for token in beam.token_ids}
        assert llm.context_size == 300


@pytest.fixture(scope="module")
def golden_llm(tmp_path_factory: pytest.TempPathFactory, bundled_folder: Path) -> Iterator[genai.LLM]:
    spec, made = DecoderSpec(**SPEC), tmp_path_factory.mktemp("goldens") / "model"
    weights = RandomWeights(spec, GOLDENS["seed"])
    write_model_folder(made, spec, ExportOptions(precision="fp32"), weights, tokenizer_dir=bundled_folder)
    with genai.LLM(made, threads=2) as llm:
        yield llm


GOLDENS = json.loads(PATH.read_text(encoding="utf-8"))


def golden_params(case: dict[str, Any]) -> genai.SamplingParams:
    """The defaults that the keys of a case set."""
    keys = {name: value for name, value in case["keys"].items() if name != "num_beams"}
    return with_defaults(model_defaults(keys, SPEC["vocab_size"], (EOS,)), {})


def test_replies_are_those_of_transformers(golden_llm: genai.LLM) -> None:
    """Cases of tools/make_generation_config_goldens.py, whose keys change most of the outputs; also in one batch."""
    cases = [case for case in GOLDENS["cases"] if case["keys"]["num_beams"] == 1]
    params = [golden_params(case) for case in cases]
    together = golden_llm.generate([case["prompt"] for case in cases], params)
    alone = [golden_llm.generate(case["prompt"], one)[0] for case, one in zip(cases, params, strict=True)]
    for found in (together, alone):
        ours = [[*one.token_ids, *([one.stopped_by] if one.finish_reason == "stop" else [])] for one in found]
        assert ours == [case["outputs"][0] for case in cases]
    assert sum(case["outputs"][0] != case["free"] for case in cases) > 30


def test_beams_are_those_of_transformers(golden_llm: genai.LLM) -> None:
    cases = [case for case in GOLDENS["cases"] if case["keys"]["num_beams"] > 1]
    for case in cases:
        (found,) = golden_llm.generate(case["prompt"], golden_params(case), num_beams=case["keys"]["num_beams"])
        ours = [*found.token_ids, *([found.stopped_by] if found.finish_reason == "stop" else [])]
        assert ours == case["outputs"][0], case["keys"]
        assert found.score == pytest.approx(case["scores"][0], abs=2e-4)
    assert len(cases) > 15


def test_sequences_and_first_tokens_of_the_file(folder: Path) -> None:
    with genai.LLM(write(folder)) as llm:
        free = list(llm.generate(PROMPT, max_tokens=12, ignore_eos=True)[0].token_ids)
    write(folder, begin_suppress_tokens=[free[0]], bad_words_ids=[free[4:7]])
    with genai.LLM(folder) as llm:
        (found,) = llm.generate(PROMPT, max_tokens=12, ignore_eos=True)
        assert found.token_ids[0] != free[0]
        options = {"begin_suppress_tokens": (), "max_tokens": 12, "ignore_eos": True}
        (found,) = llm.generate(PROMPT, **options)
        assert list(found.token_ids[:6]) == free[:6] and found.token_ids[6] != free[6]
        (found,) = llm.generate(PROMPT, sequence_bias={}, **options)
        assert list(found.token_ids) == free


def test_keys_that_are_not_supported_are_named(folder: Path, warnings: list[str]) -> None:
    wrong = {"forced_eos_token_id": 2, "guidance_scale": 1.5, "num_beams": 4}
    harmless = {name: neutral[0] for name, neutral in NOT_SUPPORTED.items() if neutral and name not in wrong}
    write(folder, **wrong, **harmless, **dict.fromkeys(WITHOUT_EFFECT, 1), a_key_of_another_program=1)
    names = [name for name in NOT_SUPPORTED if name in wrong]
    with genai.LLM(folder, quiet=True) as llm:
        llm.generate("A", max_tokens=1)
    assert [text for text in warnings if "no effect" in text] == [
        f"the model's defaults contain options that have no effect: {', '.join(names)}"
    ]
    assert describe(folder)["sampling_defaults_without_effect"] == names


def test_keys_in_config_json(tmp_path: Path, bundled_folder: Path) -> None:
    """transformers reads config.json if there is no generation_config.json."""
    inner = {"repetition_penalty": 3.0, "top_k": 7, "vocab_size": 5}
    outer = {"repetition_penalty": 1.5, "num_beams": 3, "top_p": None, "max_length": 20, "eos_token_id": 3}
    (tmp_path / "config.json").write_text(json.dumps({**outer, "text_config": inner}))
    found = generation_defaults(tmp_path)
    assert found.sampling == {"repetition_penalty": 1.5, "top_k": 7}
    assert (found.unsupported, found.ids.eos) == (("num_beams",), ())
    shutil.copy(bundled_folder / "tokenizer.json", tmp_path)
    target = tmp_path / "built"
    target.mkdir()
    copy_tokenizer(tmp_path, target)
    assert generation_defaults(target) == found
    (tmp_path / "config.json").write_text(json.dumps({"suppress_tokens": 5}))
    with pytest.raises(TokenizerError, match=r"config\.json: suppress_tokens"):
        generation_defaults(tmp_path)
    (tmp_path / "generation_config.json").write_text("{}")
    assert generation_defaults(tmp_path).sampling == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [("suppress_tokens", 5), ("suppress_tokens", [-1]), ("bad_words_ids", [5]), ("bad_words_ids", [[]]),
     ("begin_suppress_tokens", 5), ("begin_suppress_tokens", [True]),
     ("sequence_bias", [[5, 1.0]]), ("sequence_bias", {"a": 1}), ("stop_strings", 5), ("stop_strings", [""]),
     ("max_new_tokens", "5"), ("min_new_tokens", -1), ("max_new_tokens", True), ("samplers", 3)],
)  # fmt: skip
def test_malformed_values(name: str, value: Any, folder: Path) -> None:
    with pytest.raises(TokenizerError, match=f"generation_config.json: {name} = ") as raised:
        generation_defaults(write(folder, **{name: value}))
    assert raised.value.why and raised.value.fix


def test_values_out_of_range(folder: Path) -> None:
    with pytest.raises(ConfigError, match="in the model's files"):
        genai.LLM(write(folder, samplers="nonsense", do_sample=True))


# general.sampling.* of a GGUF file, the options that they become, and the keys that are named
GGUF: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    ({}, {"temperature": 0}, []),
    ({"temp": 0.6, "top_p": 0.9, "top_k": -1}, {"temperature": 0.6, "top_p": 0.9}, []),
    ({"temp": 0.0, "top_p": 0.9}, {"temperature": 0}, []),
    ({"top_p": 0.9}, {"temperature": 0.8, "top_p": 0.9}, []),
    ({"penalty_repeat": 1.2}, {"temperature": 0, "repetition_penalty": 1.2, "penalty_last_n": 64}, []),
    ({"penalty_repeat": 1.2, "penalty_last_n": -1}, {"temperature": 0, "repetition_penalty": 1.2}, []),
    ({"penalty_repeat": 1.2, "penalty_last_n": 0}, {"temperature": 0}, []),
    ({"xtc_probability": 0.3, "xtc_threshold": 0.1}, {"temperature": 0.8, "xtc_probability": 0.3}, []),
    ({"mirostat": 2, "mirostat_tau": 4.0, "top_k": 5}, {"temperature": 0.8, "mirostat": 2, "mirostat_tau": 4.0}, []),
    ({"mirostat": 1, "temp": 0.5}, {"temperature": 0.5}, ["mirostat"]),
    ({"temp": 0.5, "top_k": 5, "sequence": "top_k;temp"},
     {"temperature": 0.5, "top_k": 5, "samplers": "top_k;temperature"}, []),
    ({"temp": 0.5, "top_k": 5, "sequence": "infill;temp"}, {"temperature": 0.5, "top_k": 5}, ["sequence"]),
    ({"temp": 0.5, "top_k": 5, "sequence": "temp"}, {"temperature": 0.5, "top_k": 5}, ["sequence"]),
    ({"temp": float("nan"), "min_p": 0.1, "new": 3}, {"temperature": 0.8, "min_p": 0.1}, ["temp", "new"]),
    ({"temp": "hot", "top_p": [1]}, {"temperature": 0}, ["temp", "top_p"]),
]  # fmt: skip


@pytest.mark.parametrize(("metadata", "options", "named"), GGUF, ids=str)
def test_defaults_of_gguf_files(
    metadata: dict[str, Any], options: dict[str, Any], named: list[str], folder: Path
) -> None:
    found = sampling_of({"general.name": "x", **{f"general.sampling.{key}": value for key, value in metadata.items()}})
    read = generation_defaults(write(folder, **json.loads(json.dumps(found, allow_nan=False))))
    assert with_defaults(model_defaults(read.sampling, 1000), {}) == genai.SamplingParams(**options)
    assert sorted(read.unsupported) == sorted(f"general.sampling.{key}" for key in named)
