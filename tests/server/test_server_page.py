"""The page at `/` in a real browser, against a real server with a tiny language model.

Where the server would not say a thing on demand (a rejection, a busy moment), its answer is changed on the way to the page.
"""

from __future__ import annotations

import json
import re
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
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="the page is tested in Debian's chromium: apt install chromium"
)

from playwright.sync_api import Browser, Page, Request, Route, expect, sync_playwright  # noqa: E402
from tiny_sdm_lm import train  # noqa: E402

from sdmlm import SDMLanguageModel  # noqa: E402
from sdmlm.cli.commands.serve import listen, make_server  # noqa: E402
from sdmlm.language_model.answer_rule import AnswerCertificate, save_certificate  # noqa: E402
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("page"), chat=True)


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


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    yield from serve(folder)


@pytest.fixture(scope="module")
def certified(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The same model with a certificate at alpha 0.9, which asks for more than its region does."""
    home = tmp_path_factory.mktemp("certified") / "lm"
    shutil.copytree(folder, home)
    lm = SDMLanguageModel.from_pretrained(home)
    (answer,) = lm.generate(["abc="], progress=False)
    threshold = answer.probability_of_yes - 1e-4
    certificate = AnswerCertificate(0.9, 0.05, 0.1, threshold, 40, 36, 30, 29, 0, None, lm.digest())
    save_certificate(home / "sdm", certificate)
    yield from serve(home)


@pytest.fixture(scope="module")
def locked(folder: Path) -> Iterator[Served]:
    yield from serve(folder, api_key="open-sesame")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


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


@pytest.fixture
def visit(browser: Browser) -> Iterator[Visit]:
    visit = Visit(browser)
    yield visit
    for context in visit.contexts:
        context.close()
    assert [text for text in visit.complaints if REFUSED not in text] == []
    assert {r.url.split("/")[2].split(":")[0] for r in visit.requests if not r.url.startswith("blob:")} <= {"127.0.0.1"}


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


# Ask


def test_an_answer_streams_and_then_gets_its_verdict(visit: Visit, served: Served) -> None:
    page = visit(served)
    page.evaluate(
        """() => {
          window.pieces = [];
          const note = (node) => window.pieces.push([node.data, document.getElementById("verdict").hidden]);
          new MutationObserver((records) => records.forEach((r) => r.addedNodes.forEach(note)))
            .observe(document.getElementById("answer"), { childList: true });
        }"""
    )
    judged(page, "abc=")
    expected = served.lm.generate("abc=", progress=False)
    assert expected.verified
    assert expected.text == "abc"
    expect(page.locator("#verdict strong")).to_have_text("Verified")
    expect(page.locator("#answer")).to_have_text(expected.text)
    expect(page.locator("#answer")).to_have_attribute("aria-busy", "false")
    expect(page.locator("#reason")).to_have_text(expected.reason)
    pieces = page.evaluate("window.pieces")
    assert [text for text, _ in pieces] == ["a", "b", "c", "abc"]  # as it came, then the whole
    sent = [json.loads(r.post_data or "") for r in visit.requests if r.url.endswith("/v1/chat/completions")]
    assert sent == [{"messages": [{"role": "user", "content": "abc="}], "stream": True}]
    # The evidence.
    documents = page.locator("#exemplars-list li")
    expect(documents).to_have_count(3)
    for i, exemplar in enumerate(expected.exemplars):
        text = documents.nth(i).inner_text()
        assert (exemplar.text or "").removesuffix("\n<verified>") in text
        assert f"distance {exemplar.distance:.4g}" in text
        assert text.startswith("Yes" if exemplar.label else "No")
    for id in ("similarity", "distance", "magnitude", "scatter", "curve"):
        assert page.locator(f"#{id} svg title").count() == 1
        expect(page.locator(f"#{id} svg")).to_be_visible()
    expect(page.locator("#similarity .marker-text")).to_have_text(f"q′ {expected.q_prime:.4g}")
    expect(page.locator("#similarity .limit-text")).to_have_text(f"least {served.lm.estimator.region_.q_min:.4g}")
    expect(page.locator("#distance .marker-text")).to_have_text(f"d {expected.d:.4g}")
    expect(page.locator("#magnitude .marker-text")).to_have_text(f"{expected.probability:.4f}")


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


@pytest.mark.parametrize(("changes", "name"), OUTCOMES, ids=[name for _, name in OUTCOMES])
def test_the_four_outcomes(visit: Visit, served: Served, changes: dict[str, Any], name: str) -> None:
    page = visit(served)
    page.route(ASK, altered(**changes))
    judged(page)
    expect(page.locator("#verdict strong")).to_have_text(name)
    expect(page.locator("#verdict svg use")).to_have_count(1)  # a shape, not colour alone
    expect(page.locator("#news")).to_contain_text(name)  # for screen readers
    verdict = changes.get("verdict", "Yes")
    expect(page.locator("#verdict span")).to_contain_text(f"Verdict: {verdict}.")  # whatever becomes of the answer
    if "out of distribution" in name:
        expect(page.locator("#alpha-effect")).to_contain_text("q = 0, out of distribution at every alpha")


WORDS = {
    "verified": "Verified",
    "judged wrong": "Judged wrong",
    "not verified": "Not verified: a person should look",
    "out of distribution": "Not verified, out of distribution: a person should look",
}


def test_a_certificate_decides(visit: Visit, certified: Served) -> None:
    """At every alpha of the slider the box says what the server would; above the certificate's own the region decides."""
    page, lm = visit(certified), certified.lm
    assert lm.answer_certificate is not None
    expect(page.locator("#measured")).to_contain_text("answered 36 of 40 held-out prompts rightly")
    slider = page.get_by_label("Alpha", exact=True)
    alphas = [r["alpha"] for r in page.request.get(certified.url + "v1/sdm").json()["regions"]]
    seen = set()
    for prompt in ("abc=", "a.b.=", "hgf="):
        judged(page, prompt)
        answer = lm.generate(prompt, progress=False)
        assert answer.certified is not None
        checks = page.locator("#rule-list li")
        expect(checks).to_have_count(2)
        expect(checks.first).to_contain_text(f"at least {lm.answer_certificate.threshold:.4f} is asked for")
        passed = [use.get_attribute("href") for use in page.locator("#rule-list use").all()]
        assert (passed == ["#icon-verified"] * 2) == answer.certified
        for i in (0, alphas.index(lm.alpha), alphas.index(0.9), alphas.index(0.9) + 1, len(alphas) - 1):
            slider.fill(str(i))
            expected = lm.verify(prompt, answer.text, alpha=alphas[i], progress=False)
            expect(page.locator("#verdict strong")).to_have_text(WORDS[expected.outcome])
            assert ("verified by the certificate" in page.locator("#alpha-effect").inner_text()) == bool(
                expected.certified
            )
            seen.add((expected.outcome, expected.certified))
    assert {certified for _, certified in seen} == {True, False, None}


def test_text_is_never_taken_for_html(visit: Visit, served: Served) -> None:
    bad = "<img src=x onerror=\"document.title='taken'\">"
    exemplar = {"id": bad, "label": 1, "prediction": 0, "distance": 1.0, "text": bad}
    page = visit(served)
    page.route(ASK, altered(text=bad, reason=bad, exemplars=[exemplar]))
    judged(page, bad)
    expect(page.locator("#answer")).to_have_text(bad)
    expect(page.locator("#exemplars-list")).to_contain_text(bad)
    assert page.locator("img").count() == 0
    assert page.title() != "taken"


def test_hidden_characters_are_marked(visit: Visit, served: Served) -> None:
    """Bidirectional and zero-width characters could make an answer read as another."""
    hidden = [
        "\u202e",
        "\u2066",
        "\u200b",
        "\u200f",
        "\ufeff",
        "\u00ad",
        "\u061c",
        "\u3164",
        "\x1b",
        "\x9b",
        "\U000e0041",
    ]
    text = "".join(f"a{c}" for c in hidden)
    exemplar = {"id": text, "label": 1, "prediction": 0, "distance": 1.0, "text": text}
    page = visit(served)
    page.route(ASK, altered(text=text, reason=text, exemplars=[exemplar]))
    judged(page)
    codes = [f"U+{ord(c):04X}" for c in hidden]
    for place, times in (("#answer", 1), ("#reason", 1), ("#exemplars-list", 2)):
        assert page.locator(f"{place} mark").all_inner_texts() == codes * times, place
        assert not set(hidden) & set(page.locator(place).inner_text())
    page.unroute(ASK)
    run_batch(page, [json.dumps({"prompt": "abc=" + text})], 1)
    assert page.locator("#batch-rows td.long").first.locator("mark").all_inner_texts() == codes


def test_the_start_says_what_this_is(visit: Visit, served: Served) -> None:
    page = visit(served)
    expect(page.locator(".intro")).to_contain_text("a second model judges the answer")
    expect(page.locator("#measured")).to_contain_text("has not been measured")

    def with_figures(route: Route) -> None:
        figures = {"name": "test", "prompts": 200, "alpha": 0.95, "verified": 26, "verified_right": 25}
        route.fulfill(json={**route.fetch().json(), "measured": [figures]})

    page = visit(served, lambda page: page.route("**/v1/sdm", with_figures))
    expect(page.locator("#measured")).to_have_text(
        "Measured on this model's own answers to 200 prompts (test, alpha 0.95): 13.0% verified, 96.2% of these right."
    )
    expect(page.locator("#curve-text")).to_contain_text(
        "These are not the model's own answers: 54.2% of them are negatives"
    )


def test_an_exemplar_shows_what_differs(visit: Visit, served: Served) -> None:
    shared = "Put the words into their order :"
    exemplar = {"label": 1, "prediction": 1, "distance": 1.0, "id": 7}
    exemplar["text"] = f"<|user|>{shared} b a<|end|><|assistant|>The answer is a b\n<verified>"
    tokens = {"control_tokens": ["<|assistant|>", "<|user|>", "<|end|>"]}
    page = visit(served, lambda p: p.route("**/v1/sdm", lambda r: r.fulfill(json={**r.fetch().json(), **tokens})))
    page.route(ASK, altered(exemplars=[exemplar]))
    judged(page, f"{shared} d c")
    card = page.locator("#exemplars-list .document")
    assert card.inner_text().split() == f"{shared} b a The answer is a b".split()
    assert card.locator(".shared").all_inner_texts() == [shared + " "]
    assert card.evaluate("e => e.scrollTop") == 0  # its first line is there


def test_this_answer_can_be_read_among_the_dots(visit: Visit, served: Served) -> None:
    page = visit(served)
    judged(page)
    label, back = (
        page.locator(f"#scatter {c}").evaluate("e => e.getBoundingClientRect().toJSON()")
        for c in (".here-text", ".label-back")
    )
    assert back["left"] <= label["left"]
    assert back["right"] >= label["right"]
    assert back["top"] <= label["top"] + 2
    assert back["bottom"] >= label["bottom"] - 2
    order = "e => [...e.querySelectorAll('*')].map((x) => x.getAttribute('class'))"
    classes = page.locator("#scatter svg").evaluate(order)
    assert max(i for i, c in enumerate(classes) if c in ("yes", "no")) < classes.index("label-back")


@pytest.mark.parametrize("width", [390, 1200])
def test_the_batch_shows_whole_answers_and_reasons_on_the_screen(visit: Visit, served: Served, width: int) -> None:
    long = "word " * 150 + "END"

    def with_long_text(route: Route) -> None:
        answer = route.fetch().json()
        answer["choices"][0]["sdm"].update(text=long, reason="Because. " * 20)
        route.fulfill(json=answer)

    page = visit(served, viewport={"width": width, "height": 800})
    page.route(ASK, with_long_text)
    run_batch(page, ['"abc="'], 1)
    for place in ("td.long:nth-child(4) > div", ".reason-cell", "td.kind"):
        box = page.locator(f"#batch-rows {place}").evaluate(
            "e => ({ ...e.getBoundingClientRect().toJSON(), cut: e.scrollHeight > e.clientHeight + 1 })"
        )
        assert not box["cut"], place
        assert box["left"] >= 0, place
        assert box["right"] <= width, place
        assert box["height"] > 0, place


def test_examples_fill_the_box(visit: Visit, served: Served) -> None:
    def with_examples(route: Route) -> None:
        route.fulfill(json={**route.fetch().json(), "examples": ["cab=", "feed="]})

    page = visit(served, lambda page: page.route("**/v1/sdm", with_examples))
    page.get_by_role("button", name="feed=").click()
    expect(prompt_box(page)).to_have_value("feed=")
    expect(prompt_box(page)).to_be_focused()


def test_stop(visit: Visit, served: Served) -> None:
    page = visit(served)
    page.route(ASK, lambda route: None)  # an answer that never comes
    ask(page)
    expect(page.get_by_role("button", name="Ask")).to_be_disabled()
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#reason")).to_contain_text("Stopped before the answer was complete")
    expect(page.get_by_role("button", name="Ask")).to_be_enabled()
    page.unroute(ASK)
    judged(page)


# Alpha


def test_the_slider_says_what_the_server_would(visit: Visit, served: Served) -> None:
    """Membership at every alpha, the region and the admitted share, against the estimator."""
    lm, page = served.lm, visit(served)
    judged(page, "abc=")
    layer = lm.estimator.layers_[0]
    ca, slider = layer.calibration, page.get_by_label("Alpha", exact=True)
    expect(slider).to_have_attribute("aria-valuetext", "alpha 0.8 (the server's)")
    alphas = [r["alpha"] for r in page.request.get(served.url + "v1/sdm").json()["regions"]]
    seen = set()
    for i in (0, 10, alphas.index(lm.alpha), 40, 46, len(alphas) - 1):
        slider.fill(str(i))
        region = layer.region(alphas[i])
        accepted = lm.verify("abc=", "abc", alpha=alphas[i], progress=False).accepted
        seen.add(accepted)
        expect(page.locator("#alpha-effect")).to_contain_text(
            f"At alpha {alphas[i]:g} {'this answer is in the region as “Yes”' if accepted else ''}".strip()
        )
        assert ("not verified" in page.locator("#alpha-effect").inner_text()) == (not accepted)
        # The box above follows, and says at which alpha.
        name = "Verified" if accepted else "Not verified: a person should look"
        expect(page.locator("#verdict strong")).to_have_text(name)
        assert (f"At alpha {alphas[i]:g}" in page.locator("#verdict").inner_text()) == (alphas[i] != lm.alpha)
        inside = region.contains(ca.q_prime, ca.p, ca.predictions)
        facts = page.locator("#alpha-facts").inner_text()
        assert f"{100 * inside.double().mean():.1f}% of {len(inside)}" in facts
        expect(page.locator("#scatter .zone")).to_have_count(0 if region.q_min == float("inf") else 2)
        if region.q_min < float("inf"):
            limits = [f"{region.q_min:.4g}", *(f"{v:.4f}" for v in region.psi)]
            assert page.locator("#alpha-facts dd").all_inner_texts()[:3] == limits
    assert seen == {True, False}
    page.get_by_role("button", name="Back to the server's alpha").click()
    expect(slider).to_have_value(str(alphas.index(lm.alpha)))
    expect(slider).to_be_focused()


# Feedback


def test_feedback_and_undo(visit: Visit, served: Served) -> None:
    page, lm = visit(served), served.lm
    judged(page)
    up, down = page.get_by_role("button", name="Follows the prompt"), page.get_by_role("button", name="Does not")
    size = len(lm.estimator.layers_[0].support)
    expect(page.locator("#model")).to_contain_text(f"judged against {size} documents")
    up.click()
    expect(up).to_have_attribute("aria-pressed", "true")
    expect(page.locator("#model")).to_contain_text(f"judged against {size + 1} documents")
    (first,) = lm.feedback_ids
    down.click()  # a change of mind replaces the first
    expect(down).to_have_attribute("aria-pressed", "true")
    expect(up).to_have_attribute("aria-pressed", "false")
    (second,) = lm.feedback_ids
    assert first != second
    page.get_by_role("button", name="Undo").click()
    expect(page.locator("#feedback-note")).to_have_text("Taken back.")
    expect(page.get_by_role("button", name="Undo")).to_be_hidden()
    assert len(lm.feedback_ids) == 0
    sent = [json.loads(r.post_data or "") for r in visit.requests if r.url.endswith("/v1/feedback")]
    assert [s["label"] for s in sent] == [True, False]
    assert sent[0] == {"messages": [{"role": "user", "content": "abc="}], "completion": "abc", "label": True}


def test_feedback_that_is_refused(visit: Visit, served: Served) -> None:
    page = visit(served)
    page.route(
        "**/v1/feedback", lambda route: route.fulfill(status=403, json={"error": {"message": "Feedback is off."}})
    )
    judged(page)
    page.get_by_role("button", name="Does not").click()
    expect(page.locator("#problem")).to_contain_text("Feedback is off.")
    expect(page.get_by_role("button", name="Does not")).to_have_attribute("aria-pressed", "false")


# Errors


def test_a_refusal_is_shown_and_goes_away(visit: Visit, served: Served) -> None:
    page = visit(served)
    ask(page, "abcdefgh" * 60 + "=")  # beyond the context
    problem = page.locator("#problem")
    expect(problem).to_contain_text("tokens")
    expect(problem).to_have_attribute("role", "status")
    expect(page.locator("#answer-card")).to_be_hidden()
    assert any(REFUSED in text for text in visit.complaints)
    page.get_by_role("button", name="Dismiss").click()
    expect(problem).to_be_empty()
    ask(page, "   ")
    expect(problem).to_contain_text("Write a prompt first.")
    judged(page)
    expect(problem).to_be_empty()


BROKEN: list[tuple[dict[str, Any] | None, str]] = [
    (None, "The server does not answer"),
    ({"status": 502, "body": "<html>bad gateway</html>"}, "status 502"),
    ({"body": 'data: {"choices":[{"delta":{"content":"ab"}}]}\n\ndata: [DONE]\n\n'}, "without a verdict"),
    (
        {"body": 'data: {"choices":[{"delta":{"content":"ab"}}]}\n\ndata: {"error":{"message":"Too slow."}}\n\n'},
        "Too slow.",
    ),
    ({"body": "data: {half an ev\n\n"}, "broke"),
]


@pytest.mark.parametrize(("answer", "said"), BROKEN, ids=["down", "proxy", "no verdict", "late error", "garbage"])
def test_broken_answers(visit: Visit, served: Served, answer: dict[str, Any] | None, said: str) -> None:
    page = visit(served)
    page.route(ASK, lambda route: route.abort() if answer is None else route.fulfill(**answer))
    ask(page)
    expect(page.locator("#problem")).to_contain_text(said)
    expect(page.locator("#verdict")).to_be_hidden()
    expect(page.locator("#feedback")).to_be_hidden()
    expect(page.get_by_role("button", name="Ask")).to_be_enabled()


def test_api_key(visit: Visit, locked: Served) -> None:
    page = visit(locked)
    key = page.get_by_label("API key", exact=True)
    expect(key).to_be_focused()
    expect(page.locator("#problem")).to_contain_text("API key")
    key.fill("wrong")
    key.press("Enter")
    expect(page.locator("#problem")).to_contain_text("wrong")
    key.fill("open-sesame")
    page.get_by_role("button", name="Use this key").click()
    expect(key).to_be_hidden()
    expect(page.locator("#problem")).to_be_empty()
    judged(page)
    page.reload()  # the same tab still has it
    judged(page)
    assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
    assert "open-sesame" not in "".join(r.url for r in visit.requests)


# Batch


def open_batch(page: Page, lines: list[str]) -> None:
    page.get_by_role("tab", name="Batch").click()
    file = {"name": "prompts.jsonl", "mimeType": "application/jsonl", "buffer": "\n".join(lines).encode()}
    page.get_by_label("Drop a file here or choose one").set_input_files(files=[file])


def run_batch(page: Page, lines: list[str], count: int) -> None:
    open_batch(page, lines)
    page.get_by_role("button", name="Start").click()
    expect(page.locator("#batch-count")).to_contain_text(f"{count} of {count} answered")


def column(page: Page, n: int) -> list[str]:
    return page.locator(f"#batch-rows tr > :nth-child({n})").all_inner_texts()


def test_batch_upload_filter_sort_download(visit: Visit, served: Served, tmp_path: Path) -> None:
    page = visit(served)
    prompts = ["abc=", "hgf=", "bad=", "a.b.=", "====", "fed="]
    lines = [json.dumps({"prompt": p, "id": i}) for i, p in enumerate(prompts)]
    lines[1:1] = ["not json", "", '{"prompt": 3}', "[1]"]
    lines += ['"cab="', '{"messages": [{"role": "user", "content": "hab="}]}', '{"prompt": "%s"}' % ("abcdefgh" * 60)]
    run_batch(page, lines, 9)
    expect(page.locator("#batch-found")).to_have_text("9 prompts in prompts.jsonl.")
    bad = page.locator("#bad-lines-list li").all_inner_texts()
    assert [re.match(r"Line (\d+):", text)[1] for text in bad] == ["2", "4", "5"]  # type: ignore[index]
    asked = [*prompts, "cab=", "hab="]
    expected = served.lm.generate(asked, progress=False)
    names = [
        "Out of distribution" if v.out_of_distribution else ("Verified" if v.verified else "Judged wrong") if v.accepted
        else "Not verified"
        for v in expected
    ]  # fmt: skip
    assert column(page, 1) == ["1", "6", "7", "8", "9", "10", "11", "12", "13"]
    assert column(page, 2) == [*names, "Error"]
    assert column(page, 3)[:-1] == asked
    answers = page.locator("#batch-rows tr > :nth-child(4) > div").all_inner_texts()
    assert [text.strip() for text in answers[:-1]] == [v.text.strip() for v in expected]
    assert page.locator(".reason-cell").all_inner_texts()[:-1] == [v.reason for v in expected]
    assert "tokens" in column(page, 4)[-1]
    # Filter.
    assert "Verified" in names
    for name in ("Verified", "Judged wrong", "Not verified", "Out of distribution", "Error"):
        page.get_by_role("radio", name=re.compile(f"^{name}")).check(force=True)
        shown = [name] * [*names, "Error"].count(name)
        expect(page.locator("#batch-rows tr")).to_have_count(len(shown))
        assert column(page, 2) == shown
        expect(page.locator("#batch-none")).to_be_visible(visible=not shown)
    page.get_by_role("radio", name="All").check(force=True)
    # Sort: rows without a value stay last.
    head = page.get_by_role("columnheader", name="SDM output")
    for direction in ("ascending", "descending"):
        head.get_by_role("button").click()
        expect(head).to_have_attribute("aria-sort", direction)
        order = sorted(range(8), key=lambda i: expected[i].probability, reverse=direction == "descending")
        found = column(page, 3)
        values = [expected[asked.index(p)].probability for p in found[:-1]]
        assert values == pytest.approx([expected[i].probability for i in order])
        assert found[-1].startswith("abcdefgh")
    # Download.
    with page.expect_download() as download:
        page.get_by_role("button", name="Download results").click()
    assert download.value.suggested_filename == "results.jsonl"
    download.value.save_as(tmp_path / "results.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text("utf-8").splitlines()]
    assert [r["line"] for r in rows] == [1, 6, 7, 8, 9, 10, 11, 12, 13]
    assert [r.get("id") for r in rows[:6]] == list(range(6))
    assert [r["outcome"] for r in rows] == [name.lower() for name in [*names, "Error"]]
    for row, v in zip(rows[:8], expected, strict=True):
        assert (row["answer"], row["sdm"]["verdict"], row["sdm"]["accepted"]) == (v.text, v.verdict, v.accepted)
    assert "tokens" in rows[-1]["error"]


def test_why_shows_the_evidence_of_a_row(visit: Visit, served: Served) -> None:
    page = visit(served)
    run_batch(page, ['"abc="', '"hgf="'], 2)
    page.get_by_role("button", name="Why, line 2").click()
    expect(page.get_by_role("tab", name="Ask")).to_have_attribute("aria-selected", "true")
    expect(page.locator("#reason")).to_have_text(served.lm.generate("hgf=", progress=False).reason)
    expect(prompt_box(page)).to_have_value("hgf=")
    expect(page.locator("#similarity svg")).to_be_visible()


def test_batch_by_pasting_and_dropping(visit: Visit, served: Served) -> None:
    page = visit(served)
    page.get_by_role("tab", name="Batch").click()
    found, start = page.locator("#batch-found"), page.get_by_role("button", name="Start")
    expect(start).to_be_disabled()
    page.get_by_label("Or paste lines").fill('{"prompt": "abc="}')
    expect(found).to_have_text("1 prompt.")
    expect(start).to_be_enabled()
    drop = """(zone, bytes) => {
      const data = new DataTransfer();
      data.items.add(new File([new Uint8Array(bytes)], "dropped.jsonl"));
      zone.dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true }));
    }"""
    page.locator("#drop").evaluate(drop, list(b'"abc="\r\n"cab="\r\n'))
    expect(found).to_have_text("2 prompts in dropped.jsonl.")
    page.locator("#drop").evaluate(drop, [0x22, 0xE9, 0x22])  # Latin-1
    expect(page.locator("#problem")).to_contain_text("dropped.jsonl is not UTF-8")
    expect(start).to_be_disabled()


def test_batch_waits_for_a_busy_server_and_stays_within_its_bound(visit: Visit, served: Served) -> None:
    page = visit(served)
    tries: dict[str, int] = {}
    open_now, most = 0, 0

    def handle(route: Route) -> None:
        nonlocal open_now, most
        prompt = (route.request.post_data_json or {})["messages"][0]["content"]
        tries[prompt] = tries.get(prompt, 0) + 1
        if tries[prompt] == 1 and prompt in ("abc=", "cab="):
            busy = {"error": {"message": "busy"}}
            route.fulfill(status=429, json=busy, headers={"Retry-After": "1"})
        else:
            route.continue_()

    def begun(request: Request) -> None:
        nonlocal open_now, most
        open_now += request.url.endswith("/completions")
        most = max(most, open_now)

    def ended(request: Request) -> None:
        nonlocal open_now
        open_now -= request.url.endswith("/completions")

    page.on("request", begun)
    page.on("requestfinished", ended)
    page.route(ASK, handle)
    words = ["abc=", "cab=", "bad=", "fed=", "hag=", "gab=", "bag=", "dab=", "ebb=", "egg="]
    run_batch(page, [json.dumps(w) for w in words], 10)
    assert {w: tries[w] for w in words} == {w: 2 if w in ("abc=", "cab=") else 1 for w in words}
    assert "Error" not in column(page, 2)
    assert 2 <= most <= 4


def test_batch_cancel(visit: Visit, served: Served) -> None:
    page = visit(served)
    page.route(ASK, lambda route: None if "hgf" in (route.request.post_data or "") else route.continue_())
    open_batch(page, ['"abc="', *['"hgf="'] * 8])
    page.get_by_role("button", name="Start").click()
    expect(page.locator("#batch-count")).to_contain_text("1 of 9 answered")
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator("#news")).to_contain_text("Stopped: 1 of 9 answered")
    assert column(page, 2)[1:] == ["Cancelled"] * 8
    expect(page.get_by_role("button", name="Start")).to_be_enabled()
    with page.expect_download() as download:
        page.get_by_role("button", name="Download results").click()
    assert len(Path(download.value.path()).read_text().splitlines()) == 1
    page.unroute(ASK)
    page.get_by_role("button", name="Start").click()
    expect(page.locator("#batch-count")).to_contain_text("9 of 9 answered")


def test_a_batch_stops_where_the_server_is_gone(visit: Visit, served: Served) -> None:
    page = visit(served)
    page.route(ASK, lambda route: route.abort())
    open_batch(page, ['"abc="'] * 30)
    page.get_by_role("button", name="Start").click()
    expect(page.locator("#problem")).to_contain_text("The server does not answer")
    expect(page.get_by_role("button", name="Start")).to_be_enabled()
    assert column(page, 2).count("Cancelled") >= 20


def test_many_rows_are_drawn_in_parts(visit: Visit, served: Served) -> None:
    page = visit(served)
    page.route(ASK, lambda route: route.abort())
    open_batch(page, ['"abc="'] * 700)
    page.get_by_role("button", name="Start").click()
    expect(page.get_by_role("button", name="Start")).to_be_enabled()
    expect(page.locator("#batch-rows tr")).to_have_count(500)
    page.get_by_role("button", name="Show more rows").click()
    expect(page.locator("#batch-rows tr")).to_have_count(700)


# For everybody


def test_keyboard_alone(visit: Visit, served: Served) -> None:
    page = visit(served)
    expect(page.locator("#scatter svg")).to_be_visible()
    press = page.keyboard.press
    for name in ("Skip to the page", "Ask"):
        press("Tab")
        expect(page.locator(":focus")).to_have_text(name)
    press("Tab")
    expect(prompt_box(page)).to_be_focused()
    page.keyboard.type("abc")
    press("Shift+Enter")
    expect(prompt_box(page)).to_have_value("abc\n")
    press("Backspace")
    page.keyboard.type("=")
    press("Enter")
    expect(page.locator("#verdict strong")).to_have_text("Verified")
    examples = page.locator("#examples-list button").all_inner_texts()
    for name in ("Ask", *examples, "Follows the prompt", "Does not"):
        press("Tab")
        expect(page.locator(":focus")).to_have_text(name)
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    press("Enter")
    expect(page.get_by_role("button", name="Undo")).to_be_visible()
    press("Tab")
    press("Enter")  # Undo
    expect(page.get_by_role("button", name="Follows the prompt")).to_be_focused()
    press("Tab")
    press("Tab")
    expect(page.get_by_label("Alpha", exact=True)).to_be_focused()
    press("End")
    expect(page.locator("#alpha-value")).to_have_text("1")
    prompt_box(page).focus()
    press("Control+Enter")
    expect(page.locator("#news")).to_contain_text("Verified")
    # The tabs: arrows between them, one stop for Tab.
    page.get_by_role("tab", name="Ask").focus()
    press("ArrowRight")
    expect(page.get_by_role("tab", name="Batch")).to_be_focused()
    expect(page.get_by_role("tabpanel", name="Batch")).to_be_visible()
    expect(page.get_by_role("tabpanel", name="Ask")).to_be_hidden()
    press("Tab")
    press("Tab")
    page.keyboard.insert_text('"abc="')
    press("Tab")
    expect(page.get_by_role("button", name="Start")).to_be_focused()
    press("Enter")
    expect(page.get_by_role("button", name="Download results")).to_be_focused()  # when it is done
    press("Shift+Tab")
    press("ArrowRight")
    expect(page.get_by_role("radio", name=re.compile("^Verified"))).to_be_checked()


CONTROLS = {"button", "textbox", "slider", "radio", "tab", "link", "progressindicator", "tabpanel", "img", "table"}


def nameless(page: Page) -> list[str]:
    """Roles of what a screen reader meets without a name."""
    tree = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    roles = [(n["role"]["value"], n.get("name", {}).get("value", "")) for n in tree if not n["ignored"]]
    assert len([role for role, _ in roles if role in CONTROLS]) > 5
    return [role for role, name in roles if role in CONTROLS and not name.strip()]


# Text whose contrast with what lies behind it is below the 4.5 that WCAG asks for.
FAINT = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgb = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const back = rgb(getComputedStyle(e).backgroundColor);
      if (back[3] === 255) return back;
    }
    return [255, 255, 255];
  };
  const faint = [];
  let seen = 0;
  for (const e of document.querySelectorAll("body *")) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (!own || !e.checkVisibility() || e.disabled || e.closest("title, desc")) continue;
    seen += 1;
    const style = getComputedStyle(e);
    const [a, b] = [light(rgb(e.closest("svg") ? style.fill : style.color)), light(behind(e))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) faint.push(`${e.tagName} ${e.className.baseVal ?? e.className} ${e.textContent} ${ratio.toFixed(2)}`);
  }
  return { seen, faint };
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_names_and_contrast(visit: Visit, served: Served, scheme: str) -> None:
    page = visit(served, color_scheme=scheme)
    back = [int(v) for v in re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))]
    assert (min(back) > 200) if scheme == "light" else (max(back) < 60)
    for changes, name in OUTCOMES:
        page.route(ASK, altered(**changes))
        ask(page)
        expect(page.locator("#verdict strong")).to_have_text(name)
        found = page.evaluate(FAINT)
        assert found["seen"] > 50
        assert found["faint"] == []
        assert nameless(page) == []
    page.get_by_text("All numbers").click()
    assert page.evaluate(FAINT)["faint"] == []
    page.unroute(ASK)
    run_batch(page, ['"abc="', "bad", '"%s"' % ("abcdefgh" * 60)], 2)
    assert page.evaluate(FAINT)["faint"] == []
    assert nameless(page) == []
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map((e) => e.id)")
    assert len(ids) == len(set(ids))
    assert page.locator("thead th[scope=col]").count() == 8
    assert page.locator("tbody th[scope=row]").count() == 2


@pytest.mark.parametrize("width", [320, 390, 1200])
def test_nothing_is_wider_than_the_screen(visit: Visit, served: Served, width: int) -> None:
    page = visit(served, viewport={"width": width, "height": 800})
    page.route(ASK, altered(text="x" * 400))
    judged(page)
    wide = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
    assert page.evaluate(wide) is False
    page.unroute(ASK)
    run_batch(page, ['"abc="'], 1)
    assert page.evaluate(wide) is False
    page.get_by_role("tab", name="Ask").click()
    page.set_viewport_size({"width": 500, "height": 800})  # the charts follow
    expect(page.locator("#scatter svg")).to_have_attribute(
        "width", str(page.locator("#scatter").evaluate("e => e.clientWidth"))
    )


def test_reduced_motion(visit: Visit, served: Served) -> None:
    moving = "getComputedStyle(document.getElementById('answer'), '::after').animationName"
    for reduced, expected in (("no-preference", "blink"), ("reduce", "none")):
        page = visit(served, reduced_motion=reduced)
        page.route(ASK, lambda route: None)
        ask(page)
        expect(page.get_by_role("button", name="Stop")).to_be_visible()
        assert page.evaluate(moving) == expected


def test_the_policy_allows_nothing_from_elsewhere(visit: Visit, served: Served) -> None:
    page = visit(served)
    answer = page.request.get(served.url)
    assert answer.headers["content-security-policy"].startswith("default-src 'self';")
    assert not re.search(r'https?://|\sstyle="|\son\w+="|<script>|<style', answer.text())
    expect(page.locator("#scatter svg")).to_be_visible()
    files = {r.url.rsplit("/", 1)[1] for r in visit.requests}
    assert {"app.js", "style.css", "sdm"} <= files
