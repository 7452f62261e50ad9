"""Batch runs that are killed and resumed."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import genai
from genai.errors import InputError, OptionError
from genai.llm.batch.journal import digest
from genai.llm.batch.lines import open_lines
from genai.llm.batch.page import page, write_page
from genai.llm.batch.requests import Asking, PromptFormat, PromptTemplate
from genai.llm.batch.run import BatchProgress, run_batch
from genai.llm.batch.settings import ModelSettings
from tests.drawing import Draw

FAKE = Path(__file__).with_name("conftest.py")


def write_input(path: Path, count: int, *, wrong: int = 0) -> None:
    """Write lines with ids 0 to count - 1; every `wrong`th line is not JSON."""
    with path.open("w") as file:
        for number in range(count):
            if wrong and number % wrong == wrong - 1:
                file.write("not json\n")
            else:
                file.write(json.dumps({"custom_id": f"id-{number}", "prompt": f"prompt {number}"}) + "\n")


def read(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def text(line: Any) -> str:
    return str(line["response"]["body"]["choices"][0]["text"])


def test_every_line_is_answered(tmp_path: Path, fake: Any) -> None:
    write_input(tmp_path / "in.jsonl", 100, wrong=10)
    heard: list[BatchProgress] = []
    report = run_batch(fake, open_lines(tmp_path / "in.jsonl"), tmp_path / "out", progress=heard.append)
    lines = read(tmp_path / "out")
    assert len(lines) == 100 and len({line["custom_id"] for line in lines}) == 100
    for line in lines:
        number = int(line["custom_id"].split("-")[1])
        if line["error"] is None:
            assert text(line) == f"prompt {number}"[::-1]
        else:
            assert number % 10 == 0 and line["custom_id"] == f"line-{number}" and "not JSON" in line["error"]["message"]
    assert (sum(report.errors.values()), report.finished["stop"], report.kept) == (10, 90, 0)
    assert heard[-1].total == (tmp_path / "in.jsonl").stat().st_size and heard[-1].done <= heard[-1].total


def test_in_order(tmp_path: Path, fake: Any) -> None:
    write_input(tmp_path / "in.jsonl", 95)
    numbers = {}
    for in_order in (False, True):
        run_batch(fake, open_lines(tmp_path / "in.jsonl"), tmp_path / "out", begin="force", in_order=in_order)
        numbers[in_order] = [int(line["custom_id"].split("-")[1]) for line in read(tmp_path / "out")]
    assert numbers[True] == list(range(95)) != numbers[False] and sorted(numbers[False]) == numbers[True]
    kept = (tmp_path / "out").read_bytes().splitlines(keepends=True)
    (tmp_path / "out").write_bytes(b"".join(kept[:50]) + kept[50][:9])
    run_batch(fake, open_lines(tmp_path / "in.jsonl"), tmp_path / "out", begin="resume", in_order=True)
    assert [int(line["custom_id"].split("-")[1]) for line in read(tmp_path / "out")] == list(range(95))
    (tmp_path / "out").write_bytes(b"".join([*kept[:5], *kept[6:9]]))
    report = run_batch(fake, open_lines(tmp_path / "in.jsonl"), tmp_path / "out", begin="resume", in_order=True)
    assert report.reordered and report.kept == 8
    assert [int(line["custom_id"].split("-")[1]) for line in read(tmp_path / "out")] == list(range(95))


def test_in_order_holds_no_finished_line_back(tmp_path: Path, fake: Any) -> None:
    """The first line is finished last. SIGKILL before that must lose none of the others."""
    write_input(tmp_path / "in.jsonl", 95)
    source, output = open_lines(tmp_path / "in.jsonl"), tmp_path / "out"
    finished_in_order, before_the_first = fake.map, b""

    def first_is_last(items: Any, ask: Any, *, in_order: bool, **options: Any) -> Any:
        nonlocal before_the_first
        answers = list(finished_in_order(items, ask, in_order=True, **options))
        if in_order:
            before_the_first = output.read_bytes()
            yield from answers
        else:
            yield from answers[1:]
            before_the_first = output.read_bytes()
            yield answers[0]

    fake.map = first_is_last
    report = run_batch(fake, source, output, in_order=True)
    assert before_the_first.count(b"\n") == 94 and report.reordered
    assert [int(line["custom_id"].split("-")[1]) for line in read(output)] == list(range(95))
    output.write_bytes(before_the_first)  # as after SIGKILL
    report = run_batch(fake, source, output, begin="resume", in_order=True)
    assert (report.kept, report.figures.done, report.reordered) == (94, 1, True)
    assert [int(line["custom_id"].split("-")[1]) for line in read(output)] == list(range(95))


def test_a_disk_that_cannot_be_flushed_stops_the_run(
    tmp_path: Path, fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the flush is not part of a write, but of the progress."""
    from genai.llm.batch.journal import Journal

    write_input(tmp_path / "in.jsonl", 95)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Journal, "_sync", full)
    monkeypatch.setattr(Journal, "write", lambda *_: None)
    with pytest.raises(InputError, match="cannot be written") as caught:
        run_batch(fake, open_lines(tmp_path / "in.jsonl"), tmp_path / "out")
    assert "No space" in caught.value.why and "--resume" in caught.value.fix


def test_a_complete_output_is_put_in_order(tmp_path: Path, fake: Any) -> None:
    write_input(tmp_path / "in.jsonl", 95)
    run_batch(fake, open_lines(tmp_path / "in.jsonl"), tmp_path / "out")
    before = (tmp_path / "out").read_bytes().splitlines()
    for expected in (True, False):
        report = run_batch(fake, open_lines(tmp_path / "in.jsonl"), tmp_path / "out", begin="resume", in_order=True)
        assert (report.reordered, report.kept, report.figures.done) == (expected, 95, 0)
        after = (tmp_path / "out").read_bytes().splitlines()
        assert after == sorted(before, key=lambda line: int(json.loads(line)["custom_id"].split("-")[1]))
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".part"] == []


def test_errors_are_tried_again(tmp_path: Path, fake: Any) -> None:
    """The failed lines of the input may have been corrected; only the other answered lines must be unchanged."""
    write_input(tmp_path / "in.jsonl", 40, wrong=4)
    first = run_batch(fake, open_lines(tmp_path / "in.jsonl"), tmp_path / "out")
    assert first.figures.done == 40 and sum(first.errors.values()) == 10
    again = run_batch(fake, open_lines(tmp_path / "in.jsonl"), tmp_path / "out", begin="resume")
    assert (again.kept, again.figures.done) == (40, 0)
    write_input(tmp_path / "in.jsonl", 40)
    retried = run_batch(fake, open_lines(tmp_path / "in.jsonl"), tmp_path / "out", begin="retry")
    assert (retried.kept, retried.figures.done) == (30, 10)
    lines = read(tmp_path / "out")
    assert len({line["custom_id"] for line in lines}) == len(lines) == 40 and not any(line["error"] for line in lines)


def test_another_input_or_other_options_are_refused(tmp_path: Path, fake: Any) -> None:
    write_input(tmp_path / "in.jsonl", 30)
    run_batch(fake, open_lines(tmp_path / "in.jsonl"), tmp_path / "out")
    before = (tmp_path / "out").read_bytes()
    (tmp_path / "other.jsonl").write_text((tmp_path / "in.jsonl").read_text().replace("prompt 7", "prompt X"))
    (tmp_path / "short.jsonl").write_text("".join((tmp_path / "in.jsonl").read_text().splitlines(keepends=True)[:29]))
    for name in ("other.jsonl", "short.jsonl"):
        with pytest.raises(InputError, match="does not belong to this input") as caught:
            run_batch(fake, open_lines(tmp_path / name), tmp_path / "out", begin="resume")
        assert caught.value.why and caught.value.fix
    for arguments in (
        {"max_tokens": 3},
        {"prompt_format": PromptFormat(PromptTemplate("{prompt}"))},
        {"prompt_format": PromptFormat(as_chat=True)},
    ):
        with pytest.raises(InputError, match="other options"):
            run_batch(fake, open_lines(tmp_path / "in.jsonl"), tmp_path / "out", begin="resume", **arguments)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="begin = 'again'"):
        run_batch(fake, open_lines(tmp_path / "in.jsonl"), tmp_path / "out", begin="again")
    assert (tmp_path / "out").read_bytes() == before
    with (tmp_path / "in.jsonl").open("a") as more:  # lines that come behind are further ones
        more.write('{"prompt": "more"}\n')
    report = run_batch(fake, open_lines(tmp_path / "in.jsonl"), tmp_path / "out", begin="resume")
    assert (report.kept, report.figures.done) == (30, 1)


def test_outputs_of_earlier_versions_are_refused(tmp_path: Path, llm: genai.LLM) -> None:
    """Their ids do not cover the cache type, the accuracy, the tokenizer and the chat template."""
    write_input(tmp_path / "in.jsonl", 2)
    run_batch(llm, open_lines(tmp_path / "in.jsonl"), tmp_path / "out", max_tokens=5)
    asking = "Asking(template=None, as_chat=False, adapter=None)"
    settings = {"model": llm.model.identity().model, "asking": asking, "options": [("max_tokens", "5")]}
    number = digest(json.dumps(settings, sort_keys=True).encode(), 4)
    first = read(tmp_path / "out")[0]
    first["id"] = f"batch_req_{number:08x}_{first['id'].split('_', 3)[3]}"
    (tmp_path / "out").write_text(json.dumps(first) + "\n")
    with pytest.raises(InputError, match="was started with other options") as caught:
        run_batch(llm, open_lines(tmp_path / "in.jsonl"), tmp_path / "out", begin="resume", max_tokens=5)
    assert "another version of this toolkit" in caught.value.why


def edited(folder: Path, name: str, old: str, new: str) -> Path:
    text = (folder / name).read_text()
    assert old in text
    (folder / name).write_text(text.replace(old, new, 1))
    return folder


def with_defaults(folder: Path) -> Path:
    (folder / "generation_config.json").write_text('{"repetition_penalty": 1.5}')
    return folder


def with_tokenizer_option(folder: Path) -> Path:
    return edited(folder, "tokenizer.json", '"normalizer": null', '"normalizer": {"type": "Lowercase"}')


# What changes tokens: a change of the folder, and options of the model.
DIFFERENT: dict[str, tuple[Callable[[Path], object], dict[str, Any]]] = {
    "cache type": (str, {"kv_dtype": "int8"}),
    "accuracy": (str, {"accuracy": "fp32"}),
    "device": (str, {"device": "reference", "threads": None}),
    "context": (str, {"context_size": 512}),
    "context by memory": (str, {"cache_bytes": 2**20}),
    "template": (lambda folder: edited(folder, "chat_template.jinja", "assistant", "Assistant"), {}),
    "tokenizer": (with_tokenizer_option, {}),
    "sampling defaults": (with_defaults, {}),
    "configuration": (lambda folder: edited(folder, "genai_config.json", '"top_k": 50', '"top_k": 3'), {}),
}
# What changes no token.
SAME: dict[str, dict[str, Any]] = {
    "same": {},
    "threads": {"threads": 2},
    "speculation": {"speculation": "lookup"},
    "sequences": {"max_sequences": 2},
}


@pytest.fixture(scope="module")
def half(bundled_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, an input, and an output whose last line is missing."""
    folder = tmp_path_factory.mktemp("half")
    # Without this key, the value in generation_config.json applies.
    edited(Path(shutil.copytree(bundled_folder, folder / "m")), "genai_config.json", '"repetition_penalty": 1.0,', "")
    write_input(folder / "in.jsonl", 3)
    with genai.LLM(folder / "m", threads=1, quiet=True) as llm:
        run_batch(llm, open_lines(folder / "in.jsonl"), folder / "out", in_order=True, max_tokens=3, ignore_eos=True)
    (folder / "whole").write_bytes((folder / "out").read_bytes())
    (folder / "out").write_text("".join((folder / "out").read_text().splitlines(keepends=True)[:2]))
    return folder


def resume(folder: Path, **options: Any) -> None:
    with genai.LLM(folder / "m", **{"threads": 1, "quiet": True, **options}) as llm:
        lines = open_lines(folder / "in.jsonl")
        run_batch(llm, lines, folder / "out", begin="resume", in_order=True, max_tokens=3, ignore_eos=True)


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_changes_tokens_is_refused(half: Path, tmp_path: Path, name: str) -> None:
    folder = Path(shutil.copytree(half, tmp_path / "copy"))
    change, options = DIFFERENT[name]
    change(folder / "m")
    with pytest.raises(InputError, match="was started with other options") as caught:
        resume(folder, **options)
    assert caught.value.why and "--force" in caught.value.fix
    assert (folder / "out").read_bytes() == (half / "out").read_bytes()


@pytest.mark.parametrize("name", SAME)
def test_what_changes_no_token_is_resumed(half: Path, tmp_path: Path, name: str) -> None:
    folder = Path(shutil.copytree(half, tmp_path / "copy"))
    resume(folder, prefix_cache_dir=tmp_path / "blocks", **SAME[name])
    expected, found = read(half / "whole"), read(folder / "out")
    assert [(line["id"], text(line)) for line in found] == [(line["id"], text(line)) for line in expected]


def test_other_kernels_are_refused(half: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from genai.llm.batch import settings

    monkeypatch.setattr(settings, "kernel_sources", lambda: "of another version")
    with pytest.raises(InputError, match="was started with other options"):
        resume(Path(shutil.copytree(half, tmp_path / "copy")))


def test_a_template_that_changes_has_no_effect_on_the_run(half: Path, tmp_path: Path) -> None:
    """All replies have prompts from the template that was loaded, and are written as those of the same run."""
    folder, outputs = Path(shutil.copytree(half, tmp_path / "copy")), []
    write_input(folder / "in.jsonl", 40)

    def change(progress: BatchProgress) -> None:
        if progress.figures.done and "Assistant" not in (folder / "m" / "chat_template.jinja").read_text():
            edited(folder / "m", "chat_template.jinja", "assistant", "Assistant")

    with genai.LLM(folder / "m", threads=1, quiet=True) as llm:
        for name, progress in (("first", None), ("second", change), ("third", None)):
            lines, target = open_lines(folder / "in.jsonl"), folder / name
            run_batch(llm, lines, target, PromptFormat(as_chat=True), progress=progress, window=2, in_order=True,
                      max_tokens=9, temperature=0)  # fmt: skip
            choices = [(line["id"], line["response"]["body"]["choices"][0]["message"]) for line in read(target)]
            outputs.append(choices)
    assert "Assistant" in (folder / "m" / "chat_template.jinja").read_text()
    assert outputs[0] == outputs[1] == outputs[2] and len(outputs[0]) == 40
    with pytest.raises(InputError, match="was started with other options"), genai.LLM(folder / "m", threads=1) as llm:
        lines = open_lines(folder / "in.jsonl")
        run_batch(llm, lines, folder / "first", PromptFormat(as_chat=True), begin="resume", max_tokens=9, temperature=0)


def test_the_earlier_name_of_the_prompt_format(tmp_path: Path, fake: Any) -> None:
    write_input(tmp_path / "in.jsonl", 1)
    with pytest.warns(DeprecationWarning, match=r"run_batch\(asking=…\)"):
        run_batch(fake, open_lines(tmp_path / "in.jsonl"), tmp_path / "out", asking=Asking())


def test_another_model_of_the_same_name_is_refused(tmp_path: Path, fake: Any) -> None:
    def with_files(key: str) -> Any:
        named = type(fake)()
        named.settings = lambda: ModelSettings(key, "none")
        return named

    write_input(tmp_path / "in.jsonl", 3)
    run_batch(with_files("a"), open_lines(tmp_path / "in.jsonl"), tmp_path / "out")
    run_batch(with_files("a"), open_lines(tmp_path / "in.jsonl"), tmp_path / "out", begin="resume")
    with pytest.raises(InputError, match="other options"):
        run_batch(with_files("b"), open_lines(tmp_path / "in.jsonl"), tmp_path / "out", begin="resume")


def test_an_input_that_changes_stops_the_run(tmp_path: Path, fake: Any) -> None:
    write_input(tmp_path / "in.jsonl", 5000)

    def change(progress: BatchProgress) -> None:
        if progress.figures.done == 100:
            with (tmp_path / "in.jsonl").open("a") as more:
                more.write('{"prompt": "more"}\n')

    with pytest.raises(InputError, match="changed while it was read"):
        run_batch(fake, open_lines(tmp_path / "in.jsonl"), tmp_path / "out", progress=change)
    done = len(read(tmp_path / "out"))
    assert 90 <= done < 5000
    report = run_batch(fake, open_lines(tmp_path / "in.jsonl"), tmp_path / "out", begin="resume")
    assert (report.kept, len(read(tmp_path / "out"))) == (done, 5001)


def test_lines_before_one_that_cannot_be_read_are_answered(llm: genai.LLM, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text('prompt,max_tokens\nOnce,2\nTwice,3\n"no end,4\n')
    with pytest.raises(InputError, match="the row that begins in line 4"):
        run_batch(llm, open_lines(tmp_path / "in.csv"), tmp_path / "out")
    assert len(read(tmp_path / "out")) == 2


def run_fake(source: Path, output: Path, begin: str = "resume", limit: int = 0) -> subprocess.Popen[bytes]:
    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.Popen(
        [sys.executable, str(FAKE), str(source), str(output), begin],
        env=environment,
        stderr=subprocess.PIPE,
        preexec_fn=limited if limit else None,
    )


def test_killed_at_any_moment_each_id_comes_once(tmp_path: Path) -> None:
    """SIGKILL while a process writes, in the middle of a line or not, also while it drops failed lines."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out"
    write_input(source, 20_000, wrong=50)
    order = random.Random(5)
    kills = kept = 0
    while kills < 12:
        process = run_fake(source, output, order.choice(["resume", "resume", "retry"]))
        deadline = time.monotonic() + 30
        size = output.stat().st_size if output.exists() else 0
        while process.poll() is None and time.monotonic() < deadline:
            if output.exists() and output.stat().st_size != size:
                break
        time.sleep(order.uniform(0, 0.03))
        process.kill()
        assert process.stderr is not None
        stderr = process.stderr.read()
        process.stderr.close()
        assert process.wait() in (-signal.SIGKILL, 0), stderr
        kills += process.returncode == -signal.SIGKILL
        kept = max(kept, output.read_bytes().count(b"\n"))
        if process.returncode == 0:
            break
        if order.random() < 0.5:  # what a machine that loses its power may do besides
            os.truncate(output, max(output.stat().st_size - order.randrange(200), 0))
    assert kills >= 3 and kept > 0
    last = run_fake(source, output)
    assert last.communicate() and last.returncode == 0
    ids = [line["custom_id"] for line in read(output)]
    assert len(ids) == len(set(ids)) == 20_000


def test_a_full_disk_stops_the_run_and_it_goes_on(tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out"
    write_input(source, 500)
    process = run_fake(source, output, "new", limit=100_000)
    _, stderr = process.communicate()
    assert process.returncode == 1 and b"cannot be written" in stderr and b"File too large" in stderr
    assert output.read_bytes().endswith(b"}\n") and 50_000 < output.stat().st_size <= 100_000
    again = run_fake(source, output)
    again.communicate()
    assert again.returncode == 0 and len({line["custom_id"] for line in read(output)}) == 500


def test_memory_does_not_grow_with_the_input(tmp_path: Path, fake: Any) -> None:
    peaks = []
    for count in (2_000, 20_000):
        write_input(tmp_path / "in.jsonl", count)
        tracemalloc.start()
        run_batch(fake, open_lines(tmp_path / "in.jsonl"), tmp_path / "out", begin="force")
        run_batch(fake, open_lines(tmp_path / "in.jsonl"), tmp_path / "out", begin="resume")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    hashes = 18_000 * 8  # of custom_ids
    assert peaks[1] < peaks[0] + hashes + 200_000, "the lines take thirty times as much"


def test_the_page(tmp_path: Path, fake: Any) -> None:
    (tmp_path / "in.txt").write_text("<script>alert(1)</script>\n" * 300)
    report = run_batch(fake, open_lines(tmp_path / "in.txt"), tmp_path / "out")
    report.input = "<b>in</b>"
    shown = page(report)
    assert "<script>" not in shown and "<b>in" not in shown and "&lt;" in shown
    assert "300, of which 0 failed" in shown and "<polyline" in shown and "<rect" in shown
    assert len(report.moments) <= 240 and len(report.answers) == 20
    write_page(report, tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text() == shown
    with pytest.raises(InputError, match="cannot be written"):
        write_page(report, tmp_path)


def test_the_bundled_model(llm: genai.LLM, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    with source.open("w") as file:
        for number in range(40):
            messages = [{"role": "user", "content": f"What is {number} + 7?"}]
            body = {"model": "other", "messages": messages, "max_completion_tokens": 8}
            line = {"custom_id": f"q{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    report = run_batch(llm, open_lines(source), tmp_path / "out", in_order=True)
    answers = [line["response"]["body"]["choices"][0]["message"]["content"] for line in read(tmp_path / "out")]
    expected = llm.generate([llm.render(f"What is {number} + 7?") for number in range(40)])
    assert answers == [one.text for one in expected]
    assert report.other_models == {"other"} and report.figures.generated_tokens > 40
    table = tmp_path / "table.csv"
    table.write_text("a,b\n3,4\n5,6\n")
    asking = PromptFormat(PromptTemplate("What is {a} + {b}?"), as_chat=True)
    run_batch(llm, open_lines(table), tmp_path / "sums", asking, in_order=True)
    sums = [line["response"]["body"]["choices"][0]["message"]["content"] for line in read(tmp_path / "sums")]
    assert sums == ["7", "11"]


@pytest.mark.slow
def test_ten_thousand_lines_killed_many_times(tmp_path: Path, draw: Draw) -> None:
    """Killed fifty times, or a quarter of that, at moments that are drawn by the commit."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out"
    with source.open("w") as file:
        for number in range(10_000):
            body = {"messages": [{"role": "user", "content": f"What is {number % 97} + {number % 89}?"}]}
            file.write(json.dumps({"custom_id": f"q{number}", "body": body}) + "\n")
    command = [sys.executable, "-m", "genai", "batch", str(source), "-o", str(output), "--resume", "-q"]
    order = random.Random(draw.seed)
    for _ in range(draw.fewer(50, 4)):
        process = subprocess.Popen(command)
        size = output.stat().st_size if output.exists() else 0
        while process.poll() is None and (not output.exists() or output.stat().st_size <= size):
            time.sleep(0.001)
        time.sleep(order.uniform(0, 0.15))
        process.kill()
        assert process.wait() == -signal.SIGKILL, "it was done before it was killed so often"
    assert subprocess.run(command, check=False).returncode == 0
    ids = [line["custom_id"] for line in read(output)]
    assert len(ids) == len(set(ids)) == 10_000
