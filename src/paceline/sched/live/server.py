"""How commands reach the daemon: HTTP on loopback, with a token that only the state folder's owner reads.

A request is checked, and what takes long of it is worked out, in a thread of its own; only what reads or
changes the scheduler's state runs in the daemon's thread, one request after the other. No request ends the
daemon: whatever goes wrong in one is its answer, unless the store or the engine failed.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import queue
import secrets
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.errors import PacelineError, SpecError, UnknownName
from paceline.sched.live.driver import EngineAway
from paceline.sched.live.job_spec import JobSpec
from paceline.sched.live.permissions import opener
from paceline.sched.live.store import StoreError

if TYPE_CHECKING:
    from paceline.sched.live.daemon import Daemon

T = TypeVar("T")
#: where the daemon of a state folder says how to reach it
ENDPOINT = "daemon.json"
_MOST_BYTES = 16 << 20
#: seconds that an answer may take
_WAIT_S = 60.0
#: characters of a message
_MOST_CHARACTERS = 1000


class _Http(ThreadingHTTPServer):
    """Many clients may ask at once: connections wait in the kernel until the accepting thread takes them."""

    daemon_threads = True
    request_queue_size = 1024

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is its own affair."""
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


class DaemonServer:
    """Threads take requests; the daemon's own thread answers them, one after the other."""

    def __init__(self, state: Path, requests: queue.Queue[Callable[[], None]], daemon: Daemon) -> None:
        self.token = secrets.token_urlsafe(24)
        self._requests, self._daemon = requests, daemon
        self._does: dict[str, Callable[[Mapping[str, Any]], Any]] = {
            "submit": self._submit,
            "cluster": self._cluster,
            "queue": self._queue,
            "eta": self._eta,
            "cancel": self._cancel,
            "stop": self._stop,
        }
        #: held by the one request whose speeds or forecast are being worked out
        self._working = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            timeout = 10

            def do_POST(self) -> None:
                server.answer(self)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._http = _Http(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(
            target=self._http.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True
        )
        self._thread.start()
        self._path = state / ENDPOINT
        beside = state / f"{ENDPOINT}.tmp"
        beside.unlink(missing_ok=True)
        with open(beside, "x", opener=opener) as file:
            json.dump({"pid": os.getpid(), "port": self._http.server_address[1], "token": self.token}, file)
        beside.replace(self._path)

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        """One request: {"do": NAME, ...} to {"ok": ...} or {"error": TEXT}."""
        given = handler.headers.get("Authorization", "").encode(errors="replace")
        if not hmac.compare_digest(given, f"Bearer {self.token}".encode()):
            _reply(handler, 403, {"error": "the token is missing or wrong"})
            return
        try:
            _reply(handler, 200, {"ok": self._do(_read(handler))})
        except PacelineError as error:
            _reply(handler, 400, {"error": _line(error)})
        except _Busy:
            _reply(
                handler,
                503,
                {"error": "the scheduler is busy; what was asked may still happen: look at the queue"},
            )
        except ConnectionError:
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            _reply(handler, 400, {"error": _line(f"the request cannot be carried out ({what})")})

    def _do(self, request: Any) -> Any:
        if not isinstance(request, Mapping):
            raise SpecError(f'a request is written {{"do": NAME, ...}}, got {request!r}')
        return self._does[_chosen(request, self._does)](request)

    # -- requests: checked here, in a thread of each; `_in_loop` is the daemon's thread ------------------

    def _submit(self, request: Mapping[str, Any]) -> list[str]:
        given = request.get("orders")
        if not isinstance(given, list):
            raise SpecError(f"orders must be a list of jobs, got {given!r}")
        specs = [_job_spec(entry) for entry in given]
        known, shape = self._daemon.ledger.specs, self._daemon.ledger.shape
        with self._worked_out():  # models may be predicted, which takes seconds
            specs = [spec if spec.name in known else spec.resolved(shape) for spec in specs]
        return self._in_loop(lambda: self._daemon.submit(specs))

    def _cluster(self, request: Mapping[str, Any]) -> dict[str, Any]:
        shape = self._daemon.ledger.shape
        return {"devices": shape.devices, "kinds": shape.kinds, "racks": shape.racks, "name": shape.name}

    def _queue(self, request: Mapping[str, Any]) -> list[dict[str, Any]]:
        return self._in_loop(self._daemon.queue)

    def _eta(self, request: Mapping[str, Any]) -> dict[str, Any]:
        name = _text(request, "job")
        question = self._in_loop(lambda: self._daemon.ask(name))
        with self._worked_out():  # seconds with a thousand jobs: the loop goes on meanwhile
            return question.answer().to_dict()

    def _cancel(self, request: Mapping[str, Any]) -> str:
        name = _text(request, "job")
        return self._in_loop(lambda: self._daemon.cancel(name))

    def _stop(self, request: Mapping[str, Any]) -> None:
        self._in_loop(self._daemon.stop)

    def _in_loop(self, work: Callable[[], T]) -> T:
        """What `work` returns when the daemon has come to it."""
        done: Future[T] = Future()
        self._requests.put(lambda: _settle(done, work))
        try:
            return done.result(timeout=_WAIT_S)
        except TimeoutError:
            if done.done():  # its own
                raise
            raise _Busy from None

    @contextlib.contextmanager
    def _worked_out(self) -> Iterator[None]:
        """One at a time: together they would take the processor from the loop."""
        if not self._working.acquire(timeout=_WAIT_S):
            raise _Busy
        try:
            yield
        finally:
            self._working.release()

    def close(self) -> None:
        """Takes no more requests."""
        self._path.unlink(missing_ok=True)
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


class _Busy(Exception):
    """An answer did not come in time."""


def _settle(done: Future[Any], work: Callable[[], Any]) -> None:
    """What goes wrong in a request is its answer; a store or an engine that failed also ends the daemon."""
    try:
        done.set_result(work())
    except (StoreError, EngineAway) as error:
        done.set_exception(error)
        raise
    except Exception as error:
        done.set_exception(error)
    except BaseException as error:
        done.set_exception(error)
        raise


def _read(handler: BaseHTTPRequestHandler) -> Any:
    """The body of a request."""
    length = handler.headers.get("Content-Length", "0")
    if not (length.isascii() and length.isdigit() and len(length) < 20 and int(length) <= _MOST_BYTES):
        raise SpecError(f"a request has at most {_MOST_BYTES} bytes, got {length[:40]!r}")
    body = handler.rfile.read(int(length))
    try:
        return json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise SpecError(f"the request is not valid JSON: {error}") from None


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not a number")


def _text(request: Mapping[str, Any], key: str) -> str:
    found = request.get(key)
    if not isinstance(found, str):
        raise SpecError(f"{key} must be text, got {found!r}")
    return found


def _chosen(request: Mapping[str, Any], allowed: Mapping[str, Any]) -> str:
    what = _text(request, "do")
    if what not in allowed:
        raise UnknownName("request", what, allowed, f"allowed: {', '.join(allowed)}")
    return what


def _job_spec(given: Any) -> JobSpec:
    """A job of a request: paths are absolute, for the daemon runs elsewhere."""
    if not isinstance(given, Mapping):
        raise SpecError(f'a job is written {{"name": ..., "command": ..., ...}}, got {given!r}')
    folder = given.get("folder")
    if not isinstance(folder, str) or not folder.startswith("/"):
        raise SpecError(f"job {given.get('name')!r}: folder must be an absolute path, got {folder!r}")
    return JobSpec.of(given, Path("/"))


def _line(what: object) -> str:
    """One line of bounded length."""
    text = " ".join(str(what).split())
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."


def _reply(handler: BaseHTTPRequestHandler, status: int, body: dict[str, Any]) -> None:
    text = json.dumps(body, allow_nan=False).encode()
    handler.send_response(status)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(text)))
    handler.end_headers()
    handler.wfile.write(text)
