"""`sdmlm report`: describe a trained SDM language model in one HTML file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from sdmlm.cli import common
from sdmlm.storage.record import read_record

EXAMPLES = """\
  sdmlm report runs/demo/sdm_hn
  sdmlm report runs/lm --output lm.html --alpha 0.9"""


def add(subparsers: Any) -> None:
    """Declare the command."""
    parser = common.add_command(subparsers, "report", "describe a trained SDM LM in one HTML file", EXAMPLES)
    parser.add_argument("model", metavar="DIR", help="folder of an SDM language model")
    parser.add_argument("--output", metavar="FILE.html", help="the file to write (DIR/report.html)")
    parser.add_argument(
        "--alpha", type=float, metavar="A", help="accuracy that accepted answers are to have (as calibrated)"
    )
    parser.add_argument("--json", action="store_true", help="print the main numbers as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Write the report: the SDM layer, the settings, and the training and evaluations if the folder holds them."""
    from sdmlm.estimator.calibration_summary import summarize_calibration
    from sdmlm.estimator.estimator import SDMEstimator
    from sdmlm.evaluation.lm_evaluation import read_evaluations
    from sdmlm.generation.feedback import load_feedback, with_feedback
    from sdmlm.generation.judging import applicable
    from sdmlm.generation.search_calibration import load_searches
    from sdmlm.generation.search_certificate import in_force, load_search_certificates
    from sdmlm.language_model.answer_rule import AnswerCertificate, load_certificate
    from sdmlm.language_model.sdm_folder import layer_sha256, read_lm_metadata
    from sdmlm.report.language_model import write_report
    from sdmlm.storage.artifacts import SDM_FOLDER

    folder = Path(args.model)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder: name that of an SDM language model.")
    output = args.output or str(folder / "report.html")
    common.check_output_file(output, ".html")
    sdm = folder / SDM_FOLDER
    metadata = read_lm_metadata(sdm)
    estimator = SDMEstimator.from_pretrained(sdm)
    feedback = load_feedback(sdm, metadata["fingerprint"])
    alpha = estimator.alpha_ if args.alpha is None else args.alpha
    single = load_certificate(sdm)
    certificate = applicable(single, alpha, with_feedback(estimator, feedback.items).digest)
    if args.alpha is not None:
        estimator.recalibrate(args.alpha)
    estimator = with_feedback(estimator, feedback.items)
    digest = estimator.digest()

    def deciding(alpha: float) -> AnswerCertificate | None:
        return applicable(single, alpha, lambda: digest)

    # What was made for another SDM layer or certificate no longer applies.
    searches = [one for one in load_searches(sdm) if one.estimator == digest and deciding(one.alpha) is None]
    certified = in_force(load_search_certificates(sdm), None if single is None else deciding(single.alpha))
    runs, others = read_evaluations(folder, layer_sha256(sdm))
    for path in others:
        common.warn(f"{path} is left out: it was made with another SDM layer than the present one.")
    record, added = read_record(folder), len(feedback.items)
    write_report(output, folder.name, estimator, metadata, record, runs, searches, added, certificate, certified)
    if args.json:
        common.print_json({"output": output, "tests": sorted(runs), **summarize_calibration(estimator).metrics()})
        return
    common.console(args).print(f"Written: {output}", markup=False, soft_wrap=True)
