"""The page of `shardwise explore`, by its function, by its server, and in a browser where there is one."""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli import main
from shardwise.cli.explore import FIELDS, HOST, LONGEST_QUERY, make_server, page_for

from ..browser import browser


@pytest.fixture
def address() -> Iterator[str]:
    """The address of a running server."""
    with make_server() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"{HOST}:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def answer(address: str, path: str, method: str = "GET", **headers: str) -> tuple[int, str, Any]:
    connection = http.client.HTTPConnection(address, timeout=60)
    connection.request(method, path, headers=headers)
    response = connection.getresponse()
    return response.status, response.read().decode(), response.headers


def test_the_first_page_answers() -> None:
    page = page_for({})
    # 8 x 16 on 2 x 4 devices: 8 shards of 4 x 4, of 64 bytes each.
    assert "8 shards of 4 x 4, each on one device, 64 B of 512 B, 12.5%" in page
    assert "PartitionSpec('data', 'model')" in page
    assert "all-to-all" in page
    # b is cut by data, d by model in both operands: the addends are added over model.
    assert "over model" in page
    assert 'class="bad"' not in page
    assert page.count("<svg") == 2


def test_each_field_has_a_label_and_keeps_its_value() -> None:
    page = page_for({"shape": "6,\"8'<b>"})
    assert len(re.findall(r"<label>", page)) == len(FIELDS)
    assert 'value="6,&quot;8\'&lt;b&gt;"' in page
    assert "<b>" not in page.partition("<form")[2]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"mesh": "x=0"}, "0"),
        ({"mesh": "x=99999999999"}, "4,096 at most"),
        ({"shape": "8,x"}, "not integers"),
        ({"shape": "7,16"}, "do not divide evenly"),
        ({"layout": "data,data"}, "data"),
        ({"uneven": "some"}, "uneven"),
        ({"dtype": "float33"}, "float33"),
        ({"einsum": "bd"}, "einsum"),
        ({"shapes": "1,2 3,4 5,6"}, "operand"),
        ({"after": "-"}, "New layout: shape has 2 dims but the layout has 1"),
        ({"layout": "data,no"}, "Layout: dim 1 names axis"),
        ({"x": "no,-"}, "Layout of x: dim 0 names axis"),
        ({"shapes": "1,2"}, "Shapes of x and w: there are 1, but the operation has 2 operands"),
    ],
)
def test_bad_input_is_said_where_it_is(asked: dict[str, str], message: str) -> None:
    page = page_for(asked)
    errors = re.findall(r'<p class="bad">(.*?)</p>', page)
    assert errors
    assert any(message in error for error in errors)


def test_an_error_is_said_once() -> None:
    page = page_for({"mesh": "x=" * 2000})
    (error,) = re.findall(r'<p class="bad">(.*?)</p>', page)
    assert error.startswith("mesh 'x=x=")
    assert len(error) < 500
    assert page.count("There is no answer: the error is above.") == 3


def test_a_browser_that_left_is_not_reported(address: str, capfd: pytest.CaptureFixture[str]) -> None:
    host, port = address.split(":")
    question = f"GET / HTTP/1.0\r\nHost: {address}\r\n\r\n".encode()
    for _ in range(5):
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            # Closed with a reset, in the middle of the question or before its answer.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.sendall(question)
    assert answer(address, "/")[0] == 200
    assert capfd.readouterr().err == ""


def test_the_server_gives_the_page_to_this_machine(address: str) -> None:
    status, page, headers = answer(address, "/?mesh=x%3D2&shape=4%2C6&layout=x%2C-&after=&einsum=")
    assert status == 200
    assert "2 shards of 2 x 6" in page
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert "connect-src 'self'" in page


@pytest.mark.parametrize(
    ("path", "host", "status"),
    [
        ("/etc/passwd", None, 404),
        ("/../x", None, 404),
        ("/?mesh=" + "x" * LONGEST_QUERY, None, 414),
        ("/", "evil.example", 421),
        ("/", "evil.example:80", 421),
    ],
)
def test_the_server_refuses_all_else(address: str, path: str, host: str | None, status: int) -> None:
    assert answer(address, path, **({} if host is None else {"Host": host}))[0] == status


def test_the_server_takes_no_other_method(address: str) -> None:
    assert answer(address, "/", "POST")[0] == 501


def test_a_port_that_is_none_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explore", "--port", "70000", "--no-browser"]) == 2
    assert "must be from 0 to 65535" in capsys.readouterr().err


def test_a_port_that_is_taken_is_an_error(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    port = address.rpartition(":")[2]
    assert main(["explore", "--port", port, "--no-browser"]) == 2
    assert f"--port {port}: Address already in use; without --port a free one is taken" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="Ctrl-C is sent as a signal")
def test_the_command_says_its_address_and_ends_with_ctrl_c() -> None:
    command = [sys.executable, "-m", "shardwise", "explore", "--no-browser"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        found = re.match(r"http://(127\.0\.0\.1:\d+)/  for this machine only", said)
        assert found is not None, said
        assert answer(found[1], "/")[0] == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


@pytest.mark.slow
def test_in_a_browser_the_answers_follow_the_fields(address: str, tmp_path: Path) -> None:
    with browser(tmp_path) as page:
        page.resize(400)
        page.call("Page.navigate", url=f"http://{address}/")
        wait_for(page, "document.readyState === 'complete' && document.documentElement.classList.contains('js')")
        assert page.run("document.documentElement.scrollWidth") <= 400
        # By keyboard: to the second field, a new shape.
        page.run("document.querySelector('[name=mesh]').focus()")
        page.press("Tab")
        assert page.run("document.activeElement.name") == "shape"
        page.run("document.activeElement.select()")
        page.type("16,32")
        wait_for(page, "document.querySelector('.answer').textContent.includes('8 shards of 8 x 8')")
        # The fields of the tensor and its answer are in one window.
        assert page.run("document.querySelector('.answer').getBoundingClientRect().top") < 900
        assert "shape=16%2C32" in page.run("location.search")
        # A change while a question is under way is asked afterwards, and no other question at the same time.
        page.run(
            "window.most = window.now = 0; const get = window.fetch; window.fetch = async (...asked) => {"
            " window.most = Math.max(window.most, ++window.now); await new Promise(done => setTimeout(done, 300));"
            " try { return await get(...asked); } finally { window.now--; } }"
        )
        for layout in ("data,-", "-,data", "model,data"):
            page.run(f"document.querySelector('[name=layout]').value = '{layout}'")
            page.run("document.querySelector('form').requestSubmit()")
        wait_for(page, "document.querySelector('.answer').textContent.includes('8 shards of 4 x 16')")
        assert page.run("window.most") == 1
        assert page.complaints == []


def wait_for(page: Any, condition: str) -> None:
    end = time.monotonic() + 60
    while not page.run(condition):
        assert time.monotonic() < end, condition
        time.sleep(0.05)
