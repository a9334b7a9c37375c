"""The page in a headless Chromium, where one is installed."""

from __future__ import annotations

import shutil

import pytest

from tests.serve.harness import serving
from tests.serve.page.stub import Stub

BROWSERS = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
WAIT_MS = 30_000


@pytest.fixture(scope="module")  # while it is open, an event loop runs in this thread: others' tests need theirs
def browser():
    """A Chromium with an empty profile of its own."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture
def stub():
    return Stub()


@pytest.fixture
def stub_url(stub):
    with serving(stub.app()) as url:
        yield url


@pytest.fixture
def open_page(browser):
    """Opens an address in a fresh context; at the end no script may have failed, and only its server was asked."""
    contexts, errors, asked = [], [], []

    def open_it(url: str, **how):
        context = browser.new_context(**how)
        context.set_default_timeout(WAIT_MS)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if "Security Policy" in message.text else None)
        page.on("dialog", lambda dialog: (errors.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: asked.append((request.url, url)))
        page.goto(url)
        page.get_by_role("option", name="…").wait_for(state="detached")
        return page

    yield open_it
    for context in contexts:
        context.close()
    assert errors == []
    strangers = [address for address, url in asked if not address.startswith((f"{url}/", "data:"))]
    assert strangers == []


@pytest.fixture
def page(open_page, stub_url):
    """The page on the stub, at a desktop's size."""
    return open_page(stub_url, viewport={"width": 1280, "height": 800})
