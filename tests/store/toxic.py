"""A proxy before an HTTP server that does harm when it is told to, and counts what passes."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

#: A request: its method, its path with the query, and its headers.
Request = tuple[str, str, dict[str, str]]
#: What is done to a request: nothing, or one of `"503"`, `"short"` (fewer bytes than were asked for, said honestly),
#: `"cut"` (fewer than were said), `"stall"` (an answer that comes too late), `"lost"` (done, but without an answer).
Poison = Callable[[Request], "str | None"]
_HOP = {"connection", "transfer-encoding", "keep-alive"}


class Toxic:
    """The proxy, listening on a port of its own; `poison` may be set at any time."""

    def __init__(self, port: int) -> None:
        self.poison: Poison = lambda request: None
        self.requests: list[Request] = []
        toxic = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: Any) -> None:
                pass

            def handle_one(self) -> None:
                body = self._body()
                request = (self.command, self.path, {name.lower(): value for name, value in self.headers.items()})
                toxic.requests.append(request)
                harm = toxic.poison(request)
                if harm == "503":
                    self.send_response(503)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                if harm == "stall":
                    time.sleep(2)
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=3600)
                headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP}
                headers["Content-Length"] = str(len(body))
                connection.request(self.command, self.path, body, headers)
                answer = connection.getresponse()
                data = answer.read()
                connection.close()
                if harm == "lost":
                    self.close_connection = True
                    return
                half = data[: len(data) // 2] if harm in ("short", "cut") else data
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in (*_HOP, "content-length"):
                        self.send_header(name, value)
                length = answer.getheader("Content-Length", "0") if self.command == "HEAD" else len(data)
                self.send_header("Content-Length", str(len(half) if harm == "short" else length))
                self.end_headers()
                self.wfile.write(half)
                self.close_connection = harm == "cut"

            def _body(self) -> bytes:
                if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
                    return self.rfile.read(int(self.headers.get("Content-Length", 0)))
                body = b""
                while size := int(self.rfile.readline().split(b";")[0], 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
                return body

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_one  # noqa: N815

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def count(self, method: str, part: str = "") -> int:
        """How many requests of a method had something in their path."""
        return sum(command == method and part in path for command, path, _ in self.requests)

    def calm(self) -> None:
        """Do no harm from now on, and forget what passed."""
        self.poison = lambda request: None
        self.requests.clear()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Times:
    """Harm to the first few requests for which something holds."""

    def __init__(self, harm: str, times: int, which: Callable[[Request], bool]) -> None:
        self._harm = harm
        self.left = times
        self._which = which
        self._lock = threading.Lock()

    def __call__(self, request: Request) -> str | None:
        with self._lock:
            if self.left and self._which(request):
                self.left -= 1
                return self._harm
        return None
