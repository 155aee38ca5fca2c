from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from decodefleet.worker.assets.hub import is_hub_id

COMMIT = "1" * 40
FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights" * 1000,
    "tokenizer.json": b"{ }",
    "pytorch_model.bin": b"pickle",
    "original/consolidated.safetensors": b"twice",
}


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's HTTP interface as a download needs; knows org/name and the gated org/gated."""

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        headers: dict[str, str] = {}
        status, body = 200, b""
        if path.startswith("/api/models/org/gated"):
            status, headers = 403, {"X-Error-Code": "GatedRepo"}
        elif path == "/api/models/org/name/revision/nowhere":
            status, headers = 404, {"X-Error-Code": "RevisionNotFound"}
        elif path == f"/api/models/org/name/tree/{COMMIT}":
            body = json.dumps([self._listed(name) for name in FILES]).encode()
        elif path.startswith("/api/models/org/name"):
            body = json.dumps({"id": "org/name", "sha": COMMIT, "siblings": []}).encode()
        elif path.startswith(f"/org/name/resolve/{COMMIT}/"):
            body = FILES[path.removeprefix(f"/org/name/resolve/{COMMIT}/")]
            headers = {"ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X-Repo-Commit": COMMIT}
        else:
            status, headers = 404, {"X-Error-Code": "RepoNotFound"}
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    @staticmethod
    def _listed(name: str) -> dict[str, object]:
        content = FILES[name]
        return {
            "type": "file",
            "path": name,
            "size": len(content),
            "oid": hashlib.sha1(content).hexdigest(),
        }


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    """URL of a hub."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


# huggingface_hub reads its environment once, when it is imported: each try needs a process of its own
SCRIPT = """
import sys
from decodefleet.worker.assets.errors import ModelError
from decodefleet.worker.assets.hub import fetch_from_hub
from decodefleet.worker.assets.progress import NoProgress

class Counts(NoProgress):
    total = 0
    def advance(self, n):
        self.total += n

progress = Counts()
for model in sys.argv[1:]:
    repo, _, rest = model.partition("@")
    revision, _, what = rest.partition(":")
    try:
        folder = fetch_from_hub(repo, revision or None, progress, weights=what != "text")
        print(folder, progress.total, sep="\\t")
    except ModelError as error:
        print(error.what)
"""


def fetch_with(endpoint: str, home: Path, *models: str) -> list[str]:
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-c", SCRIPT, *models]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


def test_downloads_weights_and_text_but_no_pickle_and_reports_bytes(hub: str, tmp_path: Path) -> None:
    (line,) = fetch_with(hub, tmp_path, "org/name")
    folder, reported = line.split("\t")
    names = {"config.json", "model.safetensors", "tokenizer.json"}
    assert {path.name for path in Path(folder).iterdir()} == names
    assert (Path(folder) / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert int(reported) == sum(len(FILES[name]) for name in names)


def test_without_weights_the_text_lies_where_it_would_with_them(hub: str, tmp_path: Path) -> None:
    (line,) = fetch_with(hub, tmp_path, "org/name@:text")
    folder = Path(line.split("\t")[0])
    assert {path.name for path in folder.iterdir()} == {"config.json", "tokenizer.json"}
    (line,) = fetch_with(hub, tmp_path, "org/name")
    assert line.split("\t")[0] == str(folder)
    assert (folder / "model.safetensors").is_file()


def test_a_cached_copy_serves_when_the_hub_is_gone(hub: str, tmp_path: Path) -> None:
    (first,) = fetch_with(hub, tmp_path, "org/name")
    (second,) = fetch_with("http://127.0.0.1:9", tmp_path, "org/name")
    assert second.split("\t") == [first.split("\t")[0], "0"]


def test_what_the_hub_refuses_is_said(hub: str, tmp_path: Path) -> None:
    absent, gated, revision = fetch_with(hub, tmp_path, "org/absent", "org/gated", "org/name@nowhere")
    assert absent.startswith("The Hugging Face hub has no model org/absent")
    assert gated.startswith("org/gated is gated")
    assert revision.startswith("org/name has no revision nowhere")


@pytest.mark.parametrize(
    ("name", "expected"),
    [("org/name", True), ("Qwen/Qwen2.5-0.5B", True), ("name", False), ("/a/b", False), ("../a", False)],
)
def test_what_a_hub_id_looks_like(name: str, expected: bool) -> None:
    assert is_hub_id(name) is expected
