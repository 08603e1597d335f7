# SPDX-License-Identifier: Apache-2.0
"""Small language models with random weights: tied embeddings, layer norms, an unused pooler."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support import agreed, digest, on_ranks, residuals, seeded
from torch import nn

import agmerge

transformers = pytest.importorskip("transformers")


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=200, n_positions=32)
    return transformers.GPT2LMHeadModel(config)


def bert() -> nn.Module:
    config = transformers.BertConfig(
        num_hidden_layers=2, num_attention_heads=2, hidden_size=32, intermediate_size=64, vocab_size=200
    )
    return transformers.BertForMaskedLM(config)


@pytest.mark.parametrize("compression", ["topk", "none", "eden"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("build", [gpt2, bert])
def test_language_models_train_in_sync(build: Callable[[], nn.Module], size: int, compression: str) -> None:
    model = seeded(build).eval()  # no dropout: its random numbers belong to the process, and ranks are threads
    tied = model.get_output_embeddings().weight
    assert tied is model.get_input_embeddings().weight

    def body(rank: int, model: nn.Module) -> tuple[list[str], list[float]]:
        inner = torch.optim.AdamW(model.parameters(), lr=5e-3)
        optimizer = agmerge.DistributedOptimizer(inner, model.named_parameters(), compression=compression)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
        seen, losses = [], []
        source = torch.Generator().manual_seed(rank)
        tokens = torch.randint(0, 200, (4, 16), generator=source)
        for _ in range(5):
            optimizer.zero_grad()
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with optimizer.skip_synchronize():
                optimizer.step()
            scheduler.step()
            seen.append(digest(model))
            losses.append(loss.item())
        assert losses[-1] < losses[0]
        names = [name for name in residuals(optimizer) if "lm_head" in name or "decoder.weight" in name]
        assert names == []  # the tied weight has one name, one residual
        return seen, sorted(residuals(optimizer))

    seen, kept = agreed(on_ranks(size, model, body))
    assert len(set(seen)) == 5
    assert bool(kept) == (compression == "topk")
