"""A small hub on this machine: as much of the Hugging Face hub's protocol as downloads and uploads need.

Importing this points huggingface_hub at it, for the whole test process: no test reaches the network. `Hub.repos` are
what it holds; `Hub.requests` are what it was asked for.
"""

import atexit
import base64
import hashlib
import json
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest

SHELF = Path(tempfile.mkdtemp(prefix="tmx-hub-"))
"""Where huggingface_hub keeps its cache."""
atexit.register(shutil.rmtree, SHELF, ignore_errors=True)


class Hub:
    """Repositories by name, each with branches of files; commits are digests of what they hold."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, dict[str, bytes]]] = {}
        self.commits: dict[str, dict[str, bytes]] = {}
        self.requests: list[str] = []
        self.private: set[str] = set()
        self._objects: dict[str, bytes] = {}
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def clear(self) -> None:
        for held in (self.repos, self.commits, self.requests, self.private, self._objects):
            held.clear()
        shutil.rmtree(SHELF / "hub", ignore_errors=True)

    def put(self, repo: str, folder: Path, revision: str = "main") -> str:
        """Uploads a directory past the protocol; returns the commit."""
        files = {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}
        self.repos.setdefault(repo, {})[revision] = files
        return self.commit_of(files)

    def commit_of(self, files: dict[str, bytes]) -> str:
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.commits[commit] = files
        return commit

    def files(self, repo: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        branches = self.repos.get(repo)
        if branches is None:
            return None
        for files in branches.values():
            self.commit_of(files)
        files = branches.get(revision, self.commits.get(revision))
        return None if files is None else (self.commit_of(files), files)


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        pass

    def handle_any(self) -> None:
        path = unquote(urlparse(self.path).path)
        body = self.body()
        self.hub.requests.append(f"{self.command} {path}")
        for method, pattern, answer in ROUTES:
            if self.command in method and (match := re.fullmatch(pattern, path)):
                answer(self, body, *match.groups())
                return
        self.answer(404, {"error": "no such route"}, {})

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    do_GET = do_HEAD = do_POST = do_PUT = handle_any

    def answer(self, code: int, content: object, headers: dict[str, str] | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(code)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def found(self, repo: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        files = self.hub.files(repo, revision)
        if files is None:
            code = "RepoNotFound" if repo not in self.hub.repos else "RevisionNotFound"
            self.answer(404, {"error": code}, {"X-Error-Code": code, "X-Error-Message": code})
        return files

    def info(self, body: bytes, repo: str, revision: str = "main") -> None:
        if (files := self.found(repo, revision)) is not None:
            siblings = [{"rfilename": name, "size": len(data), "blobId": _oid(data)} for name, data in files[1].items()]
            self.answer(200, {"id": repo, "sha": files[0], "private": repo in self.hub.private, "siblings": siblings})

    def tree(self, body: bytes, repo: str, revision: str) -> None:
        if (files := self.found(repo, revision)) is not None:
            listed = [{"type": "file", "path": n, "size": len(data), "oid": _oid(data)} for n, data in files[1].items()]
            self.answer(200, listed)

    def resolve(self, body: bytes, repo: str, revision: str, name: str) -> None:
        if (files := self.found(repo, revision)) is None:
            return
        if name not in files[1]:
            self.answer(404, {"error": "EntryNotFound"}, {"X-Error-Code": "EntryNotFound"})
            return
        data = files[1][name]
        headers = {"ETag": f'"{_oid(data)}"', "X-Repo-Commit": files[0], "Accept-Ranges": "bytes"}
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(wanted[1]), min(int(wanted[2] or len(data)), len(data) - 1)
            self.answer(206, data[first : last + 1], {**headers, "Content-Range": f"bytes {first}-{last}/{len(data)}"})
        else:
            self.answer(200, data, headers)

    def create(self, body: bytes) -> None:
        asked = json.loads(body)
        repo = f"{asked['organization']}/{asked['name']}"
        new = repo not in self.hub.repos
        self.hub.repos.setdefault(repo, {"main": {}})
        if new and asked.get("visibility") == "private":
            self.hub.private.add(repo)
        self.answer(200 if new else 409, {"url": f"{self.hub.address}/{repo}", "name": repo, "id": repo})

    def valid_card(self, body: bytes) -> None:
        self.answer(200, {"errors": [], "warnings": []})

    def preupload(self, body: bytes, repo: str, revision: str) -> None:
        kinds = {True: "lfs", False: "regular"}
        listed = [
            {"path": f["path"], "uploadMode": kinds[f["path"].endswith(".safetensors")], "shouldIgnore": False}
            for f in json.loads(body)["files"]
        ]
        self.answer(200, {"files": listed})

    def batch(self, body: bytes, repo: str) -> None:
        objects = [
            {**each, "actions": {"upload": {"href": f"{self.hub.address}/objects/{each['oid']}"}}}
            for each in json.loads(body)["objects"]
        ]
        self.answer(200, {"transfer": "basic", "objects": objects})

    def store(self, body: bytes, oid: str) -> None:
        assert hashlib.sha256(body).hexdigest() == oid
        self.hub._objects[oid] = body
        self.answer(200, {})

    def commit(self, body: bytes, repo: str, revision: str) -> None:
        files = dict(self.hub.repos[repo][revision])
        for line in map(json.loads, body.decode().splitlines()):
            if line["key"] == "file":
                files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            elif line["key"] == "lfsFile":
                files[line["value"]["path"]] = self.hub._objects[line["value"]["oid"]]
        self.hub.repos[repo][revision] = files
        commit = self.hub.commit_of(files)
        url = f"{self.hub.address}/{repo}/commit/{commit}"
        self.answer(200, {"success": True, "commitOid": commit, "commitUrl": url})


def _oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


_REPO = r"([\w.-]+/[\w.-]+)"
ROUTES = [
    (("GET",), rf"/api/models/{_REPO}", _Handler.info),
    (("GET",), rf"/api/models/{_REPO}/revision/(.+)", _Handler.info),
    (("GET",), rf"/api/models/{_REPO}/tree/([^/]+).*", _Handler.tree),
    (("GET", "HEAD"), rf"/{_REPO}/resolve/([^/]+)/(.+)", _Handler.resolve),
    (("POST",), r"/api/repos/create", _Handler.create),
    (("POST",), r"/api/validate-yaml", _Handler.valid_card),
    (("POST",), rf"/api/models/{_REPO}/preupload/(.+)", _Handler.preupload),
    (("POST",), rf"/{_REPO}\.git/info/lfs/objects/batch", _Handler.batch),
    (("PUT",), r"/objects/(\w+)", _Handler.store),
    (("POST",), rf"/api/models/{_REPO}/commit/(.+)", _Handler.commit),
]
"""Methods, path and handler of everything that this hub knows."""

HUB = Hub()
os.environ |= {
    "HF_ENDPOINT": HUB.address,
    "HF_HOME": str(SHELF),
    "HF_HUB_DISABLE_XET": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_TOKEN": "hf_a_secret_of_tests",
}
for _name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
    os.environ.pop(_name, None)


@pytest.fixture
def hub() -> Iterator[Hub]:
    """The hub, with nothing on it and nothing in the cache."""
    HUB.clear()
    yield HUB
    HUB.clear()
