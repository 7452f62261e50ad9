"""Files come whole or not at all, whatever the connection, the server and the disk do."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import genai
from genai.common import progress
from genai.common.progress import Task
from genai.errors import DownloadError, ModelFolderError
from genai.hub import client, download
from genai.hub.pull import PullHooks, pull_model
from genai.hub.references import parse
from genai.hub.store import models
from tools.local_hub import Fault, LocalHub

from .conftest import left

WEIGHTS = bytes(range(256)) * 12_000  # 3 MB
DIGEST = hashlib.sha256(WEIGHTS).hexdigest()


@pytest.fixture
def gguf(hub: LocalHub) -> LocalHub:
    """A hub with a repository of one large file."""
    hub.add("org/name", {"a-Q4_0.gguf": WEIGHTS})
    return hub


def pull(name: str = "org/name") -> Path:
    return genai.pull(name, quiet=True)


def ranges(hub: LocalHub) -> list[str]:
    return [headers.get("range", "") for path, headers in hub.requests if path.startswith("/cdn/")]


def test_a_file_comes_whole(gguf: LocalHub, cache: Path) -> None:
    place = pull()
    assert place == cache / "org--name" / "name" / "a-Q4_0.gguf"
    assert place.read_bytes() == WEIGHTS
    assert left(cache) == ["org--name/name/a-Q4_0.gguf", "org--name/pulled.json"]
    (model,) = models()
    assert (model.kind, model.path, model.files[0].sha256) == ("gguf", place, DIGEST)
    asked = len(gguf.requests)
    assert pull() == place
    assert len(gguf.requests) == asked


def test_broken_connections_go_on_where_they_broke(gguf: LocalHub) -> None:
    gguf.faults["/cdn/"] = [Fault(cut=1 << 20), Fault(cut=1 << 20), Fault(cut=0), Fault(cut=100)]
    assert pull().read_bytes() == WEIGHTS
    begins = [int(asked.removeprefix("bytes=").rstrip("-") or 0) for asked in ranges(gguf)]
    assert begins == [0, 1 << 20, 2 << 20, 2 << 20, (2 << 20) + 100]


def test_nothing_begun_is_nothing_to_resume(gguf: LocalHub, cache: Path) -> None:
    gguf.faults["/cdn/"] = [Fault(cut=0)] * 6
    with pytest.raises(DownloadError, match="the download failed") as caught:
        pull()
    assert caught.value.fix.endswith("run the command again") and left(cache) == []


def test_an_interrupted_pull_goes_on_later(gguf: LocalHub, cache: Path) -> None:
    gguf.faults["/cdn/"] = [Fault(cut=1 << 20), *[Fault(cut=0)] * 5]
    with pytest.raises(DownloadError, match="the download failed") as caught:
        pull()
    assert "to resume the download" in caught.value.fix
    assert models() == []
    (part,) = left(cache)
    assert part.startswith(".partial/org--name/") and part.endswith(".part")
    gguf.requests.clear()
    gguf.faults.clear()
    assert pull().read_bytes() == WEIGHTS
    assert ranges(gguf) == [f"bytes={1 << 20}-"]
    assert left(cache) == ["org--name/name/a-Q4_0.gguf", "org--name/pulled.json"]


def test_what_is_there_before_a_pull_is_not_believed(gguf: LocalHub, cache: Path) -> None:
    """A part with wrong bytes, a finished file with wrong bytes, and files of another pull."""
    gguf.faults["/cdn/"] = [Fault(cut=1 << 20), *[Fault(cut=0)] * 5]
    with pytest.raises(DownloadError):
        pull()
    (part,) = (cache / ".partial" / "org--name" / "name").iterdir()
    part.write_bytes(b"x" * 2000)
    (part.parent / "a-Q4_0.gguf").write_bytes(b"y" * len(WEIGHTS))
    (part.parent / "config.json").write_text("{}")
    gguf.faults.clear()
    assert pull().read_bytes() == WEIGHTS
    assert left(cache) == ["org--name/name/a-Q4_0.gguf", "org--name/pulled.json"]


def test_a_wrong_checksum_gets_one_more_chance(gguf: LocalHub, cache: Path) -> None:
    wrong = b"x" + WEIGHTS[1:]
    gguf.faults["/cdn/"] = [Fault(body=wrong)]
    assert pull().read_bytes() == WEIGHTS
    shutil.rmtree(cache)
    gguf.faults["/cdn/"] = [Fault(body=wrong), Fault(body=wrong)]
    with pytest.raises(DownloadError, match="the checksum was wrong twice") as caught:
        pull()
    assert DIGEST in caught.value.why
    assert left(cache) == []


def test_a_wrong_checksum_of_a_small_file(hub: LocalHub, cache: Path, checkpoint: dict[str, bytes]) -> None:
    hub.add("org/name", checkpoint)
    hub.faults["config.json"] = [Fault(body=checkpoint["config.json"].replace(b"llama", b"ollam"))] * 2
    with pytest.raises(DownloadError, match=r"config.json: the checksum was wrong"):
        pull()
    assert not any(path.endswith(("config.json", ".part")) for path in left(cache))


@pytest.mark.parametrize("body", [WEIGHTS + b"x", WEIGHTS * 2])
def test_more_than_was_announced(gguf: LocalHub, cache: Path, body: bytes) -> None:
    gguf.faults["/cdn/"] = [Fault(body=body)]
    with pytest.raises(DownloadError, match="sent more than the announced 3,072,000"):
        pull()
    assert all((cache / path).stat().st_size == 0 for path in left(cache))
    gguf.faults.clear()
    assert pull().read_bytes() == WEIGHTS


def test_less_than_was_announced(gguf: LocalHub) -> None:
    gguf.faults["/cdn/"] = [Fault(body=WEIGHTS[:1000])] * 9
    with pytest.raises(DownloadError, match="the download failed") as caught:
        pull()
    assert "ended after 1,000 of 3,072,000 bytes" in str(caught.value) or "416" in str(caught.value)


def test_servers_that_know_no_ranges(gguf: LocalHub) -> None:
    gguf.faults["/cdn/"] = [Fault(cut=1 << 20), Fault(ignores_ranges=True)]
    assert pull().read_bytes() == WEIGHTS


def test_a_server_that_says_416(gguf: LocalHub) -> None:
    gguf.faults["/cdn/"] = [Fault(cut=1 << 20), Fault(status=416)]
    assert pull().read_bytes() == WEIGHTS


def test_only_the_hub_sees_the_token(gguf: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    pull()
    seen = {path.split("/")[1]: headers.get("authorization") for path, headers in gguf.requests}
    assert seen == {"api": "Bearer hf_secret", "org": "Bearer hf_secret", "cdn": None}
    agents = {headers["user-agent"] for _, headers in gguf.requests}
    assert agents == {"onnx-genai-toolkit"}  # no list of what is installed here


@pytest.mark.parametrize(
    "headers", [{"retry-after": "0.2"}, {"ratelimit": '"api";r=0;t=1', "retry-after": "x"}, {}], ids=str
)
def test_rate_limits_are_waited_for(
    gguf: LocalHub, headers: dict[str, str], monkeypatch: pytest.MonkeyPatch, logged: Callable[[], list[str]]
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    gguf.faults["/api/"] = [Fault(status=429, headers=headers)]
    gguf.faults["/cdn/"] = [Fault(status=429, headers=headers), Fault(status=503)]
    assert genai.pull("org/name").is_file()
    expected = 0.2 if headers.get("retry-after") == "0.2" else 1.0 if headers else 0.01
    assert [seconds for seconds in waited if seconds] == [expected, expected, 0.01]
    assert ("requests a wait" in str(logged())) == bool(headers)


def test_a_rate_limit_of_an_hour_is_said(gguf: LocalHub) -> None:
    gguf.faults["/cdn/"] = [Fault(status=429, headers={"retry-after": "3600"})]
    with pytest.raises(DownloadError, match="no more requests at the moment") as caught:
        pull()
    assert "3600 s" in caught.value.why


@pytest.mark.parametrize("status", [500, 502, 503, 429])
def test_servers_that_stay_down(gguf: LocalHub, status: int) -> None:
    gguf.faults["/api/"] = [Fault(status=status)] * 9
    with pytest.raises(DownloadError, match="the download failed 5 times") as caught:
        pull()
    assert str(status) in caught.value.why


def test_nobody_answers(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DownloadError, match="is not in the cache, and the hub cannot be reached") as caught:
        pull()
    assert "ConnectError" in caught.value.why and "HF_ENDPOINT" in caught.value.fix


def test_a_host_that_nobody_knows(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once: it would be as unknown a second later."""

    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr(client.time, "sleep", lambda seconds: pytest.fail("it waited"))
    monkeypatch.setenv("HF_ENDPOINT", "http://no-such-host.invalid")
    with pytest.raises(DownloadError, match="is not in the cache, and the hub cannot be reached") as caught:
        pull()
    assert "the host name cannot be resolved" in caught.value.why and "genai list" in caught.value.fix


def test_a_server_that_falls_silent(gguf: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_TIMEOUT", 0.2)
    gguf.faults["/cdn/"] = [Fault(pause=5.0)]
    assert pull().read_bytes() == WEIGHTS
    assert ranges(gguf) == ["", f"bytes={len(WEIGHTS) // 2}-"]


def _disk_full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk(gguf: LocalHub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = download._read_into
    with monkeypatch.context() as patched:
        patched.setattr(download, "_read_into", _disk_full)
        with pytest.raises(DownloadError, match="cannot be written") as caught:
            pull()
        assert "the disk is full" in caught.value.why and "to resume the download" in caught.value.fix
    assert download._read_into is begin
    assert models() == []
    assert pull().read_bytes() == WEIGHTS


def test_a_disk_that_fills_while_a_file_comes(gguf: LocalHub, cache: Path) -> None:
    """The limit on the size of files stands for a disk of that size."""
    resource, signal = pytest.importorskip("resource"), pytest.importorskip("signal")
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(DownloadError, match="cannot be written"):
            pull()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert models() == []
    gguf.requests.clear()
    assert pull().read_bytes() == WEIGHTS
    assert ranges(gguf) == [f"bytes={1 << 20}-"]


def test_no_room_is_said_before_anything_comes(gguf: LocalHub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda place: type("Usage", (), {"free": 1_000_000})())
    with pytest.raises(DownloadError, match=r"3\.\d MB must be downloaded, but only 1.0 MB is free") as caught:
        pull()
    assert "genai list" in caught.value.fix and "MB must stay free" in caught.value.why
    assert ranges(gguf) == [] and left(cache) == []


def test_a_cache_that_cannot_be_written(gguf: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GENAI_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(ModelFolderError, match="cannot be created"):
        pull()


@pytest.mark.parametrize("linked", [True, False])
def test_what_another_library_downloaded_is_taken(
    gguf: LocalHub, tmp_path: Path, linked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob = tmp_path / "hf" / "hub" / "models--org--name" / "blobs" / DIGEST
    blob.parent.mkdir(parents=True)
    blob.write_bytes(WEIGHTS)
    if not linked:
        monkeypatch.setattr("os.link", lambda *_: _disk_full())
    place = pull()
    assert place.read_bytes() == WEIGHTS
    assert ranges(gguf) == []
    assert place.samefile(blob) == linked


def test_what_another_library_left_damaged_is_not(gguf: LocalHub, tmp_path: Path) -> None:
    blob = tmp_path / "hf" / "hub" / "models--org--name" / "blobs" / DIGEST
    blob.parent.mkdir(parents=True)
    blob.write_bytes(b"x" * len(WEIGHTS))
    assert pull().read_bytes() == WEIGHTS


def test_a_file_from_an_address(hub: LocalHub, cache: Path) -> None:
    hub.plain_files["/files/a-Q8_0.gguf"] = WEIGHTS
    url = f"{hub.elsewhere}/files/a-Q8_0.gguf"
    hub.faults["/files/"] = [Fault(), Fault(cut=1 << 20)]
    place = pull(f"{url}#sha256={DIGEST}")
    assert place.read_bytes() == WEIGHTS
    assert place.name == "a-Q8_0.gguf"
    assert genai.pull(url) == genai.pull("a-Q8_0.gguf") == place
    assert [model.name for model in models()] == [url]


def test_a_file_that_changes_at_its_address_is_not_put_together_of_two(
    hub: LocalHub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but what the server calls the contents tells the two apart: while a pull waits, and between two pulls."""
    url, place, other = f"{hub.elsewhere}/files/a-Q8_0.gguf", "/files/a-Q8_0.gguf", WEIGHTS[::-1]
    hub.plain_files[place] = WEIGHTS
    hub.faults["/files/"] = [Fault(), Fault(cut=1 << 20), *[Fault(cut=0)] * 5]
    with pytest.raises(DownloadError, match="the download failed"):
        pull(url)
    hub.plain_files[place] = other
    hub.faults.clear()

    class Receiving(Task):
        def add(self, count: float) -> None:
            hub.plain_files[place] = WEIGHTS

    def change(plan: object) -> None:
        hub.faults["/files/"] = [Fault(cut=1 << 20)]

    with monkeypatch.context() as patch:
        patch.setattr(progress, "_renderer", lambda *arguments, **options: Receiving())
        assert pull_model(parse(url), PullHooks(watch=change)).path.read_bytes() == WEIGHTS
    shutil.rmtree(cache / next(iter(left(cache))).split("/")[0])
    hub.faults["/files/"] = [Fault(), Fault(cut=1 << 20), *[Fault(cut=0)] * 5]
    with pytest.raises(DownloadError, match="the download failed"):
        pull(url)
    hub.plain_files[place] = other
    hub.faults.clear()
    assert pull(url).read_bytes() == other


def test_addresses_that_give_no_model(hub: LocalHub, cache: Path) -> None:
    hub.plain_files |= {"/a.gguf": WEIGHTS, "/a.zip": WEIGHTS, "/empty.gguf": b"", "/a.safetensors": WEIGHTS}
    with pytest.raises(DownloadError, match="the checksum was wrong"):
        pull(f"{hub.elsewhere}/a.gguf#sha256={'0' * 64}")
    with pytest.raises(DownloadError, match="does not report a valid size"):
        pull(f"{hub.elsewhere}/empty.gguf")
    with pytest.raises(DownloadError, match="404"):
        pull(f"{hub.elsewhere}/none.gguf")
    for name in ("a.zip", "a.safetensors"):
        with pytest.raises(DownloadError, match="only a part of a model"):
            pull(f"{hub.elsewhere}/{name}")
    assert left(cache) == []


@pytest.mark.parametrize(
    "fault",
    [
        Fault(302, {"location": "file:///etc/passwd"}),
        Fault(302, {"location": "gopher://x"}),
        Fault(302, {"location": "/a.gguf"}),
        Fault(304),
        Fault(204),
    ],
)
def test_answers_that_would_be_the_same_again_are_not_asked_for_again(hub: LocalHub, cache: Path, fault: Fault) -> None:
    hub.plain_files["/a.gguf"] = WEIGHTS
    hub.faults["/a.gguf"] = [fault] * 100
    with pytest.raises(DownloadError) as caught:
        pull(f"{hub.elsewhere}/a.gguf")
    assert caught.value.why and caught.value.fix and "the download failed" not in caught.value.what
    assert left(cache) == []


def test_a_file_of_an_address_that_changes_comes_anew(hub: LocalHub) -> None:
    hub.plain_files["/a.gguf"] = WEIGHTS
    hub.faults["/a.gguf"] = [Fault(), Fault(cut=1000), *[Fault(cut=0)] * 4]
    with pytest.raises(DownloadError):
        pull(f"{hub.elsewhere}/a.gguf")
    hub.plain_files["/a.gguf"] = other = WEIGHTS[::-1] + b"more"
    assert pull(f"{hub.elsewhere}/a.gguf").read_bytes() == other


def test_interrupts_lose_nothing_that_came(
    gguf: LocalHub, cache: Path, interrupted: Callable[[Callable[[], object], int], bool]
) -> None:
    """Ctrl-C somewhere while it comes: never half a model, and the next pull succeeds."""
    reference = parse("org/name")
    assert reference is not None
    pull_model(reference, PullHooks())  # imports what it needs
    for place in range(1, 4000, 197):
        shutil.rmtree(cache)
        stopped = interrupted(lambda: pull_model(reference, PullHooks()), place)
        for model in models():
            assert model.path.read_bytes() == WEIGHTS
        assert pull().read_bytes() == WEIGHTS
        if not stopped:
            break


def test_what_comes_with_a_redirection_is_not_read(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server could send without end there."""
    sent = 0

    def answer(server: socket.socket) -> None:
        nonlocal sent
        connection, _ = server.accept()
        with connection, suppress(OSError):
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 302 Found\r\nLocation: ftp://other/\r\nTransfer-Encoding: chunked\r\n\r\n")
            for _ in range(1 << 10):
                connection.sendall(b"10000\r\n" + bytes(1 << 16) + b"\r\n")
                sent += 1 << 16

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer, args=(server,))
        thread.start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(DownloadError, match="not downloaded"):
            pull()
        thread.join()
    assert sent < 16 << 20


@pytest.mark.parametrize("place", ["/x/../a\x7f", "http://[::1", "http://127.0.0.1:x/", "file:///etc/passwd", "/again"])
def test_redirections_that_lead_nowhere(gguf: LocalHub, place: str) -> None:
    gguf.faults["/"] = [Fault(status=302, headers={"location": place}) for _ in range(50)]
    with pytest.raises(DownloadError, match="not downloaded") as caught:
        pull()
    assert "check the address" in caught.value.fix
    assert len(gguf.requests) <= 21


def test_an_answer_that_never_ends_is_given_up(gguf: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_LONGEST_ANSWER", 0.1)
    gguf.faults["/api/"] = [Fault(body=b"{" * (1 << 20), pause=0.3)]
    with pytest.raises(DownloadError, match="did not end within"):
        pull()


def test_a_record_that_cannot_be_written(gguf: LocalHub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("genai.hub.store.PulledModel.write", full)
        with pytest.raises(DownloadError, match="cannot be written") as caught:
            pull()
    assert "to resume the download" in caught.value.fix
    assert models() == []
    assert pull().read_bytes() == WEIGHTS
    assert len(ranges(gguf)) == 1


def test_an_index_without_any_of_its_shards(hub: LocalHub, checkpoint: dict[str, bytes], cache: Path) -> None:
    files = {path: data for path, data in checkpoint.items() if path != "model.safetensors"}
    for weight_map, said in (
        ({"a": "model-00001-of-00001.safetensors"}, "lists 1 files that are not in the repository"),
        ({"a": "parts/model-00001-of-00001.safetensors"}, "lists 1 files"),
        ({}, "has no weight_map"),
    ):
        index = json.dumps({"weight_map": weight_map}).encode()
        hub.add(
            "org/name", {**files, "model.safetensors.index.json": index, "parts/model-00001-of-00001.safetensors": b"x"}
        )
        with pytest.raises(DownloadError, match=said):
            pull()
        assert models() == []


def test_weights_that_an_index_does_not_name_are_not_fetched(
    hub: LocalHub, checkpoint: dict[str, bytes], cache: Path
) -> None:
    files = {path: data for path, data in checkpoint.items() if path != "model.safetensors"}
    index = json.dumps({"weight_map": {"a": "model-00001-of-00001.safetensors"}}).encode()
    others = {"model.fp16-00001-of-00001.safetensors": WEIGHTS, "lora.safetensors": b"x"}
    files |= {"model.safetensors.index.json": index, "model-00001-of-00001.safetensors": b"weights"}
    hub.add("org/name", {**files, **others})
    pull()
    (model,) = models()
    assert {file.path for file in model.files} == set(files)
    assert not any(path.endswith(tuple(others)) for path in hub.paths())
