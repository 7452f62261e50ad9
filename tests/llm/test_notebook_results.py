"""Results in notebooks: HTML that shows every text as it is, and that no reply can break out of."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from genai import LLM
from genai.evaluate import Divergence, ModelDiff, Perplexity, ValueDiff
from genai.llm.batch.run import BatchReport, ReportedAnswer
from genai.llm.completion import ChatReply, Completion, Timings
from genai.llm.mapping import MapFigures
from genai.quantize.compare import Comparison
from genai.quantize.report import Report
from genai.text.parsing import Reply, ToolCall
from tests.html_text import HtmlText

HOSTILE = "</div></td><script>alert('x')</script> & <b>bold\n  indented\x1b[2J"
SHOWN = HOSTILE.replace("\x1b", "\\x1b")


def completion(text: str = HOSTILE) -> Completion:
    return Completion(
        text, (5, 6, 7), "length", None, 1234, 1000, Timings(0.25, 0.5), 1, proposed_tokens=4, accepted_tokens=2
    )


def html_of(result: object) -> str:
    """Return what IPython's HTML formatter shows."""
    html = result._repr_html_()  # type: ignore[attr-defined]
    assert isinstance(html, str)
    return html


def test_a_completion() -> None:
    text = HtmlText.of(html_of(completion()), keep_space=True)
    assert SHOWN in text
    facts = (
        "3 tokens · 4.0 tokens/s · first token after 0.25 s · prompt 1,234 (1,000 cached) · accepted 2 of 4 · length"
    )
    assert facts in text
    one = Completion("", (5,), "stop", 2, 1, 0, Timings(), 1)
    assert HtmlText.of(html_of(one)) == "1 token · first token after 0.00 s · prompt 1 (0 cached) · stop"


def test_a_reply_with_all_parts() -> None:
    call = ToolCall("weather", {"city": HOSTILE}, f'{{"city": "{HOSTILE}"}}')
    reply = ChatReply(Reply(HOSTILE + "!", HOSTILE + "?", (call,)), completion())
    html = html_of(reply)
    text = HtmlText.of(html, keep_space=True)
    assert text.index("Reasoning") < text.index(SHOWN + "?") < text.index(SHOWN + "!") < text.index("weather(")
    assert f"weather({json.dumps({'city': HOSTILE})})" in text and "4.0 tokens/s" in text
    assert HtmlText.tags(html)["details"] == 1
    plain = html_of(ChatReply(Reply("Hi", "", ()), completion("Hi")))
    assert HtmlText.of(plain).startswith("Hi 3 tokens") and "details" not in HtmlText.tags(plain)


def test_a_model(bundled_folder: Path) -> None:
    with LLM(bundled_folder, threads=2, context_size=256) as llm:
        text = HtmlText.of(html_of(llm))
        assert text.startswith(f"model pebble folder {bundled_folder} type llama parameters ")
        assert "context 256 tokens KV cache fp16 device cpu, 2 threads adapters none state loaded" in text
        llm.chat("What is 12 + 7?")
        assert "finished 1 " in HtmlText.of(html_of(llm.stats()))
        reply = llm.chat("What is 12 + 7?", temperature=0)
        assert HtmlText.of(html_of(reply)).startswith("19 ")
    assert HtmlText.of(html_of(llm)) == f"model pebble folder {bundled_folder} type llama state closed"


def test_a_batch_report() -> None:
    report = BatchReport(
        HOSTILE, Path("out.jsonl"), HOSTILE, kept=3, finished=Counter(stop=2, length=1), errors=Counter(InputError=1),
        figures=MapFigures(done=4, failed=1, prompt_tokens=100, cached_tokens=50, generated_tokens=30, seconds=2.0),
        answers=[ReportedAnswer(1, HOSTILE, HOSTILE)], failures=[ReportedAnswer(2, "b", HOSTILE)],
    )  # fmt: skip
    html = html_of(report)
    text = HtmlText.of(html, keep_space=True)
    assert text.count(SHOWN) == 3 and "First errors (1)" in text and "First replies (1)" in text
    assert "4, of which 1 failed" in text and "50, 50% of the prompt tokens" in text and "2 stop, 1 length" in text
    assert HtmlText.tags(html) == {"table": 3, "tr": 12, "th": 14, "td": 14, "details": 2, "summary": 2}
    assert "details" not in HtmlText.tags(html_of(BatchReport("in", Path("out"), "model")))


def test_measured_quality() -> None:
    perplexity = Perplexity(12.5, 0.25, 2.5257, 0.02, 0.9, 1000, 4000, 3, 512, 256, True, 1.0, 1000.0)
    assert "perplexity 12.5000 ± 0.2500" in HtmlText.of(html_of(perplexity))
    divergence = Divergence(
        0.01, 0.001, 0.005, 0.02, 0.1, 0.5, 0.975, 12.0, 12.5, 0.04, 0.01, 0.02, 1000, 3, 512, 256, True, 1.0, 500.0
    )
    assert "same top token 97.500 %" in HtmlText.of(html_of(divergence))


@pytest.mark.parametrize("first", [None, 1])
def test_a_comparison_of_values(first: int | None) -> None:
    values = (
        ValueDiff("a", "MatMul", 0, (2, 3), (2, 3), 0.001, 0.1, 1.0),
        ValueDiff(HOSTILE, HOSTILE, 1, (2, 3), (3, 2), 0.5, 2.0, 0.9),
    )
    html = html_of(ModelDiff("BASE <1>", "OTHER <2>", 7, 0.05, False, values, (), (), first))
    text = HtmlText.of(html, keep_space=True)
    assert SHOWN in text and "2×3 (3×2)" in text and "BASE <1>" in text and "7 tokens" in text
    assert ("first difference: layer 1" in text) == (first == 1)
    assert html.count(">&gt;<") == (first == 1), "the row of the first difference is marked"
    assert HtmlText.tags(html)["tr"] == 3 + 1 + 2


def test_quantised_versions() -> None:
    quality = {"kld": 0.01, "p99": 0.1, "top1_agreement": 0.97, "perplexity": 12.5, "base_perplexity": 12.0}
    report = {"bits_per_weight": 4.5, "nbytes": 5_000_000, "quality": quality, "seconds": {}, "readers": []}
    html = html_of(Comparison({"rtn-4": report, HOSTILE: report}, ["rtn-4"], "rtn-4", HOSTILE))
    text = HtmlText.of(html, keep_space=True)
    assert "rtn-4 (recommended)" in text and f"{SHOWN} (dominated)" in text and f"Recommended: rtn-4, {SHOWN}." in text
    parts = {HOSTILE: {"weights": 1000.0, "nbytes": 500.0, "bits_per_weight": 4.0}}
    one = Report(
        HOSTILE, "in", "out", {}, 1000, 500, 600, 4.0, parts, ["onnxruntime"], None, None, None, [], [], {}, 0
    )  # fmt: skip
    assert HtmlText.of(html_of(one), keep_space=True).count(SHOWN) == 2
