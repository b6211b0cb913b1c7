"""`sdmlm generate`, `sdmlm verify` and `sdmlm chat` on a tiny SDM language model."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_checks import fails, strict_json
from tiny_sdm_lm import calibration_rows, marked_rows, train

from sdmlm import SDMLanguageModel, SearchPolicy, calibrate_search
from sdmlm.cli import main
from sdmlm.cli.commands.calibrate_search import summary
from sdmlm.cli.commands.generate import decision
from sdmlm.cli.common import to_json

PROMPTS = [row["prompt"] for row in marked_rows(30, 5)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("cli"))


@pytest.fixture(scope="module")
def lm(folder: Path) -> SDMLanguageModel:
    return SDMLanguageModel.from_pretrained(folder)


@pytest.fixture
def here(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model").symlink_to(folder)
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS) + "\n\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def pipe(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))


def lines(text: str) -> list[Any]:
    return [strict_json(line) for line in text.splitlines()]


def unwrapped(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.usefixtures("here")
def test_json_lines_are_the_verifications(lm: SDMLanguageModel, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", "model", "--prompts", "prompts.txt", "--json", "--alpha", "0.7", "--neighbors", "2"]
    assert main([*command, "--temperature", "1.5", "--top-p", "0.9", "--seed", "3", "--max-new-tokens", "20"]) == 0
    out, err = capsys.readouterr()
    expected = lm.generate(
        PROMPTS, alpha=0.7, neighbors=2, temperature=1.5, top_p=0.9, seed=3, max_new_tokens=20, progress=False
    )
    assert lines(out) == [
        {"prompt": prompt, **json.loads(json.dumps(v.to_dict()))} for prompt, v in zip(PROMPTS, expected, strict=True)
    ]
    assert err == ""


def test_a_table_for_people(here: Path, lm: SDMLanguageModel, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "model", "--prompts", "prompts.txt", "--output", "out.jsonl"]) == 0
    out = unwrapped(capsys.readouterr().out)
    found = lm.generate(PROMPTS)
    verified = sum(v.verified for v in found)
    assert f'{verified} of 30 answers ({verified / 30:.1%}) are verified: judged "Yes" in the high-reliability ' in out
    assert "... and 10 more." in out
    assert "Written: out.jsonl." in out
    written = lines((here / "out.jsonl").read_text())
    assert [row["text"] for row in written] == [v.text for v in found]
    assert [row["verified"] for row in written] == [v.verified for v in found]
    assert 0 < verified < 30
    assert all(word in out for word in ("Verified (verdict Yes)", "Not verified", "a person should look (verdict "))
    for prompt, v in zip(PROMPTS[:20], found, strict=False):
        assert unwrapped(f"asked: {prompt} answer: {v.text} why: {v.reason}") in out


def test_prompts_from_json_lines_and_stdin(
    here: Path, lm: SDMLanguageModel, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": "abc=", "more": 1}, {"prompt": [{"role": "user", "content": "abd="}]}]
    text = "".join(json.dumps(row) + "\n\n" for row in rows)
    (here / "p.jsonl").write_text("\ufeff" + text)
    asked = ["generate", "model", "--json", "--stop", "d", "--stop", "x", "--prompts"]
    assert main([*asked, "p.jsonl"]) == 0
    first = lines(capsys.readouterr().out)
    assert [row["prompt"] for row in first] == [row["prompt"] for row in rows]
    assert first[1]["text"] == lm.generate("abd=", stop="d").text
    pipe(monkeypatch, text.encode())
    assert main([*asked, "-"]) == 0
    assert lines(capsys.readouterr().out) == first
    pipe(monkeypatch, b"abc=\r\nabd=\n")
    assert main([*asked, "-"]) == 0
    assert [row["prompt"] for row in lines(capsys.readouterr().out)] == ["abc=", "abd="]


def test_fields_of_the_rows_stay_and_strange_line_ends_are_text(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "rows.jsonl").write_text(
        json.dumps({"id": 7, "prompt": "abc=", "completion": "abc", "text": "mine"}) + "\n"
    )
    for command in (["generate", "model", "--prompts"], ["verify", "model", "--data"]):
        assert main([*command, "rows.jsonl", "--json"]) == 0
        (row,) = lines(capsys.readouterr().out)
        assert (row["id"], row["prompt"], row["text"]) == (7, "abc=", "abc")
    pipe(monkeypatch, "a\u2028bc=\n".encode())
    assert main(["generate", "model", "--prompts", "-", "--json"]) == 0
    assert strict_json(capsys.readouterr().out)["prompt"] == "a\u2028bc="


def test_search(folder: Path, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "model").unlink()
    shutil.copytree(folder, here / "model")
    asked = ["generate", "model", "--prompts", "prompts.txt", "--json", "--search", "resample", "--budget", "2"]
    assert main(asked) == 0
    out, err = capsys.readouterr()
    assert not any(row["calibrated"] for row in lines(out))
    assert {row["tries"] for row in lines(out)} == {1, 3}
    assert (
        err
        == "sdmlm: this search is neither certified nor calibrated with these settings, so answers may be accepted too easily.\n"
    )
    (here / "ca.jsonl").write_text("".join(json.dumps(row) + "\n" for row in calibration_rows()))
    calibrate = ["calibrate-search", "model", "--data", "ca.jsonl", "--search", "resample", "--budget", "2"]
    assert main([*calibrate, "--json"]) == 0
    facts = strict_json(capsys.readouterr().out)
    opened = SDMLanguageModel.from_pretrained("model")
    expected = calibrate_search(opened, calibration_rows(), SearchPolicy(budget=2), save=False)
    assert facts == strict_json(to_json({"model": "model", **summary(expected)}))
    assert main(calibrate) == 0
    out, err = capsys.readouterr()
    assert "tries per prompt" in unwrapped(out)
    assert err == ""
    assert main(["report", "model", "--output", "model.html"]) == 0
    row = re.search(r"resample, budget 2.*?</tr>", (here / "model.html").read_text(), re.DOTALL)
    assert row is not None
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", row[0])
    accepted, right = int(expected.accepted.sum()), expected.accepted_right
    assert 0 < accepted < len(expected)
    assert cells[-3:] == [
        f"{accepted / len(expected):.1%}", f"{right / accepted:.1%}", f"{sum(expected.tries) / len(expected):.2f}"
    ]  # fmt: skip
    capsys.readouterr()
    assert main([*calibrate, "--alpha", "1"]) == 0
    assert "no final answer lies in the region" in unwrapped(capsys.readouterr().err)
    assert main(asked) == 0
    out, err = capsys.readouterr()
    assert all(row["calibrated"] for row in lines(out))
    assert err == ""
    (here / "short.jsonl").write_text("".join(json.dumps(row) + "\n" for row in calibration_rows()[:9]))
    assert "rows and 9 are given" in fails(capsys, *calibrate[:3], "short.jsonl", *calibrate[4:])


def test_verify(
    here: Path, lm: SDMLanguageModel, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = [("abc=", "abc"), ("abc=", "abd."), ("hgf=", "hgf\n<verified>No</verified>")]
    text = "".join(json.dumps({"prompt": p, "completion": c}) + "\n" for p, c in pairs)
    (here / "answers.jsonl").write_text(text)
    assert main(["verify", "model", "--data", "answers.jsonl", "--alpha", "0.7", "--json", "--output", "o.jsonl"]) == 0
    out = capsys.readouterr().out
    expected = lm.verify([p for p, _ in pairs], [c for _, c in pairs], alpha=0.7)
    assert lines(out) == [
        {"prompt": p, **json.loads(json.dumps(v.to_dict()))} for (p, _), v in zip(pairs, expected, strict=True)
    ]
    assert (here / "o.jsonl").read_text() == out
    assert lines(out)[2]["text"] == "hgf"
    pipe(monkeypatch, text.encode())
    assert main(["verify", "model", "--data", "-"]) == 0
    assert "of 3 answers" in capsys.readouterr().out


# Chat


def test_chat_with_piped_lines(
    here: Path, lm: SDMLanguageModel, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe(monkeypatch, ("abc=\n\n" + "a" * 300 + "\nabd=").encode())
    assert main(["chat", "model", "--alpha", "0.7"]) == 0
    out, err = capsys.readouterr()
    first, second = lm.generate(["abc=", "abd="], alpha=0.7)
    assert out.startswith(f"{first.text}\n{decision(first)}. {first.reason}\n{second.text}\n")
    assert out.endswith(second.reason + "\n")
    assert err.startswith("sdmlm: This has 300 tokens, but the model's context leaves room for")
    assert err.count("\n") == 1


def test_chat_keeps_the_conversation_where_there_is_a_template(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = train(tmp_path, chat=True, num_train_epochs=3)
    asked: list[Any] = []
    plain = SDMLanguageModel.generate

    def listen(self: Any, prompts: Any, **options: Any) -> Any:
        asked.append(prompts[0])
        return plain(self, prompts, **options)

    monkeypatch.setattr(SDMLanguageModel, "generate", listen)
    pipe(monkeypatch, b"abc=\nabd=\n\nabe=\n")
    assert main(["chat", str(folder), "--search", "resample", "--budget", "1"]) == 0
    capsys.readouterr()
    assert [[m["role"] for m in turns] for turns in asked] == [["user"], ["user", "assistant", "user"], ["user"]]
    assert asked[1][0] == asked[0][0]


def test_the_person_at_a_terminal(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal("abc=\n"))
    assert main(["chat", "model"]) == 0
    out = capsys.readouterr().out
    assert "Ctrl-D ends" in out
    assert "> " in out


def test_a_small_model_runs_on_one_thread(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def note(self: Any, *_: Any, **__: Any) -> list[Any]:
        seen.append(torch.get_num_threads())
        return []

    class Server:
        run = note

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(SDMLanguageModel, "judge", note)
    monkeypatch.setattr("sdmlm.cli.commands.serve.make_server", lambda *_: Server())
    (here / "answers.jsonl").write_text('{"prompt": "abc=", "completion": "abc"}\n')
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(StopIteration):  # there is no verdict to show
            main(["verify", "model", "--data", "answers.jsonl"])
        main(["serve", "model", "--port", "0"])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert seen == [1, 1]


@pytest.mark.parametrize("command", ["train", "calibrate", "fit", "generate", "verify", "chat", "serve"])
def test_help_says_how_many_threads(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    out = capsys.readouterr().out
    assert "one thread" in unwrapped(out)
    assert "OMP_NUM_THREADS" in out


# Bad input


def test_what_is_too_long_is_listed_and_the_rest_is_judged(
    here: Path, lm: SDMLanguageModel, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "long.txt").write_text("abc=\n" + "a" * 300 + "\nabd=\n")
    assert main(["generate", "model", "--prompts", "long.txt", "--json"]) == 1
    out, err = capsys.readouterr()
    first, refused, last = lines(out)
    expected = lm.generate(["abc=", "abd="])
    assert [first["text"], last["text"]] == [v.text for v in expected]
    assert (first["prompt"], last["prompt"]) == ("abc=", "abd=")
    assert set(refused) == {"prompt", "verified", "error"}
    assert refused["verified"] is False
    assert refused["error"].startswith("Prompt 1 has 300 tokens")
    assert err == f"sdmlm: 1 of 3 rows were not judged:\nsdmlm:   {refused['error']}\n"
    rows = [{"prompt": "abc=", "completion": c} for c in ("abc", "a" * 300, "abd.")]
    (here / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["verify", "model", "--data", "long.jsonl", "--output", "v.jsonl"]) == 1
    out, err = capsys.readouterr()
    assert "of 2 answers" in unwrapped(out)
    assert "Prompt 1 and its completion are longer together" in err
    assert ["error" in row for row in lines((here / "v.jsonl").read_text())] == [False, True, False]
    (here / "all.txt").write_text("a" * 300)
    assert main(["generate", "model", "--prompts", "all.txt"]) == 1
    assert "1 of 1 rows were not judged" in capsys.readouterr().err


FORGED = "\x1b[2J\x1b[32m Yes, verified\x9b\u202e\u200b\r"


def test_text_cannot_control_the_terminal(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"prompt": FORGED + "abc=", "completion": FORGED}
    (here / "forged.jsonl").write_text(json.dumps(row) + "\n")
    hidden = set(FORGED) - set("[2J3m Yes,vrifd")
    shown = r"\x1b[2J\x1b[32m Yes, verified\x9b\u202e\u200b\x0d"

    class Model:
        """Says whatever it is asked, forged text included."""

        def __init__(self, lm: SDMLanguageModel) -> None:
            self.encoder, self.tokenizer, self.model, self._lm = lm.encoder, lm.tokenizer, lm.model, lm

        def __getattr__(self, name: str) -> Any:
            def judged(prompts: list[Any], *args: Any, on_text: Any = None, **options: Any) -> Any:
                if on_text is not None:
                    on_text(0, FORGED)
                v = self._lm.verify(["abc="], ["abc"])[0]
                return [dataclasses.replace(v, text=FORGED, reason=FORGED) for _ in prompts]

            return judged

    real = SDMLanguageModel.from_pretrained
    monkeypatch.setattr(SDMLanguageModel, "from_pretrained", lambda *a, **k: Model(real(*a, **k)))
    for command in (["verify", "model", "--data"], ["generate", "model", "--prompts"]):
        for options in ([], ["--json"]):
            assert main([*command, "forged.jsonl", *options]) == 0
            out, err = capsys.readouterr()
            assert not hidden & set(out + err), (command, options)
            if options:
                assert lines(out)[0]["text"] == FORGED  # the same value, in JSON escapes
            else:
                assert unwrapped(out).count(shown.removesuffix(r"\x0d")) >= 3  # asked, answer and why
    pipe(monkeypatch, FORGED.encode()[:-1] + b"\n")
    assert main(["chat", "model"]) == 0
    out, err = capsys.readouterr()
    assert not hidden & set(out + err)
    assert shown in out
    assert not hidden & set(fails(capsys, "generate", "model", "--prompts", FORGED + ".csv"))


def test_one_sentence_for_every_mistake(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "bad.txt").write_bytes(b"abc\xff")
    (here / "empty.txt").write_text("\n \n")
    (here / "bad.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    (here / "list.jsonl").write_text("[1]\n")
    (here / "other.jsonl").write_text('{"text": "a"}\n')
    (here / "types.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{"prompt": 3, "completion": "b"}\n')
    (here / "x.csv").write_text("a")
    ask = ["generate", "model", "--prompts"]
    for name, message in {
        "bad.txt": "bad.txt is not UTF-8 text (byte 3)",
        "empty.txt": "empty.txt is empty",
        "bad.jsonl": "bad.jsonl, line 2: not JSON",
        "list.jsonl": "list.jsonl, line 1: expected an object",
        "other.jsonl": "other.jsonl, line 1: 'prompt' is missing",
        "types.jsonl": "Prompt 1 is int",
        "x.csv": "x.csv is of an unknown kind",
        "none.txt": "none.txt: No such file",
        ".": ". is a folder",
    }.items():
        assert message in fails(capsys, *ask, name)
    assert "'completion' is missing" in fails(capsys, "verify", "model", "--data", "bad.jsonl")
    assert "unknown kind" in fails(capsys, "verify", "model", "--data", "prompts.txt")
    good = [*ask, "prompts.txt"]
    assert "alpha is 0.3" in fails(capsys, *good, "--alpha", "0.3")
    assert "temperature is -1.0" in fails(capsys, *good, "--temperature", "-1")
    assert "budget is -1" in fails(capsys, *good, "--search", "resample", "--budget", "-1")
    assert "must end in .jsonl" in fails(capsys, *good, "--output", "o.csv")
    assert "is no folder here" in fails(capsys, "generate", "nowhere", "--prompts", "prompts.txt")
    assert "cannot be used here" in fails(capsys, *good, "--device", "warp")
    (here / "plain").mkdir()
    assert "has no sdm/ folder" in fails(capsys, "verify", "plain", "--data", "types.jsonl")
    pipe(monkeypatch, b"abc=\n")
    assert "has no sdm/ folder" in fails(capsys, "chat", "plain")
    for wrong, message in {
        ("--alpha", "2"): "alpha is 2.0",
        ("--temperature", "-1"): "temperature is -1.0",
        ("--top-p", "5"): "top_p is 5.0",
        ("--max-new-tokens", "0"): "max_new_tokens is 0",
        ("--seed", "-1"): "seed is -1",
    }.items():
        pipe(monkeypatch, b"abc=\n")
        assert message in fails(capsys, "chat", "model", *wrong)
    pipe(monkeypatch, b"ab\xff\n")
    assert "not UTF-8" in fails(capsys, "chat", "model")
    pipe(monkeypatch, b"")
    assert "stdin is empty" in fails(capsys, *ask, "-")
