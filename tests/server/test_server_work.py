"""The engine's thread over a real model: batches give the same answers as the model alone, and no row spoils another's."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from server_checks import PROMPTS, Slow, trained, wait_until
from tiny_sdm_lm import calibration_rows

from sdmlm import SDMLanguageModel, SearchPolicy, Verification, calibrate_search
from sdmlm.server.errors import ApiError
from sdmlm.server.info import describe
from sdmlm.server.model import Model
from sdmlm.server.protocol import Ask, FeedbackRequest, GivenAnswer, SdmOptions
from sdmlm.server.settings import ServerSettings

NUMBERS = ("probability", "probability_lower", "probability_upper", "d", "d_nearest", "q_prime")


@pytest.fixture(scope="module")
def lm() -> Iterator[SDMLanguageModel]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield SDMLanguageModel.from_pretrained(trained())
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def slow(lm: SDMLanguageModel) -> Slow:
    return Slow(lm)


@pytest.fixture
def model(lm: SDMLanguageModel, slow: Slow) -> Iterator[Model]:
    made = Model(lm, "tiny", ServerSettings(max_batch=8, max_queue=64))
    yield made
    slow.seconds = 0.0
    made.close(20)


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 60))


def asked(*prompts: str, **fields: Any) -> Ask:
    return Ask(
        True, tuple([{"role": "user", "content": p}] for p in prompts), fields.pop("sdm", SdmOptions()), **fields
    )


def same(a: Verification, b: Verification) -> None:
    left, right = a.to_dict(), b.to_dict()
    for name in NUMBERS:
        assert left.pop(name) == pytest.approx(right.pop(name), rel=1e-4, abs=1e-5), name
    for one in (*left["exemplars"], *right["exemplars"]):
        one["distance"] = pytest.approx(one["distance"], rel=1e-3)
    left.pop("reason"), right.pop("reason")  # holds the numbers once more
    assert left == right


def test_requests_that_share_batches_get_the_answers_of_the_model_alone(
    lm: SDMLanguageModel, slow: Slow, model: Model
) -> None:
    """Greedy and sampled, with seeds, alphas and neighbours of their own, all at once."""
    requests = [
        asked(PROMPTS[i], sdm=SdmOptions(alpha=(0.6, 0.8, 0.95)[i % 3], neighbors=i % 3)) for i in range(12)
    ] + [asked(PROMPTS[i], temperature=1.5, n=3, seed=i, max_tokens=12) for i in range(6)]
    alone = []
    for each in requests:
        found: list[Verification] = lm.generate(
            each.rows(),
            temperature=each.temperature,
            seed=each.seed or 0,
            max_new_tokens=each.max_tokens,
            alpha=each.sdm.alpha,
            neighbors=each.sdm.neighbors,
            progress=False,
        )
        alone.append(found)
    assert len({v.text for found in alone for v in found}) > 12

    async def work() -> None:
        before = slow.passes, slow.rows
        answers = await asyncio.gather(*(model.generate(each) for each in requests))
        assert slow.rows - before[1] > 3 * (slow.passes - before[0])  # they did share
        for judged, found in zip(answers, alone, strict=True):
            for j, v in zip(judged, found, strict=True):
                same(j.verification, v)
                region = lm.estimator.layers_[0].region(v.alpha)
                assert (j.region["alpha"], j.region["q_min"], tuple(j.region["psi"])) == (
                    v.alpha,
                    region.q_min,
                    region.psi,
                )

    run(work)


def test_pieces_make_up_the_text(model: Model) -> None:
    async def work() -> None:
        pieces: dict[int, str] = {}

        def hear(n: int, piece: str) -> None:
            assert piece
            pieces[n] = pieces.get(n, "") + piece

        request = asked(*PROMPTS[:6], temperature=1.5, n=2, seed=3, max_tokens=16)
        judged = await model.generate(request, hear)
        assert [pieces.get(n, "") for n in range(12)] == [j.verification.text for j in judged]
        assert any(j.verification.generated != j.verification.text for j in judged)  # there were tags to hold back

    run(work)


def test_verify(lm: SDMLanguageModel, model: Model) -> None:
    completions = ["abc", "abd.", "<verified>", "xyz\n<verified>Yes</verified>", "h" * 20]
    documents = [GivenAnswer(p, c) for p, c in zip(PROMPTS, completions, strict=False)]
    found: list[Verification] = lm.verify(PROMPTS[:5], completions, alpha=0.7, neighbors=1, progress=False)

    async def work() -> None:
        judged = await model.verify(documents, SdmOptions(alpha=0.7, neighbors=1))
        for j, v in zip(judged, found, strict=True):
            same(j.verification, v)

    run(work)


def test_a_row_that_cannot_be_answered_fails_alone(model: Model) -> None:
    async def work() -> None:
        good, long, also = await asyncio.gather(
            model.generate(asked(PROMPTS[0])),
            model.generate(asked("ab" * 200)),
            model.generate(asked(PROMPTS[1])),
            return_exceptions=True,
        )
        assert isinstance(good, list)
        assert isinstance(also, list)
        assert isinstance(long, ApiError)
        assert (long.status, long.code) == (400, "context_length_exceeded")
        assert long.message.startswith("The prompt has")
        fine, strange = await asyncio.gather(
            model.verify([GivenAnswer(PROMPTS[0], "abc")], SdmOptions()),
            model.verify([GivenAnswer(PROMPTS[0], "ab" * 200)], SdmOptions()),
            return_exceptions=True,
        )
        assert isinstance(fine, list)
        assert isinstance(strange, ApiError)
        assert (strange.status, strange.code) == (400, "context_length_exceeded")

    run(work)


def test_a_prompt_limit_below_the_context(lm: SDMLanguageModel) -> None:
    async def work() -> None:
        bounded = Model(lm, "tiny", ServerSettings(max_prompt_tokens=12))
        assert await bounded.generate(asked("abc="))
        for request in (asked("abcdefgh=" * 3), asked("abcdefgh=" * 3, sdm=SdmOptions(on_reject="search"))):
            with pytest.raises(ApiError, match="at most 12") as error:
                await bounded.generate(request)
            assert (error.value.status, error.value.param) == (400, "messages")
        documents = [GivenAnswer("abc=", "abc"), GivenAnswer("abcdefgh=" * 3, "abc", "items[1].")]
        with pytest.raises(ApiError, match="at most 12") as error:
            await bounded.verify(documents, SdmOptions())
        assert error.value.param == "items[1].prompt"
        with pytest.raises(ApiError, match="longer together") as error:
            await bounded.verify([GivenAnswer("abc=", "abc" * 100, "items[0].")], SdmOptions())
        assert error.value.param == "items[0].completion"
        bounded.close(20)

    run(work)


def test_a_batch_that_breaks_is_tried_row_by_row(
    lm: SDMLanguageModel, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = lm.write
    (poison,) = lm.read_prompts([[{"role": "user", "content": "poison="}]])

    def broken(prompts: Any, *rest: Any, **options: Any) -> Any:
        if poison in prompts:
            raise RuntimeError("poison")
        return write(prompts, *rest, **options)

    monkeypatch.setattr(lm, "write", broken)

    async def work() -> None:
        bad, *good = await asyncio.gather(
            model.generate(asked("poison=")),
            *(model.generate(asked(p)) for p in PROMPTS[:4]),
            return_exceptions=True,
        )
        assert isinstance(bad, ApiError)
        assert bad.status == 500
        assert all(isinstance(each, list) for each in good)

    run(work)


def test_who_leaves_stops_costing(lm: SDMLanguageModel, slow: Slow, model: Model) -> None:
    """Alone: the passes stop. In company: the row is dropped and the others go on."""

    def length(seed: int) -> int:
        return int(lm.generate("abc=", temperature=3.0, seed=seed, max_new_tokens=60, progress=False).completion_tokens)

    seeds = sorted(range(30), key=length)[-2:]
    long, other = (asked("abc=", temperature=3.0, seed=seed, max_tokens=60) for seed in seeds)

    async def work() -> None:
        slow.seconds = 0.02
        lonely = asyncio.ensure_future(model.generate(long))
        start = slow.passes
        await asyncio.to_thread(wait_until, lambda: slow.passes > start + 2)
        lonely.cancel()
        await asyncio.sleep(0.1)
        stopped = slow.passes
        await asyncio.sleep(0.3)
        assert slow.passes <= stopped + 1

        both = [asyncio.ensure_future(model.generate(each)) for each in (long, other)]
        await asyncio.to_thread(wait_until, lambda: slow.passes > stopped + 3)
        both[0].cancel()
        before = slow.passes, slow.rows
        (judged,) = await both[1]
        assert judged.verification.completion_tokens > 30
        assert slow.rows - before[1] < 1.5 * (slow.passes - before[0])  # mostly one row

        search = asked("abc=", sdm=SdmOptions(on_reject="search", budget=64, alpha=1.0), temperature=2.0, max_tokens=60)
        searching = asyncio.ensure_future(model.generate(search))
        start = slow.passes
        await asyncio.to_thread(wait_until, lambda: slow.passes > start + 2)
        searching.cancel()
        await asyncio.sleep(0.1)
        stopped = slow.passes
        await asyncio.sleep(0.2)
        assert slow.passes <= stopped + 1
        slow.seconds = 0.0
        assert await model.generate(asked("abc="))  # all is well

    run(work)


def test_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = SDMLanguageModel.from_pretrained(shutil.copytree(trained(), tmp_path / "model"))
    plain = lm.generate
    model = Model(lm, "tiny", ServerSettings())

    def answers(prompts: list[str], policy: SearchPolicy, **options: Any) -> list[Verification]:
        rows = [[{"role": "user", "content": p}] for p in prompts]
        found: list[Verification] = lm.generate(rows, search=policy, progress=False, **options)
        return found

    async def check(policy: SearchPolicy, sdm: SdmOptions, calibrated: bool) -> list[Any]:
        judged = await model.generate(asked(*PROMPTS[:8], sdm=sdm, seed=5))
        for j, v in zip(judged, answers(PROMPTS[:8], policy, alpha=sdm.alpha, seed=5), strict=True):
            same(j.verification, v)
            assert v.calibrated == calibrated
        return judged

    async def work() -> None:
        judged = await check(SearchPolicy(), SdmOptions(on_reject="search", alpha=0.97), False)
        assert max(j.verification.tries for j in judged) == 5
        seeds: list[int] = []
        monkeypatch.setattr(lm, "generate", lambda *a, **k: seeds.append(k["seed"]) or plain(*a, **k))
        for _ in range(2):  # without a seed the draws are others
            await model.generate(asked(PROMPTS[0], sdm=SdmOptions(on_reject="search")))
        assert len(set(seeds)) == 2
        monkeypatch.undo()
        await check(SearchPolicy(budget=2), SdmOptions(on_reject="search", alpha=0.97, budget=2), False)
        policy = SearchPolicy("reprompt", 3)
        calibration = calibrate_search(lm, calibration_rows(), policy, progress=False)
        judged = await check(policy, SdmOptions(on_reject="search"), True)  # the policy that was calibrated, unasked
        assert judged[0].region == calibration.region().to_dict()
        await check(policy, SdmOptions(on_reject="search", budget=3), True)
        await check(SearchPolicy(budget=2), SdmOptions(on_reject="search", budget=2), False)

    run(work)
    model.close(20)


def test_feedback_changes_the_model_and_can_be_undone(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(trained(), tmp_path / "model"))
    lm = SDMLanguageModel.from_pretrained(folder)
    model = Model(lm, "tiny", ServerSettings())

    async def work() -> None:
        before = model.info
        document = GivenAnswer([{"role": "user", "content": "abc="}], "abd")
        id, size = await model.feedback(FeedbackRequest(document, False))
        assert model.info["support_size"] == size == before["support_size"] + 1
        assert SDMLanguageModel.from_pretrained(folder).feedback_ids == [id]
        (judged,) = await model.verify([document], SdmOptions(neighbors=1))
        assert (judged.verification.exemplars[0].id, judged.verification.exemplars[0].label) == (id, 0)
        with pytest.raises(ApiError) as error:
            await model.undo_feedback("feedback:77")
        assert error.value.status == 404
        await model.undo_feedback(id)
        assert model.info == before
        assert SDMLanguageModel.from_pretrained(folder).feedback_ids == []
        lm.folder = None
        with pytest.raises(ApiError) as error:
            await model.feedback(FeedbackRequest(document, False))
        assert error.value.status == 403

    run(work)
    model.close(20)


def test_two_servers_over_one_folder_know_the_feedback_of_both(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(trained(), tmp_path / "model"))
    one, two = (Model(SDMLanguageModel.from_pretrained(folder), "tiny", ServerSettings()) for _ in range(2))

    async def work() -> None:
        document = GivenAnswer([{"role": "user", "content": "abc="}], "abd")
        id, size = await one.feedback(FeedbackRequest(document, False))
        (judged,) = await two.verify([document], SdmOptions(neighbors=1))
        assert judged.verification.exemplars[0].id == id
        assert two.info["support_size"] == size
        await two.undo_feedback(id)
        (judged,) = await one.verify([document], SdmOptions(neighbors=1))
        assert judged.verification.exemplars[0].id != id
        assert one.info["support_size"] == size - 1
        with pytest.raises(ApiError) as error:
            await one.undo_feedback(id)
        assert error.value.status == 404
        # What cannot be read is said in the log, and answers go on with what is known.
        await two.feedback(FeedbackRequest(document, False))
        (tensors,) = (folder / "sdm" / "feedback").glob("*.safetensors")
        tensors.write_bytes(b"damaged")
        (again,) = await one.verify([document], SdmOptions(neighbors=1))
        assert again.verification.exemplars == judged.verification.exemplars

    run(work)
    one.close(20)
    two.close(20)


def test_info(lm: SDMLanguageModel) -> None:
    info = describe(lm, "tiny")
    layer = lm.estimator.layers_[0]
    ca, region = layer.calibration, layer.region(lm.alpha)
    columns = info["calibration"]
    assert len(columns["label"]) == len(ca.labels)
    for i in range(len(ca.labels)):
        c = int(ca.z[i].argmax())
        assert (columns["label"][i], columns["prediction"][i], columns["q"][i]) == (ca.labels[i], c, ca.q[i])
        assert columns["probability"][i] == pytest.approx(float(ca.p[i, c]))
        others = [float(ca.p[i, k]) >= region.psi[k] for k in range(2) if k != c]
        inside = float(ca.q_prime[i]) >= region.q_min and float(ca.p[i, c]) >= region.psi[c] and not any(others)
        assert columns["accepted"][i] is inside
    assert any(columns["accepted"])
    assert not all(columns["accepted"])
    assert info["classes"] == ["No", "Yes"]
    assert info["region"] in info["regions"]
    assert len(info["regions"]) == 52
    assert info["support_size"] == len(layer.support_ids)
    assert info["chat"] is True
    prompts = {row["prompt"] for row in calibration_rows()}
    assert len(info["examples"]) == 6
    assert set(info["examples"]) <= prompts


def test_info_samples_large_calibration_sets_and_knows_no_examples_without_a_template(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lm = SDMLanguageModel.from_pretrained(trained(chat=False))
    monkeypatch.setattr("sdmlm.server.info.MAX_POINTS", 10)
    info = describe(lm, "tiny")
    assert {len(column) for column in info["calibration"].values()} == {10}
    assert info == describe(lm, "tiny")
    assert (info["chat"], info["examples"]) == (False, [])
    lm.alpha = 1.0
    region = describe(lm, "tiny")["region"]
    assert region["alpha"] == 1.0
