"""Quantised checkpoints that are damaged, contradict themselves, or are of a kind that is not read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from genai.convert import plan_build
from genai.convert.build import execute
from genai.errors import ConfigError, GenaiError, InputError, ModelFolderError, UnsupportedModelError
from genai.weight_files.safetensors import SafetensorsFile
from tools.quantised_checkpoints import write

Q = "model.layers.1.self_attn.q_proj"
DOWN = "model.layers.0.mlp.down_proj"


def refused(folder: Path, kind: type[GenaiError], *said: str) -> None:
    """The plan is refused, or the build, which then leaves nothing."""
    with pytest.raises(kind) as caught:
        execute(plan_build(folder), folder / "made")
    error = caught.value
    assert type(error) is kind and error.what and error.why and error.fix
    assert all(text in str(error) for text in said), str(error)
    assert not (folder / "made").exists()


def change(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> Path:
    file = SafetensorsFile(folder / "model.safetensors")
    tensors = {name: np.array(file.read(name)) for name in file.tensors}
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def configure(folder: Path, **values: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= values
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def put(name: str, make: Callable[[Any], Any]) -> Callable[[dict[str, Any]], None]:
    def edit(tensors: dict[str, Any]) -> None:
        tensors[name] = np.ascontiguousarray(make(tensors[name]))

    return edit


def with_number(index: Any, number: Any) -> Callable[[Any], Any]:
    def edit(tensor: Any) -> Any:
        tensor = tensor.copy()
        tensor[index] = number
        return tensor

    return edit


TENSORS: dict[str, tuple[str, Callable[[dict[str, Any]], Any], tuple[str, ...]]] = {
    "scales are missing": ("awq", lambda t: t.pop(f"{Q}.scales"), ("no tensor", f"{Q}.scales")),
    "zero points are missing": ("gptq", lambda t: t.pop(f"{DOWN}.qzeros"), ("no tensor", f"{DOWN}.qzeros")),
    "one matrix is missing": (
        "awq", lambda t: [t.pop(f"{Q}.{end}") for end in ("qweight", "qzeros", "scales")], ("lacks 1 tensors", Q),
    ),
    "a float in the place of integers": (
        "awq", put(f"{Q}.qweight", lambda a: a.astype(np.float32)), ("type float32", "int32"),
    ),
    "fewer columns": ("awq", put(f"{Q}.qweight", lambda a: a[:32]), ("has groups of 16 columns", "sets group size 32")),
    "columns that are no groups": ("awq", put(f"{Q}.qweight", lambda a: a[:33]), ("2 groups for 33 columns",)),
    "zero points of other groups": ("awq", put(f"{Q}.qzeros", lambda a: a[:1]), ("has shape [1, 8]",)),
    "zero points of other outputs": ("gptq", put(f"{Q}.qzeros", lambda a: a[:, :3]), ("96 bits for 64 numbers",)),
    "group that there is not": (
        "gptq_act_order", put(f"{Q}.g_idx", with_number(5, 2)), ("group 2, but the number of groups is 2",),
    ),
    "negative group": (
        "gptq_act_order", put(f"{Q}.g_idx", with_number(5, -3)), ("group -3, but the number of groups is 2",),
    ),
    "g_idx of another size": ("gptq", put(f"{Q}.g_idx", lambda a: a[:-1]), ("g_idx has shape [63], expected [64]",)),
    "scales that are infinite": ("awq", put(f"{Q}.scales", with_number((0, 0), np.inf)), ("NaN or infinite",)),
    "a matrix of floats and of integers": (
        "awq", lambda t: t.update({f"{Q}.weight": np.zeros((64, 64), np.float32)}), ("is stored twice",),
    ),
    "no shape": ("w4a16", lambda t: t.pop(f"{Q}.weight_shape"), ("no tensor", "weight_shape")),
    "a shape of 2^40 rows": (
        "w4a16", put(f"{Q}.weight_shape", lambda a: np.array([2**40, 64])), ("expected [1099511627776, any]",),
    ),
    "scales of other rows": ("w8a8", put(f"{Q}.weight_scale", lambda a: a[:3]), ("expected [64, groups]",)),
    "no scale of integers": ("w8a8", lambda t: t.pop(f"{Q}.weight_scale"), (f"{Q}.weight", "int8")),
    "no scale of floats": ("fp8", lambda t: t.pop(f"{Q}.weight_scale_inv"), ("no tensor", "weight_scale")),
    "scales of other blocks": ("fp8", put(f"{Q}.weight_scale_inv", lambda a: a[:1]), ("per block of 32 x 32",)),
    "no state": (
        "nf4", lambda t: t.pop(f"{Q}.weight.quant_state.bitsandbytes__nf4"), ("no tensor", "quant_state"),
    ),
    "a state that is no JSON": (
        "nf4", put(f"{Q}.weight.quant_state.bitsandbytes__nf4", with_number(0, 0)), ("is not a JSON object",),
    ),
    "fewer bytes": ("nf4", put(f"{Q}.weight", lambda a: a[:7]), ("has 7 bytes", "64 x 64")),
    "fewer scales": ("nf4", put(f"{Q}.weight.absmax", lambda a: a[:7]), ("has shape [7], expected [128]",)),
    "no largest numbers": ("int8", lambda t: t.pop(f"{Q}.SCB"), ("no tensor", f"{Q}.SCB")),
    "an axis that there is not": (
        "hqq", put(f"{Q}.axis", lambda a: np.array(2, np.int32)), ("axis has the value 2", "axis = 1"),
    ),
    "HQQ's scales of scales": ("hqq", put(f"{Q}.quant_zero", lambda a: np.array(1, np.int32)), ("quant_zero is set",)),
    "HQQ of another shape": ("hqq", put(f"{Q}.shape", lambda a: np.array([64, 96])), ("W_q has shape",)),
    "fewer zero points": (
        "w4a16", put(f"{Q}.weight_zero_point", lambda a: a[:-1]), ("has shape [7, 2], expected [8, 2]",),
    ),
    "zero points of other groups than scales": (
        "w8a8", lambda t: t.update({f"{Q}.weight_zero_point": np.zeros((64, 3), np.int8)}),
        ("weight_zero_point has 3 numbers per row", "weight_scale has 1"),
    ),
    "no scale of scales": (
        "nvfp4", put(f"{Q}.weight_global_scale", lambda a: a[:0]), ("weight_global_scale has 0 numbers",),
    ),
    "HQQ of no number of bits": (
        "hqq", put(f"{Q}.nbits", lambda a: np.array(np.nan, np.float32)), ("must contain one integer",),
    ),
    "HQQ of infinite bits": (
        "hqq", put(f"{Q}.nbits", lambda a: np.array(np.inf, np.float32)), ("must contain one integer",),
    ),
    "another packing of HQQ": (
        "hqq", put(f"{Q}.packing", lambda a: np.frombuffer(b"8bit_u8", np.uint8)), ("'8bit_u8'", "nbits is 4"),
    ),
    "a state under another name": (
        "nf4", lambda t: t.update(
            {f"{Q}.weight.quant_state.bitsandbytes__fp4": t.pop(f"{Q}.weight.quant_state.bitsandbytes__nf4")}
        ), ("bitsandbytes__fp4 contains quant_type 'nf4'",),
    ),
    "no order of columns": ("gptq_act_order", lambda t: t.pop(f"{Q}.g_idx"), ("no tensor", f"{Q}.g_idx")),
    "MLX without least values": ("mlx", lambda t: t.pop(f"{Q}.biases"), ("no tensor", f"{Q}.biases")),
    "MLX of other words": ("mlx", put(f"{Q}.weight", lambda a: a[:, :5]), ("160 bits for 64 numbers",)),
}  # fmt: skip
UNSUPPORTED = {"HQQ's scales of scales"}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors(case: str, tmp_path: Path) -> None:
    form, edit, said = TENSORS[case]
    source = change(write(tmp_path, form)[0], edit)
    refused(source, UnsupportedModelError if case in UNSUPPORTED else InputError, *said)


def test_groups_of_different_sizes(tmp_path: Path) -> None:
    source = change(
        write(tmp_path, "gptq_act_order")[0], put(f"{Q}.g_idx", lambda a: np.r_[a[:0], np.zeros(64, np.int32)])
    )
    refused(source, UnsupportedModelError, "groups of different sizes", "desc_act=false")


SETTINGS: dict[str, tuple[str, dict[str, Any], type[GenaiError], tuple[str, ...]]] = {
    "an unknown method": ("awq", {"quant_method": "aqlm"}, UnsupportedModelError, ("'aqlm'", "awq, gptq, auto-round")),
    "a typo": ("awq", {"quant_method": "gtpq"}, UnsupportedModelError, ("'gtpq'", "awq, gptq, ")),
    "no method": ("gptq_v2", {"quant_method": None}, UnsupportedModelError, ("quant_method is None",)),
    "a number for a method": ("awq", {"quant_method": 4}, UnsupportedModelError, ("quant_method is 4",)),
    "another layout of AWQ": ("awq", {"version": "gemv"}, UnsupportedModelError, ("'gemv'", "'gemm'")),
    "a layout for one kernel": ("gptq", {"checkpoint_format": "marlin"}, UnsupportedModelError, ("'marlin'", "gptq")),
    "other bits": ("gptq", {"bits": 8}, InputError, ("4-bit numbers, but quantization_config sets 8 bits",)),
    "another group size of AWQ": ("awq", {"group_size": 64}, InputError, ("groups of 32 columns", "group size 64")),
    "AWQ by row": ("awq", {"group_size": -1}, InputError, ("groups of 32 columns", "group size -1")),
    "another group size of GPTQ": ("gptq", {"group_size": 16}, InputError, ("groups of 32 columns", "group size 16")),
    "another group size of AutoRound": ("auto_round", {"group_size": 128}, InputError, ("sets group size 128",)),
    "a group size that is text": ("awq", {"group_size": "all"}, ConfigError, ("'all'",)),
    "another group size of packed numbers": (
        "w4a16", {"config_groups": {"a": {"weights": {"num_bits": 4, "group_size": 16}}}},
        InputError, ("sets group size 16",),
    ),
    "zero points of symmetric weights": (
        "w4a16", {"config_groups": {"a": {"weights": {"num_bits": 4, "symmetric": True}}}},
        InputError, ("has zero points, but quantization_config sets symmetric weights",),
    ),
    "bits that are text": ("gptq", {"bits": "four"}, ConfigError, ("'four'",)),
    "another packing": ("auto_round", {"packing_format": "x:nvfp"}, UnsupportedModelError, ("'x:nvfp'",)),
    "sparse weights": ("w4a16", {"format": "marlin-24"}, UnsupportedModelError, ("'marlin-24'", "pack-quantized")),
    "groups that are no object": ("w4a16", {"config_groups": [1]}, ConfigError, ("config_groups",)),
    "sparsity that is text": ("w4a16", {"sparsity_config": "dense"}, ConfigError, ("sparsity_config", "an object")),
    "a group that is text": ("w4a16", {"config_groups": {"a": "x"}}, ConfigError, ("'x'", "an object")),
    "weights that are text": ("w4a16", {"config_groups": {"a": {"weights": "x"}}}, ConfigError, ("'x'", "an object")),
    "bits that are a list": (
        "w4a16", {"config_groups": {"a": {"weights": {"num_bits": [4]}}}}, ConfigError, ("num_bits of a.weights",),
    ),
    "blocks of one size": (
        "w4a16", {"config_groups": {"a": {"weights": {"block_structure": [4]}}}}, ConfigError, ("two positive sizes",),
    ),
    "what is rotated while it runs": (
        "w4a16", {"transform_config": {"config_groups": {"R4": {"apply": [{"location": "input"}]}}}},
        UnsupportedModelError, ("applies R4 to 'input'",),
    ),
    "a rotation of nobody knows what": (
        "w4a16", {"transform_config": {"config_groups": {"R4": 1}}}, UnsupportedModelError, ("applies R4",),
    ),
    "zero points of symmetric GPTQ": (
        "gptq", {"sym": True}, InputError, ("qzeros has zero points such as", "sym = True, which means 8"),
    ),
    "symmetric zero points that are stored minus 1": (
        "gptq_sym", {"checkpoint_format": "gptq_v2"}, InputError, ("zero points such as 7", "sym = True"),
    ),
    "zero points of AWQ without any": (
        "awq", {"zero_point": False}, InputError, ("qzeros has zero points such as", "zero_point = False"),
    ),
    "zero points of symmetric AutoRound": ("auto_round_awq", {"sym": True}, InputError, ("sym = True",)),
    "columns in another order": (
        "gptq_act_order", {"desc_act": False}, InputError, ("g_idx has columns that are not in", "desc_act = False"),
    ),
    "bitsandbytes of other bits": (
        "nf4", {"load_in_4bit": False, "load_in_8bit": True}, InputError,
        (".weight has 4-bit numbers", "load_in_8bit = True"),
    ),
    "LLM.int8 of other bits": (
        "int8", {"load_in_8bit": False, "load_in_4bit": True}, InputError,
        (".weight has 8-bit numbers", "load_in_4bit = True"),
    ),
    "bitsandbytes of another type": (
        "nf4", {"bnb_4bit_quant_type": "fp4"}, InputError, ("has quant_type 'nf4'", "bnb_4bit_quant_type = 'fp4'"),
    ),
    "a type that is a number": ("nf4", {"bnb_4bit_quant_type": 4}, ConfigError, ("bnb_4bit_quant_type",)),
    "scales that are not quantised": (
        "nf4", {"bnb_4bit_use_double_quant": True}, InputError,
        ("has scales that are not quantised", "bnb_4bit_use_double_quant = True"),
    ),
    "HQQ of other bits": (
        "hqq", {"quant_config": {"weight_quant_params": {"nbits": 8}}}, InputError, (".nbits has the value 4", "= 8"),
    ),
    "HQQ of another axis": (
        "hqq", {"quant_config": {"weight_quant_params": {"axis": 0}}}, InputError, (".axis has the value 1", "= 0"),
    ),
    "HQQ of another group size": (
        "hqq", {"quant_config": {"weight_quant_params": {"group_size": 64}}}, InputError, ("group_size = 64",),
    ),
    "HQQ of other bits in one layer": (
        "hqq", {"quant_config": {"self_attn.q_proj": {"weight_quant_params": {"nbits": 3}}}},
        InputError, ("self_attn.q_proj.nbits has the value 4", "nbits = 3"),
    ),
    "HQQ's settings that are a list": ("hqq", {"quant_config": [4]}, ConfigError, ("quant_config", "an object")),
    "floats for integers": (
        "w4a16", {"config_groups": {"a": {"weights": {"num_bits": 4, "type": "float"}}}},
        InputError, ("weight_packed has int weights (int32)", "type = 'float'"),
    ),
    "integers for floats": (
        "nvfp4", {"config_groups": {"a": {"weights": {"num_bits": 4, "type": "int"}}}},
        InputError, ("weight_packed has float weights (uint8)", "type = 'int'"),
    ),
    "8-bit floats for integers": (
        "w8a8", {"config_groups": {"a": {"weights": {"num_bits": 8, "type": "float"}}}},
        InputError, (".weight has int weights (int8)",),
    ),
    "one scale per row": (
        "w4a16", {"config_groups": {"a": {"weights": {"num_bits": 4, "strategy": "channel"}}}},
        InputError, ("has 3 scales per row", "strategy = 'channel'"),
    ),
    "integers of fewer bits": (
        "w8a8", {"config_groups": {"a": {"weights": {"num_bits": 4}}}},
        InputError, ("has numbers from -", "num_bits = 4"),
    ),
    "another kind of 8-bit floats": (
        "fp8", {"fmt": "e5m2"}, InputError, ("has type float8_e4m3fn", "fmt = 'e5m2'"),
    ),
    "a block of one size": ("fp8", {"weight_block_size": [128]}, ConfigError, ("two positive sizes",)),
    "tensors of another format": (
        "awq", {"quant_method": "hqq"}, InputError, ("sets hqq, but no tensor has this format",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SETTINGS)
def test_settings(case: str, tmp_path: Path) -> None:
    form, values, kind, said = SETTINGS[case]
    refused(configure(write(tmp_path, form)[0], **values), kind, *said)


@pytest.mark.parametrize("values", [{"bits": 8}, {"group_size": 64}, {"group_size": 16}])
def test_settings_of_mlx(values: dict[str, Any], tmp_path: Path) -> None:
    """A wrong group size would give other widths: the same words are 2-bit numbers in groups of 64."""
    source, _ = write(tmp_path, "mlx")
    config = json.loads((source / "config.json").read_text())
    config["quantization"] |= values
    (source / "config.json").write_text(json.dumps(config))
    refused(source, InputError, "the settings are")


@pytest.mark.parametrize("values", [{"bits": 8, "group_size": 16}, {"bits": 2, "group_size": 64}])
def test_settings_of_mlx_that_give_other_columns(values: dict[str, Any], tmp_path: Path) -> None:
    """Both settings together describe the words, but as a matrix of another width."""
    source, _ = write(tmp_path, "mlx")
    config = json.loads((source / "config.json").read_text())
    config["quantization"] |= values
    (source / "config.json").write_text(json.dumps(config))
    refused(source, InputError, "has shape [", "expected [")
    config["quantization"] |= {"mode": "mxfp4"}
    (source / "config.json").write_text(json.dumps(config))
    refused(source, InputError, "mode = 'mxfp4', which has 4 bits and groups of 32")


def test_settings_that_are_no_object(tmp_path: Path) -> None:
    source, _ = write(tmp_path, "awq")
    config = {**json.loads((source / "config.json").read_text()), "quantization_config": "awq"}
    (source / "config.json").write_text(json.dumps(config))
    refused(source, ConfigError, "quantization_config is 'awq'")


def test_sizes_that_do_not_fit_the_configuration(tmp_path: Path) -> None:
    source, _ = write(tmp_path, "awq")
    config = {**json.loads((source / "config.json").read_text()), "intermediate_size": 128}
    (source / "config.json").write_text(json.dumps(config))
    refused(source, InputError, "has shape [96, 64], expected [128, 64]")


def test_pickles_are_never_opened(tmp_path: Path) -> None:
    source, _ = write(tmp_path, "gptq")
    (source / "model.safetensors").rename(source / "gptq_model-4bit.pt")
    refused(source, ModelFolderError, "gptq_model-4bit.pt, which is a pickle", "safetensors")


def test_merging_into_integers_is_refused(tmp_path: Path) -> None:
    from genai.lora.parameters import AdapterParameters

    source, _ = write(tmp_path, "awq")
    adapter = AdapterParameters(tmp_path / "a", {}, "peft")
    with pytest.raises(
        UnsupportedModelError, match="an adapter cannot be merged into weights that are already quantised"
    ):
        plan_build(source, merge=(adapter, 1.0))


def test_quantising_again_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from genai.cli.app import run

    source, _ = write(tmp_path, "awq")
    assert run(["quantize", str(source), "-o", str(tmp_path / "model"), "--method", "rtn"]) == 1
    assert "is already quantised: weights in 4 bits by 32 with zero points" in capsys.readouterr().err
