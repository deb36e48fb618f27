"""The facade: pairs in, scores out. Every step is one call into the room that does it."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gatekern import ops
from gatekern.assembly import Part, assemble, usage_of
from gatekern.encoding import Batch, Prompts, encode_batch
from gatekern.engine.backbone import Backbone
from gatekern.engine.invariance import Invariance
from gatekern.engine.loading import load
from gatekern.engine.work import Work
from gatekern.errors import InputError
from gatekern.inputs import Pair, check_pairs
from gatekern.labels import YES_NO, LabelSet, LabelSpec, resolve_labels
from gatekern.modes import TASKS, Mode, Options, Task, check_mode, mode_options
from gatekern.modes.adaptive import AdaptiveOptions, answers_better, undecided
from gatekern.modes.exact import ExactOptions, reply_evidence
from gatekern.modes.logprob import label_evidence
from gatekern.modes.sample import SampleOptions, TextReader, sample_evidence
from gatekern.ops import dispatch
from gatekern.prompts import Layout, PromptEncoder, PromptTemplate, template
from gatekern.reply_table import ReplyTable, reply_table
from gatekern.results import ScoreBatch, Status

logger = logging.getLogger("gatekern")


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
        Wording of your own (`gatekern.prompts.load` reads one from a file) for the question with labels.
    rating_prompt : PromptTemplate, optional
        Wording of your own for the question for a score from 0.0 to 1.0 (modes "exact", "sample" and "adaptive").
    labels : sequence or mapping, optional
        Answer labels; the score is the probability of the first among all. Default ``("yes", "no")``. Give names, or
        names with the words or token ids that count for them.
    backend : "auto", "triton", "native" or "torch"
        Implementation of the operators. An explicit one raises where it cannot run; "auto" picks. What has no form of a
        backend runs on PyTorch with it: masses over the vocabulary with "native", those by class and the drawing of
        tokens with every one.
    attention : "auto", "triton", "flash" or "torch"
        Implementation of attention in packed forwards; likewise.
    deterministic : bool
        A fact's score should be the same bits in any batch, order and chunk size: attention adds in a fixed order and
        forwards are padded to fixed sizes. `invariance` says whether a self-test on this model and machine holds.
    compile : bool
        Run decoder layers through ``torch.compile``, which pays on GPUs with small models. The first calls compile.
    prune_last_layer : bool
        Run the last decoder layer on the rows that are read only: saves a part of one layer in all.
    max_tokens_per_forward : int, optional
        Memory bound of one forward, tokens. Default by device and model size.
    min_label_mass : float
        Below this probability of *any* label (or of any score), the status is ``low_label_mass``.

    Attributes
    ----------
    labels : LabelSet
        Token ids that count for each label.
    invariance : Invariance or None
        What the self-test of ``deterministic=True`` found: ``.verified`` and ``.detail``.

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
        rating_prompt: PromptTemplate | None = None,
        labels: LabelSpec = YES_NO,
        backend: str = "auto",
        attention: str = "auto",
        deterministic: bool = False,
        compile: bool = False,
        prune_last_layer: bool = False,
        max_tokens_per_forward: int | None = None,
        min_label_mass: float = 0.05,
    ) -> None:
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise InputError(f"tokenizer must be a transformers tokenizer, got {type(tokenizer).__name__}")
        for name, value in (("prompt", prompt), ("rating_prompt", rating_prompt)):
            if value is not None and not isinstance(value, PromptTemplate):
                raise InputError(f"{name} must be a PromptTemplate (gatekern.prompts.load reads one), got {value!r}")
        if not 0.0 <= min_label_mass <= 1.0:
            raise InputError(f"min_label_mass is a probability, got {min_label_mass}")
        self.model = model
        self.tokenizer = tokenizer
        self.min_label_mass = min_label_mass
        self.backbone = Backbone(
            model,
            max_tokens=max_tokens_per_forward,
            attention=attention,
            deterministic=deterministic,
            compiled=compile,
            pruned=prune_last_layer,
        )
        self.ops_backend = ops.resolved_name("label_scores", backend, self.backbone.head.weight.device)
        self._backend = backend
        self._templates: dict[Task, PromptTemplate] = {
            "verify": prompt or template("verify", layout),
            "rate": rating_prompt or template("rate", layout),
        }
        self._encoders: dict[Task, PromptEncoder] = {}
        self.labels: LabelSet = resolve_labels(self._encoder("verify"), labels, self.backbone.head.vocab_rows)
        self.invariance = self._prove_invariance() if deterministic else None

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
        rating_prompt: PromptTemplate | None = None,
        labels: LabelSpec = YES_NO,
        backend: str = "auto",
        attention: str = "auto",
        deterministic: bool = False,
        compile: bool = False,
        prune_last_layer: bool = False,
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
            rating_prompt=rating_prompt,
            labels=labels,
            backend=backend,
            attention=attention,
            deterministic=deterministic,
            compile=compile,
            prune_last_layer=prune_last_layer,
            max_tokens_per_forward=max_tokens_per_forward,
            min_label_mass=min_label_mass,
        )

    def encode(self, context: str, fact: str, mode: str = "logprob") -> list[int]:
        """Exactly the token ids that the model sees for this pair (in "adaptive": at first)."""
        check_mode(mode)
        checked = check_pairs([(context, fact)])[0]
        if checked.text is None:
            raise InputError(checked.note or "")
        return [int(token) for token in self._encoder(TASKS[mode][0]).encode_one(*checked.text)]

    def score_batch(
        self,
        pairs: Iterable[Pair],
        mode: Mode = "logprob",
        *,
        on_error: Literal["raise", "report"] = "raise",
        **options: Any,
    ) -> ScoreBatch:
        """Score facts against their contexts.

        Parameters
        ----------
        pairs : iterable of (context, fact)
            Any order, any mix of contexts. Prompts that start with the same tokens share them; equal pairs are
            computed once.
        mode : "logprob", "exact", "sample" or "adaptive"
            ``logprob``: probability of the first label among the labels, from one forward. ``exact``: expectation of
            the score from 0.0 to 1.0 that the model would reply with, from one forward. ``sample``: mean of K such
            replies. ``adaptive``: ``logprob``, then ``exact`` for the facts that it leaves undecided.
        on_error : "raise" or "report"
            What to do with a pair that cannot be scored: raise before any work, or give it a status and a note and
            score the others.
        **options
            Of the mode: the fields of `gatekern.modes.exact.ExactOptions` (``law``, ``temperature``),
            `gatekern.modes.sample.SampleOptions` (``k``, ``temperature``, ``top_p``, ``max_new_tokens``, ``seed``,
            ``min_valid``, ``reply``, ``threshold``, ``early_stop``) and `gatekern.modes.adaptive.AdaptiveOptions`
            (``threshold``, ``band``, ``mass``, and those of ``exact``).

        Returns
        -------
        ScoreBatch
            Aligned with `pairs`; empty for no pairs.

        Raises
        ------
        InputError
            A pair is not two strings, its fact is empty, or its prompt is longer than the model's positions (nothing
            is ever cut); `index` is its position. Or an option is not one of the mode's, or out of its range.
        LabelError
            The tokenizer cannot spell a score after the rating prompt.
        NumericError
            The model gave a logit that is not finite.
        """
        settings = mode_options(mode, options)
        if on_error not in ("raise", "report"):
            raise InputError(f'on_error must be "raise" or "report", got {on_error!r}')
        work = Work()
        batch = Batch.of(check_pairs(pairs))
        with work.stage("encode"):
            every = [self._encode(batch, task, settings) for task in TASKS[mode]]
        if on_error == "raise":
            batch.raise_first()
        scored = np.nonzero([state is Status.OK for state in batch.status])[0]
        parts = self._evidence([prompts.of(scored) for prompts in every], settings, work) if len(scored) else []
        return assemble(
            batch,
            parts,
            settings,
            usage=usage_of(batch, parts, work),
            label_names=self.labels.names if "verify" in TASKS[mode] else (),
            min_label_mass=self.min_label_mass,
            on_error=on_error,
            attention=self.backbone.attention,
            backend=self._backend_of(mode),
            path=self.backbone.path,
            prompt_version="+".join(self._encoder(task).template.version for task in TASKS[mode]),
        )

    def _prove_invariance(self) -> Invariance:
        head, backend = self.backbone.head, self._backend

        def read(hidden: Tensor) -> Tensor:
            rows = ops.score_rows(hidden, head, self.labels.ids, mass=True, backend=backend)
            assert rows.mass is not None  # it was asked for
            return torch.stack([rows.score, rows.mass], dim=-1)

        found = self.backbone.prove_invariance(read)
        if not found.verified:
            logger.warning("deterministic=True is %s", found)
        return found

    def _evidence(self, prompts: list[Prompts], settings: Options, work: Work) -> list[Part]:
        """What the mode finds out, the deciding part last."""
        first = prompts[0]
        if isinstance(settings, SampleOptions):
            reader = self._replies if settings.reply == "number" else self._texts
            args = (first.distinct, self._encoder("rate"), reader, work, settings)
            return [Part("sample", first, sample_evidence(self.backbone, *args))]
        if isinstance(settings, AdaptiveOptions):
            labelled = self._labelled(first, work)
            open_ = undecided(labelled.evidence, settings)[first.index]
            if not open_.any():
                return [labelled]
            weighed = self._weighed(prompts[1].of(first.pairs[open_]), settings, work)
            return [labelled, replace(weighed, decides=answers_better(labelled.mass[open_], weighed.mass, settings))]
        if isinstance(settings, ExactOptions):
            return [self._weighed(first, settings, work)]
        return [self._labelled(first, work)]

    def _labelled(self, prompts: Prompts, work: Work) -> Part:
        evidence = label_evidence(self.backbone, prompts.distinct, self.labels, work, backend=self._backend)
        return Part("logprob", prompts, evidence)

    def _weighed(self, prompts: Prompts, settings: ExactOptions, work: Work) -> Part:
        args = (prompts.distinct, self._replies, work, settings)
        return Part("exact", prompts, reply_evidence(self.backbone, *args, backend=self._backend))

    def _encode(self, batch: Batch, task: Task, settings: Options) -> Prompts:
        further = 0
        if task == "rate":
            further = (
                settings.max_new_tokens - 1
                if isinstance(settings, SampleOptions)
                else int(self._replies.trie.depths.max())
            )
        limit = self.backbone.max_prompt_tokens
        if limit is not None and further >= limit:
            raise InputError(f"an answer of {further + 1:,} tokens leaves no room for a prompt in {limit:,} positions")
        return encode_batch(
            batch,
            self._encoder(task),
            further=further,
            max_tokens=limit,
            embedding_rows=self.backbone.embedding_rows,
        )

    def _encoder(self, task: Task) -> PromptEncoder:
        if task not in self._encoders:
            self._encoders[task] = PromptEncoder(self.tokenizer, self._templates[task])
        return self._encoders[task]

    @cached_property
    def _replies(self) -> ReplyTable:
        return reply_table(self._encoder("rate"), self.backbone.head.vocab_rows)

    @cached_property
    def _texts(self) -> TextReader:
        """How replies that run to their end are read: where they end is the model's matter, as in `generate`."""
        ends = {self.tokenizer.eos_token_id}
        configured = getattr(self.model.generation_config, "eos_token_id", None)
        ends.update(configured if isinstance(configured, (list, tuple)) else [configured])
        return TextReader(self._encoder("rate"), self.backbone.head.vocab_rows, ends - {None})

    def _backend_of(self, mode: Mode) -> str:
        """What reads hidden states in a mode."""
        if mode == "logprob":
            return self.ops_backend
        if mode == "sample":
            return "torch"
        form = dispatch.with_form("class_lse", self._backend)
        exact = ops.resolved_name("class_lse", form, self.backbone.head.weight.device)
        return exact if mode == "exact" else "+".join(dict.fromkeys([self.ops_backend, exact]))


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
