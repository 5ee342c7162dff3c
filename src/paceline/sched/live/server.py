"""How commands reach the daemon: HTTP on loopback, with a token that only the owner of the state folder can read."""

from __future__ import annotations

import hmac
import json
import os
import queue
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import PacelineError, SpecError
from paceline.sched.live.order import Order

if TYPE_CHECKING:
    from paceline.sched.live.daemon import Daemon

#: where the daemon of a state folder says how to reach it
ENDPOINT = "daemon.json"
_MOST_BYTES = 16 << 20
#: seconds that an answer may take
_WAIT_S = 60.0


class Server:
    """Threads take requests; the daemon's own thread answers them, one after the other."""

    def __init__(self, state: Path, requests: queue.Queue[Callable[[], None]], daemon: Daemon) -> None:
        self.token = secrets.token_urlsafe(24)
        self._requests, self._daemon = requests, daemon
        server = self

        class Handler(BaseHTTPRequestHandler):
            timeout = 10

            def do_POST(self) -> None:
                server.answer(self)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
        self._thread.start()
        self._path = state / ENDPOINT
        beside = state / f"{ENDPOINT}.tmp"
        beside.unlink(missing_ok=True)
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump({"pid": os.getpid(), "port": self._http.server_address[1], "token": self.token}, file)
        beside.replace(self._path)

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        """One request: {"do": NAME, ...} to {"ok": ...} or {"error": TEXT}."""
        if not hmac.compare_digest(handler.headers.get("Authorization", ""), f"Bearer {self.token}"):
            _reply(handler, 403, {"error": "the token is missing or wrong"})
            return
        try:
            length = int(handler.headers.get("Content-Length", "0"))
            if not 0 <= length <= _MOST_BYTES:
                raise ValueError(f"a request has at most {_MOST_BYTES} bytes")
            request = json.loads(handler.rfile.read(length))
            done: Future[Any] = Future()
            self._requests.put(lambda: _settle(done, lambda: self._do(request)))
            _reply(handler, 200, {"ok": done.result(timeout=_WAIT_S)})
        except PacelineError as error:
            _reply(handler, 400, {"error": str(error)})
        except TimeoutError:
            _reply(handler, 503, {"error": "the scheduler is busy; what was asked may still happen: look at the queue"})
        except (ValueError, KeyError, TypeError) as error:
            _reply(handler, 400, {"error": f"the request cannot be read: {error}"})

    def _do(self, request: dict[str, Any]) -> Any:
        what = request["do"]
        if what == "submit":
            return self._daemon.submit([Order.of(given, Path(given["folder"])) for given in request["orders"]])
        if what == "cluster":
            shape = self._daemon.ledger.shape
            return {"devices": shape.devices, "kinds": shape.kinds, "racks": shape.racks, "name": shape.name}
        if what == "queue":
            return self._daemon.queue()
        if what == "eta":
            return self._daemon.eta(request["job"]).to_dict()
        if what == "cancel":
            return self._daemon.cancel(request["job"])
        if what == "stop":
            return self._daemon.stop()
        raise SpecError(f"cannot do {what!r}; allowed: submit, cluster, queue, eta, cancel, stop")

    def close(self) -> None:
        """Takes no more requests."""
        self._path.unlink(missing_ok=True)
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


def _settle(done: Future[Any], work: Callable[[], Any]) -> None:
    """A user's mistake is the user's answer; anything that broke the daemon's state also ends the daemon."""
    try:
        done.set_result(work())
    except (SpecError, KeyError, TypeError, ValueError) as error:
        done.set_exception(error)
    except BaseException as error:
        done.set_exception(error)
        raise


def _reply(handler: BaseHTTPRequestHandler, status: int, body: dict[str, Any]) -> None:
    text = json.dumps(body).encode()
    handler.send_response(status)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(text)))
    handler.end_headers()
    handler.wfile.write(text)
