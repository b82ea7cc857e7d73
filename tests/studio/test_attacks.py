"""Other pages, other names for this machine, strange names of files, and too much of everything."""

import io
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from urllib.parse import quote

import pytest
from PIL import Image

from tunable_magmax.studio import samples
from tunable_magmax.studio.guard import JSON_BYTES

PORT = 8123


@pytest.fixture
def png():
    content = io.BytesIO()
    Image.new("RGB", (4, 4)).save(content, "PNG")
    return content.getvalue()


@pytest.mark.parametrize("host", ["evil.example", f"evil.example:{PORT}", "127.0.0.1", f"127.0.0.1:{PORT + 1}", ""])
@pytest.mark.parametrize("path", ["/", "/static/studio.js", "/api/state"])
def test_a_foreign_host_is_refused(page, host, path):
    answer = page.ask("GET", path, headers={"Host": host})
    assert answer.status_code == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": f"http://127.0.0.1:{PORT + 1}"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_another_sites_page_may_not_post(page, headers):
    models = page.get("/api/state")["models"]
    answer = page.ask("POST", "/api/models", {"name": "evil", "point": {"weights": [1, 1]}}, headers=headers)
    assert answer.status_code == 403
    assert "access-control-allow-origin" not in answer.headers
    assert page.get("/api/state")["models"] == models
    # What a form on another page can send: it has no header of its own, so no token either.
    form = {**headers, "X-Studio-Token": "", "Content-Type": "text/plain"}
    assert page.ask("POST", "/api/models", {"name": "evil"}, headers=form).status_code == 403


def test_a_page_of_this_server_may_post(page):
    origin = {"Origin": f"http://127.0.0.1:{PORT}", "Sec-Fetch-Site": "same-origin"}
    assert page.ask("POST", "/api/command", {"point": {"weights": [1, 1]}}, headers=origin).status_code == 200
    assert page.ask("GET", "/", headers={"X-Studio-Token": ""}).text.startswith("<!doctype html>")


@pytest.mark.parametrize("token", ["", "wrong", "the-token ", "THE-TOKEN"])
@pytest.mark.parametrize("path", ["/api/state", "/api/events", "/api/points", "/api/nothing", "/else"])
def test_without_the_token_nothing_is_told(page, token, path):
    answer = page.ask("GET", path, headers={"X-Studio-Token": token})
    assert answer.status_code == 401
    assert page.studio.run.path.name not in answer.text


@pytest.mark.parametrize("name", ["..%2f..%2fsession.py", "../session.py", "%2fetc%2fpasswd", "index.html%00.js"])
def test_static_files_are_those_of_the_page_only(page, name):
    assert page.ask("GET", f"/static/{name}").status_code in (401, 404)  # 401: the client made /session.py of it


@pytest.mark.parametrize(
    "name",
    [
        "../../evil.png",
        "/etc/evil.png",
        "red/../../../evil.png",
        "..\\..\\evil.png",
        "C:\\evil.png",
        "ev\0il.png",
        "../evil.png\0.png",
        "\n.png",
        ".png.png",
        "~/evil.png",
        "red\0/x.png",
    ],
)
def test_names_of_uploaded_files_are_no_paths(page, png, name):
    before = set(page.studio.out.parent.rglob("*"))
    upload = page.upload({name: png})
    stored = {path for path in page.studio.out.parent.rglob("*") if path.is_file()} - before
    assert {path.relative_to(page.studio.out).as_posix() for path in stored} == {f"samples/{upload}/000000.png"}
    assert len(page.studio.uploads.get(upload).samples({"red", "..", "."})) == 1
    assert {path for path in page.studio.out.parent.rglob("*") if path.is_file()} - before == stored
    page.ask("DELETE", f"/api/uploads/{upload}")


@pytest.mark.parametrize(
    "name", ["x", "x.exe", "x.npy", "x.safetensors", "x.pt", "x.parquet", "x.json", "..", "x.png/.."]
)
def test_other_kinds_of_files_are_refused(page, name):
    upload = page.upload({})
    answer = page.client.post(f"/api/uploads/{upload}/files", params={"name": name}, content=b"x")
    assert answer.status_code == 400
    page.ask("DELETE", f"/api/uploads/{upload}")


def test_a_huge_file_is_refused_by_its_length_and_while_it_streams(page, monkeypatch):
    monkeypatch.setattr(samples, "FILE_BYTES", 1000)
    upload = page.upload({})
    address, query = f"/api/uploads/{upload}/files", {"name": "x.png"}
    assert page.client.post(address, params=query, content=b"x" * 1001).status_code == 413
    lying = {"content-length": "99999999999999"}
    assert page.client.post(address, params=query, content=b"x", headers=lying).status_code == 413
    sent = 0

    def endless():
        nonlocal sent
        while sent < 10**6:
            sent += 500
            yield b"x" * 500

    assert page.client.post(address, params=query, content=endless()).status_code == 413
    assert page.studio.uploads.get(upload).files == []
    assert page.ask("POST", "/api/measure", {"preset": "x" * JSON_BYTES}).status_code == 413
    page.ask("DELETE", f"/api/uploads/{upload}")


def test_too_many_files_and_too_many_bytes(page, png, monkeypatch):
    monkeypatch.setattr(samples, "FILES", 2)
    upload = page.upload({"a.png": png, "b.png": png})
    address = f"/api/uploads/{upload}/files"
    assert page.client.post(address, params={"name": "c.png"}, content=png).status_code == 413
    monkeypatch.setattr(samples, "FILES", 100)
    monkeypatch.setattr(samples, "TOTAL_BYTES", 2 * len(png) + 1)
    assert page.client.post(address, params={"name": "c.png"}, content=png).status_code == 413
    page.ask("DELETE", f"/api/uploads/{upload}")
    begun = [page.ask("POST", "/api/uploads", {}) for _ in range(samples.UPLOADS + 1)]
    assert [answer.status_code for answer in begun] == [201] * samples.UPLOADS + [413]
    for answer in begun[:-1]:
        page.ask("DELETE", f"/api/uploads/{answer.json()['upload']}")


def test_files_that_come_at_once_each_have_a_name(tmp_path, monkeypatch):
    slow = samples.write_atomic
    monkeypatch.setattr(samples, "write_atomic", lambda path, content: (time.sleep(0.01), slow(path, content)))
    upload = samples.Upload(tmp_path)
    senders = [threading.Thread(target=upload.add, args=(f"{k}.png", bytes([k]))) for k in range(8)]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    assert {path.read_bytes() for path, _ in upload.files} == {bytes([k]) for k in range(8)}
    assert upload.size == 8


@pytest.mark.parametrize(
    "name", ["../evil", "/tmp/evil", "", ".hidden", "a/b", "a\0b", "x.partial", "x" * 65, None, 7, "samples"]
)
def test_models_and_preferences_stay_in_the_output_folder(page, name):
    point = {"weights": [1, 1]}
    assert page.ask("POST", "/api/models", {"name": name, "point": point}).status_code == 400
    if name not in ("samples",):
        assert page.ask("POST", "/api/preferences", {"name": name, "point": point}).status_code == 400
    assert page.ask("DELETE", f"/api/models/{quote(str(name), safe='')}").status_code in (404, 405, 409)


@pytest.mark.parametrize("body", [b"[1]", b"{", b"\xff", b"[" * 100_000, b"null"])
def test_what_is_not_an_object_is_refused(page, body):
    assert page.client.post("/api/measure", content=body).status_code == 400


def test_pictures_that_are_none_are_told(page, png):
    bomb = io.BytesIO()
    Image.new("1", (20000, 20000)).save(bomb, "PNG")
    name = page.upload({"a.png": b"not a picture", "b.png": png[:40], "c.png": bomb.getvalue()})
    page.post(f"/api/uploads/{name}/estimate", {"labels": False}, 202)
    assert "cannot be read" in page.wait("failed", upload=name)["error"]["message"]
    page.ask("DELETE", f"/api/uploads/{name}")


def test_the_program_listens_here_only_and_ends_cleanly(image_run, site, tmp_path):
    """Also in the middle of a merge: then there is no model, and nothing half-written."""
    out = tmp_path / "out"
    arguments = ["studio", image_run.path, "--data", site, "--no-browser", "-q", "-o", out, "--device", "cpu"]
    command = [sys.executable, "-m", "tunable_magmax", *map(str, arguments)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    with subprocess.Popen(command, **pipes) as program:
        stopping = threading.Timer(90, program.kill)
        stopping.start()
        assert program.stdout is not None
        address, _, token = program.stdout.readline().strip().partition("/#token=")
        host, port = address.removeprefix("http://").split(":")
        assert host == "127.0.0.1"
        assert len(token) >= 32
        head = f"Host: {host}:{port}\r\nX-Studio-Token: {token}\r\n"
        with socket.create_connection((host, int(port)), timeout=30) as listening:
            listening.sendall(f"GET /api/events HTTP/1.1\r\n{head}\r\n".encode())
            assert b"200 OK" in listening.recv(4096)
            with socket.create_connection((host, int(port)), timeout=30) as asking:
                body = '{"name": "late", "point": {"weights": [1, 1]}}'
                asking.sendall(f"POST /api/models HTTP/1.1\r\n{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
                assert b"202" in asking.recv(4096)
            program.send_signal(signal.SIGINT)
            _, told = program.communicate(timeout=60)
    stopping.cancel()
    assert program.returncode == 0, told
    assert not told
    left = {path.name for path in out.iterdir()} if out.exists() else set()
    assert not any(name.endswith(".partial") for name in left)
    assert "late" not in left or (out / "late/tmx-tailor.json").is_file()
