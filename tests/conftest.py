"""Shared fixtures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

import gatekern as gk
from tests.families import tiny_model
from tests.tinytok import tiny_tokenizer
from tools.fetch_smollm2 import fetch

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


@pytest.fixture(scope="session")
def tiny_verifier() -> gk.Verifier:
    """A verifier over a tiny random Llama that reads the tiny tokenizer."""
    tokenizer = tiny_tokenizer()
    model = tiny_model("llama", vocab_size=len(tokenizer) + 5, max_position_embeddings=2048)
    return gk.Verifier(model, tokenizer, min_label_mass=0.0)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real small model, as a GGUF file."""
    return fetch()


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> gk.Verifier:
    return gk.Verifier.from_pretrained(smollm2_path)


@pytest.fixture(autouse=True)
def _few_threads() -> Iterator[None]:
    """Tests run in parallel; each keeps to one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
