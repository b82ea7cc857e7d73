"""The studio's server: what each address answers, and how it starts and ends."""

from __future__ import annotations

import secrets
import socket
import webbrowser
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tunable_magmax.config import check
from tunable_magmax.errors import InputError, TmxError
from tunable_magmax.studio.guard import App, Guard, Refused, error_body, read_body, read_object
from tunable_magmax.studio.points import PointRequest, Setting
from tunable_magmax.studio.session import Studio

STATIC = Path(__file__).parent / "static"
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
MISSING = 'the studio needs starlette and uvicorn: pip install "tunable-magmax[studio]"'
LONGEST_NAME = 1024


def make_app(studio: Studio, port: int, token: str) -> App:
    """Returns the studio as an ASGI application behind its guard."""
    try:
        from starlette.applications import Starlette
        from starlette.concurrency import run_in_threadpool
        from starlette.exceptions import HTTPException
        from starlette.requests import Request
        from starlette.responses import JSONResponse, Response, StreamingResponse
        from starlette.routing import Route
    except ImportError:
        raise InputError(MISSING) from None

    def answers(work: Callable[[dict[str, Any], Request], Any], status: int = 200) -> Callable[..., Any]:
        """Makes an endpoint: `work` gets the request's JSON in a thread, and returns the answer's."""

        async def endpoint(request: Request) -> Response:
            content = await read_object(request)
            return JSONResponse(await run_in_threadpool(work, content, request), status)

        return endpoint

    def point(content: Any) -> PointRequest:
        return check(PointRequest, content, "the point")

    def named(content: dict[str, Any]) -> tuple[Any, Setting]:
        """Returns the name and the setting that a model or preference is to be saved as."""
        asked(content, "name", "point")
        return content.get("name"), studio.setting(point(content.get("point", {})))

    def asked(content: dict[str, Any], *keys: str) -> None:
        """Refuses keys that a request does not have."""
        if strange := sorted(set(content) - set(keys)):
            raise InputError(f"unknown key {strange[0]!r}; known: {', '.join(keys)}")

    async def static(request: Request) -> Response:
        # Only names that the folder lists: what is asked for is compared with them and opened nowhere.
        name = request.path_params.get("name", "index.html")
        file = next((file for file in STATIC.iterdir() if file.name == name and file.suffix in KINDS), None)
        if file is None:
            raise HTTPException(404)
        return Response(file.read_bytes(), media_type=KINDS[file.suffix])

    async def events(request: Request) -> Response:
        return StreamingResponse(studio.events.listen(), media_type="text/event-stream")

    def measure(content: dict[str, Any], request: Request) -> Any:
        return {"request": studio.measure(point(content))}

    def command(content: dict[str, Any], request: Request) -> Any:
        name = content.pop("name", "site-model")
        return {"tailor": studio.command(point(content), name)}

    def begin_upload(content: dict[str, Any], request: Request) -> Any:
        return {"upload": studio.uploads.begin().name}

    async def add_file(request: Request) -> Response:
        upload, name = studio.uploads.get(request.path_params["upload"]), request.query_params.get("name", "")
        if not 0 < len(name) <= LONGEST_NAME:
            raise InputError("what is the file called? Give its name as ?name=NAME")
        upload.check(name)
        content = await read_body(request, upload.room(), "the file")
        await run_in_threadpool(upload.add, name, content)
        return JSONResponse({"files": len(upload.files), "bytes": upload.size})

    def estimate(content: dict[str, Any], request: Request) -> Any:
        asked(content, "labels")
        studio.estimate(request.path_params["upload"], bool(content.get("labels", True)))
        return {}

    def remove_upload(content: dict[str, Any], request: Request) -> Any:
        studio.remove_upload(request.path_params["upload"])
        return {}

    def samples(content: dict[str, Any], request: Request) -> Any:
        query = request.query_params
        start, count = (_whole(query.get(name, usual), name) for name, usual in (("start", "0"), ("count", "60")))
        return studio.samples(start, count, query.get("show", "all"))

    def save_preference(content: dict[str, Any], request: Request) -> Any:
        return studio.writer.save_preference(*named(content))

    def write_model(content: dict[str, Any], request: Request) -> Any:
        return {"name": studio.writer.write(*named(content))}

    def cancel_model(content: dict[str, Any], request: Request) -> Any:
        studio.writer.cancel(request.path_params["name"])
        return {}

    async def failed(request: Request, error: Exception) -> Response:
        status = error.status if isinstance(error, Refused) else 400 if isinstance(error, InputError) else 500
        answer = JSONResponse(error_body(error), status)
        if status == 413:  # the rest of the body is not read
            answer.headers["connection"] = "close"
        return answer

    async def no_such(request: Request, error: HTTPException) -> Response:
        words = {404: "there is nothing at this address", 405: "this address does not take such a request"}
        text = words.get(error.status_code, error.detail)
        return JSONResponse(error_body(Refused(error.status_code, text)), error.status_code)

    get, post, delete = (dict[str, Any](methods=[method]) for method in ("GET", "POST", "DELETE"))
    routes = [
        Route("/", static, **get),
        Route("/static/{name}", static, **get),
        Route("/api/state", answers(lambda content, request: studio.state()), **get),
        Route("/api/events", events, **get),
        Route("/api/measure", answers(measure, 202), **post),
        Route("/api/points", answers(lambda content, request: {"points": studio.points()}), **get),
        Route("/api/command", answers(command), **post),
        Route("/api/uploads", answers(begin_upload, 201), **post),
        Route("/api/uploads/{upload}/files", add_file, **post),
        Route("/api/uploads/{upload}/estimate", answers(estimate, 202), **post),
        Route("/api/uploads/{upload}", answers(remove_upload), **delete),
        Route("/api/samples", answers(samples), **get),
        Route("/api/preferences", answers(save_preference), **post),
        Route("/api/models", answers(write_model, 202), **post),
        Route("/api/models/{name}", answers(cancel_model), **delete),
    ]
    handlers: dict[Any, Any] = {TmxError: failed, HTTPException: no_such, Exception: failed}
    return Guard(Starlette(routes=routes, exception_handlers=handlers), port, token)


def _whole(text: str, name: str) -> int:
    if not text.isdecimal() or len(text) > 9:
        raise InputError(f"{name} must be a whole number")
    return int(text)


# -- start and end ----------------------------------------------------------------------------------------------------


def serve(studio: Studio, port: int = 0, browser: bool = True, tell: Callable[[str], None] = lambda text: None) -> None:
    """Serves the studio until it is interrupted. `port` 0: any that is free. `tell` gets the address."""
    try:
        import uvicorn
    except ImportError:
        raise InputError(MISSING) from None
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
