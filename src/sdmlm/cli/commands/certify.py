"""`sdmlm certify`: certify the accuracy among what is accepted, with points or rows that were not used for fitting."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING, Any

from sdmlm.cli import common
from sdmlm.cli.commands.generate import add_writing
from sdmlm.cli.layer_tables import REWARD_HELP, ROWS_HELP
from sdmlm.storage.record import read_record

if TYPE_CHECKING:
    from sdmlm.estimator.acceptance import CertifiedRule
    from sdmlm.generation.language_model import SDMLanguageModel
    from sdmlm.generation.search import SearchPolicy
    from sdmlm.generation.search_certificate import SearchCertificate
    from sdmlm.language_model.rows import PreferenceRows

SEARCH_OPTIONS = ("budget", "max_new_tokens", "temperature", "top_p", "stop")
DEFAULT_BUDGET = 4
SHA256_DIGITS = 16  # of the file's, in the certificate
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
    add_writing(parser, preparing=True)
    parser.set_defaults(run=run, **dict.fromkeys(SEARCH_OPTIONS))  # None: not given


def run(args: argparse.Namespace) -> None:
    """Certify an estimator or a language model."""
    given = [name for name in SEARCH_OPTIONS if getattr(args, name) is not None]
    if args.search is None and given:
        raise ValueError(f"--{given[0].replace('_', '-')} goes only with --search.")
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
    search, sampling = _search(args)
    from sdmlm.language_model.loading import require_transformers

    require_transformers()
    from sdmlm.finetuning.threads import threads_for
    from sdmlm.generation.certification import certify_lm
    from sdmlm.generation.language_model import SDMLanguageModel
    from sdmlm.generation.search_certificate import applying, certify_search
    from sdmlm.language_model.answer_rule import EPSILON, FILE
    from sdmlm.language_model.rows import read_preferences

    lm = SDMLanguageModel.from_pretrained(args.estimator)
    data = read_preferences(args.data, lm.tags)
    _check_file(args, lm, data)
    epsilon, applied = EPSILON if args.epsilon is None else args.epsilon, len(applying(lm))
    how = {"alpha": args.alpha, "delta": args.delta, "epsilon": epsilon, "source": _source(data)}
    with threads_for(lm.model.num_parameters()), contextlib.redirect_stdout(sys.stderr):  # a reward may print
        if search is not None:
            searched = certify_search(lm, data.rows, search, args.reward, **sampling, **how)
        else:
            certificate = certify_lm(lm, data.rows, args.reward, **how)
    if search is not None:
        _show_search(args, lm, searched)
        return
    if lost := applied - len(applying(lm)):
        common.warn(
            f"The certificates of searches no longer apply ({lost}): the model's own, which decides when to stop, is new. Certify "
            "these searches again."
        )
    if args.json:
        common.print_json(certificate.figures())
        return
    out = common.console(args)
    out.print(certificate.sentence(), markup=False, soft_wrap=True)
    out.print(f"Written: {args.estimator}/sdm/{FILE}.", markup=False, soft_wrap=True)


def _search(args: argparse.Namespace) -> tuple[SearchPolicy | None, dict[str, Any]]:
    """The search to certify, if any, and the settings of its answers that were given."""
    if args.search is None:
        return None, {}
    from sdmlm.generation.answers import Sampling
    from sdmlm.generation.search import SearchPolicy

    sampling = {name: getattr(args, name) for name in SEARCH_OPTIONS[1:] if getattr(args, name) is not None}
    Sampling(**{"max_new_tokens": 1, **sampling, "stop": tuple(args.stop or ())})  # refuses bad values at once
    return SearchPolicy(args.search, DEFAULT_BUDGET if args.budget is None else args.budget), sampling


def _check_file(args: argparse.Namespace, lm: SDMLanguageModel, data: PreferenceRows) -> None:
    """Refuse a file that the model or, for a search, its certificate was made with."""
    record = read_record(args.estimator)
    known = [lm.metadata.get("calibrated"), *(record["data"].values() if record else ())]
    if any(one and one.get("sha256") == data.sha256 for one in known):
        raise ValueError(f"The model was trained or calibrated with {data.source}: a certificate needs new rows.")
    own = lm.answer_certificate
    if args.search is not None and own is not None and data.sha256[:SHA256_DIGITS] in own.source:
        raise ValueError(
            f"The model's own certificate, which decides when the search stops, was made with {data.source}: a search needs "
            "other rows."
        )


def _source(data: PreferenceRows) -> str:
    return f"{data.source} (SHA-256 {data.sha256[:SHA256_DIGITS]})"


def _show_search(args: argparse.Namespace, lm: SDMLanguageModel, search: SearchCertificate) -> None:
    """The certificate of a search, and what is verified without the search, to see whether it pays."""
    from sdmlm.generation.search_certificate import FILE

    single, alpha = lm.certificate(search.certificate.alpha), search.certificate.alpha
    assert single is not None  # it decides when to stop
    without = single.accepted / max(1, single.prompts)
    if args.json:
        common.print_json({**search.figures(), "verified_without": without})
        return
    out = common.console(args)
    out.print(search.sentence(), markup=False, soft_wrap=True)
    at = "" if single.alpha == alpha else f" at alpha {single.alpha:g}"
    out.print(
        f"Without the search, about {100 * without:.0f} of 100 answers are verified{at}, with one answer per prompt.",
        soft_wrap=True,
    )
    if not search.certificate.certified:
        common.warn("no answer of this search will be verified.")
    use = "sdmlm generate --search and sdmlm serve use it"
    use += " with these settings." if alpha >= lm.alpha else f" with these settings and alpha {alpha:g} or lower."
    out.print(f"Written: {args.estimator}/sdm/{FILE}. {use}", markup=False, soft_wrap=True)


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
