"""`sdmlm certify`: certify the accuracy among what is accepted, with points or rows that were not used for fitting."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING, Any

from sdmlm.cli import common
from sdmlm.cli.layer_tables import REWARD_HELP, ROWS_HELP

if TYPE_CHECKING:
    from sdmlm.estimator.acceptance import CertifiedRule
    from sdmlm.generation.language_model import SDMLanguageModel
    from sdmlm.generation.search_certificate import SearchCertificate

KINDS = ("resample", "reprompt", "continue")
EXAMPLES = """\
  sdmlm certify runs/estimator fresh.npz
  sdmlm certify runs/estimator fresh.npz --delta 0.01 --classes 1 --output certificate.json
  sdmlm score runs/estimator new.npz --certificate certificate.json
  sdmlm certify runs/lm --data fresh.jsonl
  sdmlm certify runs/lm --data more.jsonl --search resample --budget 2"""


def add(subparsers: Any) -> None:
    """Declare the command."""
    help = "certify the accuracy among the accepted, with fresh labelled embeddings or rows of a language model"
    parser = common.add_command(subparsers, "certify", help, EXAMPLES)
    parser.add_argument("estimator", metavar="DIR", help="folder of a saved estimator, or of an SDM language model")
    parser.add_argument(
        "embeddings",
        metavar="EMBEDDINGS",
        nargs="?",
        help="for an estimator: embedding file of points that were not used for fitting",
    )
    parser.add_argument("--data", metavar="ROWS", help=f"for a language model: new {ROWS_HELP}")
    parser.add_argument("--reward", metavar="M:F", help=REWARD_HELP)
    parser.add_argument(
        "--search", choices=KINDS, help="certify the final answers of this search, for sdmlm generate --search"
    )
    parser.add_argument("--budget", type=int, metavar="N", help="with --search: further tries per prompt (4)")
    parser.add_argument("--alpha", type=float, metavar="A", help="another alpha than the one it was saved with")
    parser.add_argument(
        "--delta", type=float, default=0.05, metavar="P", help="probability of a wrong certificate (0.05)"
    )
    parser.add_argument("--promise", choices=("overall", "predicted", "class"), help="what alpha holds for (as fitted)")
    parser.add_argument(
        "--epsilon",
        type=float,
        metavar="P",
        help="share of known points that may be rejected to reject shifted ones too",
    )
    parser.add_argument("--classes", metavar="C,...", help="predicted classes to cover, by name (all)")
    parser.add_argument("--output", metavar="FILE.json", help="save the certificate, for score --certificate")
    parser.add_argument("--json", action="store_true", help="print the certificate as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Certify an estimator or a language model."""
    if args.search is None and args.budget is not None:
        raise ValueError("--budget goes only with --search.")
    if (args.embeddings is None) == (args.data is None):
        raise ValueError("give EMBEDDINGS to certify an estimator, or --data ROWS to certify a language model.")
    if args.data is None:
        if args.search is not None:
            raise ValueError("--search goes only with --data: an estimator does not search.")
        _certify_estimator(args)
    else:
        _certify_lm(args)


def _certify_lm(args: argparse.Namespace) -> None:
    """Renew the certificate over own answers, in the model's folder; or certify a search."""
    for name in ("promise", "classes", "output"):
        if getattr(args, name) is not None:
            raise ValueError(
                f"--{name} does not go with --data: the certificate of a language model is kept in its folder."
            )
    from sdmlm.language_model.loading import require_transformers

    require_transformers()
    from sdmlm.finetuning.threads import threads_for
    from sdmlm.generation.certification import certify_lm
    from sdmlm.generation.language_model import SDMLanguageModel
    from sdmlm.generation.search import SearchPolicy
    from sdmlm.generation.search_certificate import FILE as SEARCH_CERTIFICATES
    from sdmlm.generation.search_certificate import SearchCertificate, certify_search
    from sdmlm.language_model.answer_rule import EPSILON, AnswerCertificate
    from sdmlm.language_model.answer_rule import FILE as CERTIFICATE
    from sdmlm.language_model.rows import read_preferences

    lm = SDMLanguageModel.from_pretrained(args.estimator)
    data = read_preferences(args.data, lm.tags)
    epsilon = EPSILON if args.epsilon is None else args.epsilon
    threads = threads_for(lm.model.num_parameters())
    with threads, contextlib.redirect_stdout(sys.stderr):  # a reward may print
        how = {"alpha": args.alpha, "delta": args.delta, "epsilon": epsilon, "source": data.source}
        certificate: AnswerCertificate | SearchCertificate
        if args.search is None:
            certificate, file = certify_lm(lm, data.rows, args.reward, **how), CERTIFICATE
        else:
            policy = SearchPolicy(args.search, 4 if args.budget is None else args.budget)
            certificate, file = certify_search(lm, data.rows, policy, args.reward, **how), SEARCH_CERTIFICATES
    if args.json:
        common.print_json(certificate.figures())
        return
    out = common.console(args)
    out.print(certificate.sentence(), markup=False, soft_wrap=True)
    if isinstance(certificate, SearchCertificate):
        out.print(_without_search(lm, certificate), markup=False, soft_wrap=True)
    out.print(f"Written: {args.estimator}/sdm/{file}.", markup=False, soft_wrap=True)


def _without_search(lm: SDMLanguageModel, search: SearchCertificate) -> str:
    """What is verified without the search, to see whether it pays."""
    single = lm.certificate(search.certificate.alpha)
    assert single is not None  # it decides when to stop
    share = round(100 * single.accepted / max(1, single.prompts))
    return f"Without the search about {share} of 100 answers are verified, with one answer per prompt."


def _certify_estimator(args: argparse.Namespace) -> None:
    from sdmlm.estimator.acceptance import CertifiedRule
    from sdmlm.estimator.certify import certificate_rows
    from sdmlm.estimator.embedding_files import read_embeddings

    common.check_output_file(args.output, ".json")
    estimator, names = common.load_estimator(args.estimator)
    if args.alpha is not None:
        estimator.recalibrate(args.alpha)
    data = read_embeddings(args.embeddings, names)
    y = common.labels_of(data, args.embeddings)
    known = {*estimator.support_ids_, *estimator.calibration_ids_}
    shared = sum(isinstance(i, str) and i in known for i in data.ids)
    if shared:  # numeric ids are not compared: every file may count from 0
        common.warn(f"{args.embeddings} shares {shared} ids with the fitted points; a certificate needs fresh ones.")
    certificate = estimator.certify(data.X, y, args.delta, _classes(args.classes, names), args.promise, args.epsilon)
    if args.output:
        certificate.save(args.output)
    if isinstance(certificate, CertifiedRule):
        _show_rule(args, certificate, names)
        return
    tests = certificate_rows(certificate)
    for test in tests:
        test["predicted_class"] = names[test["predicted_class"]]
    if args.json:
        region = certificate.region
        limits = None if region is None else {"q_min": region.q_min, "psi": dict(zip(names, region.psi, strict=True))}
        head = {"certified": region is not None, "alpha": certificate.alpha, "delta": certificate.delta}
        common.print_json({**head, "says": certificate.sentence(names), "region": limits, "tests": tests})
    else:
        _show(args, certificate.sentence(names), tests)


def _show_rule(args: argparse.Namespace, rule: CertifiedRule, names: list[str]) -> None:
    says = rule.sentence(names)
    if args.json:
        common.print_json({"certified": rule.certified, "says": says, **rule.to_dict()})
        return
    from rich.text import Text

    out = common.console(args)
    columns = ("least confidence", "group", "accepted", "errors", "p-value", "passed")
    caption = (
        "Each line tests a candidate threshold on confidence over the points of a group, from strict to loose. accepted, "
        "errors: points that it accepts, and wrong ones among them. p-value: probability of so few errors if the accuracy were "
        "below alpha. The last threshold before a failure is used."
    )
    table = common.rich_table("Tests", columns, ["group"], caption)
    for test in rule.tests:
        counts = str(test.accepted), str(test.errors)
        cells = f"{test.threshold:.3f}", Text(test.group), *counts
        table.add_row(*cells, f"{test.p_value:.2g}", "yes" if test.passed else "no")
    if rule.tests:
        out.print(table)
    out.print(Text(says))
    if args.output:
        out.print(f"Written: {args.output}.", markup=False)


def _classes(text: str | None, names: list[str]) -> list[int] | None:
    if text is None:
        return None
    wanted = [part.strip() for part in text.split(",")]
    unknown = [name for name in wanted if name not in names]
    if unknown:
        raise ValueError(f"--classes has {unknown[0]!r} but the classes are {', '.join(names)}.")
    return [names.index(name) for name in wanted]


def _show(args: argparse.Namespace, says: str, tests: list[dict[str, Any]]) -> None:
    from rich.text import Text

    out = common.console(args)
    if tests:
        columns = ("q'min", "predicted class", "accepted", "errors", "p-value", "passed")
        caption = (
            "Each line tests a candidate threshold on q', over the points of a predicted class. accepted, errors: points that "
            "it accepts, and wrong ones among them. p-value: probability of so few errors if the accuracy were below alpha."
        )
        table = common.rich_table("Tests", columns, ["predicted class"], caption)
        for test in tests:
            counts = str(test["accepted"]), str(test["errors"])
            cells = f"{test['q_min']:.4g}", Text(test["predicted_class"]), *counts
            table.add_row(*cells, f"{test['p_value']:.2g}", "yes" if test["passed"] else "no")
        out.print(table)
    out.print(Text(says))
    if args.output:
        out.print(f"Written: {args.output}.", markup=False)
