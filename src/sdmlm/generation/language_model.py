"""SDMLanguageModel: generation in which every answer comes with the verdict of the SDM layer (docs/method.md, "Use").

The LM generates as usual. The SDM layer reads the document (prompt, answer, `<verified>`), and the verdict is its prediction,
never the LM's next token. An answer without a tag gets one and is judged like any other. Every answer is judged as an answer
to the original prompt, however it was generated, so `verify(prompt, text)` gives the same verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sdmlm.errors import BadInput
from sdmlm.estimator.estimator import SDMEstimator
from sdmlm.estimator.explain import Exemplar
from sdmlm.estimator.region import HighReliabilityRegion, check_alpha
from sdmlm.estimator.scores import Scores
from sdmlm.generation import prompts as reading
from sdmlm.generation import storage
from sdmlm.generation.answers import Answer, Sampling, check_whole, marked
from sdmlm.generation.feedback import FeedbackStore, label_number
from sdmlm.generation.judging import applicable, by_certificate, guarded, verifications, widened
from sdmlm.generation.summaries import add_missing, check_summary, reading_precision
from sdmlm.generation.verification import Verification
from sdmlm.generation.writing import write_answers
from sdmlm.language_model.answer_rule import AnswerCertificate
from sdmlm.language_model.decoding import answer_room
from sdmlm.language_model.encoding import Encoder, Messages, Prompt, PromptIds, VerificationTags
from sdmlm.language_model.likelihood import LIKELIHOOD, STATES
from sdmlm.language_model.reduction import Reduction
from sdmlm.storage.artifacts import SDM_FOLDER

if TYPE_CHECKING:
    from sdmlm.generation.search import SearchPolicy
    from sdmlm.generation.search_calibration import SearchCalibration
    from sdmlm.generation.search_certificate import SearchCertificate

MAX_NEW_TOKENS = 256  # where the SDM layer was saved without a bound


class SDMLanguageModel:
    """A causal language model with its SDM layer: every answer says whether it may be used without a person looking.

    Usually made by `from_pretrained`, which refuses a damaged SDM layer and one that was fitted over other weights.
    Calls leave the object as it is, except `feedback`, `undo_feedback` and `save_pretrained`.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        The causal LM.
    tokenizer : transformers.PreTrainedTokenizerBase
        Its tokenizer.
    encoder : Encoder
        How documents are formatted for the model: tags, chat template, length.
    estimator : SDMEstimator
        The SDM layer, over the classes No (0) and Yes (1).
    metadata : mapping
        The content of `sdm/lm.json`.
    folder : Path, optional
        Where feedback is kept; None for a model of the Hub.
    reduction : Reduction, optional
        What the SDM layer reads of a summary; None for all of it.

    Attributes
    ----------
    alpha : float
        The accuracy that accepted answers are to have; the default of every call.
    estimator : SDMEstimator
        The SDM layer with the feedback so far in its support.
    search_calibrations, search_certificates : tuple of SearchCalibration, tuple of SearchCertificate
        The calibrations of searches, and, for a model with a certificate, their certificates.
    answer_certificate : AnswerCertificate or None
        The certificate as saved; `certificate()` returns it only where it applies.

    Examples
    --------
    >>> from sdmlm import SDMLanguageModel
    >>> lm = SDMLanguageModel.from_pretrained("runs/lm")
    >>> answer = lm.generate("abc=")
    >>> answer.text
    'abc'
    >>> answer.verdict, answer.verified
    ('Yes', True)
    >>> lm.verify("abc=", "cba.").verified
    False
    """

    tokens_per_batch = 8192  # padded tokens of a batch

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        encoder: Encoder,
        estimator: SDMEstimator,
        metadata: Mapping[str, Any],
        folder: Path | None = None,
        reduction: Reduction | None = None,
    ) -> None:
        if estimator.combine == "all" or len(estimator.classes_) != 2:
            raise ValueError("The SDM layer of a language model has two classes (No, Yes) and is no ensemble.")
        check_summary(metadata.get("summary", STATES), model, estimator.n_features_in_, reduction)
        self.model, self.tokenizer, self.encoder = model.eval(), tokenizer, encoder
        self.metadata, self.folder, self.reduction = dict(metadata), folder, reduction
        self.alpha = estimator.alpha_
        self.estimator = estimator
        self.feedback_store = FeedbackStore(estimator, str(metadata.get("fingerprint")))
        self.search_calibrations: tuple[SearchCalibration, ...] = ()
        self.search_certificates: tuple[SearchCertificate, ...] = ()
        self.answer_certificate: AnswerCertificate | None = None
        self.saved_certificate: AnswerCertificate | None = None  # these two as they were last read or written
        self.saved_search_certificates: tuple[SearchCertificate, ...] = ()
        self._digest: tuple[SDMEstimator, str] | None = None

    @property
    def reads_likelihood(self) -> bool:
        """Whether the SDM layer reads the likelihood of answers in addition to the states."""
        return self.metadata.get("summary") == LIKELIHOOD

    @property
    def tags(self) -> VerificationTags:
        """The verification tags."""
        return self.encoder.tags

    # Answers

    def generate(
        self,
        prompts: Any,
        *,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: str | Sequence[str] | None = None,
        alpha: float | None = None,
        neighbors: int = 3,
        search: SearchPolicy | str | None = None,
        on_text: Callable[[int, str], bool | None] | None = None,
        progress: bool = True,
    ) -> Any:
        """Answer prompts, each answer with its verdict.

        Parameters
        ----------
        prompts : str, conversation, or list of these
            A conversation is a list of {"role": ..., "content": ...}.
        max_new_tokens : int, optional
            Most tokens of an answer; by default as for the documents that the SDM layer was fitted over.
        temperature, top_p, seed
            Temperature 0 is greedy. Otherwise the same seed gives the same answers.
        stop : str or list of str, optional
            Strings that end an answer and are not part of it.
        alpha : float, optional
            Another alpha than the model's, for this call.
        neighbors : int
            How many of the nearest support documents to return as evidence.
        search : SearchPolicy or str, optional
            What to try when an answer is not verified: a policy or its kind ("resample", "reprompt", "continue").
        on_text : callable, optional
            `on_text(index of the prompt, piece)` is called with the text of answers as it becomes final; an answer
            ends when it returns False. Not with `search`.
        progress : bool
            Show a progress bar on a terminal.

        Returns
        -------
        Verification or list of Verification
            One for a single prompt, a list for a list.
        """
        asked, single = reading.as_list(prompts)
        sampling = self.sampling(max_new_tokens, temperature, top_p, stop)
        check_whole("seed", seed, 0)
        alpha = self._checked_alpha(alpha)
        check_whole("neighbors", neighbors, 0)
        prompt_ids = self.read_prompts(asked)
        if search is not None:
            from sdmlm.generation.search import run_search

            if on_text is not None:
                raise ValueError("on_text does not go with search: a searched answer is known only at the end.")
            searched = run_search(self, asked, prompt_ids, search, sampling, seed, alpha, neighbors, progress)
            judged = searched.verifications
        else:
            seeds = [[seed, n] for n in range(len(asked))]
            listeners = {n: partial(on_text, n) for n in range(len(asked))} if on_text is not None else {}
            answers = self.write(prompt_ids, sampling, seeds, listeners, progress=progress)
            judged = self.judge(answers, alpha, neighbors, progress)
        return judged[0] if single else judged

    def verify(
        self, prompts: Any, completions: Any, *, alpha: float | None = None, neighbors: int = 3, progress: bool = True
    ) -> Any:
        """Judge answers written by anyone: a person, another LM, an API.

        A verification suffix at the end of a completion, complete or cut off, is removed first. Anything else that a
        completion says about itself is ordinary text.

        Parameters
        ----------
        prompts : str, conversation, or list of these
        completions : str, list with one assistant message, or list of these
            One for each prompt.
        alpha, neighbors, progress
            As for `generate`.

        Returns
        -------
        Verification or list of Verification
        """
        asked, single = reading.as_list(prompts)
        if single and (isinstance(completions, str) or reading.is_conversation(completions)):
            completions = [completions]
        alpha = self._checked_alpha(alpha)
        check_whole("neighbors", neighbors, 0)
        if isinstance(completions, str) or not isinstance(completions, Sequence) or len(completions) != len(asked):
            raise ValueError("completions must be a list with one completion for each prompt.")
        pairs = zip(self.read_prompts(asked), completions, strict=True)
        answers = [reading.read_completion(self.encoder, ids, text, n) for n, (ids, text) in enumerate(pairs)]
        judged = self.judge(answers, alpha, neighbors, progress)
        return judged[0] if single else judged

    def read_prompts(self, prompts: Sequence[Any]) -> list[PromptIds]:
        """The token ids of each prompt. A prompt that cannot be answered is an error that names its position."""
        return [reading.read_prompt(self.encoder, prompt, n) for n, prompt in enumerate(prompts)]

    def sampling(
        self,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        stop: str | Sequence[str] | None = None,
    ) -> Sampling:
        """Checked settings of a generation; max_new_tokens defaults to that of the SDM layer's own documents."""
        if max_new_tokens is None:
            max_new_tokens = int(self.metadata.get("max_new_tokens") or MAX_NEW_TOKENS)
        stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
        return Sampling(max_new_tokens, temperature, top_p, stops)

    def write(
        self,
        prompts: Sequence[PromptIds],
        sampling: Sampling,
        seeds: Sequence[Sequence[int]],
        listeners: Mapping[int, Callable[[str], bool | None]] | None = None,
        keep_going: Callable[[int], bool] | None = None,
        progress: bool = True,
        contexts: Sequence[Prompt | PromptIds] | None = None,
        prefixes: Sequence[Sequence[int]] | None = None,
    ) -> list[Answer]:
        """Answers of the LM to prompts from `read_prompts`, not judged yet.

        `listeners` maps a prompt's index to a callback for the pieces of its answer; the answer ends when the callback
        returns False. `keep_going(index)` is called after every token; the answer ends when it returns False.
        For search: the LM reads `contexts` instead of the prompts, and its turn begins with the ids `prefixes`; `judge` computes h.
        """
        usual = self.sampling()  # a larger max_new_tokens must not shorten the prompt further
        room = answer_room(self.encoder, min(sampling.max_new_tokens, usual.max_new_tokens))
        with reading_precision(self.model, self.metadata):
            how = prompts, sampling, seeds, room, self.tokens_per_batch, listeners or {}, keep_going, progress
            answers = write_answers(self.model, self.encoder, *how, contexts, prefixes, self.reads_likelihood)
        return [marked(answer, sampling, usual) for answer in answers]

    # Judging

    def judge(
        self, answers: Sequence[Answer], alpha: float, neighbors: int, progress: bool = True
    ) -> list[Verification]:
        """The verdicts of the SDM layer on answers."""
        if not answers:
            return []
        h = self.summaries(answers, progress)
        scores, certificate = self.score(h, alpha), self.certificate(alpha)
        judged = self.verdicts(answers, h, scores, self.estimator.region(alpha), neighbors)
        if certificate is not None:
            return by_certificate(answers, judged, certificate, scores, h)
        guard = self.guard(alpha)
        return judged if guard is None else guarded(judged, guard, scores, h)

    def certificate(self, alpha: float | None = None) -> AnswerCertificate | None:
        """The certificate that decides which answers are verified; None if it is for another SDM layer or a lower alpha."""
        return applicable(self.answer_certificate, self._checked_alpha(alpha), self.digest)

    def guard(self, alpha: float) -> AnswerCertificate | None:
        """The certificate where it promises nothing: for a higher alpha, or after feedback. What it rejects stays rejected there."""
        return None if self.certificate(alpha) is not None else self.answer_certificate

    def summaries(self, answers: Sequence[Answer], progress: bool = True) -> Tensor:
        """h of each answer's document as the SDM layer reads it."""
        h = self.whole_summaries(answers, progress)
        return h if self.reduction is None else self.reduction(h)

    def whole_summaries(self, answers: Sequence[Answer], progress: bool = True) -> Tensor:
        """h of each answer's document: from its generation where that is exact, otherwise from a pass over it."""
        with reading_precision(self.model, self.metadata):
            how = self.reads_likelihood, self.tokens_per_batch, progress
            return add_missing(self.model, self.encoder, answers, *how)

    def score(self, h: Tensor, alpha: float) -> Scores:
        """Scores of summaries at an alpha, with decisions by `region`."""
        return self.estimator.score(h, alpha=alpha, regions=self.region)

    def region(self, alpha: float | None = None) -> HighReliabilityRegion:
        """The high-reliability region that decides about answers."""
        return widened(self.estimator.region(self._checked_alpha(alpha)))

    def verdicts(
        self, answers: Sequence[Answer], h: Tensor, scores: Scores, region: HighReliabilityRegion, neighbors: int
    ) -> list[Verification]:
        """Answers with their scores and exemplars; `region` is the one to quote in the reason (not widened)."""
        none: Sequence[tuple[Exemplar, ...]] = [()] * len(answers)
        exemplars = self.estimator.exemplars(h, neighbors) if neighbors else none
        return verifications(answers, scores, exemplars, region, self.tags)

    def digest(self) -> str:
        """A hash of everything that decisions depend on: the SDM layer and its support, feedback included."""
        if self._digest is None or self._digest[0] is not self.estimator:
            self._digest = self.estimator, self.estimator.digest()
        return self._digest[1]

    def _checked_alpha(self, alpha: float | None) -> float:
        return self.alpha if alpha is None else check_alpha(alpha)

    # Feedback

    def feedback(self, prompt: Prompt, completion: str | Messages, label: bool | str, *, save: bool = True) -> str:
        """Add a document that a person has judged to the support, and return its id.

        label: whether the completion follows the instructions: True or "yes", False or "no". The weights do not change; q, d
        and the region do, and with them later decisions about similar answers. Feedback is stored in the model's folder
        (`sdm/feedback/`) unless `save` is False; given twice, it counts once. Certificates and calibrations of searches, made
        with another support, no longer apply.
        """
        y = label_number(label, self.tags)
        sdm = self._feedback_folder(save)
        try:
            answer = reading.read_completion(self.encoder, reading.read_prompt(self.encoder, prompt), completion)
        except BadInput as error:
            error.args = (error.named(),)  # without a position: there is only one
            raise
        h = self.summaries([answer], progress=False)[0]
        self.estimator, id = self.feedback_store.give(self.encoder.decode(answer.ids), y, h, sdm)
        return id

    def undo_feedback(self, id: str | None = None, *, save: bool = True) -> str:
        """Remove one feedback (default: the latest), also after a reload; returns its id."""
        sdm = self._feedback_folder(save)
        self.estimator, removed = self.feedback_store.take_back(id, sdm)
        return removed

    @property
    def feedback_ids(self) -> list[str]:
        """Ids of the feedback in the support, oldest first."""
        return [item.id for item in self.feedback_store.log.items]

    def _feedback_folder(self, save: bool) -> Path | None:
        """Where to store feedback; None to keep it in memory."""
        if not save:
            return None
        if self.folder is None:
            raise ValueError("This model has no folder of its own to keep feedback in: call save_pretrained first.")
        return self.folder / SDM_FOLDER

    # On disk

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype | str | None = None,
        allow_other_weights: bool = False,
        **hub: Any,
    ) -> SDMLanguageModel:
        """Open a folder, or a model of the Hub, that holds a causal LM with its SDM layer in `sdm/`.

        device: by default a GPU if there is one. dtype: by default that in which the SDM layer was fitted. An SDM layer of
        other weights is refused; with `allow_other_weights` it is used, but its verdicts are not reliable.
        `hub`: options of `huggingface_hub.snapshot_download`, such as revision and token.
        """
        return storage.load(cls, path, device, dtype, allow_other_weights, hub)

    def save_pretrained(self, folder: str | Path) -> None:
        """Save model, tokenizer, `sdm/` with feedback and what is known about searches, and a model card (README.md).

        If this is the folder that the model was loaded from, the weights are not written again.
        """
        storage.save(self, Path(folder))

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        commit_message: str = "SDM language model",
    ) -> str:
        """Save to a repository of the Hugging Face Hub, which is created if there is none; returns its address.

        This uploads the texts of the support documents too, feedback among them.
        """
        return storage.push(self, repo_id, private, token, revision, commit_message)
