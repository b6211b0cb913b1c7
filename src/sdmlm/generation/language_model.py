"""SDMLanguageModel: generation whose answers come with the verdict of the SDM layer (spec section 7, "Use").

The LM generates as usual. The SDM layer reads the document (prompt, answer, `<verified>`), and the verdict that follows the
tag is its prediction, never the LM's next token. An answer without a tag gets one and is judged like any other. However an
answer came about, it is judged as an answer to the prompt that was asked, so `verify(prompt, text)` says the same.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sdmlm.errors import BadCompletion, BadInput, BadPrompt, BadRow, CompletionTooLong, PromptTooLong
from sdmlm.estimator.estimator import SDMEstimator
from sdmlm.estimator.explain import Exemplar, reason
from sdmlm.estimator.region import HighReliabilityRegion, check_alpha
from sdmlm.estimator.scores import Scores
from sdmlm.generation.feedback import FEEDBACK, FeedbackLog, load_feedback, save_feedback, with_feedback
from sdmlm.generation.verification import Answer, AnswerText, Sampling, Verification, check_whole, widened
from sdmlm.language_model.decoding import answer_room, generate
from sdmlm.language_model.encoding import Encoder, Messages, Prompt, PromptIds, VerificationTags, completion_text
from sdmlm.language_model.forward import inner_lm
from sdmlm.language_model.loading import loaded, open_lm
from sdmlm.language_model.sdm_folder import fingerprint, read_lm_metadata, write_sdm_folder
from sdmlm.language_model.summary import GenerationReader, embed_sequences
from sdmlm.storage.artifacts import SDM_FOLDER, locked, write_text_atomically
from sdmlm.storage.record import copy_record

if TYPE_CHECKING:
    from sdmlm.generation.search import SearchPolicy
    from sdmlm.generation.search_calibration import SearchCalibration

FORMAT_VERSION = 1  # of sdm/lm.json
HALF_A_PAIR = " holds half of a surrogate pair, which is not text: remove it."
MAX_NEW_TOKENS = 256  # where the SDM layer was saved without a bound


class SDMLanguageModel:
    """A causal LM with its SDM layer: `generate` and `verify` say of every answer whether it can be accepted.

    `model`, `tokenizer`, `encoder` (how documents are put to the model), `estimator` (the SDM layer, feedback included),
    `facts` (sdm/lm.json), `alpha` (the default of every call), `folder` (where feedback is kept; None for a model of the
    Hub), `search_calibrations`. Calls do not change the object, except `feedback` and what says so by its name.

    A damaged SDM layer, or one that was fitted over other weights, is refused by `from_pretrained`.
    """

    tokens_per_batch = 8192  # padded tokens of a batch

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        encoder: Encoder,
        estimator: SDMEstimator,
        facts: Mapping[str, Any],
        folder: Path | None = None,
    ) -> None:
        if estimator.ensemble or len(estimator.classes_) != 2:
            raise ValueError("The SDM layer of a language model has two classes (No, Yes) and is no ensemble.")
        width = 2 * inner_lm(model).config.get_text_config().hidden_size
        if estimator.n_features_in_ != width:
            raise ValueError(
                f"The SDM layer reads summaries {estimator.n_features_in_} wide but this model gives {width}: it belongs "
                "to another model."
            )
        self.model, self.tokenizer, self.encoder = model.eval(), tokenizer, encoder
        self.facts, self.folder = dict(facts), folder
        self.alpha = estimator.alpha_
        self.estimator = self._fitted = estimator  # the second stays as it was fitted, without feedback
        self.search_calibrations: tuple[SearchCalibration, ...] = ()
        self._feedback = self._stored_feedback = FeedbackLog()  # as used here, and as last seen on disk
        self._digest: tuple[SDMEstimator, str] | None = None

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
        """Answers with their verdicts: a list for a list of prompts, one Verification for a single prompt.

        prompts: strings or conversations (lists of role/content). temperature 0 is greedy; otherwise the same seed gives
        the same answers. stop: strings that end an answer and are no part of it. alpha: another one than the model's, for
        this call. neighbors: how many support documents come along as evidence. search: a `SearchPolicy` or its kind
        ("resample", "reprompt", "continue"), for answers that are not verified at first. `on_text(number of the prompt,
        piece)` hears the text of answers as it becomes certain, and ends an answer by returning False; not with search.
        """
        asked, single = _as_list(prompts)
        sampling = self.sampling(max_new_tokens, temperature, top_p, stop)
        check_whole("seed", seed, 0)
        alpha = self._checked_alpha(alpha)
        check_whole("neighbors", neighbors, 0)
        read = self.read_prompts(asked)
        if search is not None:
            from sdmlm.generation.search import run_search

            if on_text is not None:
                raise ValueError("on_text does not go with search: a searched answer is known only at the end.")
            found = run_search(self, asked, read, search, sampling, seed, alpha, neighbors, progress).verifications
        else:
            seeds = [[seed, n] for n in range(len(asked))]
            hears = {n: partial(on_text, n) for n in range(len(asked))} if on_text is not None else {}
            answers = self.write(read, sampling, seeds, hears, progress=progress)
            found = self.judge(answers, alpha, neighbors, progress)
        return found[0] if single else found

    def verify(
        self, prompts: Any, completions: Any, *, alpha: float | None = None, neighbors: int = 3, progress: bool = True
    ) -> Any:
        """Judge answers written by anyone: a person, another LM, an API.

        Both are lists of the same length, or a single prompt with a single completion. A verification suffix at the end
        of a completion, whole or cut off, is no part of it; whatever else it says about itself is text like any other.
        """
        asked, single = _as_list(prompts)
        if single and (isinstance(completions, str) or _is_conversation(completions)):
            completions = [completions]
        alpha = self._checked_alpha(alpha)
        check_whole("neighbors", neighbors, 0)
        if isinstance(completions, str) or not isinstance(completions, Sequence) or len(completions) != len(asked):
            raise ValueError("completions must be a list with one completion for each prompt.")
        read = self.read_prompts(asked)
        answers = [self._given(n, *each) for n, each in enumerate(zip(read, completions, strict=True))]
        found = self.judge(answers, alpha, neighbors, progress)
        return found[0] if single else found

    def sampling(
        self,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        stop: str | Sequence[str] | None = None,
    ) -> Sampling:
        """Checked settings of a generation; max_new_tokens as for the SDM layer's own documents, where not given."""
        if max_new_tokens is None:
            max_new_tokens = int(self.facts.get("max_new_tokens") or MAX_NEW_TOKENS)
        stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
        return Sampling(max_new_tokens, temperature, top_p, stops)

    def write(
        self,
        prompts: Sequence[PromptIds],
        sampling: Sampling,
        seeds: Sequence[Sequence[int]],
        hears: Mapping[int, Callable[[str], bool | None]] | None = None,
        going: Callable[[int], bool] | None = None,
        progress: bool = True,
        contexts: Sequence[Prompt | PromptIds] | None = None,
        begun: Sequence[str] | None = None,
    ) -> list[Answer]:
        """Answers of the LM to prompts from `read_prompts`, not judged yet.

        `hears` holds, for the prompts whose answer is wanted piece by piece, what hears the pieces and ends the answer by
        returning False. `going(number of the prompt)` is asked after every token, and ends the answer by saying False.
        `contexts` are put to the LM in place of the prompts, and `begun` is what its turn begins with (both for search);
        a document is then not what the LM has read, so h is left to `judge`.
        """
        own, hears = contexts is None and begun is None, hears or {}
        answers: dict[int, Answer] = {}
        texts = [AnswerText(self.encoder, sampling.stop) for _ in prompts]
        # Whoever allows for more than the answers that the SDM layer knows does not have prompts cut for it.
        room = answer_room(self.encoder, min(sampling.max_new_tokens, self.sampling().max_new_tokens))

        def finish(n: int, ids: list[int]) -> list[int]:
            answers[n] = self._written(prompts[n], ids, texts[n], room)
            return answers[n].ids

        def ends(n: int, ids: list[int]) -> bool:
            if (going is not None and not going(n)) or texts[n].stopped(ids):
                return True
            hear = hears.get(n)
            piece = texts[n].piece(ids) if hear is not None else ""  # decoding costs: only where somebody listens
            return bool(piece) and hear is not None and hear(piece) is False

        reader = GenerationReader(self.encoder.open_ids, finish) if own else None
        with self._precision():
            generated = generate(
                self.model,
                self.encoder,
                prompts if contexts is None else contexts,
                sampling.max_new_tokens,
                sampling.temperature,
                seeds,
                self.tokens_per_batch,
                progress,
                rooms=[room] * len(prompts),
                top_p=sampling.top_p,
                prefixes=begun,
                should_stop=ends if sampling.stop or hears or going is not None else None,
                reader=reader,
            )
        for n, ids in enumerate(generated):
            if n not in answers:
                finish(n, ids)
            if reader is not None:
                answers[n].h = reader.h.get(n)
            if n in hears and (piece := texts[n].last(answers[n].text)):
                hears[n](piece)
        return [answers[n] for n in range(len(prompts))]

    def judge(
        self, answers: Sequence[Answer], alpha: float, neighbors: int, progress: bool = True
    ) -> list[Verification]:
        """What the SDM layer says about answers."""
        if not answers:
            return []
        h = self.summaries(answers, progress)
        region = self.estimator.region(alpha)
        return self.verdicts(answers, h, self.score(h, alpha), region, neighbors)

    def summaries(self, answers: Sequence[Answer], progress: bool = True) -> Tensor:
        """h of each answer's document: from its generation where that is exact, otherwise from a pass over it."""
        missing = [n for n, answer in enumerate(answers) if answer.h is None]
        if missing:
            ids = [answers[n].ids for n in missing]
            lm = inner_lm(self.model)
            with self._precision():
                h = embed_sequences(lm, ids, tokens_per_batch=self.tokens_per_batch, progress=progress)
            for n, row in zip(missing, h, strict=True):
                answers[n].h = row
        return torch.stack([answer.h.float().cpu() for answer in answers if answer.h is not None])

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        """That of the documents the SDM layer was fitted over: mixed, where training was."""
        name = self.facts.get("autocast")
        if name is None:
            return contextlib.nullcontext()
        return torch.autocast(self.model.device.type, dtype=getattr(torch, name))

    def score(self, h: Tensor, alpha: float) -> Scores:
        """Scores of summaries at an alpha of their own: the estimator keeps its."""
        return self.estimator.score(h, alpha=alpha, regions=self.region)

    def region(self, alpha: float | None = None) -> HighReliabilityRegion:
        """The high-reliability region that answers are decided by."""
        return widened(self.estimator.region(self._checked_alpha(alpha)))

    def verdicts(
        self,
        answers: Sequence[Answer],
        h: Tensor,
        scores: Scores,
        region: HighReliabilityRegion,
        neighbors: int,
    ) -> list[Verification]:
        """Answers with their scores, in words too; `region` is what they were decided by, as it was found (not widened)."""
        tags = self.tags
        exemplars: list[tuple[Exemplar, ...]] = [()] * len(answers)
        if neighbors:
            exemplars = self.estimator.exemplars(h, neighbors)
        found = []
        for i, answer in enumerate(answers):
            c = int(scores.prediction[i])
            highest = float(scores.highest_alpha[i])
            found.append(
                Verification(
                    text=answer.text,
                    accepted=bool(scores.accepted[i]),
                    verdict=tags.yes if c else tags.no,
                    probability=float(scores.p[i, c]),
                    probability_lower=float(scores.p_lower[i, c]),
                    probability_upper=float(scores.p_upper[i, c]),
                    q=int(scores.q[i]),
                    d=float(scores.d[i]),
                    d_nearest=float(scores.d_nearest[i]),
                    q_prime=float(scores.q_prime[i]),
                    accepted_lower=bool(scores.accepted_lower[i]),
                    out_of_distribution=bool(scores.out_of_distribution[i]),
                    highest_alpha=None if math.isnan(highest) else highest,
                    exemplars=exemplars[i],
                    reason=reason(scores, i, region, (tags.no, tags.yes)),
                    alpha=region.alpha,
                    completion=answer.text + tags.suffix(bool(c)),
                    generated=answer.generated,
                    lm_verdict=answer.lm_verdict,
                    finish_reason=answer.finish_reason,
                    prompt_tokens=answer.prompt_tokens,
                    completion_tokens=answer.completion_tokens,
                    yes=tags.yes,
                )
            )
        return found

    def _written(self, prompt: PromptIds, ids: list[int], text: AnswerText, room: int) -> Answer:
        """The answer in generated ids; `room` is what the prompt left for it."""
        said, read = text.verbatim(ids), self.encoder.encode_prompt(prompt, room)
        body, verdict = text.read(said)
        try:
            document = self.encoder.encode_for_judging(prompt, body)
        except ValueError:  # tokens that are more when they are encoded again, and then too many: read as generated
            document = read + self._up_to_tag(ids)
        over = text.stopped(ids) or self.encoder.ends(ids)
        return Answer(
            text=body,
            ids=document,
            prompt_tokens=len(read),
            completion_tokens=len(ids),
            generated=said,
            lm_verdict=verdict,
            finish_reason="stop" if over else "length",
        )

    def _up_to_tag(self, ids: list[int]) -> list[int]:
        """Generated ids up to and including their right-most `<verified>`, or with one appended.

        Control tokens that the LM wrote into its answer are left out: no answer may hold turns of its own.
        """
        turn, tag = self.encoder.turn(ids), self.encoder.open_ids
        ends = range(len(turn) - len(tag), -1, -1)
        body = turn[: next((n for n in ends if turn[n : n + len(tag)] == tag), len(turn))]
        return [i for i in body if i not in self.encoder.control_ids] + tag

    def _given(self, n: int, prompt: PromptIds, completion: Any) -> Answer:
        """A completion that somebody else wrote."""
        if not isinstance(completion, str) and not (
            isinstance(completion, Sequence) and len(completion) == 1 and _is_message(completion[0])
        ):
            raise BadCompletion(n, f" is {type(completion).__name__}: give text, or a list with one assistant message.")
        text = self.tags.bare(completion_text(completion))
        if not _is_text(text):
            raise BadCompletion(n, HALF_A_PAIR)
        try:
            ids = self.encoder.encode_for_judging(prompt, text)
        except BadRow as error:
            raise BadCompletion(n, f": {error.problem}") from error
        except ValueError as error:
            raise CompletionTooLong(
                n,
                f" and its completion are longer together than the {self.encoder.max_length} tokens of the model's "
                "context: shorten them.",
            ) from error
        length = len(self.encoder.encode_prompt(prompt))
        return Answer(text, ids, length, len(ids) - length)

    # What is asked of input

    def read_prompts(self, prompts: Sequence[Any]) -> list[PromptIds]:
        """The ids of each prompt; one that cannot be answered is refused by its number."""
        return [self._read_prompt(prompt, n) for n, prompt in enumerate(prompts)]

    def _read_prompt(self, prompt: Any, n: int) -> PromptIds:
        if not isinstance(prompt, str):
            if not isinstance(prompt, Sequence) or not prompt or not all(map(_is_message, prompt)):
                raise BadPrompt(
                    n,
                    f" is {type(prompt).__name__}: give text, or a conversation, which is a list of "
                    "{'role': ..., 'content': ...} with text in both.",
                )
            if prompt[-1]["role"] == "assistant":
                raise BadPrompt(n, " ends with an assistant message: end with what is to be answered.")
        text = prompt if isinstance(prompt, str) else "".join(m["content"] for m in prompt)
        last = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        if not last.strip():
            raise BadPrompt(n, " is empty: write something to answer.")
        if not _is_text(text):
            raise BadPrompt(n, HALF_A_PAIR)
        encoder = self.encoder
        try:
            ids = encoder.prompt_ids(prompt)
        except BadRow as error:
            raise BadPrompt(n, f": {error.problem}") from error
        if encoder.max_length is None:
            return ids
        room = encoder.max_length - encoder.suffix_length - 1  # at least one token for the answer
        if len(ids) <= room or (encoder.truncate_prompt and room > 1):
            return ids
        raise PromptTooLong(n, f" has {len(ids)} tokens, but the model's context leaves room for {room}: shorten it.")

    def digest(self) -> str:
        """A hash over all that decisions rest on: the SDM layer and its support, feedback included."""
        if self._digest is None or self._digest[0] is not self.estimator:
            self._digest = self.estimator, self.estimator.digest()
        return self._digest[1]

    def _checked_alpha(self, alpha: float | None) -> float:
        return self.alpha if alpha is None else check_alpha(alpha)

    # Feedback

    def feedback(self, prompt: Prompt, completion: str | Messages, label: bool | str, *, save: bool = True) -> str:
        """Add a document that a person has judged to the support, and return its id.

        label: whether the completion follows the instructions: True or "yes", False or "no". The weights stay; q, d and the
        region change, as does every later decision near it. It is kept in the model's folder (`sdm/feedback/`) unless `save`
        is False. Calibrations of searches hold for the support that they were made with: they no longer apply.
        """
        y = self._label(label)
        self._check_save(save)
        try:
            answer = self._given(0, self._read_prompt(prompt, 0), completion)
        except BadInput as error:
            error.args = (error.named(),)  # there is only one
            raise
        h = self.summaries([answer], progress=False)[0]
        with self._latest_feedback(save) as known:
            log = known.added(self.encoder.decode(answer.ids), y, h)
            self._use(log, save)
        return log.items[-1].id

    def undo_feedback(self, id: str | None = None, *, save: bool = True) -> str:
        """Take one feedback back (default: the latest), also after a reload; returns its id."""
        self._check_save(save)
        with self._latest_feedback(save) as known:
            log, gone = known.without(id)
            self._use(log, save)
        return gone.id

    @property
    def feedback_ids(self) -> list[str]:
        """Ids of the feedback in the support, oldest first."""
        return [item.id for item in self._feedback.items]

    @contextlib.contextmanager
    def _latest_feedback(self, save: bool) -> Iterator[FeedbackLog]:
        """All feedback so far. To save more, that of other processes in this folder too, which wait meanwhile."""
        if not save or self.folder is None:
            yield self._feedback
            return
        sdm = self.folder / SDM_FOLDER
        with locked(sdm):
            stored = load_feedback(sdm, self.facts["fingerprint"])
            if stored.same(self._stored_feedback):
                yield self._feedback
            elif self._feedback.same(self._stored_feedback):
                yield stored
            else:
                raise ValueError(
                    f"The feedback in {sdm} was changed by another process, and this one holds some that was not saved: "
                    "open the model again."
                )

    def _use(self, log: FeedbackLog, save: bool) -> None:
        estimator = with_feedback(self._fitted, log.items)  # all at once, as after a reload: the same to the last bit
        if save and self.folder is not None:  # first: where it cannot be kept, nothing changes
            save_feedback(self.folder / SDM_FOLDER, log, self.facts["fingerprint"])
            self._stored_feedback = log
        self._feedback, self.estimator = log, estimator

    def _label(self, label: Any) -> int:
        words = {"yes": 1, "no": 0, self.tags.yes.lower(): 1, self.tags.no.lower(): 0}
        known = label if isinstance(label, bool) else words.get(label.lower()) if isinstance(label, str) else None
        if known is None:
            raise ValueError(f'label is {label!r} but must be True, False, "yes" or "no".')
        return int(known)

    def _check_save(self, save: bool) -> None:
        if save and self.folder is None:
            raise ValueError("This model has no folder of its own to keep feedback in: call save_pretrained first.")

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

        device: by default a GPU where there is one. dtype: by default the one that the SDM layer was fitted in. A layer
        that was fitted over other weights is refused, unless `allow_other_weights`: its verdicts then mean little.
        `hub`: what `huggingface_hub.snapshot_download` takes, such as revision and token.
        """
        from sdmlm.generation.search_calibration import load_searches

        folder, own = _local_folder(path, hub)
        sdm = folder / SDM_FOLDER
        if not sdm.is_dir():
            raise ValueError(f"{path} has no sdm/ folder, so it is no SDM language model: run sdmlm calibrate on it.")
        facts = read_lm_metadata(sdm)
        where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        estimator = SDMEstimator.from_pretrained(sdm, where)
        try:
            version = int(facts["format_version"])
            tags = VerificationTags(**facts["tags"])
            max_length, truncate_prompt, expected = facts["max_length"], facts["truncate_prompt"], facts["fingerprint"]
            if facts.get("autocast") not in (None, "bfloat16", "float16"):
                raise ValueError(f"autocast {facts['autocast']!r}")
            own_dtype = facts.get("dtype", "auto")  # of the saved weights, in folders older than this fact
            if own_dtype not in ("auto", "float64", "float32", "bfloat16", "float16"):
                raise ValueError(f"dtype {own_dtype!r}")
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{sdm / 'lm.json'} is damaged ({error}): run sdmlm calibrate --force.") from error
        if version > FORMAT_VERSION:
            raise ValueError(
                f"{sdm} was written by a newer sdmlm (format {version}, this one reads up to {FORMAT_VERSION}): upgrade."
            )
        from transformers import AutoTokenizer

        tokenizer = loaded(AutoTokenizer.from_pretrained, folder, "tokenizer", path)
        model = loaded(open_lm, folder, "model", path, dtype=dtype or own_dtype).to(where)
        if not allow_other_weights and fingerprint(inner_lm(model).state_dict()) != expected:
            raise ValueError(
                f"The SDM layer in {sdm} was fitted over other weights than those of the model beside it: run sdmlm "
                "calibrate --force, or give allow_other_weights=True."
            )
        self = cls(model, tokenizer, Encoder(tokenizer, tags, max_length, truncate_prompt), estimator, facts)
        self.folder = folder if own else None
        self._feedback = self._stored_feedback = load_feedback(sdm, expected)
        self.estimator = with_feedback(estimator, self._feedback.items)
        self.search_calibrations = load_searches(sdm)
        return self

    def save_pretrained(self, folder: str | Path) -> None:
        """Save model, tokenizer, `sdm/` with feedback and calibrated searches, and a model card (README.md).

        Into the folder that the model came from, the weights are not written again.
        """
        from sdmlm.generation.search_calibration import joined, load_searches

        home = Path(folder)
        own = self.folder is not None and home.exists() and home.resolve() == self.folder.resolve()
        with self._latest_feedback(own) as known:  # with what other processes have saved there since
            if own:
                self._use(known, save=False)
                self.search_calibrations = joined(load_searches(home / SDM_FOLDER), self.search_calibrations)
            self._save(home, home.name, weights=not own)
            self.folder, self._stored_feedback = home, self._feedback

    def _save(self, folder: Path, name: str, weights: bool = True) -> None:
        """`name` is what the card calls the model; without `weights` those that are there stay."""
        from sdmlm.generation.model_card import WRITTEN_BY, model_card
        from sdmlm.generation.search_calibration import save_searches

        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{folder} is a file: name a folder to save into.")
        if weights:
            self.model.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)
        sdm = folder / SDM_FOLDER
        write_sdm_folder(sdm, self._fitted, self.facts)
        if self._feedback.next > 1 or (sdm / FEEDBACK).exists():
            save_feedback(sdm, self._feedback, self.facts["fingerprint"])
        save_searches(sdm, self.search_calibrations)
        if self.folder is not None:
            copy_record(self.folder, folder)
        card = folder / "README.md"
        if not card.exists() or WRITTEN_BY in card.read_text(encoding="utf-8", errors="replace"):  # not somebody else's
            write_text_atomically(card, model_card(self, name))

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        commit_message: str = "SDM language model",
    ) -> str:
        """Save to a repository of the Hugging Face Hub, which is made where there is none; returns its address.

        The texts of the support documents, feedback among them, go with the model.
        """
        from huggingface_hub import HfApi

        with tempfile.TemporaryDirectory() as folder:
            self._save(Path(folder), repo_id)
            api = HfApi(token=token)
            repo = api.create_repo(repo_id, private=private, exist_ok=True)
            api.upload_folder(
                repo_id=repo.repo_id, folder_path=folder, commit_message=commit_message, revision=revision
            )
        return str(repo)


def _local_folder(path: str | Path, hub: Mapping[str, Any]) -> tuple[Path, bool]:
    """The folder of a model, and whether it is the user's own: that of a model of the Hub is a cache."""
    folder = Path(path)
    if folder.is_dir():
        if hub:
            raise ValueError(f"{path} is a folder here: {', '.join(hub)} goes only with a model of the Hub.")
        return folder, True
    name = str(path)
    here = folder.parent != Path() and folder.parent.is_dir()  # a folder here that is misspelt, then
    if folder.exists() or here or name.count("/") != 1 or name.startswith((".", "~", "/")):
        raise ValueError(f"{path} is no folder here: name the folder of an SDM language model, or org/name of the Hub.")
    from huggingface_hub import snapshot_download

    try:
        # Weights are saved as safetensors; checkpoints of a training run are of no use here.
        return Path(snapshot_download(name, ignore_patterns=["checkpoint-*", "*.bin", "*.pt"], **hub)), False
    except (OSError, ValueError) as error:
        why = (str(error).strip() or type(error).__name__).split("\n")[0].rstrip(".")
        if "ConnectError" in why or "cannot find the requested files in the local cache" in why:
            why = "it cannot be reached"
        raise ValueError(f"{path} is no folder here, and the Hub did not give it: {why}.") from error


def _as_list(prompts: Any) -> tuple[list[Any], bool]:
    """The prompts as a list, and whether it was a single one."""
    if isinstance(prompts, str):
        return [prompts], True
    if isinstance(prompts, Mapping) or not isinstance(prompts, Sequence):
        raise ValueError(
            f"prompts is {type(prompts).__name__}: give text, a conversation (a list of role/content), or a list of these."
        )
    return ([prompts], True) if _is_conversation(prompts) else (list(prompts), False)


def _is_conversation(value: Any) -> bool:
    return isinstance(value, Sequence) and len(value) > 0 and isinstance(value[0], Mapping)


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def _is_text(text: str) -> bool:
    """Whether a string can be encoded as UTF-8: half of a surrogate pair cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
