"""The page in headless Chromium, before a server whose engine's answers the test writes."""

import contextlib
import importlib.util
import shutil

import pytest_asyncio
from live_server import MAX_BODY_BYTES, served
from scripted_llm import ScriptedLLM

from quire.config import ServerConfig
from quire.server.app import create_app

CHROMIUM = shutil.which("chromium")
collect_ignore_glob = [] if CHROMIUM and importlib.util.find_spec("playwright") else ["test_*.py"]

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser():
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        chromium = await playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        await chromium.close()


class Site:
    """A server with an engine whose answers the test writes, and the pages that look at it."""

    def __init__(self, browser, stack):
        self._browser = browser
        self._stack = stack
        self.llm = ScriptedLLM()
        self.app = None
        self.expected_complaints = ()  # parts of lines in the console

    def serve(self, **config):
        self.app = create_app(self.llm, ServerConfig(max_body_bytes=MAX_BODY_BYTES, **config))
        return self._stack.enter_context(served(self.app))

    async def open(self, url=None, path="/", *, has_model=True, **options):
        """Return a page that has loaded; what it complains of in its console is an error."""
        url = url or self.serve()
        context = await self._browser.new_context(**options)
        self._stack.push_async_callback(context.close)
        page = await context.new_page()
        complaints = []
        self._stack.callback(self._check, complaints)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        await page.clock.install()
        await page.goto(f"{url}{path}")
        if has_model:
            await page.wait_for_selector("#sampling input", state="attached")
        return page

    def _check(self, complaints):
        unexpected = [
            text for text in complaints if not any(part in text for part in self.expected_complaints)
        ]
        assert unexpected == []


@pytest_asyncio.fixture(loop_scope="session")
async def site(browser):
    async with contextlib.AsyncExitStack() as stack:
        yield Site(browser, stack)
