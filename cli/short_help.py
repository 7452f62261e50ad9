"""The short help of each command: an example, and the options that most users need. `--help-all` shows all options."""

from __future__ import annotations

from typing import NamedTuple


class ShortHelp(NamedTuple):
    """The short help page of a command.

    Attributes:
        example: a command line that works as written, or after its file names are replaced.
        options: the options to show, at most ten, in this order; empty = all.
    """

    example: str
    options: tuple[str, ...] = ()


def _short(example: str, options: str = "") -> ShortHelp:
    return ShortHelp(example, tuple(f"--{name}" for name in options.split()))


SHORT_HELP = {
    "genai chat": _short(
        'genai chat -p "What is 12 + 7?"',
        "prompt system session tools device ctx-size max-tokens temperature lora kv-type",
    ),
    "genai generate": _short(
        'genai generate -p "What is 12 + 7?"',
        "prompt file chat system max-tokens temperature json-schema device ctx-size json",
    ),
    "genai batch": _short(
        "genai batch questions.txt -o replies.jsonl --chat",
        "output chat template resume in-order max-tokens temperature max-sequences device json-schema",
    ),
    "genai serve": _short(
        "genai serve --port 8000",
        "host port api-key-file lora embedder reranker ctx-size max-sequences precision device",
    ),
    "genai balance": _short("genai balance http://10.0.0.1:8000 http://10.0.0.2:8000"),
    "genai ps": _short("genai ps"),
    "genai stop": _short("genai stop 8000"),
    "genai top": _short("genai top --once"),
    "genai launch": _short("genai launch codex"),
    "genai embed": _short(
        "genai embed model texts.txt -o vectors.npy",
        "output prompt column pooling prompt-name dimensions precision resume force quiet",
    ),
    "genai rerank": _short('genai rerank model documents.txt -q "the cat" -n 10'),
    "genai info": _short("genai info qwen3-0.6b"),
    "genai pull": _short("genai pull HuggingFaceTB/SmolLM2-135M-Instruct"),
    "genai list": _short("genai list"),
    "genai show": _short("genai show HuggingFaceTB/SmolLM2-135M-Instruct"),
    "genai rm": _short("genai rm HuggingFaceTB/SmolLM2-135M-Instruct"),
    "genai run": _short("genai run model.onnx --random --profile"),
    "genai build": _short("genai build checkpoint -o model --precision int4"),
    "genai quantize": _short(
        "genai quantize checkpoint -o model --bits 4 --method gptq",
        "output bits block-size format method recipe target-bits calib compare json",
    ),
    "genai quantize-onnx": _short(
        "genai quantize-onnx model.onnx -o model.int8.onnx --calib inputs.npz",
        "output calib format method activation-type weight-type per-channel exclude",
    ),
    "genai doctor": _short("genai doctor"),
    "genai bench decode": _short("genai bench decode --batch 8"),
    "genai bench prefill": _short("genai bench prefill --tokens 512"),
    "genai bench context": _short("genai bench context --plot context.svg"),
    "genai bench batch": _short("genai bench batch --plot batch.svg"),
    "genai bench threads": _short("genai bench threads"),
    "genai bench startup": _short("genai bench startup --cold"),
    "genai bench kernels": _short("genai bench kernels"),
    "genai bench throughput": _short("genai bench throughput --requests 32"),
    "genai bench serve": _short("genai bench serve --clients 8"),
    "genai bench lora": _short("genai bench lora --rank 16"),
    "genai bench speculation": _short("genai bench speculation --file text.txt"),
    "genai bench embed": _short("genai bench embed model --compare"),
    "genai bench session": _short("genai bench session model.onnx --compare"),
    "genai lora ls": _short("genai lora ls adapters"),
    "genai lora info": _short("genai lora info adapters/pirate"),
    "genai lora check": _short("genai lora check adapters/pirate model"),
    "genai lora convert": _short("genai lora convert adapters/pirate -o pirate.onnx_adapter"),
    "genai lora merge": _short("genai lora merge checkpoint adapters/pirate -o model"),
    "genai eval ppl": _short("genai eval ppl model -f text.txt", "file window stride device kv-type accuracy json"),
    "genai eval kld": _short(
        "genai eval kld model-fp32 model-int4 -f text.txt", "file window plot device kv-type accuracy json"
    ),
    "genai eval diff": _short(
        "genai eval diff model-fp32 model-int4", "against prompt tolerance isolate plot device kv-type accuracy json"
    ),
    "genai eval tasks": _short("genai eval tasks", "file batch show-wrong html plot device kv-type accuracy json"),
}
