"""SDM language models on disk and on the Hub."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from sdm_lm_checks import PROMPTS, all_same, same
from tiny_lm import tiny_lm, tiny_tokenizer
from tiny_sdm_lm import train
from transformers import AutoModelForCausalLM

from sdmlm import SDMLanguageModel, Verification
from sdmlm.language_model.forward import inner_lm
from sdmlm.storage.artifacts import read_metadata, write_metadata

# On disk


def test_saved_and_opened_again(copied: Path, tmp_path: Path) -> None:
    lm = SDMLanguageModel.from_pretrained(copied)
    lm.feedback("abc=", "abc", False)
    data = {"train": {"source": "x.jsonl", "rows": 7, "sha256": "ab"}}
    record = {"status": "finished", "settings": {}, "data": data, "config": {}, "log_history": []}
    (copied / "training.json").write_text(json.dumps(record))
    lm.save_pretrained(tmp_path / "new")
    again = SDMLanguageModel.from_pretrained(tmp_path / "new")
    all_same(again.generate(PROMPTS), lm.generate(PROMPTS))
    assert again.feedback_ids == ["feedback:1"]
    assert again.undo_feedback() == "feedback:1"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "new").config.hidden_size == 32
    assert not [p for p in (tmp_path / "new").rglob("*") if p.suffix in (".bin", ".pt", ".pkl")]

    card = (tmp_path / "new" / "README.md").read_text()
    layer, region = lm.estimator.layers_[0], lm.estimator.region_
    assert f"alpha 0.8, q'min {region.q_min:.4g}; {len(layer.support)} support documents, 48 calibration" in card
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in card.split("\n") if line.startswith("|")]
    points = layer.calibration
    triples = list(zip(points.labels.tolist(), points.predictions.tolist(), range(48), strict=True))
    inside = {a: layer.region(a).contains(points.q_prime, points.p, points.predictions).tolist() for a in (0.6, 0.8)}

    def share(hits: list[bool]) -> str:
        return f"{sum(hits) / len(hits):.1%}" if hits else "-"

    for c, name in enumerate(("No", "Yes")):
        own = [(y == c_hat, inside[0.8][n]) for y, c_hat, n in triples if y == c]
        (row,) = (r for r in rows if r[0] == name)
        assert row[1] == str(len(own))
        assert row[3] == share([right for right, _ in own])
        assert row[5:] == [share([a for _, a in own]), share([right for right, a in own if a])]
    admitted = [y == c_hat for y, c_hat, n in triples if inside[0.8][n]]
    assert next(r for r in rows if r[0] == "0.8")[-2:] == [f"{len(admitted) / 48:.1%}", share(admitted)]
    assert not all(y == c_hat for y, c_hat, _ in triples)
    assert all(f"{psi:.4g}" in card for psi in region.psi)
    assert 'from_pretrained("new")' in card
    assert "1 of them are feedback" in card
    assert "train rows: 7 of x.jsonl (SHA-256 ab)" in card
    assert "- learning_rate: 0.01" in card

    # Into its own folder: the weights stay as they are.
    weights = (tmp_path / "new" / "model.safetensors").stat()
    again.save_pretrained(tmp_path / "new")
    assert (tmp_path / "new" / "model.safetensors").stat().st_mtime_ns == weights.st_mtime_ns
    same(SDMLanguageModel.from_pretrained(tmp_path / "new").generate("abc="), again.generate("abc="))
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        lm.save_pretrained(tmp_path / "file")


def test_other_weights_are_refused(copied: Path) -> None:
    tiny_lm(1, max_position_embeddings=96).save_pretrained(copied)
    with pytest.raises(ValueError, match="fitted over other weights"):
        SDMLanguageModel.from_pretrained(copied)
    lm = SDMLanguageModel.from_pretrained(copied, allow_other_weights=True)
    assert isinstance(lm.generate("abc="), Verification)
    tiny_lm(1, hidden_size=16).save_pretrained(copied)
    with pytest.raises(ValueError, match="64 wide but this model gives 32"):
        SDMLanguageModel.from_pretrained(copied, allow_other_weights=True)


def test_in_another_type_it_is_still_the_same_model(folder: Path) -> None:
    lm = SDMLanguageModel.from_pretrained(folder, dtype=torch.bfloat16)
    assert lm.model.dtype == torch.bfloat16
    v = lm.generate("abc=")
    assert v.verdict in ("Yes", "No")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda sdm: shutil.rmtree(sdm), "has no sdm/ folder"),
        (lambda sdm: (sdm / "lm.json").unlink(), "no whole SDM layer"),
        (lambda sdm: (sdm / "lm.json").write_text("{"), "no whole SDM layer"),
        (lambda sdm: (sdm / "config.json").write_text("{}"), "another SDM layer"),
        (lambda sdm: next(sdm.glob("tensors-*")).write_bytes(b"x"), "checksum differs"),
        (lambda sdm: next(sdm.glob("texts-*")).unlink(), "is missing"),
        (lambda sdm: change(sdm, tags={"open": ""}), "lm.json is damaged"),
        (lambda sdm: change(sdm, autocast="int4"), "lm.json is damaged"),
        (lambda sdm: change(sdm, dtype="int4"), "lm.json is damaged"),
        (lambda sdm: change(sdm, format_version=9), "newer sdmlm"),
        (lambda sdm: change(sdm, training=...), r"lm.json is damaged \(training is missing"),
        (lambda sdm: edited(sdm / "lm.json", '"Yes"', '"Yds"'), r"lm.json is damaged \(its checksum differs"),
        (lambda sdm: (sdm / "lm.json").write_text("[]"), "lm.json is damaged"),
        (
            lambda sdm: edited(sdm.parent / "config.json", '"hidden_size": ', '"hidden_size": "x", "was": '),
            "could not be loaded: Validation error for field 'hidden_size'",
        ),
        (lambda sdm: (sdm / "search.json").write_text("[]"), "search.json is damaged"),
        (lambda sdm: (sdm.parent / "model.safetensors").write_bytes(b"x"), "model of .* could not be loaded"),
        (lambda sdm: (sdm.parent / "tokenizer.json").write_text("x"), "tokenizer of .* could not be loaded"),
    ],
)
def test_a_damaged_folder_is_refused(copied: Path, damage: Any, message: str) -> None:
    damage(copied / "sdm")
    with pytest.raises(ValueError, match=message) as error:
        SDMLanguageModel.from_pretrained(copied)
    assert "\n" not in str(error.value)


def change(sdm: Path, **facts: Any) -> None:
    path = sdm / "lm.json"
    known = {**read_metadata(path), **facts}
    write_metadata(path, {name: value for name, value in known.items() if value is not ...})


def edited(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_feedback_of_other_weights_or_damaged_is_refused(copied: Path) -> None:
    SDMLanguageModel.from_pretrained(copied).feedback("abc=", "abc", True)
    path = copied / "sdm" / "feedback" / "config.json"
    good = path.read_text()
    path.write_text(json.dumps({**json.loads(good), "fingerprint": "0"}))
    with pytest.raises(ValueError, match="given over other weights"):
        SDMLanguageModel.from_pretrained(copied)
    path.write_text(json.dumps({k: v for k, v in json.loads(good).items() if k != "next"}))
    with pytest.raises(ValueError, match="is damaged"):
        SDMLanguageModel.from_pretrained(copied)


def test_an_adapter_folder(tmp_path: Path) -> None:
    from peft import LoraConfig

    tiny_lm(max_position_embeddings=96).save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, task_type="CAUSAL_LM")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    folder = train(tmp_path, peft_config=lora, model=base, num_train_epochs=1)
    assert (folder / "adapter_config.json").exists()
    lm = SDMLanguageModel.from_pretrained(folder)
    found = lm.generate(PROMPTS[:5])
    all_same(found, lm.verify(PROMPTS[:5], [v.text for v in found]))
    lm.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "adapter_model.safetensors").exists()
    assert not (tmp_path / "again" / "model.safetensors").exists()
    all_same(SDMLanguageModel.from_pretrained(tmp_path / "again").generate(PROMPTS[:5]), found)


def test_an_adapter_is_opened_in_the_type_it_was_trained_in(tmp_path: Path) -> None:
    """Not in that of its base on disk: h would be rounded where the layer's was not."""
    from peft import LoraConfig

    path = tmp_path / "base"
    tiny_lm(max_position_embeddings=96).bfloat16().save_pretrained(path)
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear")
    folder = train(tmp_path, peft_config=lora, model=str(path), num_train_epochs=1)
    lm = SDMLanguageModel.from_pretrained(folder)
    assert {p.dtype for p in lm.model.parameters()} == {torch.float32}
    change(folder / "sdm", dtype=...)  # as written by sdmlm before this fact
    assert SDMLanguageModel.from_pretrained(folder).model.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["dora", "vera"])
def test_adapters_that_transformers_does_not_open_whole(tmp_path: Path, kind: str) -> None:
    """It leaves out the magnitudes of DoRA, and does not know VeRA; here the weights are those that were trained."""
    from peft import LoraConfig, VeraConfig

    tiny_lm(max_position_embeddings=96).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    plain: dict[str, Any] = {"r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    config = LoraConfig(**plain, use_dora=True, lora_dropout=0.0) if kind == "dora" else VeraConfig(**plain)
    folder = train(tmp_path, peft_config=config, model=base, num_train_epochs=1, learning_rate=3e-2)
    lm = SDMLanguageModel.from_pretrained(folder)  # which compares the fingerprint of the weights
    trained = {name: p for name, p in base.named_parameters() if kind in name or "magnitude" in name}
    opened = dict(inner_lm(lm.model).named_parameters())
    assert trained
    assert all(torch.equal(p, opened[name]) for name, p in trained.items())
    assert lm.generate(PROMPTS[0]).text


def test_the_hub(copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Api:
        def __init__(self, token: Any = None) -> None:
            asked.append(token)

        def create_repo(self, repo_id: str, **options: Any) -> Any:
            class Repo(str):
                repo_id = "me/model"

            asked.append((repo_id, options))
            return Repo("https://hub/me/model")

        def upload_folder(self, repo_id: str, folder_path: str, **options: Any) -> None:
            shutil.copytree(folder_path, tmp_path / repo_id)

    def download(name: str, **options: Any) -> str:
        asked.append(options["revision"])
        return str(tmp_path / name)

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.chdir(copied)
    lm = SDMLanguageModel.from_pretrained(copied)
    assert lm.push_to_hub("me/model", private=True, token="t") == "https://hub/me/model"
    assert asked[:2] == ["t", ("me/model", {"private": True, "exist_ok": True})]
    assert 'from_pretrained("me/model")' in (tmp_path / "me/model/README.md").read_text()
    assert lm.folder == copied
    theirs = SDMLanguageModel.from_pretrained("me/model", revision="v1")
    assert asked[-1] == "v1"
    all_same(theirs.generate(PROMPTS[:5]), lm.generate(PROMPTS[:5]))
    with pytest.raises(ValueError, match="no folder of its own"):  # a cache is not the user's
        theirs.feedback("abc=", "abc", True)
    with pytest.raises(ValueError, match="revision goes only with a model of the Hub"):
        SDMLanguageModel.from_pretrained(copied, revision="v1")


def test_what_is_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nowhere", "./no/where", "/no/where"):
        with pytest.raises(ValueError, match="is no folder here: name"):
            SDMLanguageModel.from_pretrained(name)

    def offline(name: str, **options: Any) -> str:
        raise OSError("Connection refused.\nlong story")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(ValueError, match=r"the Hub did not give it: Connection refused\.$"):
        SDMLanguageModel.from_pretrained("org/name")
