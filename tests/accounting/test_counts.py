"""Parameters and FLOPs against the published figures and the parameters that really exist."""

import pytest

from llmstack.accounting import cache_bytes, count_parameters, model_flops_per_token
from llmstack.model import Llama, ModelConfig


@pytest.mark.parametrize(("preset", "total"), [("374m", 374_637_568), ("1b", 1_235_814_400), ("3b", 3_212_749_824)])
def test_presets_have_the_published_number_of_parameters(preset: str, total: int):
    assert count_parameters(ModelConfig.preset(preset)).total == total


def test_parts_of_374m_follow_from_its_widths():
    counts = count_parameters(ModelConfig.preset("374m"))
    assert counts.to_dict() == {
        "embedding": 128256 * 1024,
        "positions": 0,
        "attention": 16 * (2 * 1024 * 1024 + 2 * 1024 * 256),
        "mlp": 16 * 3 * 1024 * 4096,
        "norms": (2 * 16 + 1) * 1024,
        "head": 0,
        "total": 374_637_568,
    }


def test_every_parameter_of_a_model_is_in_one_part():
    config = ModelConfig(
        vocab_size=50,
        positions="learned",
        attention_bias=True,
        mlp_bias=True,
        lm_head_bias=True,
        tie_word_embeddings=False,
        norm={"method": "bhyt"},
    )
    model = Llama(config)
    counts = count_parameters(model)
    assert counts == count_parameters(config)
    assert counts.total == sum(parameter.numel() for parameter in model.parameters())
    assert counts.head == 50 * 128 + 50
    assert counts.positions == 4096 * 128
    assert counts.norms == 9 * 128 + 2 * 4, "gains and, with BHyT, two λ in each block"


@pytest.mark.parametrize(
    ("preset", "flops", "attention_share"),
    [("374m", 2.449e9, 0.082), ("1b", 7.818e9, 0.052), ("3b", 2.033e10, 0.052)],
)
def test_model_flops_per_token_at_1024_are_the_published_ones(preset: str, flops: float, attention_share: float):
    config = ModelConfig.preset(preset)
    palm, causal = (model_flops_per_token(config, 1024, convention) for convention in ("palm", "causal"))
    assert palm == pytest.approx(flops, rel=5e-4)
    assert 2 * (palm - causal) / palm == pytest.approx(attention_share, abs=5e-4)


def test_an_untied_input_embedding_and_learned_positions_cost_no_flops():
    tied = ModelConfig(vocab_size=1000)
    untied = ModelConfig(vocab_size=1000, tie_word_embeddings=False, positions="learned")
    assert model_flops_per_token(untied, 64) == model_flops_per_token(tied, 64)


def test_cache_of_374m_at_1024_tokens_in_bf16_is_16_mib():
    assert cache_bytes(ModelConfig.preset("374m"), 1, 1024, 2) == 2 * 16 * 4 * 64 * 1024 * 2 == 16 * 2**20
