"""The page at `/` in a real browser: asking, the answer, its verdict and evidence."""

from __future__ import annotations

import json
from typing import Any

import pytest
from page_checks import ASK, OUTCOMES, Served, Visit, altered, ask, judged, needs_chromium, prompt_box, run_batch
from playwright.sync_api import Route, expect

pytestmark = needs_chromium


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
    """At every alpha of the slider the box says what the server would; above the certificate's own both rules have to accept."""
    page, lm = visit(certified), certified.lm
    assert lm.answer_certificate is not None
    expect(page.locator("#measured")).to_contain_text("answered 36 of 40 held-out prompts correctly")
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
    boxes = "e => ['.here-text', '.label-back'].map((c) => e.querySelector(c).getBoundingClientRect().toJSON())"
    expect(page.locator("#scatter .label-back")).to_have_count(1)
    label, back = page.locator("#scatter").evaluate(boxes)  # both at once: the picture may be drawn again in between
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
