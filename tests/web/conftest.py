"""A running explorer, requests to it, and a page of it in a real browser."""

import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

#: what the explorer of the tests opens with
MODEL, CLUSTER, PLAN = "llama3-70b", "16xdgx-h100", "fsdp tp=8 gbs=512 seq=8192"


@pytest.fixture(scope="session")
def explorer():
    """One `paceline explore` for all tests: its address, port and token."""
    pytest.importorskip("fastapi", reason="the explorer needs: pip install 'paceline[web]'")
    command = [sys.executable, "-m", "paceline.cli", "explore", MODEL, "--cluster", CLUSTER, "--plan", PLAN]
    with subprocess.Popen(
        [*command, "--no-browser"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        line = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)/\?token=(\S+)", line)
        assert found is not None, line + process.stderr.read()
        yield SimpleNamespace(
            address=found[0], port=int(found[1]), token=found[2], process=process, call=_caller(found)
        )
        process.terminate()
        process.wait(30)


def _caller(found):
    """Sends a request as a program does: (status, headers, body)."""

    def call(method, path, body=None, headers=None):
        connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=120)
        usual = {"authorization": f"Bearer {found[2]}", "content-type": "application/json"}
        text = body if isinstance(body, (str, bytes, type(None))) else json.dumps(body)
        connection.request(method, path, text, {**usual, **(headers or {})})
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        kind = answer.headers.get("content-type", "")
        return answer.status, answer.headers, json.loads(content) if kind == "application/json" else content

    return call


def chromium():
    """Debian's browser, or the one that PACELINE_BROWSER names."""
    named = os.environ.get("PACELINE_BROWSER")
    return named or shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="module")
def browser():
    """A headless browser, driven by Playwright, whose event loop runs until it ends: tests of other modules
    need theirs.
    """
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
    path = chromium()
    if path is None:
        pytest.skip("no browser: apt-get install --no-install-recommends chromium, or set PACELINE_BROWSER")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield started
        started.close()


def until(page, expression, argument=None, seconds=60):
    """Waits till an expression is true; Playwright's own waiting needs what the page's policy forbids."""
    end = time.monotonic() + seconds
    while not page.evaluate(expression, argument):
        assert time.monotonic() < end, f"never true: {expression}"
        time.sleep(0.02)


@pytest.fixture
def open_page(browser, explorer):
    """Opens the explorer; a message in the browser's console, or an error of a script, fails the test."""
    contexts, said = [], []

    def open_(fragment="", *, width=1300, dark=False, expect_problem=False):
        context = browser.new_context(
            viewport={"width": width, "height": 900},
            color_scheme="dark" if dark else "light",
            accept_downloads=True,
        )
        context.set_default_timeout(60_000)
        contexts.append(context)
        page = context.new_page()
        page.until = partial(until, page)
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(explorer.address + fragment)
        if not expect_problem:
            page.wait_for_selector("[data-panel=headline] .card")
        return page

    yield open_
    for context in contexts:
        context.close()
    assert not said, said


@pytest.fixture(scope="session")
def data():
    """The folder of this package's static files."""
    import paceline.web

    return Path(paceline.web.__file__).parent / "static"
