"""The page in a real browser: the slider of alpha, feedback, errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from page_checks import ASK, REFUSED, Served, Visit, ask, judged, needs_chromium, serve
from playwright.sync_api import expect

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def locked(folder: Path) -> Iterator[Served]:
    yield from serve(folder, api_key="open-sesame")


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
