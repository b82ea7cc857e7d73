"""A studio on a small run, with its events in a list."""

import time
from dataclasses import dataclass
from typing import Any

import pytest
from starlette.testclient import TestClient

from tunable_magmax.runs.run import Run
from tunable_magmax.studio.options import StudioOptions
from tunable_magmax.studio.server import make_app
from tunable_magmax.studio.session import Studio

PORT, TOKEN = 8123, "the-token"


@dataclass
class Page:
    """What the page does: asks, and waits for events."""

    studio: Studio
    client: TestClient
    events: list[tuple[str, Any]]

    def ask(self, method: str, path: str, content: Any = None, **options: Any) -> Any:
        answer = self.client.request(method, path, json=content, **options)
        assert answer.headers["content-security-policy"].startswith("default-src 'none'")
        return answer

    def get(self, path: str) -> Any:
        answer = self.ask("GET", path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def post(self, path: str, content: Any, status: int = 200) -> Any:
        answer = self.ask("POST", path, content)
        assert answer.status_code == status, answer.text
        return answer.json()

    def wait(self, name: str, /, **wanted: Any) -> Any:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            for event, data in list(self.events):
                if event == name and all(data.get(key) == value for key, value in wanted.items()):
                    return data
            time.sleep(0.01)
        raise AssertionError(f"no event {name} {wanted}; the last ones: {self.events[-5:]}")

    def measure(self, **point: Any) -> Any:
        return self.wait("measured", request=self.post("/api/measure", point, 202)["request"])

    def upload(self, files: dict[str, bytes]) -> str:
        name = self.post("/api/uploads", {}, 201)["upload"]
        for file, content in files.items():
            answer = self.client.post(f"/api/uploads/{name}/files", params={"name": file}, content=content)
            assert answer.status_code == 200, answer.text
        return name


@pytest.fixture(scope="module")
def site(image_run, tmp_path_factory):
    return image_run.pairs(tmp_path_factory.mktemp("site") / "test", {"red": 8, "blue": 6, "green": 4, "grey": 4})


@pytest.fixture(scope="module")
def page(image_run, site, tmp_path_factory):
    """A studio that has read its models and measured its lines."""
    out = tmp_path_factory.mktemp("studio") / "out"
    studio = Studio(Run.open(image_run.path), StudioOptions(out=out, data=site, device="cpu"))
    events: list[tuple[str, Any]] = []
    studio.events.publish = lambda name, data: events.append((name, data))  # type: ignore[method-assign]
    app = make_app(studio, PORT, TOKEN)
    client = TestClient(
        app, raise_server_exceptions=False, base_url=f"http://127.0.0.1:{PORT}", headers={"X-Studio-Token": TOKEN}
    )
    studio.start()
    opened = Page(studio, client, events)
    opened.wait("lines")
    yield opened
    studio.close()
