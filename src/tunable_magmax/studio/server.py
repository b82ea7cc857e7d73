"""The studio's server: what each address answers, and how it starts and ends."""

from __future__ import annotations

import secrets
import socket
import webbrowser
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tunable_magmax.config import check
from tunable_magmax.errors import InputError, TmxError, required
from tunable_magmax.studio.guard import Guard, error_body, read_body, read_object
from tunable_magmax.studio.points import PointRequest, SaveRequest, Setting
from tunable_magmax.studio.session import Studio

STATIC = Path(__file__).parent / "static"
LONGEST_NAME = 1024


def make_app(studio: Studio, port: int, token: str) -> Guard:
    """Returns the studio as an ASGI application behind its guard."""
    required("starlette")
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
    from starlette.routing import Mount, Route
    from starlette.staticfiles import StaticFiles

    def answers(work: Callable[[dict[str, Any], Mapping[str, str], Mapping[str, str]], Any], status: int = 200) -> Any:
        """Makes an endpoint: `work` gets the request's JSON, path and query in a thread, and returns the answer's."""

        async def endpoint(request: Request) -> Response:
            given = await read_object(request), request.path_params, request.query_params
            return JSONResponse(await run_in_threadpool(work, *given) or {}, status)

        return endpoint

    def named(content: Any) -> tuple[str, Setting]:
        """Returns the name and the setting that a model or preference is to be saved as."""
        asked = check(SaveRequest, content, "the request")
        return asked.name, studio.setting(asked.point)

    async def page(request: Request) -> Response:
        return FileResponse(STATIC / "index.html")

    async def events(request: Request) -> Response:
        return StreamingResponse(studio.events.listen(), media_type="text/event-stream")

    async def add_file(request: Request) -> Response:
        upload, name = studio.uploads.get(request.path_params["upload"]), request.query_params.get("name", "")
        if not 0 < len(name) <= LONGEST_NAME:
            raise InputError("what is the file called? Give its name as ?name=NAME")
        upload.check(name)
        content = await read_body(request, upload.room(), "the file")
        await run_in_threadpool(upload.add, name, content)
        return JSONResponse({"files": len(upload.files), "bytes": upload.size})

    def measure(content: Any, *_: Any) -> Any:
        return {"request": studio.measure(check(PointRequest, content, "the point"))}

    def estimate(content: dict[str, Any], path: Mapping[str, str], _: Any) -> None:
        studio.estimate(path["upload"], bool(content.get("labels", True)))

    def samples(content: Any, path: Any, query: Mapping[str, str]) -> Any:
        start, count = (_whole(query.get(name, usual), name) for name, usual in (("start", "0"), ("count", "60")))
        return studio.samples(start, count, query.get("show", "all"))

    async def failed(request: Request, error: Exception) -> Response:
        status = getattr(error, "status_code", 400 if isinstance(error, InputError) else 500)
        rest = {"connection": "close"} if status == 413 else None  # the rest of the body is not read
        return JSONResponse(error_body(error), status, rest)

    def route(method: str, path: str, endpoint: Any) -> Route:
        return Route(path, endpoint, methods=[method])

    uploads, writer = studio.uploads, studio.writer
    routes = [
        route("GET", "/", page),
        Mount("/static", StaticFiles(directory=STATIC)),
        route("GET", "/api/state", answers(lambda *_: studio.state())),
        route("GET", "/api/events", events),
        route("POST", "/api/measure", answers(measure, 202)),
        route("GET", "/api/points", answers(lambda *_: {"points": studio.points()})),
        route("POST", "/api/command", answers(lambda content, *_: {"tailor": studio.command(*named(content))})),
        route("POST", "/api/uploads", answers(lambda *_: {"upload": uploads.begin()}, 201)),
        route("POST", "/api/uploads/{upload}/files", add_file),
        route("POST", "/api/uploads/{upload}/estimate", answers(estimate, 202)),
        route("DELETE", "/api/uploads/{upload}", answers(lambda _, path, __: studio.remove_upload(path["upload"]))),
        route("GET", "/api/samples", answers(samples)),
        route("POST", "/api/preferences", answers(lambda content, *_: writer.save_preference(*named(content)))),
        route("POST", "/api/models", answers(lambda content, *_: {"name": writer.write(*named(content))}, 202)),
        route("DELETE", "/api/models/{name}", answers(lambda _, path, __: writer.cancel(path["name"]))),
    ]
    handlers = dict.fromkeys((TmxError, HTTPException, Exception), failed)
    return Guard(Starlette(routes=routes, exception_handlers=handlers), port, token)


def _whole(text: str, name: str) -> int:
    if not text.isdecimal() or len(text) > 9:
        raise InputError(f"{name} must be a whole number")
    return int(text)


# -- start and end ----------------------------------------------------------------------------------------------------


def serve(studio: Studio, port: int = 0, browser: bool = True, tell: Callable[[str], None] = lambda text: None) -> None:
    """Serves the studio until it is interrupted. `port` 0: any that is free. `tell` gets the address."""
    required("uvicorn")
    import uvicorn

    token = secrets.token_urlsafe(24)
    with listening(port) as opened:
        port = opened.getsockname()[1]
        address = f"http://127.0.0.1:{port}/#token={token}"
        options: dict[str, Any] = {"log_level": "error", "access_log": False, "lifespan": "off", "ws": "none"}
        config = uvicorn.Config(make_app(studio, port, token), timeout_graceful_shutdown=3, **options)

        class Server(uvicorn.Server):
            def handle_exit(self, sig: int, frame: Any) -> None:
                studio.events.close()  # or the server would wait for pages that listen
                super().handle_exit(sig, frame)

        try:
            studio.start()
            tell(address)
            if browser:
                webbrowser.open(address)
            Server(config).run(sockets=[opened])
        except KeyboardInterrupt:  # uvicorn passes the signal on once it is done
            pass
        finally:
            studio.close()


def listening(port: int) -> socket.socket:
    """Returns a socket that listens on this machine only."""
    opened = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        opened.bind(("127.0.0.1", port))
        opened.listen(128)  # already: the address is told before the server is up
    except (OSError, OverflowError) as error:
        opened.close()
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"port {port} cannot be used ({reason}): give another --port, or none") from None
    return opened
