"""Ends of processes: exit during a generation, a dropped LLM, a fork. Nothing hangs or crashes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]
START = """
import os, sys, threading, time, gc
import genai
from genai.errors import StateError
llm = genai.LLM()
LONG = {"max_tokens": 900, "ignore_eos": True}
"""

EXITS = {
    "never closed": "print(llm.chat('What is 12 + 7?', temperature=0).text)",
    "dropped": "print(llm.chat('What is 12 + 7?', temperature=0).text); del llm; gc.collect()",
    "an open stream, dropped LLM": "s = llm.stream('Once', **LONG); print(next(s)); del llm; gc.collect()",
    "sys.exit": "s = llm.stream('Once', **LONG); print(next(s)); sys.exit(0)",
    "a daemon thread generates": """
def work():
    try:
        while True: llm.generate(['Once', 'A'], **LONG)
    except StateError:
        pass  # the exit closed the LLM
threading.Thread(target=work, daemon=True).start()
time.sleep(0.2); print('leaving')
""",
    "a thread's stream": """
threading.Thread(target=lambda: print(len(list(llm.stream('Once', max_tokens=50, ignore_eos=True))))).start()
""",
    "in a running event loop": """
import asyncio
async def main():
    task = asyncio.create_task(llm.agenerate('Once', **LONG))
    stream = llm.astream('Once', **LONG)
    print(await anext(stream))
asyncio.run(main())
""",
    "close in the middle": "s = llm.stream('Once', **LONG); print(next(s)); llm.close()",
}


@pytest.mark.parametrize("end", EXITS)
def test_exit(run_script: Run, end: str) -> None:
    result = run_script(START + EXITS[end])
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert result.stdout


def test_an_uncaught_interrupt(run_script: Run) -> None:
    result = run_script(
        START
        + """
import signal
threading.Timer(0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
llm.generate(['Once'] * 4, **LONG)
print('not reached')
"""
    )
    assert result.stdout == ""
    assert result.stderr.rstrip().endswith("KeyboardInterrupt")


FORK = """
def child(work):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = work()
        finally:
            sys.stdout.flush()
            os._exit(code)
    for _ in range(300):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.1)
    os.kill(pid, 9)
    return 'hung'

def refused(call):
    try:
        call()
    except StateError as error:
        assert 'fork' in error.why, error
        return 0
    return 1
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "generating"])
def test_a_forked_child_is_told(run_script: Run, busy: bool) -> None:
    result = run_script(
        START
        + FORK
        + f"""
llm.generate('A', max_tokens=2)
stream = llm.stream('Once', **LONG)
next(stream)
if not {busy}:
    stream.close()
for call in (
    lambda: llm.generate('A'),
    lambda: llm.stream('A'),
    lambda: llm.chat('A'),
    *([lambda: next(stream)] if {busy} else []),
):
    assert child(lambda: refused(call)) == 0
def close():
    llm.close()
    try:
        llm.generate('A')
    except StateError:
        return 0
    return 1
assert child(close) == 0
def drop():
    global stream, llm
    del stream, llm
    gc.collect()
    return 0
assert child(drop) == 0
def fresh():
    with genai.LLM() as own:
        return 0 if own.chat('What is 12 + 7?', temperature=0).text == '19' else 2
assert child(fresh) == 0
print(llm.chat('What is 12 + 7?', temperature=0).text)
"""
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "19\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("threads", [1, 2])
def test_a_fork_while_the_model_computes(run_script: Run, threads: int) -> None:
    """In the child, the same model computes the same through the token API, or raises StateError; it never waits."""
    result = run_script(
        START.replace("genai.LLM()", f"genai.LLM(threads={threads})")
        + FORK
        + """
import contextlib
from tests.inside_steps import inside_steps
def tokens():
    generator = genai.Generator(llm.model, genai.GeneratorParams(llm.model))
    generator.append_tokens(llm.encode('Once upon'))
    for _ in range(3):
        generator.generate_next_token()
    return generator.get_sequence(0).tolist()

expected = tokens()
story = [llm.render('Tell me a story about Luna and Tom.')] * 8
def work():
    with contextlib.suppress(StateError):  # the end of this script closes the LLM
        while True:
            llm.generate(story, max_tokens=80, temperature=1)
threading.Thread(target=work, daemon=True).start()
def same_or_refused():
    try:
        return 0 if tokens() == expected else 1
    except StateError as error:
        assert 'fork' in error.what, error
        return 0
for _ in range(15):
    time.sleep(0.02)
    assert child(same_or_refused) == 0

inside, go_on = threading.Event(), threading.Event()
def held():
    inside.set()
    go_on.wait()
stack = contextlib.ExitStack()
stack.enter_context(inside_steps(llm.model.decoder, held))
inside.wait()
def refused():
    stack.close()
    try:
        tokens()
    except StateError as error:
        return 0 if 'fork' in error.what else 1
    return 2
assert child(refused) == 0
go_on.set()
print(tokens() == expected)
"""
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "True\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_inside_a_run(run_script: Run) -> None:
    """A signal handler may fork: the parent's step continues, and the child's raises StateError."""
    result = run_script(
        START.replace("genai.LLM()", "genai.LLM(threads=2)")
        + """
from genai.kernels.cpu.program import thread_pool
def tokens():
    generator = genai.Generator(llm.model, genai.GeneratorParams(llm.model))
    generator.append_tokens(llm.encode('Once upon'))
    return generator.get_logits().tolist()

expected, run = tokens(), thread_pool._Workspace.run
def forking(*arguments):
    global pid
    thread_pool._Workspace.run = run
    pid = os.fork()
    return run(*arguments)
thread_pool._Workspace.run = forking
try:
    found = tokens()
except StateError as error:
    os._exit(0 if pid == 0 and 'fork' in error.what else 1)
if pid == 0:
    os._exit(2)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
print(found == expected == tokens())
"""
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "True\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_before_the_first_use(run_script: Run) -> None:
    result = run_script(
        START
        + FORK
        + """
assert child(lambda: 0 if llm.chat('What is 12 + 7?', temperature=0).text == '19' else 2) == 0
pid = os.fork()
if pid == 0:
    assert llm.chat('What is 12 + 7?', temperature=0).text == '19'
    sys.exit(0)  # with the interpreter's whole farewell
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
print(llm.chat('What is 12 + 7?', temperature=0).text)
pid = os.fork()
if pid == 0:
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "19\n"
