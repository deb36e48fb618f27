"""A small tokenizer, trained in memory: byte-level BPE with single digits, special tokens and chat templates."""

from __future__ import annotations

from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<pad>"]
#: Not flagged special, as in Qwen3, but control tokens all the same.
MARKERS = ["<think>", "</think>"]

_TEXT = [
    "yes no Yes No yes. no. Answer yes or no. the source text directly supports the statement",
    "Source text: Alice lives in Paris with her dog. Statement: Alice lives in Rome. Does Bob's cat sleep?",
    "You check statements against a source text. What it does not say is unsupported. hello world 0.5 1.0 2012",
] * 4


@cache
def _backend(bos: bool) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    tokenizer.add_tokens(MARKERS)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    return tokenizer.to_str()


def tiny_tokenizer(chat_template: str | None = CHATML, *, bos: bool = False) -> PreTrainedTokenizerFast:
    """A fresh tokenizer; `bos` makes it put ``<s>`` before a plain text."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_backend(bos)),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    tokenizer.chat_template = chat_template
    return tokenizer
