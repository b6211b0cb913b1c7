"""The demo: a small language model is fine-tuned into an SDM language model on two cores.

The base LM in the package learns to put the last words of a sentence back into order, once with cross-entropy and once
with the SDM loss, both with hard negatives. Then both models answer new sentences, and sentences that are longer than any in
training. The two fine-tunings are calls of `sdmlm train`, in parallel, with one thread each.
"""

from __future__ import annotations

import contextlib
import html
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from sdmlm.demo import SENTENCES, SENTENCES_SEED, verified
from sdmlm.demo.outcomes import outcomes_html
from sdmlm.demo.sentences import settled_sentences
from sdmlm.evaluation.lm_evaluation import Evaluation, evaluation_file, write_evaluation
from sdmlm.experiments.evaluate import evaluate, generation_length
from sdmlm.experiments.runs import Run
from sdmlm.storage.artifacts import SDM_FOLDER, locked, write_text_atomically
from sdmlm.storage.record import read_record
from sdmlm.tasks import word_ordering

if TYPE_CHECKING:
    from sdmlm.experiments.tables import Tables
    from sdmlm.generation.language_model import SDMLanguageModel
    from sdmlm.generation.verification import Verification

MARK = "demo.json"  # marks the folder of a demo
BEFORE = ".before"  # subfolder that keeps the earlier demo until the new one has finished
REPORT = "report.html"  # written last
SEED = 0
LABELS = {"ce_hn": "CE + HN", "sdm_hn": "SDM + HN"}
TABLES = ("tables.csv", "tables.json", "tables.tex")
OURS = {
    MARK,
    BEFORE,
    REPORT,
    "data",
    verified.VERIFIED,
    verified.COMPARISON,
    *LABELS,
    *TABLES,
}  # all that a demo has in its folder
LOSSES = {"ce_hn": "ce", "sdm_hn": "sdm"}
ALPHA = 0.9
# Chosen on the calibration rows and a development set; recipes/demo holds the same. Negatives and final layer are the paper's:
# the certified model of the demo is made from this one (`demo.verified`).
TRAINING: dict[str, Any] = {
    "gamma_other": 0.0,
    "documents": "paper",
    "num_train_epochs": 4,
    "per_device_train_batch_size": 32,
    "gradient_accumulation_steps": 1,
    "learning_rate": 1e-3,
    "eval_strategy": "steps",
    "eval_steps": 0.5,
    "save_strategy": "steps",
    "save_steps": 0.5,
    "save_total_limit": 1,
    "alpha": ALPHA,
    "exemplar_dim": 256,
    "sdm_epochs": 50,
    "sdm_learning_rate": 3e-3,
    "use_cpu": True,  # also on machines with a GPU: the model is too small to gain from one
}
SIZES = {"train": 3200, "calibration": 3200, "test": 1000, "shifted": 1000}
FAST_TRAINING = {**TRAINING, "num_train_epochs": 2, "eval_steps": 0.99, "save_steps": 0.99}
FAST_SIZES = {"train": 1000, "calibration": 1000, "test": 200, "shifted": 200}

INTRO = (
    "A small language model (trained from scratch on sentences of a grammar) is fine-tuned on {train} sentences whose last "
    "three words are shuffled, to put them back into order: once with the usual cross-entropy, once with the SDM loss. "
    "{calibration} other sentences are used to calibrate an SDM layer for each. At alpha {alpha:g}, at least {alpha:.0%} of "
    "the verdicts that it accepts should be right."
)
LEAD = (
    "A small language model puts the last three words of a sentence back into order, and a second model judges each of its "
    "answers. A verified answer may be used without a person looking; any other is left to a person."
)
READING = (
    '"test" are {test} new sentences, "shifted" the {shifted} longest, longer than any in training. An answer is accepted '
    "if its verdict (Yes: the words are in order, No: they are not) lies in the high-reliability region. n/|D| is the share "
    "accepted, Acc. the share of these verdicts that are right."
)
FAST_READING = " With so few rows and epochs, little or nothing is accepted: run `sdmlm demo` without --fast for more."


def run_demo(folder: str, fast: bool, out: Console) -> Tables:
    """Run the demo: data, two fine-tunings, two test sets each, tables, a report, and answers with reasons."""
    with _fresh(Path(folder)) as home:
        return _run(home, fast, out)


def _run(home: Path, fast: bool, out: Console) -> Tables:
    began, sizes = time.perf_counter(), FAST_SIZES if fast else SIZES
    out.print(INTRO.format(**sizes, alpha=ALPHA), style="italic")
    splits = demo_splits(sizes)
    for name, rows in splits.items():
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        write_text_atomically(home / "data" / f"{name}.jsonl", "".join(lines))
    runs, region_examples = [], []
    for setting in _fine_tune(home, FAST_TRAINING if fast else TRAINING, out):
        # These imports take seconds: do them while the trainings run.
        from sdmlm.demo.one_thread import one_thread
        from sdmlm.generation.language_model import SDMLanguageModel

        lm = SDMLanguageModel.from_pretrained(home / setting, device="cpu")
        with one_thread():
            evaluations = {name: _evaluate(lm, home, setting, name, splits[name]) for name in ("test", "shifted")}
            if setting == "sdm_hn":
                region_examples = pick_examples(lm, evaluations, splits)
        record = read_record(home / setting)
        assert record is not None  # it has just been written
        runs.append(Run("demo", setting, LABELS[setting], SEED, evaluations, record["log_history"]))
    runs.sort(key=lambda run: list(LABELS).index(run.setting))  # not in the order in which they finished
    out.print("A second SDM layer is fitted over the language model's own answers; then all scores are compared.")
    with one_thread():
        lm = verified.make_verified(home / "sdm_hn", home / "data" / "calibration.jsonl", home / verified.VERIFIED)
        comparison = verified.compared(lm, splits)
        examples = verified.examples_of(lm, splits)
    from sdmlm.experiments.tables import tables
    from sdmlm.report.replication import write_report

    paper_tables, reading = tables(runs), READING.format(**sizes) + (FAST_READING if fast else "")
    out.print(Text(f"\n{reading}\n", style="italic"))
    for table in paper_tables.rich():
        out.print(table)
    for pair in paper_tables.comparisons:
        out.print(Text("\n" + pair.statement()))
    for title, row, verification in region_examples:
        _show(out, title, row, verification)
    own = verified.READING.format(alpha=verified.ALPHA)
    out.print(Text(f"\n{own}\n", style="italic"))
    out.print(comparison.table.rich())
    certificate = lm.certificate()
    promise = "" if certificate is None else certificate.sentence()
    out.print(Text(promise))
    for title, row, verification in examples:
        _show(out, title, row, verification)
    texts = (paper_tables.csv(), json.dumps(paper_tables.json(), indent=1), paper_tables.latex())
    for name, text in zip(TABLES, texts, strict=True):
        write_text_atomically(home / name, text)
    write_text_atomically(home / verified.COMPARISON, json.dumps(comparison.json(), indent=1))
    studied = f"{INTRO.format(**sizes, alpha=ALPHA)} {reading}"
    first = [
        (
            "Which answers can be used without a person looking?",
            outcomes_html(comparison) + f"<p>{html.escape(promise)}</p>",
        ),
        ("Four answers and why", _examples_html(examples)),
        (
            "Which score tells right answers from wrong ones?",
            f"<p>{html.escape(own)}</p>" + verified.comparison_html(comparison),
        ),
        ("The study behind it: cross-entropy and the SDM loss", f"<p>{html.escape(studied)}</p>"),
    ]
    more = [("Answers of the SDM language model", _examples_html(region_examples))]
    write_report(home / REPORT, runs, paper_tables, "The demo: an SDM language model", more, intro=LEAD, first=first)
    out.print(f"\n{time.perf_counter() - began:.0f} s. Open {home / REPORT} for plots. Try next:", markup=False)
    for line in (f"sdmlm chat {home / verified.VERIFIED}", f"sdmlm serve {home / verified.VERIFIED}"):
        out.print(f"  {line}", markup=False, soft_wrap=True)
    return paper_tables


def demo_splits(sizes: Mapping[str, int]) -> dict[str, list[dict[str, str]]]:
    """The rows of the demo, always the same: those of `sdmlm data word-ordering --sentences demo` with these sizes."""
    how: dict[str, Any] = {**sizes, "seed": SEED}
    return word_ordering.make_splits(settled_sentences(SENTENCES, seed=SENTENCES_SEED), None, **how).rows


@contextlib.contextmanager
def _fresh(home: Path) -> Iterator[Path]:
    """An empty, locked folder for the demo.

    An earlier demo in it is moved to a subfolder: deleted when this demo succeeds, restored when it fails.
    """
    _check_ours(home)
    with locked(home, wait=0) as ours:
        if not ours:
            raise ValueError(f"Another demo is running in {home}: wait for it, or give another folder with --output.")
        before = home / BEFORE
        if before.exists() and not (home / REPORT).exists():
            _empty(home, but=BEFORE)  # the last demo was killed: keep the one before it
        else:
            shutil.rmtree(before, ignore_errors=True)
            earlier = list(home.iterdir())
            before.mkdir()
            for path in earlier:
                path.rename(before / path.name)
        try:
            write_text_atomically(home / MARK, json.dumps({"demo": "word ordering"}) + "\n")
            yield home
        except BaseException:
            _empty(home, but=BEFORE)
            for path in before.iterdir():
                path.rename(home / path.name)
            before.rmdir()
            raise
        shutil.rmtree(before, ignore_errors=True)


def _empty(folder: Path, but: str) -> None:
    for path in folder.iterdir():
        if path.name == but:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def _check_ours(home: Path) -> None:
    """Refuse a folder that is not a demo, or to which the user has added files: everything in it would be deleted."""
    marked = any((home / part / MARK).exists() for part in ("", BEFORE))
    if home.is_file() or (home.is_dir() and any(home.iterdir()) and not marked):
        raise ValueError(f"{home} holds something other than a demo: give another folder with --output.")
    for part in (home, home / BEFORE):
        strange = sorted({p.name for p in part.iterdir()} - OURS) if part.is_dir() else []
        if strange:
            raise ValueError(
                f"{part / strange[0]} is no part of a demo: move it, or give another folder with --output."
            )
        for model in (part / name for name in (*LABELS, verified.VERIFIED)):
            if (model / SDM_FOLDER / "feedback").exists() or (model / SDM_FOLDER / "search.json").exists():
                raise ValueError(f"{model} holds feedback or a calibrated search: give another folder with --output.")


# Fine-tuning


def command(home: Path, setting: str, training: Mapping[str, Any]) -> list[str]:
    """The `sdmlm train` that makes the model of a setting."""
    options = {
        "model": "demo",
        "data": home / "data" / "train.jsonl",
        "calibration": home / "data" / "calibration.jsonl",
        "output": home / setting,
        "loss": LOSSES[setting],
        "seed": SEED,
        **training,
    }
    return ["train", *(f"--{name.replace('_', '-')}={value}" for name, value in options.items())]


def _fine_tune(home: Path, training: Mapping[str, Any], out: Console) -> Iterator[str]:
    """Train both settings in parallel, each in a process of its own with one thread; yields each when it is done.

    So the first can be evaluated while the other is still training.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    # All steps use tensors of the same sizes: the allocator keeps freed memory instead of returning it.
    environment |= {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**32)}
    options = {**training, "logging_steps": 5}
    running: dict[str, subprocess.Popen[str]] = {}
    said: dict[str, list[str]] = {setting: [] for setting in LABELS}
    done: queue.Queue[str] = queue.Queue()
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[where]}"), TimeElapsedColumn()
    with Progress(*columns, console=out) as progress:
        tasks = {
            setting: progress.add_task(f"{label:8}", total=training["num_train_epochs"], where="starting")
            for setting, label in LABELS.items()
        }

        def follow(setting: str) -> None:
            """Show the log of a training as a progress bar."""
            for line in running[setting].stderr or ():
                said[setting].append(line)
                if (at := re.search(r"^loss ([\d.e-]+).* epoch ([\d.]+)", line)) is not None:
                    where = f"epoch {float(at[2]):.1f}, loss {float(at[1]):.3f}"
                    if not out.is_terminal and int(float(at[2])) > int(progress.tasks[tasks[setting]].completed):
                        out.print(f"{LABELS[setting]}: {where}", highlight=False)  # a log shows no bars
                    progress.update(tasks[setting], completed=float(at[2]), where=where)
                elif "train_runtime" in line:
                    progress.update(tasks[setting], completed=training["num_train_epochs"], where="final SDM layer")
            done.put(setting)

        try:
            for setting in LABELS:
                arguments = [sys.executable, "-m", "sdmlm.cli", *command(home, setting, options), "--json"]
                running[setting] = subprocess.Popen(
                    arguments, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
                )
            followers = [threading.Thread(target=follow, args=[setting]) for setting in LABELS]
            for follower in followers:
                follower.start()
            for _ in LABELS:
                setting = done.get()
                if running[setting].wait():
                    last = [x for x in said[setting] if x.startswith("sdmlm: ")] or said[setting] or ["no message"]
                    raise ValueError(
                        f"Fine-tuning {LABELS[setting]} failed: {last[-1].removeprefix('sdmlm: ').strip()}"
                    )
                for checkpoint in (home / setting).glob("checkpoint-*"):
                    shutil.rmtree(checkpoint)
                progress.update(tasks[setting], where="answering the tests")
                yield setting
                progress.update(tasks[setting], where="done")
        finally:
            for process in running.values():
                process.terminate()


# Answers


def _evaluate(
    lm: SDMLanguageModel, home: Path, setting: str, name: str, rows: Sequence[Mapping[str, Any]]
) -> Evaluation:
    from sdmlm.language_model.sdm_folder import layer_sha256

    evaluation = evaluate(lm, word_ordering, rows, progress=False)  # a progress bar is shown already
    metadata = {
        **{"family": "demo", "setting": setting, "label": LABELS[setting], "seed": SEED, "test": name},
        "sdm_sha256": layer_sha256(home / setting / SDM_FOLDER),
    }
    write_evaluation(evaluation_file(home / setting, name), evaluation, metadata)
    return evaluation


def pick_examples(
    lm: SDMLanguageModel, evaluations: Mapping[str, Evaluation], splits: Mapping[str, Sequence[Mapping[str, str]]]
) -> list[tuple[str, Mapping[str, str], Verification]]:
    """(title, row, answer) of the first answer of each kind, not picked by hand."""
    shown = []
    for name, e in evaluations.items():
        yes, right = e.prediction == 1, e.prediction == e.y
        kinds = {
            "verified: accepted as Yes": e.accepted & yes & right,
            "accepted as No": e.accepted & ~yes & right,
            "rejected (not verified: a person should look)": ~e.accepted,
            "accepted although its verdict is wrong": e.accepted & ~right,
        }
        if name == "shifted":
            kinds = {"rejected (not verified: a person should look)": ~e.accepted}
        picked = {kind: splits[name][int(mask.argmax())] for kind, mask in kinds.items() if mask.any()}
        room = generation_length(lm, splits[name])  # as in the evaluation, so that long answers are the same
        prompts = [row["prompt"] for row in picked.values()]
        answers = lm.generate(prompts, max_new_tokens=room, neighbors=2, progress=False)
        shown += [
            (f"The first of the {name} answers that is {kind}", row, answer)
            for (kind, row), answer in zip(picked.items(), answers, strict=True)
        ]
    return shown


def _asked(prompt: str) -> str:
    """The part of a prompt that differs between rows, without the fixed instructions."""
    start, end = re.findall(r"'(.*?)'(?= by reordering|\. Only)", prompt)
    return f"{start} ... ({end})"


def _lines_of(row: Mapping[str, str], verification: Verification) -> Iterator[str]:
    yield f"Asked:  {_asked(row['prompt'])}"
    yield f"Answer: {verification.text}"
    right = verification.text.strip() == row["chosen"]
    truth = "It is right." if right else f"It is wrong; the sentence was: {row['sentence']}"
    yield f"The verdict on it is {verification.verdict}. {truth}"
    yield verification.reason
    for exemplar in verification.exemplars:
        prompt, _, document = re.sub(r"<\|.*?\|>", "", exemplar.text or "").rpartition(" if it did not.")
        what = "right" if exemplar.label == 1 else "wrong"
        said = document.strip().removesuffix("<verified>").strip()
        yield f"  similar, at distance {exemplar.distance:.2f}: {said}, which is {what} for {_asked(prompt)}"


def _show(out: Console, title: str, row: Mapping[str, str], verification: Verification) -> None:
    out.print(Text(f"\n{title}", style="bold"))
    for line in _lines_of(row, verification):
        out.print(Padding(Text(line.strip()), (0, 0, 0, len(line) - len(line.lstrip()))))


def _examples_html(examples: Sequence[tuple[str, Mapping[str, str], Verification]]) -> str:
    parts = []
    for title, row, verification in examples:
        lines = "".join(f"<li>{html.escape(line.strip())}</li>" for line in _lines_of(row, verification))
        parts.append(f"<h3>{html.escape(title)}</h3><ul>{lines}</ul>")
    return "".join(parts)
