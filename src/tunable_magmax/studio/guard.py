"""Lets only this machine's own page talk to the server: with the address's token, in requests of bounded size.

The server listens on 127.0.0.1, which every web page that the user visits can send requests to, and every program on
the machine. So each request is checked before anything reads it:

- Host must be ours, or a foreign name could be pointed at 127.0.0.1 (DNS rebinding).
- Origin, if there is one, must be ours, and Sec-Fetch-Site must not say that another site asks.
- Everything but the page's own files needs the token, in a header that no other page can send.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from tunable_magmax.errors import InputError
from tunable_magmax.files import parse_json

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

TOKEN = b"x-studio-token"
JSON_BYTES = 256 << 10
POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    b"form-action 'none'; frame-ancestors 'none'; base-uri 'none'"
)
HEADERS = [
    (b"content-security-policy", POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
]


class Refused(InputError):
    """A request that is answered with an error of its own status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status_code = status


def error_body(error: BaseException) -> dict[str, Any]:
    """Returns what an answer says of an error."""
    kind = "InputError" if isinstance(error, Refused) else type(error).__name__
    text = str(error).strip() or kind
    return {"error": {"kind": kind, "message": text, "problems": list(getattr(error, "problems", ()))}}


class Guard:
    """Lets only requests of the studio's own page through to `app`, and puts the security headers on every answer."""

    def __init__(self, app: ASGIApp, port: int, token: str) -> None:
        self._app, self._token = app, token.encode()
        names = ("127.0.0.1", "localhost")
        self._hosts = {f"{name}:{port}".encode() for name in names}
        self._origins = {f"http://{name}:{port}".encode() for name in names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, or refuses it."""

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *HEADERS]}
            await send(message)

        if scope["type"] != "http":
            return  # there are no web sockets, and nothing to start or end
        refused = self._refusal(scope)
        if refused is not None:
            from starlette.responses import JSONResponse

            # The request's body is not read, so the connection cannot serve another one.
            answer = JSONResponse(error_body(refused), refused.status_code, {"connection": "close"})
            await answer(scope, receive, guarded)
            return
        await self._app(scope, receive, guarded)

    def _refusal(self, scope: Scope) -> Refused | None:
        headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.lower(), []).append(value)
        hosts = headers.get(b"host", [])
        if len(hosts) != 1 or hosts[0].lower() not in self._hosts:
            return Refused(403, "the studio answers only under the address that tmx studio printed")
        if any(origin.lower() not in self._origins for origin in headers.get(b"origin", [])):
            return Refused(403, "another page may not ask the studio anything")
        path = scope["path"]
        if path == "/" or path.startswith("/static/"):
            return None
        if any(site not in (b"same-origin", b"none") for site in headers.get(b"sec-fetch-site", [])):
            return Refused(403, "another page may not ask the studio anything")
        tokens = headers.get(TOKEN, [])
        if len(tokens) != 1 or not secrets.compare_digest(tokens[0], self._token):
            return Refused(401, "the token is missing or wrong: open the address that tmx studio printed")
        return None


async def read_body(request: Request, most: int, what: str) -> bytes:
    """Reads a request's body, refused by its declared length, or as soon as it is longer than `most` bytes."""
    too_large = Refused(413, f"{what} is larger than {most:,} bytes, the most that the studio takes")
    declared = request.headers.get("content-length", "0")
    if not declared.isdecimal() or int(declared) > most:
        raise too_large
    parts, total = [], 0
    async for part in request.stream():
        total += len(part)
        if total > most:
            raise too_large
        parts.append(part)
    return b"".join(parts)


async def read_object(request: Request) -> dict[str, Any]:
    """Reads a request's JSON object."""
    body = await read_body(request, JSON_BYTES, "the request")
    try:
        content = parse_json(body or b"{}")
    except (ValueError, RecursionError) as error:
        raise InputError(f"the request is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise InputError("the request is not a JSON object")
    return content
