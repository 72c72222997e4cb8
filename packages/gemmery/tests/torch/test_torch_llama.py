"""A Llama of transformers with gemmery's layers: the same logits, and one graph for a step with its cache."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from gemmery.torch import replace_linear  # noqa: E402 # it needs PyTorch

TOKENS = torch.arange(24).reshape(2, 12)


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=32,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval().requires_grad_(False)


@pytest.mark.parametrize("bits", [None, 8, 4])
def test_logits_and_checkpoints(model, bits):
    expected, state = model(TOKENS).logits, copy.deepcopy(model.state_dict())
    report = replace_linear(model, bits, group=32)
    assert len(report.replaced) == 15
    assert report.skipped == ()
    logits = model(TOKENS).logits
    assert bool(((logits - expected).norm() <= {None: 1e-5, 8: 0.05, 4: 0.5}[bits] * expected.norm()).all())
    assert str(model.load_state_dict(state)) == "<All keys matched successfully>"
    assert torch.equal(model(TOKENS).logits, logits)


@pytest.mark.parametrize("bits", [None, 4])
def test_a_step_with_a_cache_is_one_graph(model, bits):
    replace_linear(model, bits, group=32)
    cache = transformers.StaticCache(config=model.config, max_cache_len=16)
    model(TOKENS, past_key_values=cache, use_cache=True)
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")
    logits = compiled(TOKENS[:, :1], past_key_values=cache, use_cache=True).logits
    together = model(torch.cat((TOKENS, TOKENS[:, :1]), 1)).logits[:, -1:]
    assert torch.allclose(logits, together, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bits", [None, 8])
def test_it_generates(model, bits):
    expected = model.generate(TOKENS[:1], max_new_tokens=4, do_sample=False, pad_token_id=0)
    replace_linear(model, bits, group=32)
    tokens = model.generate(TOKENS[:1], max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert tokens.shape == expected.shape
    assert bits or torch.equal(tokens, expected)
