"""Errors for unknown names, for models that need a token or a consent, and without a network."""

from __future__ import annotations

from pathlib import Path

import pytest

import genai
from genai.errors import AccessError, DownloadError, GenaiError, ModelFolderError, UnsupportedModelError
from genai.hub.store import models, unfinished
from tools.local_hub import Fault, LocalHub

from .conftest import left


def pull(name: str = "org/name") -> Path:
    return genai.pull(name, quiet=True)


def test_a_gated_model_without_a_token(hub: LocalHub, checkpoint: dict[str, bytes], cache: Path) -> None:
    hub.add("org/name", checkpoint, gated=True, token="hf_good")
    with pytest.raises(AccessError, match="the model is gated") as caught:
        pull()
    page = f"{hub.url}/org/name"
    assert f"accept the licence at {page}" in caught.value.fix
    assert "HF_TOKEN" in caught.value.fix and "settings/tokens" in caught.value.fix
    assert models() == []


def test_a_gated_model_with_the_wrong_token_and_the_right_one(
    hub: LocalHub, checkpoint: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("org/name", checkpoint, gated=True, token="hf_good", facts={"cardData": {"license": "llama3.2"}})
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    with pytest.raises(AccessError, match="denied to this token") as caught:
        pull()
    assert "accept the licence" in caught.value.fix
    assert "hf_other" not in str(caught.value)
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    assert (pull() / "model.safetensors").is_file()
    assert models()[0].license == "llama3.2"


@pytest.mark.parametrize("status", [401, 403])
def test_gates_at_the_listing(hub: LocalHub, checkpoint: dict[str, bytes], status: int) -> None:
    hub.add("org/name", checkpoint)
    hub.faults["/api/"] = [Fault(status=status, headers={"x-error-code": "GatedRepo"})]
    with pytest.raises(AccessError, match="gated"):
        pull()


def test_no_such_repository(hub: LocalHub, checkpoint: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/tiny-llama", checkpoint)
    with pytest.raises(AccessError, match="not found") as caught:
        pull("org/tiny-lama")
    assert "does not exist, or it is private" in caught.value.why
    pull("org/tiny-llama")
    with pytest.raises(AccessError, match="not found") as caught:
        pull("org/tiny-lama")
    assert "did you mean 'org/tiny-llama'" in caught.value.fix
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    with pytest.raises(AccessError) as caught:
        pull("org/tiny-lama")
    assert "token" in caught.value.fix


def test_revisions(hub: LocalHub, checkpoint: dict[str, bytes]) -> None:
    hub.add("org/name", checkpoint, revisions=("main", "v1", "refs/pr/1"))
    for revision in ("v1", "refs/pr/1", hub.repositories["org/name"].commit):
        assert (pull(f"org/name@{revision}") / "config.json").is_file()
    with pytest.raises(DownloadError, match="the revision does not exist") as caught:
        pull("org/name@v2")
    assert "`genai pull org/name`" in caught.value.fix
    assert len(models()) == 3


def test_a_near_name_is_said_only_where_a_name_leads_nowhere(
    hub: LocalHub, checkpoint: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("org/tiny-llama", checkpoint)
    hub.add("org/tiny-lama", {"README.md": b"x"})
    pull("org/tiny-llama")
    with pytest.raises(DownloadError, match="the repository has no model that can run here") as caught:
        pull("org/tiny-lama")
    assert "did you mean" not in caught.value.fix
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DownloadError, match="not in the cache") as caught:
        pull("org/tiny-lama")
    assert "did you mean 'org/tiny-llama'" in caught.value.fix


@pytest.mark.parametrize(
    "address",
    ["http://[bad", "http://127.0.0.1:99999999", "http://a:b", "127.0.0.1:80", "http://", "ftp://a", "http://a b"],
)
def test_an_endpoint_that_is_no_address(cache: Path, monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("HF_ENDPOINT", address)
    with pytest.raises(DownloadError, match="not an address") as caught:
        pull()
    assert "HF_ENDPOINT" in caught.value.what and "unset" in caught.value.fix


@pytest.mark.parametrize("error", [ImportError("no socksio"), ValueError("bad proxy"), FileNotFoundError(2, "None")])
def test_an_environment_in_which_no_request_can_be_made(
    hub: LocalHub, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr("huggingface_hub.get_session", fail)
    with pytest.raises(DownloadError, match="no request can be sent") as caught:
        pull()
    assert "ALL_PROXY" in caught.value.fix and "SSL_CERT_FILE" in caught.value.fix


def test_a_token_that_cannot_be_sent(
    hub: LocalHub, checkpoint: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("org/name", checkpoint)
    for token in ("hf_\xe9", "hf_\x01"):
        monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(AccessError, match="the Hugging Face token cannot be sent") as caught:
            pull()
        assert token not in str(caught.value)
    assert not hub.requests


def test_what_a_server_says_is_shown_without_control_characters(hub: LocalHub) -> None:
    hub.faults["/api/"] = [Fault(status=404, headers={"x-error-message": "\x1b[31mred"})]
    with pytest.raises(DownloadError) as caught:
        pull()
    assert caught.value.why == "[31mred"


def test_a_refusal_leaves_nothing(hub: LocalHub, checkpoint: dict[str, bytes], cache: Path) -> None:
    hub.add("org/name", checkpoint, gated=True, token="hf_good")
    with pytest.raises(AccessError):
        pull()
    hub.add("org/name", {**checkpoint, "config.json": b"[]"})
    with pytest.raises(GenaiError):
        pull()
    assert unfinished() == []


def test_a_repository_that_moved(hub: LocalHub, checkpoint: dict[str, bytes]) -> None:
    hub.add("new/name", checkpoint, moved_from="old/name")
    assert (pull("new/name") / "config.json").is_file()
    assert (pull("old/name") / "config.json").is_file()


def test_without_a_network(
    hub: LocalHub, checkpoint: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("org/name", checkpoint)
    place = pull()
    asked = len(hub.requests)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert pull() == pull("hf:org/name") == pull("name") == place
    with pytest.raises(DownloadError, match="not in the cache") as caught:
        pull("org/other")
    assert "HF_HUB_OFFLINE" in caught.value.why
    snapshot = tmp_path / "hf/hub/models--org--other/snapshots/abc"
    snapshot.mkdir(parents=True)
    with pytest.raises(DownloadError) as caught:
        pull("org/other")
    assert str(snapshot) in caught.value.fix
    assert len(hub.requests) == asked


def test_a_model_that_nothing_here_runs_is_not_fetched(
    hub: LocalHub, checkpoint: dict[str, bytes], cache: Path
) -> None:
    config = checkpoint["config.json"].replace(b'"llama"', b'"rwkv"')
    hub.add("org/name", {**checkpoint, "config.json": config})
    with pytest.raises(UnsupportedModelError, match="rwkv"):
        pull()
    hub.add("org/name", {**checkpoint, "config.json": b'{"model_type": '})
    with pytest.raises(GenaiError, match=r"config.json"):
        pull()
    hub.add("org/name", {"genai_config.json": b'{"model": {}}', "model.onnx": b"x" * 5000})
    with pytest.raises(GenaiError, match=r"genai_config|model"):
        pull()
    assert left(cache) == []
    assert not any(path.endswith((".safetensors", ".onnx")) for path in hub.paths())


def test_what_is_no_name_of_anything(cache: Path) -> None:
    for name in ("nothing", "a/b/c", "./a", "What is this?"):
        with pytest.raises(ModelFolderError, match="is not a model name") as caught:
            pull(name)
        assert "org/name" in str(caught.value)
