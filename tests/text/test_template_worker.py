"""The process that renders templates: the reasons for its end, its restart, and its end with the parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import genai
from genai.errors import ChatTemplateError, InputError
from genai.text.template_worker import SHARED, RenderLimits, TemplateStopped, TemplateWorker

LIMITS = RenderLimits(cpu_seconds=0.3, memory_bytes=96 * 2**20)
DOUBLED = "{% set a=[1] %}" + "{% set a=[a,a] %}" * 40
GROWN = "{{% set ns = namespace(x='ab') %}}{{% for i in range(60) %}}{{% set ns.x = {} %}}{{% endfor %}}"
BOMBS = {
    "text of a doubled list": DOUBLED + "{{ a }}",
    "JSON of a doubled list": DOUBLED + "{{ a|tojson }}",
    "pprint": DOUBLED + "{{ a|pprint }}",
    "equality": "{% set b=[1] %}" + "{% set b=[b,b] %}" * 40 + DOUBLED + "{{ a==b }}",
    "hash": "{% set a=(1,1) %}" + "{% set a=(a,a) %}" * 45 + "{% set d={a:1} %}",
    "sum": "{{ ([[0]*100000]*40000)|sum(start=[])|length }}",
    "wordwrap": "{{ ('a '*2000000)|wordwrap(1)|length }}",
    "expandtabs": "{{ ('\\t'*4000000).expandtabs(1000)|length }}",
    "indent": "{{ ('a\\n'*2000000)|indent(1000)|length }}",
    "wide indent": "{{ ('a\\n'*1000000)|indent('x'*4000000)|length }}",
    "separators": "{{ ([1]*1000000)|tojson(separators=('x'*20000,':'))|length }}",
    "format": "{{ (('%s'*1000) % (('x'*4000000,)*1000))|length }}",
    "join of attributes": "{{ ([{'a':'x'*4000000}]*5000)|join(attribute='a')|length }}",
    "join of lists": "{{ ([['x'*4000000]]*5000)|join|length }}",
    "doubled text": GROWN.format("ns.x ~ ns.x"),
    "replaced text": GROWN.format("ns.x.replace('a', 'aa')"),
    "squared number": "{% set ns = namespace(x=7) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "power": "{{ 10 ** 10000000000 }}",
    "times": "{{ 'a' * 10 ** 12 }}",
    "centred": "{{ 'a'.center(10 ** 10) }}",
    "wide number": "{{ '%1000000000d' % 1 }}",
    "batch": "{{ [1] | batch(10 ** 9, 'x') | list }}",
    "nested loops": "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
    "recursion": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    "many variables": "".join(f"{{% set a{i} = 'a' * 4000000 ~ {i} %}}" for i in range(2000)),
    "a long template": "{{ a }}" * 140_000,
    "constants": "{% for i in range(99999) %}" + "some constant text " * 100 + "{% endfor %}",
}


@pytest.fixture(scope="module")
def worker() -> Iterator[TemplateWorker]:
    worker = TemplateWorker(LIMITS)
    yield worker
    worker.close()


def text(worker: TemplateWorker, source: str, **values: object) -> str:
    (result,) = worker.render(source, values)
    return str(result["text"])


@pytest.mark.parametrize("name", BOMBS)
def test_no_template_runs_or_grows_without_end(worker: TemplateWorker, name: str) -> None:
    with pytest.raises(TemplateStopped, match=r"longer than (0\.3|3) seconds|more than 96 MiB"):
        worker.render(BOMBS[name], {})
    assert text(worker, "{{ x }}", x=name) == name


def test_the_error_names_the_template(bundled_folder: Path) -> None:
    tokenizer = genai.Tokenizer(bundled_folder)
    with pytest.raises(ChatTemplateError, match=r"template_str\) was stopped: it") as caught:
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], template_str=BOMBS["power"])
    assert caught.value.why and caught.value.fix
    with pytest.raises(ChatTemplateError, match="it wrote 5000000 characters"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], template_str="{{ 'a' * 5000000 }}")


def test_ordinary_conversations_may_be_long(bundled_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SHARED, "limits", RenderLimits(seconds=60))  # the machine may be busy
    content = "ü" * 4_000_000
    tokenizer = genai.Tokenizer(bundled_folder)
    assert content in tokenizer.chat_prompt([{"role": "user", "content": content}])


def test_too_long_conversations_never_reach_the_template(worker: TemplateWorker) -> None:
    """Keys and nested texts count; each of several conversations may have the maximum length."""
    with pytest.raises(InputError, match=r"the conversation has 4,200,003 characters") as caught:
        worker.render("{{ x }}", {}, [{"x": "short"}, {"x": [{"y": "a" * 4_200_000, "z": 1}]}])
    assert caught.value.why and caught.value.fix == "shorten the messages"
    long = [{"x": "a" * 4_000_000}] * 2
    assert [len(one["text"]) for one in worker.render("{{ x }}", {}, long)] == [4_000_000] * 2


def test_one_process_serves_many_requests_and_threads(worker: TemplateWorker) -> None:
    text(worker, "warm")
    pid = worker.pid
    source = "{% for i in range(n) %}{{ i }},{% endfor %}"
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda n: text(worker, source, n=n), range(100)))
    assert texts == ["".join(f"{i}," for i in range(n)) for n in range(100)]
    assert worker.pid == pid


def test_a_process_that_was_killed_is_replaced(worker: TemplateWorker) -> None:
    text(worker, "warm")
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    while is_running(worker.pid):
        time.sleep(0.01)
    assert text(worker, "again") == "again"


def test_values_that_json_cannot_carry(worker: TemplateWorker) -> None:
    with pytest.raises(InputError, match="cannot be passed"):
        worker.render("x", {"number": 10**5000})
    values = {"s": "\ud800 ü\n\0", "f": float("inf"), "i": 2**200, "n": None, "d": {"a": [1.5, True]}}
    shown = "{{ s }}|{{ f }}|{{ i }}|{{ n }}|{{ d }}"
    assert text(worker, shown, **values) == f"\ud800 ü\n\0|inf|{2**200}|None|{{'a': [1.5, True]}}"


def test_the_process_cannot_write_files() -> None:
    code = (
        "import os, sys; from genai.text import template_server as s; s._lock_up(2**30)\n"
        "try: os.write(os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY), b'x'); print('wrote')\n"
        "except OSError: print('no file')"
    )
    target = Path(os.devnull).parent / "shm" / f"genai-test-{os.getpid()}"
    if not target.parent.is_dir():
        pytest.skip("no memory file system")
    try:
        result = subprocess.run(
            [
                sys.executable,
                "-c",
                f"import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n{code}",
                str(target),
            ],
            capture_output=True,
            text=True,
            check=True,
        )
    finally:
        target.unlink(missing_ok=True)
    assert result.stdout.strip() == "no file"


def test_no_process_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(ChatTemplateError, match="cannot be started") as caught:
        TemplateWorker().render("x", {})
    assert caught.value.why and caught.value.fix
    with genai.LLM() as llm:  # who renders nothing does not need it
        assert llm.generate([5, 6], max_tokens=1)


def test_an_interrupt_stops_the_template_and_the_next_one_works(run_apart: Callable[..., str]) -> None:
    code = """
import os, signal, threading, time
from genai.text.template_worker import RenderLimits, TemplateWorker
worker = TemplateWorker(RenderLimits(cpu_seconds=100))
worker.render("x", {})
pid = worker.pid
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    worker.render("{{ 10 ** 10000000000 }}", {})
except KeyboardInterrupt:
    print("interrupted")
try:
    os.kill(pid, 0)
except ProcessLookupError:
    print("gone")
print(worker.render("y", {})[0]["text"])
worker.close()
"""
    assert run_apart(code).split() == ["interrupted", "gone", "y"]


def test_a_fork_gets_a_process_of_its_own(run_apart: Callable[..., str]) -> None:
    code = """
import os, sys, threading
from genai.text.template_worker import SHARED
render = lambda text: SHARED.render(text, {})[0]["text"]
render("x")
pid = SHARED.pid
SHARED._lock.acquire()  # as a thread holds it while it renders
child = os.fork()
if not child:
    assert SHARED.pid is None and render("in the child") == "in the child" and SHARED.pid != pid
    SHARED.close()
    os._exit(0)
SHARED._lock.release()
assert os.waitpid(child, 0)[1] == 0
assert render("y") == "y" and SHARED.pid == pid
print("both")
"""
    assert run_apart(code).split() == ["both"]


@pytest.mark.parametrize("source", ["'idle'", "'{{ 10 ** 10000000000 }}'"])
def test_it_dies_with_its_parent_however_that_ends(source: str) -> None:
    code = f"""
import sys, threading, time
from genai.text.template_worker import SHARED
SHARED.render("x", {{}})
threading.Thread(target=SHARED.render, args=({source}, {{}}), daemon=True).start()
time.sleep(0.2)
print(SHARED.pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_running(pid)
        parent.kill()
    deadline = time.monotonic() + 30
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_running(pid)


def test_nothing_is_left_at_the_end_of_the_program(run_apart: Callable[..., str]) -> None:
    code = "from genai.text.template_worker import SHARED; SHARED.render('x', {}); print(SHARED.pid)"
    assert not is_running(int(run_apart(code)))


def test_an_interrupt_while_the_program_ends_is_not_shown(run_apart: Callable[..., str]) -> None:
    run_apart(
        "import os, signal\n"
        "from genai.text.template_worker import SHARED\n"
        "SHARED.render('x', {})\n"
        "process = SHARED._process\n"
        "kill = process.kill\n"
        "process.kill = lambda: (os.kill(os.getpid(), signal.SIGINT), kill())\n"
    )


def is_running(pid: int) -> bool:
    """Return True if a process is running, and not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@pytest.fixture
def run_apart() -> Callable[..., str]:
    """Run code in a process that must succeed and write nothing to stderr."""

    def run(code: str) -> str:
        result = subprocess.run(
            [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60, check=False
        )
        assert (result.returncode, result.stderr) == (0, "")
        return result.stdout

    return run


@pytest.mark.parametrize("size", [1, 2**20], ids=["short", "more than a pipe holds"])
def test_a_process_that_stands_still_is_replaced(size: int) -> None:
    worker = TemplateWorker(RenderLimits(seconds=0.3))
    text(worker, "warm")
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGSTOP)
    with pytest.raises(TemplateStopped, match=r"longer than 0\.3 seconds"):
        worker.render("{{ x }}", {"x": "a" * size})
    assert text(worker, "{{ x }}", x="a" * size) == "a" * size
    worker.close()
