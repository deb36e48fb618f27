"""The facade: pairs in, scores out. Every step is one call into the room that does it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gatekern import ops
from gatekern.engine.backbone import Backbone
from gatekern.engine.loading import load
from gatekern.engine.work import Work
from gatekern.errors import InputError, NumericError
from gatekern.inputs import CheckedPair, Pair, check_pairs
from gatekern.labels import YES_NO, LabelSet, LabelSpec, resolve_labels
from gatekern.layout import IntArray
from gatekern.modes.logprob import label_evidence
from gatekern.prompts import NOT_LITERAL, Layout, PromptEncoder, PromptTemplate, template
from gatekern.results import ScoreBatch, Status, Usage

MODES = ("logprob",)


class Verifier:
    """Scores how strongly a context supports each of its facts.

    Parameters
    ----------
    model : PreTrainedModel
        Any causal language model of transformers, in eval mode, on any device. It is wrapped, not changed; do not run
        it from another thread while a call of this verifier is running.
    tokenizer : PreTrainedTokenizerBase
        Its tokenizer. Copied where state matters, never changed.
    layout : "paper" or "fact_last"
        Built-in prompt layout: the question after the fact, or before the context (far fewer tokens a fact).
    prompt : PromptTemplate, optional
        Wording of your own (`gatekern.prompts.load` reads one from a file) instead of a built-in layout.
    labels : sequence or mapping, optional
        Answer labels; the score is the probability of the first among all. Default ``("yes", "no")``. Give names, or
        names with the words or token ids that count for them.
    backend : "auto", "triton", "native" or "torch"
        Implementation of the operators. An explicit one raises where it cannot run; "auto" picks. "native" is C++ for
        the label scores; the label mass, which has no C++ form, runs on PyTorch with it.
    max_tokens_per_forward : int, optional
        Memory bound of one forward, tokens. Default by device and model size.
    min_label_mass : float
        Below this probability of *any* label, the status is ``low_label_mass``.

    Raises
    ------
    UnsupportedModelError
        The architecture cannot be scored exactly; the message says why.
    LabelError, TemplateError, BackendError
        Labels, prompt or backend do not fit the model or this machine.

    Examples
    --------
    >>> verifier = Verifier.from_pretrained("Qwen/Qwen2.5-0.5B-Instruct")  # doctest: +SKIP
    >>> result = verifier.score_batch([("Ada lives in Rome.", "Ada lives in Italy.")])  # doctest: +SKIP
    >>> result.scores  # doctest: +SKIP
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        layout: Layout = "paper",
        prompt: PromptTemplate | None = None,
        labels: LabelSpec = YES_NO,
        backend: str = "auto",
        max_tokens_per_forward: int | None = None,
        min_label_mass: float = 0.05,
    ) -> None:
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise InputError(f"tokenizer must be a transformers tokenizer, got {type(tokenizer).__name__}")
        if not 0.0 <= min_label_mass <= 1.0:
            raise InputError(f"min_label_mass is a probability, got {min_label_mass}")
        self.model = model
        self.tokenizer = tokenizer
        self.min_label_mass = min_label_mass
        self.backbone = Backbone(model, max_tokens=max_tokens_per_forward)
        self.ops_backend = ops.resolved_name("label_scores", backend, self.backbone.head.weight.device)
        self._backend = backend
        self._encoder = PromptEncoder(tokenizer, prompt or template("verify", layout))
        self.labels: LabelSet = resolve_labels(self._encoder, labels, self.backbone.head.vocab_rows)

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        device: str = "auto",
        dtype: str | torch.dtype = "auto",
        gguf_file: str | None = None,
        layout: Layout = "paper",
        prompt: PromptTemplate | None = None,
        labels: LabelSpec = YES_NO,
        backend: str = "auto",
        max_tokens_per_forward: int | None = None,
        min_label_mass: float = 0.05,
        **model_kwargs: Any,
    ) -> Verifier:
        """Load a model and its tokenizer, and wrap them.

        Parameters
        ----------
        name_or_path : str or Path
            Hub id, local folder, or a ``.gguf`` file.
        device : str
            "auto" (CUDA where there is one, else the CPU) or a torch device.
        dtype : str or torch.dtype
            "auto" (the checkpoint's on accelerators, float32 on the CPU), "float32", "bfloat16" or "float16".
        gguf_file : str, optional
            Name of a GGUF file inside `name_or_path`.
        **model_kwargs
            For ``AutoModelForCausalLM.from_pretrained``: ``device_map``, ``revision``, ``trust_remote_code``, ...

        The other parameters are those of `Verifier`.
        """
        model, tokenizer = load(name_or_path, device=device, dtype=dtype, gguf_file=gguf_file, **model_kwargs)
        return cls(
            model,
            tokenizer,
            layout=layout,
            prompt=prompt,
            labels=labels,
            backend=backend,
            max_tokens_per_forward=max_tokens_per_forward,
            min_label_mass=min_label_mass,
        )

    def encode(self, context: str, fact: str, mode: str = "logprob") -> list[int]:
        """Exactly the token ids that the model sees for this pair."""
        _check_mode(mode)
        checked = check_pairs([(context, fact)])[0]
        if checked.text is None:
            raise InputError(checked.note or "")
        return [int(token) for token in self._encoder.encode_one(*checked.text)]

    def score_batch(
        self,
        pairs: Iterable[Pair],
        mode: Literal["logprob"] = "logprob",
        *,
        on_error: Literal["raise", "report"] = "raise",
    ) -> ScoreBatch:
        """Score facts against their contexts.

        Parameters
        ----------
        pairs : iterable of (context, fact)
            Any order, any mix of contexts. Prompts that start with the same tokens share them; equal pairs are
            computed once.
        mode : "logprob"
            Probability of the first label among the labels, from one forward.
        on_error : "raise" or "report"
            What to do with a pair that cannot be scored: raise before any work, or give it a status and a note and
            score the others.

        Returns
        -------
        ScoreBatch
            Aligned with `pairs`; empty for no pairs.

        Raises
        ------
        InputError
            A pair is not two strings, its fact is empty, or its prompt is longer than the model's positions (nothing
            is ever cut). `index` is its position.
        NumericError
            The model gave a logit that is not finite.
        """
        _check_mode(mode)
        if on_error not in ("raise", "report"):
            raise InputError(f'on_error must be "raise" or "report", got {on_error!r}')
        work = Work()
        checked = check_pairs(pairs)
        status = [Status.OK if pair.text is not None else Status.INVALID_INPUT for pair in checked]
        with work.stage("encode"):
            prompts = self._encode(checked, status)
        if on_error == "raise":
            _raise_first(checked, status)
        return self._score(checked, status, prompts, work, on_error)

    def _encode(self, checked: list[CheckedPair], status: list[Status]) -> list[IntArray | None]:
        """Token ids of every pair that can be scored; the others get their status and note here."""
        limit = self.backbone.max_prompt_tokens
        texts = list(dict.fromkeys(pair.text for pair in checked if pair.text is not None))
        if limit is not None:
            # A text of this many characters cannot fit, whatever the tokenizer does: do not spend minutes on it.
            # Four characters may become one by normalisation.
            fits = 4 * limit * self._encoder.longest_token
            texts = [text for text in texts if _num_visible(text[0]) + _num_visible(text[1]) <= fits]
        ids = dict(zip(texts, self._encoder.encode(texts), strict=True))
        prompts: list[IntArray | None] = []
        for at, pair in enumerate(checked):
            prompt, problem = None, None
            if pair.text is not None and pair.text not in ids:
                problem = Status.TOO_LONG, self._too_long(f"over {limit:,}")
            elif pair.text is not None:
                prompt = ids[pair.text]
                if prompt is None:
                    problem = Status.INVALID_INPUT, NOT_LITERAL
                elif limit is not None and len(prompt) > limit:
                    problem = Status.TOO_LONG, self._too_long(f"{len(prompt):,}")
                elif prompt.max() >= self.backbone.embedding_rows:
                    rows = self.backbone.embedding_rows
                    problem = (
                        Status.INVALID_INPUT,
                        f"token id {prompt.max()} is not among the model's {rows} embeddings",
                    )
            if problem is not None:
                status[at], checked[at], prompt = problem[0], replace(pair, note=problem[1]), None
            prompts.append(prompt)
        return prompts

    def _too_long(self, size: str) -> str:
        limit = self.backbone.max_prompt_tokens
        return f"the prompt has {size} tokens, the model reads at most {limit:,}: shorten the context or split it"

    def _score(
        self,
        checked: list[CheckedPair],
        status: list[Status],
        prompts: list[IntArray | None],
        work: Work,
        on_error: str,
    ) -> ScoreBatch:
        scored = [at for at, prompt in enumerate(prompts) if prompt is not None]
        logits = np.full((len(checked), len(self.labels.names)), np.nan, dtype=np.float32)
        scores, mass = (np.full(len(checked), np.nan, dtype=np.float32) for _ in range(2))
        notes = [pair.note for pair in checked]
        ready = [prompt for prompt in prompts if prompt is not None]
        if ready:
            evidence = label_evidence(self.backbone, ready, self.labels, work, backend=self._backend)
            logits[scored], scores[scored], mass[scored] = evidence.logits, evidence.scores, evidence.mass
        for at in scored:
            if not np.isfinite(scores[at]) or not np.isfinite(mass[at]):
                notes[at] = "the model's logits are not finite: check its weights and dtype"
                if on_error == "raise":
                    raise NumericError(f"item {at}: {notes[at]}", index=at)
                status[at] = Status.UNPARSED
                logits[at] = scores[at] = mass[at] = np.nan
            elif mass[at] < self.min_label_mass:
                status[at] = Status.LOW_LABEL_MASS
        return ScoreBatch(
            scores=scores,
            status=tuple(status),
            notes=tuple(notes),
            label_names=self.labels.names,
            label_logits=logits,
            label_mass=mass,
            usage=Usage(
                contexts=len({checked[at].text[0] for at in scored}),  # type: ignore[index]
                prompt_tokens=sum(len(prompt) for prompt in ready),
                computed_tokens=work.computed_tokens,
                forwards=work.forwards,
                seconds=work.seconds,
            ),
            backend=self.ops_backend,
            path=self.backbone.path,
            prompt_version=self._encoder.template.version,
        )


def score_batch(model: Verifier | str | Path, pairs: Iterable[Pair], **options: Any) -> ScoreBatch:
    """`Verifier.score_batch` as a function.

    Parameters
    ----------
    model : Verifier, or str or Path
        A verifier, or what `Verifier.from_pretrained` loads (once for this call: keep a verifier to score often).
    pairs : iterable of (context, fact)
    **options
        Of `Verifier.score_batch`.
    """
    verifier = model if isinstance(model, Verifier) else Verifier.from_pretrained(model)
    return verifier.score_batch(pairs, **options)


def _num_visible(text: str) -> int:
    """Characters that are not white space, which some tokenizers drop."""
    return sum(map(len, text.split()))


def _check_mode(mode: str) -> None:
    if mode not in MODES:
        raise InputError(f"mode={mode!r} is not one of {', '.join(MODES)}")


def _raise_first(checked: list[CheckedPair], status: list[Status]) -> None:
    for at, state in enumerate(status):
        if state is not Status.OK:
            raise InputError(f"item {at}: {checked[at].note} (on_error='report' scores the others)", index=at)
