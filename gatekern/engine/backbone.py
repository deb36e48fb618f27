"""A loaded model, ready to turn prompts into hidden states."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gatekern.engine.head import prove_head, read_head, text_parts
from gatekern.engine.invariance import Invariance, find_invariance
from gatekern.engine.packed import Execution, PackedPath
from gatekern.engine.running import running
from gatekern.engine.stepwise import BranchedPath, FullPath
from gatekern.engine.support import max_prompt_tokens, support_for
from gatekern.engine.work import Work
from gatekern.errors import BackendError, GatekernError, InputError, UnsupportedModelError
from gatekern.layout import IntArray
from gatekern.ops import dispatch
from gatekern.ops.head import HeadSpec
from gatekern.planning import NO_TRIE, TokenTrie, build_trie

_log = logging.getLogger("gatekern")

_ROWS_PER_BLOCK = 16


class Decode(Protocol):
    """Rows that are continued token by token; see `PackedDecode`."""

    hidden: Tensor

    def extend(self, parents: IntArray, tokens: IntArray) -> None: ...


class Continuation(Protocol):
    """Some prompts of a call, from whose ends decodes start; see `PackedContinuation`."""

    prompts: IntArray

    def start(self) -> Decode: ...


class HiddenPath(Protocol):
    """A way to compute the hidden states at the end of each prompt, and of what follows it."""

    name: str
    max_tokens: int

    def hidden_rows(self, prompts: Sequence[IntArray], work: Work, trie: TokenTrie = ...) -> Tensor: ...

    def continuations(self, prompts: Sequence[IntArray], work: Work) -> Iterator[Continuation]: ...


class Backbone:
    """The model as the modes see it: prompts in, final hidden states and the head out.

    Parameters
    ----------
    model : PreTrainedModel
        Any causal language model of transformers, in eval mode. Never changed.
    max_tokens : int, optional
        Tokens that one forward computes at most. Default by device and size of the model.
    attention : str
        Backend of `gatekern.ops.prefix_attention`; an explicit one runs or raises.
    deterministic : bool
        Results should not depend on batch mates to the last bit; `prove_invariance` says whether they do.
    compiled : bool
        Run decoder layers through `torch.compile`.
    pruned : bool
        Run the last decoder layer on the rows that are read only.

    Attributes
    ----------
    support : Support
        The path in use, and why.
    head : HeadSpec
        Proved against the model's own logits.
    max_prompt_tokens : int or None
        Longest prompt, tokens.
    dtype : torch.dtype
        Of the model's weights.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_tokens: int | None = None,
        attention: str = "auto",
        deterministic: bool = False,
        compiled: bool = False,
        pruned: bool = False,
    ) -> None:
        model = _unwrapped(model)
        if max_tokens is not None and not (isinstance(max_tokens, int) and max_tokens >= 1):
            raise InputError(f"max_tokens_per_forward must be a whole number from 1 on, got {max_tokens!r}")
        self.model = model
        self._check_mode()
        self.support = support_for(model.config, type(model))
        if self.support.path == "refused":
            raise UnsupportedModelError(f"{model.config.model_type}: {self.support.reason}")
        headed, decoder = text_parts(model)
        embedding: Any = model.get_input_embeddings()
        self.device: torch.device = embedding.weight.device
        if self.device.type == "meta":
            raise UnsupportedModelError("the input embedding is offloaded: give it a device in device_map")
        self.dtype = model.dtype
        self.deterministic = deterministic
        self.head: HeadSpec = read_head(headed)
        self.max_prompt_tokens = max_prompt_tokens(model)
        self.max_tokens = max_tokens or _default_max_tokens(model, self.device, deterministic)
        self.embedding_rows = int(embedding.weight.shape[0])
        self._headed = headed
        buckets = _buckets(self.max_tokens) if deterministic else ()
        execution = Execution(attention, deterministic, buckets, compiled, pruned)
        explicit = attention != "auto" or compiled or pruned
        if explicit and self.support.path != "packed":
            reason = f"{model.config.model_type} takes the {self.support.path} path ({self.support.reason})"
            raise UnsupportedModelError(f"{_asked(execution)} needs the packed path, and {reason}")
        dispatch.select("prefix_attention", attention, self.device)
        with running(decoder, self.device):
            prove_head(headed, decoder, self.head, self.device)
            self._path = self._prove_path(decoder, execution, explicit=explicit)
        self._alone = FullPath(decoder, self.device, self.max_tokens, alone=True)

    @property
    def path(self) -> str:
        return self._path.name

    @property
    def attention(self) -> str:
        """What computes attention: a backend of `prefix_attention`, or "model" on the other paths."""
        if not isinstance(self._path, PackedPath):
            return "model"
        return dispatch.select("prefix_attention", self._path.execution.attention, self.device)

    def readable(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., rows, hidden_size] as products with the vocabulary should get them.

        In deterministic mode rows of zeros are added, up to whole blocks: libraries take few rows in another order.
        """
        if not self.deterministic:
            return hidden
        return nn.functional.pad(hidden, (0, 0, 0, -hidden.shape[-2] % _ROWS_PER_BLOCK))

    def prove_invariance(self, score: Callable[[Tensor], Tensor]) -> Invariance:
        """Try whether a prompt's results are the same bits in every batch.

        Parameters
        ----------
        score : callable
            From hidden states [rows, hidden_size] to whatever is read from them, [rows, ...].

        Notes
        -----
        Forwards are padded to powers of two. Where the library's products differ between those sizes, all forwards are
        padded to the largest instead, and the test is made again.
        """
        trie = build_trie([(0,), (1,)])

        def rows_of(prompts: Sequence[IntArray], budget: int | None) -> Tensor:
            before, self._path.max_tokens = self._path.max_tokens, budget or self._path.max_tokens
            try:
                rows = _continued(self._path, prompts, trie).to(self.head.weight.device)
            finally:
                self._path.max_tokens = before
            places = rows.flatten(0, 1)
            scores = score(self.readable(places))[: len(places)].view(*rows.shape[:2], -1)
            return torch.cat([rows.float(), scores.float()], dim=-1)

        longest = min(self.support.packed_limit or 512, self.max_prompt_tokens or 512) - int(trie.depths.max())
        found = find_invariance(rows_of, min(self.head.vocab_rows, self.embedding_rows), longest)
        if not found.verified and isinstance(self._path, PackedPath):
            largest = self._path.execution.token_buckets[-1:]
            self._path.execution = replace(self._path.execution, token_buckets=largest)
            found = find_invariance(rows_of, min(self.head.vocab_rows, self.embedding_rows), longest)
        return found

    def hidden_rows(self, prompts: Sequence[IntArray], work: Work, trie: TokenTrie = NO_TRIE) -> Tensor:
        """Final hidden states at the last token of each prompt, and at each node of a trie below it.

        Parameters
        ----------
        prompts : sequence of int64 [length_i]
            At least one, none empty, none longer (with the trie) than `max_prompt_tokens`.
        work : Work
            Counters to add to.
        trie : TokenTrie
            Continuations to read below every prompt, in the same forward where the path is "packed".

        Returns
        -------
        Tensor [num_prompts, 1 + num_nodes, hidden_size]
            On the head's device, in the model's dtype, in the order of `prompts`.
        """
        parts = self._parts(prompts, int(trie.depths.max(initial=0)))
        rows = torch.cat([path.hidden_rows([prompts[at] for at in index], work, trie) for path, index in parts])
        back = np.argsort(np.concatenate([index for _, index in parts]))
        return rows[torch.from_numpy(back).to(rows.device)].to(self.head.weight.device)

    def continuations(
        self, prompts: Sequence[IntArray], work: Work, max_new_tokens: int
    ) -> Iterator[tuple[IntArray, Continuation]]:
        """The prompts in groups that a decode can continue, each with its indices into `prompts`."""
        for path, index in self._parts(prompts, max_new_tokens):
            for continuation in path.continuations([prompts[at] for at in index], work):
                yield index[continuation.prompts], continuation

    def _parts(self, prompts: Sequence[IntArray], further: int) -> list[tuple[HiddenPath, IntArray]]:
        """Which prompts, with so many `further` tokens, take which path."""
        self._check_mode()
        if getattr(self._headed.get_output_embeddings(), "weight", None) is not self.head.weight:
            raise InputError("the model's output head was replaced after it was wrapped: wrap it again")
        limit = self.support.packed_limit
        lengths = np.array([len(prompt) + further for prompt in prompts])
        alone = lengths > limit if limit is not None else np.zeros(len(prompts), dtype=bool)
        parts = ((self._path, np.nonzero(~alone)[0]), (self._alone, np.nonzero(alone)[0]))
        return [(path, index) for path, index in parts if len(index)]

    def _check_mode(self) -> None:
        if self.model.training:
            raise InputError("the model is in training mode (dropout would change scores): call model.eval() first")

    def _prove_path(self, decoder: nn.Module, execution: Execution, *, explicit: bool) -> HiddenPath:
        """Run the intended path on a few short prompts and compare it with whole ones; fall back if it differs."""
        full = FullPath(decoder, self.device, self.max_tokens)
        candidates: list[HiddenPath] = [full]
        if self.support.path == "branched":
            candidates = [BranchedPath(decoder, self.device, self.max_tokens), full]
        elif self.support.path == "packed":
            candidates = [PackedPath(decoder, self.device, self.max_tokens, execution), full]
        prompts, trie = _probe(self.head.vocab_rows)
        limit = min(self.support.packed_limit or 64, self.max_prompt_tokens or 64) - int(trie.depths.max())
        prompts = [prompt[-limit:] for prompt in prompts]
        texts = [np.concatenate([prompt, path]) for prompt in prompts for path in trie.paths()]
        truth = torch.stack([full.last_rows([text], Work())[0] for text in texts]).float()
        tolerance = 1e-3 if self.dtype == torch.float32 else 0.1  # low precision: rounding accumulates over layers
        for path in candidates:
            try:
                rows = path.hidden_rows(prompts, Work(), trie)
                continued = _continued(path, prompts, trie)
            except GatekernError as error:
                if explicit:
                    raise
                cause = str(error)
            except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
                # A model that cannot run this path fails somewhere inside transformers, in its own way.
                cause = f"{type(error).__name__}: {error}"
            else:
                found = torch.stack([rows, continued]).flatten(1, 2).float()
                error_size = ((found - truth).norm(dim=-1) / truth.norm(dim=-1)).max().item()
                if error_size <= tolerance:
                    return path
                cause = f"hidden states differ by {error_size:.1e} of their size from separate forwards"
            if explicit:
                raise BackendError(f"{_asked(execution)}: {cause}")
            _log.warning("%s: the %s path is off: %s", type(self.model).__name__, path.name, cause)
        raise UnsupportedModelError(
            f"{type(self.model).__name__} gives different hidden states for the same prompt alone and padded on the "
            f"right in a batch ({cause}): it is not causal, or its weights are not finite"
        )


def _unwrapped(model: Any) -> PreTrainedModel:
    """The transformers model inside a `torch.compile` or PEFT wrapper (adapters stay in place)."""
    model = getattr(model, "_orig_mod", model)
    if not isinstance(model, PreTrainedModel) and hasattr(model, "get_base_model"):
        model = model.get_base_model()
    if not isinstance(model, PreTrainedModel):
        raise InputError(f"model must be a transformers PreTrainedModel, got {type(model).__name__}")
    return model


def _default_max_tokens(model: PreTrainedModel, device: torch.device, deterministic: bool) -> int:
    """Tokens a forward: enough to fill the device, few enough for activations to stay in cache (CPU) or memory."""
    if device.type == "cpu":
        return 2048
    if deterministic:  # every forward may have to be padded to this
        return 8192
    parameters = model.num_parameters()
    return 65536 if parameters < 1e9 else 32768 if parameters < 4e9 else 16384


def _asked(execution: Execution) -> str:
    """What was asked for explicitly, as the caller spells it."""
    asked = [f"attention={execution.attention!r}"] if execution.attention != "auto" else []
    asked += ["compile=True"] if execution.compiled else []
    asked += ["prune_last_layer=True"] if execution.pruned else []
    return ", ".join(asked)


def _buckets(max_tokens: int) -> tuple[int, ...]:
    """Powers of two from 64 to the first that holds `max_tokens`."""
    return tuple(64 << at for at in range(max(0, (max_tokens - 1).bit_length() - 6) + 1))


def _probe(vocab_rows: int) -> tuple[list[IntArray], TokenTrie]:
    """Five short prompts over two contexts that share a header, suffixes of unequal length; two tokens below each."""
    ids = np.random.default_rng(0).integers(0, min(vocab_rows, 1000), size=64)
    header, contexts = ids[:12], (ids[12:32], ids[32:44])
    suffixes = ((ids[44:47], ids[47:52], ids[52:53]), (ids[53:57], ids[57:64]))
    prompts = [
        np.concatenate([header, context, suffix])
        for context, branch in zip(contexts, suffixes, strict=True)
        for suffix in branch
    ]
    return prompts, build_trie([(0,), (1,)])


def _continued(path: HiddenPath, prompts: Sequence[IntArray], trie: TokenTrie) -> Tensor:
    """What `hidden_rows` gives for a trie of one level, by a step of a decode."""
    parts: dict[int, Tensor] = {}
    for continuation in path.continuations(prompts, Work()):
        count, decode = len(continuation.prompts), continuation.start()
        ends = decode.hidden
        decode.extend(np.repeat(np.arange(count), len(trie)), np.tile(trie.tokens, count))
        both = torch.cat([ends[:, None], decode.hidden.view(count, len(trie), -1)], dim=1)
        parts |= dict(zip(continuation.prompts.tolist(), both, strict=True))
    return torch.stack([parts[at] for at in range(len(prompts))])
