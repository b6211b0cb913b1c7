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
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from sdmlm.demo import SENTENCES, SENTENCES_SEED, verified
from sdmlm.demo.examples import Example, certified_examples, examples_html, pick_examples, show_examples
from sdmlm.demo.outcomes import outcomes_html
from sdmlm.demo.sentences import settled_sentences
from sdmlm.evaluation.lm_evaluation import Evaluation, evaluation_file, write_evaluation
from sdmlm.experiments.evaluate import evaluate
from sdmlm.experiments.runs import Run
from sdmlm.storage.artifacts import SDM_FOLDER, locked, write_text_atomically
from sdmlm.storage.record import read_record
from sdmlm.tasks import word_ordering

if TYPE_CHECKING:
    from sdmlm.experiments.answer_comparison import AnswerComparison
    from sdmlm.experiments.tables import Tables
    from sdmlm.generation.language_model import SDMLanguageModel

MARK = "demo.json"  # marks the folder of a demo
BEFORE = ".before"  # subfolder that keeps the earlier demo until the new one has finished
REPORT = "report.html"  # written last
OWN_ROWS = "own"  # the rows of the certified SDM layer
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
    "A small language model (trained from scratch on sentences of a grammar) learns from {train} sentences to put their last "
    "three words, which are shuffled, back into order: once with the usual cross-entropy, once with the SDM loss. Then an SDM "
    "layer learns which of its answers can be used without a person looking."
)
STUDY = (
    "The study behind it, as in the paper: for each of the two losses, an SDM layer is calibrated on {calibration} other "
    "sentences. At alpha {alpha:g}, at least {alpha:.0%} of the verdicts that it accepts should be right. "
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
    out.print(INTRO.format(**sizes), style="italic")
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
        lm = verified.make_verified(home / "sdm_hn", home / "data" / f"{OWN_ROWS}.jsonl", home / verified.VERIFIED)
        comparison = verified.compared(lm, splits)
        examples = certified_examples(lm, splits)
    from sdmlm.experiments.tables import tables
    from sdmlm.report.replication import write_report

    paper = tables(runs)
    certificate = lm.certificate()
    promise = "" if certificate is None else certificate.sentence()
    reading = STUDY.format(**sizes, alpha=ALPHA) + READING.format(**sizes) + (FAST_READING if fast else "")
    _show_verified(out, comparison, promise, examples)
    _show_study(out, paper, reading, region_examples)
    texts = (paper.csv(), json.dumps(paper.json(), indent=1), paper.latex())
    for name, text in zip(TABLES, texts, strict=True):
        write_text_atomically(home / name, text)
    write_text_atomically(home / verified.COMPARISON, json.dumps(comparison.json(), indent=1))
    first = _first_sections(comparison, promise, examples, reading)
    more = [("Answers of the SDM language model", examples_html(region_examples))]
    write_report(home / REPORT, runs, paper, "The demo: an SDM language model", more, intro=LEAD, first=first)
    out.print(f"\n{time.perf_counter() - began:.0f} s. Open {home / REPORT} for plots. Try next:", markup=False)
    for line in (f"sdmlm chat {home / verified.VERIFIED}", f"sdmlm serve {home / verified.VERIFIED}"):
        out.print(f"  {line}", markup=False, soft_wrap=True)
    return paper


def _show_verified(out: Console, comparison: AnswerComparison, promise: str, examples: Sequence[Example]) -> None:
    out.print(Text(f"\n{verified.READING.format(alpha=verified.ALPHA)}\n", style="italic"))
    out.print(comparison.table.rich())
    out.print(Text(promise))
    show_examples(out, examples)


def _show_study(out: Console, paper: Tables, reading: str, examples: Sequence[Example]) -> None:
    out.print(Text(f"\n{reading}\n", style="italic"))
    for table in paper.rich():
        out.print(table)
    for pair in paper.comparisons:
        out.print(Text("\n" + pair.statement()))
    show_examples(out, examples)


def _first_sections(
    comparison: AnswerComparison, promise: str, examples: Sequence[Example], reading: str
) -> list[tuple[str, str]]:
    """The sections with which the report begins."""
    own = html.escape(verified.READING.format(alpha=verified.ALPHA))
    opening = verified.risk_coverage_html(comparison) + f"<p>{html.escape(promise)}</p>" + outcomes_html(comparison)
    return [
        ("Which answers can be used without a person looking?", opening),
        ("Four answers and why", examples_html(examples)),
        (
            "Which score tells right answers from wrong ones?",
            f"<p>{own}</p>" + verified.comparison_html(comparison),
        ),
        ("The study behind it: cross-entropy and the SDM loss", f"<p>{html.escape(reading)}</p>"),
    ]


def demo_splits(sizes: Mapping[str, int]) -> dict[str, list[dict[str, str]]]:
    """The rows of the demo, always the same: those of `sdmlm data word-ordering --sentences demo` with these sizes.

    Besides, for the certified SDM layer: as many further rows as for the calibration.
    """
    n, more = sizes["test"], sizes["calibration"]
    how: dict[str, Any] = {**sizes, "test": n + more, "seed": SEED}
    rows = word_ordering.make_splits(settled_sentences(SENTENCES, seed=SENTENCES_SEED), None, **how).rows
    return {**rows, "test": rows["test"][:n], OWN_ROWS: rows["test"][n:]}


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
