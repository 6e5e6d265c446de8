"""`penstock generate NAME` downloads what the cache of the hub lacks, from a hub that these tests serve."""

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.cli.test_generate_command import expected, uncounted, words  # noqa: F401
from tests.speaking_models import PROMPT, save_model

NAME, COMMIT = "nobody/tiny", "a" * 40

OTHERS = ("pytorch_model.bin", "consolidated.safetensors", "onnx/config.json", "README.md")
"""Files that the hub has of the model, and that nothing reads."""


class Hub(BaseHTTPRequestHandler):
    """Serves the files of one folder as a model of the hub."""

    folder: Path
    asked: list[str]

    def do_HEAD(self):
        self._answer(with_body=False)

    def do_GET(self):
        self._answer(with_body=True)

    def _answer(self, *, with_body):
        files = {
            str(path.relative_to(self.folder)): path for path in self.folder.rglob("*") if path.is_file()
        }
        place, headers = self.path.partition("?")[0], {}
        resolved = re.fullmatch(rf"/{NAME}/resolve/\w+/(.+)", place)
        if resolved and resolved[1] in files:
            body = files[resolved[1]].read_bytes()
            headers = {"ETag": f'"{hashlib.sha256(body).hexdigest()}"', "X-Repo-Commit": COMMIT}
            self.asked.append(resolved[1])
        elif place.startswith(f"/api/models/{NAME}/tree/"):
            tree = [
                {"type": "file", "path": name, "size": path.stat().st_size, "oid": "b" * 40}
                for name, path in files.items()
            ]
            body = json.dumps(tree).encode()
        elif place in (f"/api/models/{NAME}", f"/api/models/{NAME}/revision/main"):
            siblings = [{"rfilename": name, "size": path.stat().st_size} for name, path in files.items()]
            body = json.dumps({"id": NAME, "sha": COMMIT, "siblings": siblings}).encode()
        else:
            self.send_error(404)
            return
        self.send_response(200)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format, *args):
        """Say nothing."""


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub that has one model, and an empty cache."""
    save_model(tmp_path / "stored", layers=1)
    for name in OTHERS:
        (tmp_path / "stored" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "stored" / name).write_bytes(b"{}")
    served = type("Served", (Hub,), {"folder": tmp_path / "stored", "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), served)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    yield served
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_model_is_downloaded_once_after_a_line_that_says_how_many_bytes(hub, penstock):
    arguments = ("generate", NAME, "--memory", "2MB", "--prompt", PROMPT, "--max-new-tokens", 4)
    done = penstock(*arguments)
    wanted = [path for path in hub.folder.iterdir() if path.is_file() and path.name not in OTHERS]
    nbytes = sum(path.stat().st_size for path in wanted)
    assert done.err.startswith(f"penstock: downloading {nbytes:,} bytes ("), done.err
    assert (done.status, done.out) == (0, words(expected(hub.folder, tokens=4)) + "\n")
    assert set(hub.asked) == {path.name for path in wanted}
    hub.asked.clear()
    again = penstock(*arguments)
    assert (again.status, again.out) == (0, done.out)
    assert "downloading" not in again.err
    assert hub.asked == []


def test_a_cache_that_has_the_configuration_alone_is_completed(hub, penstock):
    from huggingface_hub import hf_hub_download

    hf_hub_download(NAME, "config.json")
    done = penstock("generate", NAME, "--memory", "2MB", "--prompt", PROMPT, "--max-new-tokens", 4)
    assert (done.status, done.out) == (0, words(expected(hub.folder, tokens=4)) + "\n")


def test_a_model_without_safetensors_is_not_downloaded(hub, penstock):
    (hub.folder / "model.safetensors").unlink()
    done = penstock("generate", NAME, "--prompt", PROMPT)
    assert (done.status, done.out, hub.asked) == (2, "", [])
    assert done.err == f"penstock: {NAME} has no model.safetensors on the hub: choose a model that has one\n"


def test_a_name_that_the_hub_does_not_have_is_one_sentence(hub, penstock):
    done = penstock("generate", "nobody/other", "--prompt", PROMPT)
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
    assert "and cannot be downloaded now (" in done.err
    assert done.err.endswith("download it with `hf download nobody/other`\n")
