"""From (context, fact) to the token ids that the model reads.

A template is rendered once per verifier, through the tokenizer's chat template, with placeholders for the context and
the fact. What remains is a fixed scaffold with two slots, so a chat template may reorder, trim or date its messages
without any effect on how facts share a context. User text fills the slots as literal text: whatever it contains, it
yields no control token.
"""

from __future__ import annotations

import copy
import json
import logging
import re
import tomllib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from gatekern.errors import InputError, TemplateError
from gatekern.layout import IntArray

_log = logging.getLogger("gatekern")

Layout = Literal["paper", "fact_last"]
Slot = Literal["context", "fact"]


#: Why `PromptEncoder.encode` gives None.
NOT_LITERAL = "the tokenizer turns this text into a control token however it is split"


@dataclass(frozen=True)
class PromptTemplate:
    """A question about a fact and its context.

    Attributes
    ----------
    version : str
        Name of this exact wording; results carry it. Scores of different versions are not comparable.
    system : str
        Instruction. Goes into the system role where the chat template keeps one, else before `user`. May be empty.
    user : str
        Holds ``{context}`` and ``{fact}`` once each. Other braces are literal.
    answer_prefix : str
        Text after the generation prompt, before the answer, e.g. an empty thinking block. May hold control tokens.
    """

    version: str
    system: str
    user: str
    answer_prefix: str = ""

    def __post_init__(self) -> None:
        for slot in ("{context}", "{fact}"):
            if self.user.count(slot) != 1:
                raise TemplateError(
                    f"template {self.version!r}: `user` must hold {slot} exactly once, found {self.user.count(slot)}"
                )


_VERIFY_SYSTEM = (
    "You check statements against a source text. The source text is all you know: what it does not say is unsupported."
)
_RATE_SYSTEM = (
    "You rate from 0.0 to 1.0 how well a source text supports a statement. The source text is all you know. "
    "0.0 means not supported or contradicted, 0.5 partly supported or unclear, 1.0 stated in full."
)

#: Built-in wordings by task and layout. ``paper`` asks after the fact, as the ConsistencyGate paper does;
#: ``fact_last`` asks before the context, so that only the fact's own tokens are computed for each fact.
TEMPLATES: dict[tuple[str, Layout], PromptTemplate] = {
    ("verify", "paper"): PromptTemplate(
        version="verify-paper/1",
        system=_VERIFY_SYSTEM,
        user=(
            "Source text:\n{context}\n\nStatement:\n{fact}\n\n"
            "Does the source text directly support the statement? Answer yes or no."
        ),
    ),
    ("verify", "fact_last"): PromptTemplate(
        version="verify-fact-last/1",
        system=f"{_VERIFY_SYSTEM} Answer yes if it directly supports the statement, otherwise no.",
        user="Source text:\n{context}\n\nStatement:\n{fact}",
    ),
    ("rate", "paper"): PromptTemplate(
        version="rate-paper/1",
        system=_RATE_SYSTEM,
        user=(
            # Eight tokens for every fact: the scale is explained once, before the context.
            "Source text:\n{context}\n\nStatement:\n{fact}\n\nRate the support with one decimal number."
        ),
    ),
    ("rate", "fact_last"): PromptTemplate(
        version="rate-fact-last/1",
        system=f"{_RATE_SYSTEM} Answer with one decimal number.",
        user="Source text:\n{context}\n\nStatement:\n{fact}",
    ),
}


def template(task: str, layout: str) -> PromptTemplate:
    """Built-in template of a task ("verify" or "rate") in a layout ("paper" or "fact_last")."""
    try:
        return TEMPLATES[task, layout]  # type: ignore[index]
    except KeyError:
        layouts = sorted({name for _, name in TEMPLATES})
        raise InputError(f"layout={layout!r} is not one of {', '.join(layouts)}") from None


def load(path: str | Path) -> PromptTemplate:
    """Read a template from a TOML file with the fields of `PromptTemplate`.

    ``user`` is required; ``version`` defaults to the file's name, ``system`` and ``answer_prefix`` to nothing.

    Raises
    ------
    TemplateError
        Not TOML, unknown or missing fields, or a slot that does not occur exactly once.
    """
    try:
        fields: dict[str, Any] = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TemplateError(f"{path}: not a TOML file: {error}") from error
    known = {"version", "system", "user", "answer_prefix"}
    if set(fields) - known or not all(isinstance(value, str) for value in fields.values()) or "user" not in fields:
        raise TemplateError(f"{path}: wants the text fields user (required), {', '.join(sorted(known - {'user'}))}")
    return PromptTemplate(**{"version": Path(path).stem, "system": "", **fields})


class PromptEncoder:
    """Encodes pairs with one tokenizer and one template.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerBase
        Copied, never changed. With a chat template the prompt is a chat turn; without one it is the plain form:
        system text, blank line, user text, and ``Answer:`` on a line of its own.
    template : PromptTemplate

    Attributes
    ----------
    scaffold : tuple of str
        Literal text and slots ("context", "fact" at odd places): text, slot, text, slot, text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: PromptTemplate) -> None:
        # A call with other padding or truncation settings rewrites the tokenizer's state, also between threads.
        self._tokenizer = copy.deepcopy(tokenizer)
        self.template = template
        chat = bool(getattr(tokenizer, "chat_template", None))
        self.scaffold = _render_chat(self._tokenizer, template) if chat else _render_plain(template)
        self._prefix = [] if chat else _leading_specials(self._tokenizer, self.scaffold[0])
        self._control = _control_tokens(self._tokenizer)
        added = self._tokenizer.added_tokens_decoder.values()
        # Control tokens that swallow the white space beside them (Phi-3).
        self._strips_before = {token.content for token in added if token.lstrip}
        self._strips_after = {token.content for token in added if token.rstrip}
        self._control_ids = np.array(sorted(self._control.values()), dtype=np.int64)
        pattern = "|".join(re.escape(text) for text in sorted(self._control, key=len, reverse=True))
        self._control_pattern = re.compile(f"({pattern})") if pattern else None
        self._literal_tokenizer = _without_control_tokens(self._tokenizer, set(self._control))
        # What the scaffold itself yields; one-letter slots stand in for user text.
        self._scaffold_control = self._control_of(self._tokenize([self._fill("a", "a")])[0])
        self.longest_token = max((len(text) for text in self._tokenizer.get_vocab()), default=1)

    def encode_one(self, context: str, fact: str, answer: str = "") -> IntArray:
        """Token ids of one prompt, int64 [length]; see `encode`. Raises `InputError` where that gives None."""
        ids = self.encode([(context, fact)], answer)[0]
        if ids is None:
            raise InputError(NOT_LITERAL)
        return ids

    def encode(self, pairs: Sequence[tuple[str, str]], answer: str = "") -> list[IntArray | None]:
        """Token ids of the fully rendered prompts.

        Parameters
        ----------
        pairs : sequence of (context, fact)
            Valid Unicode.
        answer : str
            Text appended at the answer position; used to see how a label is spelled there.

        Returns
        -------
        list of int64 [length] or None
            The joint encoding of the whole text, never a concatenation of separate encodings, except that control
            tokens come from the scaffold alone. None for a text that this tokenizer cannot keep literal.
        """
        prompts: list[IntArray | None] = []
        texts = [self._fill(context, fact) + answer for context, fact in pairs]
        for pair, joint in zip(pairs, self._tokenize(texts) if texts else [], strict=True):
            ids: IntArray | None = joint
            if not np.array_equal(self._control_of(joint), self._scaffold_control):
                ids = self._encode_literally(*pair, answer)
            if ids is not None and self._prefix:
                ids = np.concatenate([self._prefix, ids])
            prompts.append(ids)
        return prompts

    def decode(self, ids: Sequence[int]) -> str:
        """Text of some ids, control tokens included."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    @property
    def answer_lead(self) -> str:
        """White space with which an answer begins: none after a control token, a space or a line break."""
        tail = self.scaffold[-1]
        at_start = tail[-1:].isspace() or any(tail.endswith(control) for control in self._control)
        return "" if at_start else " "

    def token_texts(self, vocab_rows: int) -> list[str | None]:
        """Text of every token id inside an answer: None for control tokens, nothing for ids without a token."""
        lead = self._tokenize(["0"])[0].tolist()  # some tokenizers drop the white space of a first token
        before = self.decode(lead)
        known = [token for token in set(self._tokenizer.get_vocab().values()) if token < vocab_rows]
        control = set(self._control.values())
        texts: list[str | None] = [""] * vocab_rows
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is not None:
            decoded = backend.decode_batch([[*lead, token] for token in known], skip_special_tokens=False)
        else:
            decoded = [self.decode([*lead, token]) for token in known]
        for token, text in zip(known, decoded, strict=True):
            texts[token] = None if token in control else text.removeprefix(before)
        return texts

    def vocabulary(self) -> list[int]:
        """Ids of the ordinary (not control) tokens."""
        return sorted(set(self._tokenizer.get_vocab().values()) - set(self._control.values()))

    def _fill(self, context: str, fact: str) -> str:
        texts = {"context": context, "fact": fact}
        return "".join(part if at % 2 == 0 else texts[part] for at, part in enumerate(self.scaffold))

    def _tokenize(self, texts: list[str]) -> list[IntArray]:
        encoded = self._tokenizer(
            texts,
            add_special_tokens=False,
            padding=False,
            truncation=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return [np.array(ids, dtype=np.int64) for ids in encoded["input_ids"]]

    def _control_of(self, ids: IntArray) -> IntArray:
        return ids[np.isin(ids, self._control_ids)]

    def _encode_literally(self, context: str, fact: str, answer: str) -> IntArray | None:
        """Encode text that spells control tokens: split the scaffold at its own control tokens, and nothing else."""
        texts = {"context": context, "fact": fact}
        chunks: list[str | int] = [""]  # plain text and control ids, alternating

        def plain(text: str) -> None:
            chunks[-1] = str(chunks[-1]) + text

        for at, part in enumerate((*self.scaffold, answer)):
            if at % 2 and at < len(self.scaffold):
                plain(texts[part])
            elif self._control_pattern is None or at == len(self.scaffold):
                plain(part)
            else:
                pieces = self._control_pattern.split(part)  # text, control token, text, ..., text
                for index, piece in enumerate(pieces):
                    if index % 2:
                        chunks += [self._control[piece], ""]
                        continue
                    if index and pieces[index - 1] in self._strips_after:
                        piece = piece.lstrip()
                    if index + 1 < len(pieces) and pieces[index + 1] in self._strips_before:
                        piece = piece.rstrip()
                    plain(piece)
        ids: list[int] = []
        for index, chunk in enumerate(chunks):
            if isinstance(chunk, int):
                ids.append(chunk)
            elif chunk:
                ids += self._literal_ids(chunk, first=index == 0)
        result = np.array(ids, dtype=np.int64)
        return result if np.array_equal(self._control_of(result), self._scaffold_control) else None

    def _literal_ids(self, text: str, *, first: bool) -> list[int]:
        ids = self._plain_ids(text, first=first)
        if np.isin(ids, self._control_ids).any():
            # The model's own vocabulary still forms the token from its characters: break every spelling in two.
            assert self._control_pattern is not None
            pieces, at = [], 0
            for match in self._control_pattern.finditer(text):
                middle = (match.start() + match.end()) // 2
                pieces.append(text[at:middle])
                at = middle
            pieces.append(text[at:])
            ids = [
                token for at, piece in enumerate(pieces) for token in self._plain_ids(piece, first=first and at == 0)
            ]
        return ids

    def _plain_ids(self, text: str, *, first: bool) -> list[int]:
        """Encode text in which nothing is a control token, at the start of a prompt or after a control token."""
        if isinstance(self._literal_tokenizer, Tokenizer):
            # Some tokenizers put a space before the first piece of a text only: an anchor makes this not the first.
            lead = "" if first else _ANCHOR
            return list(self._literal_tokenizer.encode(lead + text, add_special_tokens=False).ids[0 if first else 1 :])
        return list(
            self._literal_tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)[
                "input_ids"
            ]
        )


# Placeholders that no chat template trims, escapes or splits.
_MARKS = {"system": "gksystem7q", "context": "gkcontext7q", "fact": "gkfact7q"}

# Chats whose generation prompt stops before a channel: the answer is the first token of the final channel (gpt-oss).
_CHANNEL_HEADER, _FINAL_CHANNEL = "<|start|>assistant", "<|channel|>final<|message|>"


def _render_chat(tokenizer: PreTrainedTokenizerBase, template: PromptTemplate) -> tuple[str, ...]:
    user = template.user.replace("{context}", _MARKS["context"]).replace("{fact}", _MARKS["fact"])
    folded = [{"role": "user", "content": f"{template.system}\n\n{user}" if template.system else user}]
    with_system = [{"role": "system", "content": _MARKS["system"]}, {"role": "user", "content": user}]
    failure = ""
    for messages in [with_system, folded] if template.system else [folded]:
        try:
            # Models that think first answer at once when told not to; templates ignore switches they do not know.
            text = str(
                tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True, enable_thinking=False, thinking=False
                )
            )
        except Exception as error:
            failure = f"it raises {type(error).__name__}: {error}"
            continue
        expected = [mark for mark in _MARKS.values() if mark != _MARKS["system"] or messages is with_system]
        lost = [mark for mark in expected if mark not in text]
        if lost:
            failure = f"it drops {', '.join(mark.removeprefix('gk').removesuffix('7q') for mark in lost)}"
            continue
        text = text.replace(_MARKS["system"], template.system)
        if text.endswith(_CHANNEL_HEADER) and not template.answer_prefix:
            text += _FINAL_CHANNEL
        text += template.answer_prefix
        if re.search(r"<think>\s*$", text):
            _log.warning(
                "the chat template opens a thinking block before the answer; labels are read inside it. "
                'Use a PromptTemplate with answer_prefix="</think>\\n\\n" to read them after an empty block'
            )
        return _split_slots(text)
    raise TemplateError(f"the chat template of {type(tokenizer).__name__} cannot carry the prompt: {failure}")


def _render_plain(template: PromptTemplate) -> tuple[str, ...]:
    user = template.user.replace("{context}", _MARKS["context"]).replace("{fact}", _MARKS["fact"])
    head = f"{template.system}\n\n" if template.system else ""
    return _split_slots(f"{head}{user}\n\nAnswer:{template.answer_prefix}")


def _split_slots(text: str) -> tuple[str, ...]:
    parts = re.split(f"({_MARKS['context']}|{_MARKS['fact']})", text)
    names = {_MARKS["context"]: "context", _MARKS["fact"]: "fact"}
    return tuple(names[part] if at % 2 else part for at, part in enumerate(parts))


def _leading_specials(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """What the tokenizer puts before a plain text (BOS, where the model wants one), unless the text starts with it."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a", add_special_tokens=True)["input_ids"]
    for at in range(len(full) - len(bare) + 1):
        if full[at : at + len(bare)] == bare:
            lead = full[:at]
            return [] if lead and text.startswith(str(tokenizer.decode(lead))) else lead
    return []


_ANCHOR = f"{uuid.uuid4().hex}-anchor"  # a control token of the literal twin that no text spells
_MARKUP = re.compile(r"[<\[{(|].*[>\]})|]", re.DOTALL)


def _control_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Spelling and id of every token that steers the model rather than says something.

    Those flagged special, and added tokens that look like markup (``<think>`` and ``<tool_call>`` are not flagged).
    Added words and runs of white space are ordinary vocabulary.
    """
    control = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    control.pop(tokenizer.unk_token, None)  # stands for characters that the tokenizer lacks
    for token, added in tokenizer.added_tokens_decoder.items():
        if added.content != tokenizer.unk_token and (added.special or _MARKUP.fullmatch(added.content)):
            control[added.content] = token
    return control


def _without_control_tokens(
    tokenizer: PreTrainedTokenizerBase, control: set[str]
) -> Tokenizer | PreTrainedTokenizerBase:
    """A twin that reads the spelling of a control token as ordinary text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return tokenizer
    state = json.loads(backend.to_str())
    vocab = state["model"].get("vocab", {})
    in_model = set(vocab) if isinstance(vocab, dict) else {piece for piece, _ in vocab}
    kept = []
    for token in state["added_tokens"]:
        if token["content"] not in control:
            kept.append(token)
        elif token["content"] not in in_model:
            # Ids of added tokens follow from their order: keep the place, under a name that no text has.
            kept.append({**token, "content": f"{uuid.uuid4().hex}-{token['id']}"})
    anchor = {"content": _ANCHOR, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    state["added_tokens"] = [*kept, {**anchor, "id": backend.get_vocab_size() + 1, "special": True}]
    state["truncation"] = state["padding"] = None
    return Tokenizer.from_str(json.dumps(state))
