"""What the tests of the page share: a server with a tiny language model, and a browser that opens its page.

What the server would not say on demand (a rejection, a busy moment) is put into its answer on the way to the page.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright", reason="the page is tested with playwright: pip install playwright")
for needed in ("fastapi", "uvicorn"):
    pytest.importorskip(needed, reason=f"the server needs {needed}: pip install sdmlm[serve]")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="the page is tested in Debian's chromium: apt install chromium"
)
from playwright.sync_api import Browser, Page, Request, Route, expect  # noqa: E402

from sdmlm import SDMLanguageModel  # noqa: E402
from sdmlm.cli.commands.serve import listen, make_server  # noqa: E402
from sdmlm.server.app import make_app  # noqa: E402
from sdmlm.server.model import Model  # noqa: E402
from sdmlm.server.settings import ServerSettings  # noqa: E402

expect.set_options(timeout=20_000)

REFUSED = "Failed to load resource"  # what a browser itself says of every status from 400 on


ASK = "**/v1/chat/completions"


@dataclass
class Served:
    """A running server."""

    url: str
    lm: SDMLanguageModel


def serve(folder: Path, **changes: Any) -> Iterator[Served]:
    lm = SDMLanguageModel.from_pretrained(folder)
    settings = ServerSettings(port=0, timeout=30, **changes)
    listening = listen(settings)
    server = make_server(make_app(Model(lm, "tiny", settings), settings), settings, "tiny", listening)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield Served(f"http://127.0.0.1:{listening.getsockname()[1]}/", lm)
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


@dataclass
class Visit:
    """Opens pages, and holds what none of them may do: complain in the console, or ask anybody but the server."""

    browser: Browser
    complaints: list[str] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    contexts: list[Any] = field(default_factory=list)

    def __call__(self, served: Served, before: Callable[[Page], None] = lambda page: None, **options: Any) -> Page:
        context = self.browser.new_context(**options)
        self.contexts.append(context)
        page: Page = context.new_page()
        page.on("console", lambda message: self.complaints.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.requests.append(request))
        before(page)
        page.goto(served.url)
        return page


def prompt_box(page: Page) -> Any:
    return page.get_by_label("Prompt", exact=True)


def ask(page: Page, prompt: str = "abc=") -> None:
    prompt_box(page).fill(prompt)
    page.get_by_role("button", name="Ask").click()


def judged(page: Page, prompt: str = "abc=") -> None:
    """Ask, and wait for the verdict."""
    ask(page, prompt)
    expect(page.locator("#verdict")).to_be_visible()


def altered(**changes: Any) -> Callable[[Route], None]:
    """A handler that changes the evidence of a streamed answer."""

    def handle(route: Route) -> None:
        lines = []
        for line in route.fetch().text().splitlines():
            if '"sdm"' in line:
                event = json.loads(line.removeprefix("data: "))
                event["choices"][0]["sdm"].update(changes)
                line = "data: " + json.dumps(event)
            lines.append(line)
        route.fulfill(status=200, content_type="text/event-stream", body="\n".join(lines) + "\n")

    return handle


STRANGE = {
    "outcome": "out of distribution",
    "accepted": False,
    "verified": False,
    "out_of_distribution": True,
    "q": 0,
    "q_prime": 0,
    "highest_alpha": None,
}


OUTCOMES: list[tuple[dict[str, Any], str]] = [
    ({"outcome": "verified", "verdict": "Yes"}, "Verified"),
    ({"outcome": "judged wrong", "verdict": "No"}, "Judged wrong"),
    ({"outcome": "not verified"}, "Not verified: a person should look"),
    (STRANGE, "Not verified, out of distribution: a person should look"),
]


def open_batch(page: Page, lines: list[str]) -> None:
    page.get_by_role("tab", name="Batch").click()
    file = {"name": "prompts.jsonl", "mimeType": "application/jsonl", "buffer": "\n".join(lines).encode()}
    page.get_by_label("Drop a file here or choose one").set_input_files(files=[file])


def run_batch(page: Page, lines: list[str], count: int) -> None:
    open_batch(page, lines)
    page.get_by_role("button", name="Start").click()
    expect(page.locator("#batch-count")).to_contain_text(f"{count} of {count} answered")
