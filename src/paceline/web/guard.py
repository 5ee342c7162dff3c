"""Who may ask: requests from this machine, with this run's token, from this page.

The token comes once in the address and moves into a cookie that scripts cannot read; programs send it as
`Authorization: Bearer`. Names of hosts are checked against rebinding of DNS, origins against other pages.
"""

from __future__ import annotations

import hmac
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: bytes of a request's body: of an upload, and of anything else
UPLOAD, BODY = 16 << 20, 256 << 10
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


class Guard:
    """Wraps an application: refuses what may not be asked, limits bodies, adds headers."""

    def __init__(self, app: ASGIApp, *, token: str, port: int) -> None:
        self._app, self._token = app, token
        self._cookie = f"paceline-{port}"
        self._hosts = {f"{name}:{port}" for name in ("127.0.0.1", "localhost")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = self._refusal(scope)
        limit = UPLOAD if scope["path"].startswith("/api/upload") else BODY
        if answer is None and _length(Headers(scope=scope)) > limit:
            answer = _no(413, f"a request has up to {limit:,} bytes")
        await (answer or self._app)(scope, _metered(receive, limit), _dressed(send))

    def _refusal(self, scope: Scope) -> Response | None:
        """An answer in place of the application's; None where the request may pass."""
        headers = Headers(scope=scope)
        if headers.get("host", "") not in self._hosts:
            return PlainTextResponse("this host is not known here", 400)
        origin = headers.get("origin")
        if origin is not None and origin.removeprefix("http://") not in self._hosts:
            return _no(403, "requests come from the page itself only")
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token")
        if scope["path"] == "/" and given is not None:
            return self._enter(given[0])
        open_ = scope["path"] == "/" or scope["path"].startswith("/static/")
        if open_ or self._known(headers):
            return None
        return _no(401, "open the address that paceline explore printed: it holds this run's token")

    def _enter(self, token: str) -> Response:
        """The page without the token in its address, and the cookie, where the token is right."""
        answer = RedirectResponse("/", 303)
        if self._right(token):
            answer.set_cookie(self._cookie, token, httponly=True, samesite="strict", path="/")
        return answer

    def _known(self, headers: Headers) -> bool:
        kind, _, token = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer":
            return self._right(token)
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(self._cookie)
        except CookieError:
            return False
        return cookie is not None and self._right(cookie.value)

    def _right(self, token: str) -> bool:
        return hmac.compare_digest(token.encode("utf-8", "replace"), self._token.encode())


def _no(status: int, why: str) -> Response:
    return JSONResponse({"message": why, "offers": []}, status)


def _length(headers: Headers) -> int:
    text = headers.get("content-length", "0")
    return int(text) if text.isascii() and text.isdigit() else 0


def _metered(receive: Receive, limit: int) -> Receive:
    """A body that is cut off, as if the client had gone, where it is longer than it may be."""
    seen = 0

    async def metered() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        return message if seen <= limit else {"type": "http.disconnect"}

    return metered


def _dressed(send: Send) -> Send:
    """Answers with headers that keep the page to itself; API answers are not kept."""

    async def dressed(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers: Any = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers[name] = value
            headers.setdefault("cache-control", "no-store")
        await send(message)

    return dressed
