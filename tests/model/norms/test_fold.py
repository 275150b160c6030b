"""Folding changes no logit and no greedy token, leaves the original alone, and leaves no norm where one was removed."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx

from llmstack.errors import UserError
from llmstack.inference import Generator
from llmstack.model import Llama, ModelConfig
from llmstack.model.compile import compile_model
from llmstack.model.norms import METHODS
from llmstack.model.norms.fold import DeferredLinear, FoldError, fold
from llmstack.model.norms.folded import Affine, Folded, NoNorm
from llmstack.model.norms.rmsnorm import BareRMSNorm, RMSNorm, RMSNormMethod
from llmstack.training.probe import probe
from llmstack.training.step import micro_batch_loss

STEPS, VOCAB = 100, 61
FAKE = {"start_mlp": 20, "start_qk": 26, "start_v": 32, "start_final": 40, "gap_mlp": 1, "gap_qk": 1, "gap_v": 1}
TAPER = {"taper_start": 0.1, "taper_end": 0.4}

NORMS: dict[str, dict[str, Any]] = {name: {"method": name} for name in sorted(METHODS)} | {
    "fake_ln": {"method": "fake_ln", **FAKE},
    "fake_ln of rmsnorm": {"method": "fake_ln", "kind": "rmsnorm", **FAKE},
    "fake_ln with a first token": {"method": "fake_ln", "first_token": True, "start_merge": 50, **FAKE},
    **{name: {"method": name, **TAPER} for name in sorted(METHODS) if name.startswith("taper")},
    "bhyt of many kinds": {"method": "bhyt", "exact_layers": "1", "kappa_schedule": "sqrt", "lambda_final": 3.0},
    "bhyt_star with mean": {"method": "bhyt_star", "mu_term": True, "trainable_lambda": False},
    "dyt with bias": {"method": "dyt", "bias": True},
    "sandwich": {"method": "peri_ln", "embedding_norm": False},
    "by_layer": {
        "method": "by_layer",
        "layers": {"0": {"method": "tapernorm_internal", **TAPER}},
        "otherwise": {"method": "lns"},
    },
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "tied": {"num_kv_heads": 2},
    "untied with biases": {
        "tie_word_embeddings": False,
        "num_kv_heads": 4,
        **{"attention_bias": True, "mlp_bias": True, "lm_head_bias": True, "mlp": "gelu"},
    },
}
REMOVED = ["tapernorm_internal", "tapernorm_all", "taperln_internal", "taperln_all", "fake_ln", "fake_ln of rmsnorm"]
every_norm = pytest.mark.parametrize("norm", NORMS)


def build(norm: dict[str, Any], **options: Any) -> Llama:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "intermediate_size": 48, "max_position_embeddings": 64}
    return Llama(ModelConfig(**{"vocab_size": VOCAB, "initializer_range": 0.1, **sizes, **options}, norm=norm))


ROWS = torch.randint(VOCAB, (4, 16), generator=torch.Generator().manual_seed(1))
"""What the models learn by heart."""
BATCH = {"input_ids": ROWS[:, :-1], "labels": ROWS[:, 1:], "valid_tokens": ROWS[:, 1:].numel()}


def train(model: Llama, steps: int = STEPS, last: int | None = None) -> Llama:
    """Real steps, as the training loop makes them, with a learning rate that moves gains far; ``last``: stop there."""
    method = model.config.norm_method
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0, fused=True)
    for step in range(1, (last or steps) + 1):
        observed = method.observed(model, step, steps)
        sums = probe(model, BATCH, observed) if observed else {}
        loss, own = micro_batch_loss(model, BATCH)
        (loss if own is None else loss + own).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        method.after_step(model, step, steps, sums=sums)
    return model.eval()


@functools.cache
def trained(norm: str, architecture: str = "tied") -> Llama:
    """Not to be changed: the tests share it."""
    return train(build(NORMS[norm], **ARCHITECTURES[architecture]))


IDS = torch.randint(VOCAB, (3, 40), generator=torch.Generator().manual_seed(2))
PROMPTS = [ROWS[0, :2].tolist(), list(range(20))]


def distance(found: Tensor, expected: Tensor) -> float:
    """The largest difference as a share of the largest value."""
    return float((found - expected).abs().max() / expected.abs().max())


def deviation(found: Tensor, expected: Tensor) -> float:
    """The norm of the difference as a share of the norm."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def greedy(model: Llama, **options: Any) -> list[list[int]]:
    generator = Generator(model, 64, **options)
    return [list(generator.stream(prompt, 24)) for prompt in PROMPTS]


@torch.no_grad()
def logits(model: Llama) -> Tensor:
    return model(IDS)


def gains(model: Llama) -> list[Tensor]:
    return [tensor.detach() for name, tensor in model.named_parameters() if tensor.ndim == 1 and "norm" in name]


@every_norm
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_and_greedy_tokens_stay(norm: str, architecture: str) -> None:
    model = trained(norm, architecture)
    assert max(float((gain - 1).abs().max()) for gain in gains(model)) > 0.3, "folding gains of 1 proves nothing"
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    folded = fold(model)
    assert distance(logits(folded), logits(model)) < 1e-5
    tokens = greedy(model)
    assert greedy(folded) == tokens
    assert len(set(tokens[0])) > 3
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@every_norm
def test_in_bf16_folding_costs_no_more_than_bf16_itself(norm: str) -> None:
    """Against the exact logits of the same bf16 weights: those of fp32 arithmetic."""
    low = deepcopy(trained(norm)).to(torch.bfloat16)
    exact, folded = logits(deepcopy(low).float()), fold(low)
    assert all(weight.dtype == torch.bfloat16 for weight in folded.parameters())
    assert deviation(logits(deepcopy(folded).float()), exact) < 1e-2
    assert deviation(logits(folded), exact) < 1.5 * max(deviation(logits(low), exact), 5e-3)


@pytest.mark.parametrize("norm", ["rmsnorm", "lns", "peri_ln", "mix_ln", "bhyt"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_division_after_the_matrices_is_the_same(norm: str, architecture: str) -> None:
    """bhyt has nothing to defer, Mix-LN's lower block neither."""
    model = trained(norm, architecture)
    folded = fold(model, defer_scale=True)
    assert distance(logits(folded), logits(model)) < 1e-5
    assert greedy(folded) == greedy(model)
    deferred = [isinstance(block.attention.q_proj, DeferredLinear) for block in folded.blocks]
    assert deferred == {"bhyt": [False, False], "mix_ln": [False, True]}.get(norm, [True, True])
    names = {name.removesuffix("weight").removesuffix("bias") for name in folded.state_dict()}
    divided = "" if norm == "bhyt" else "linear."
    assert {f"layers.1.attention.q_proj.{divided}", f"layers.1.mlp.up_proj.{divided}"} <= names


def test_what_the_matrices_take_over() -> None:
    """γ/sqrt(l) on the columns; β through W into the bias; rows of zero sum where the mean was removed."""
    model = trained("lns", "untied with biases")
    own, new = model.blocks[1], fold(model).blocks[1]
    expected = own.attention.k_proj.weight * (own.attention_norm.weight / 2**0.5)
    torch.testing.assert_close(new.attention.k_proj.weight, expected)
    assert torch.equal(new.attention.k_proj.bias, own.attention.k_proj.bias)
    assert new.attention.o_proj.weight.data_ptr() == own.attention.o_proj.weight.data_ptr()

    model = trained("taperln_all", "tied")
    own, new = model.blocks[0], fold(model).blocks[0]
    site, up = own.mlp_norm, own.mlp.up_proj.weight.detach().double()
    centring = torch.eye(32, dtype=torch.float64) - 1 / 32
    expected = up @ torch.diag(site.c.double() * (site.origin + site.offset.detach())) @ centring
    torch.testing.assert_close(new.mlp.up_proj.weight, expected.float(), rtol=1e-4, atol=1e-5)
    shift = (site.bias_origin + site.bias_offset.detach()).double()
    assert shift.abs().max() > 0.1
    torch.testing.assert_close(new.mlp.up_proj.bias, (up @ shift).float(), rtol=1e-4, atol=1e-5)


def test_fake_ln_has_its_own_matrices_for_scores_and_values() -> None:
    model = trained("fake_ln of rmsnorm")
    own, new = model.blocks[0], fold(model).blocks[0]
    site = own.attention_norm
    scales = site.frozen_scale.scale, site.frozen_scale_v.scale
    assert scales[0] != scales[1]
    for name, scale in zip(("q_proj", "k_proj", "v_proj"), (scales[0], *scales), strict=True):
        expected = getattr(own.attention, name).weight * site.weight / scale
        torch.testing.assert_close(getattr(new.attention, name).weight, expected)


def operations(block: nn.Module) -> Counter[str]:
    """How often the block's forward runs what."""
    with torch.no_grad():
        nodes = make_fx(lambda x: block(x))(torch.randn(2, 5, 32)).graph.nodes
    return Counter(n.target.overloadpacket.__name__ for n in nodes if isinstance(n.target, torch._ops.OpOverload))


MOVES = {"t", "view", "_unsafe_view", "transpose", "expand", "unsqueeze", "clone"}


@pytest.mark.parametrize("norm", REMOVED)
def test_nothing_is_left_in_the_graph_where_the_norms_are_gone(norm: str) -> None:
    """Seven matrices (with a bias or without), one attention, and of elementwise work SiLU, gate ⊙ up and two sums."""
    folded = fold(trained(norm))
    found = operations(folded.blocks[1])
    attention = {name for name in found if "attention" in name}
    assert found["mm"] + found["addmm"] == 7
    assert set(found) - {"mm", "addmm"} - attention - MOVES == {"silu", "mul", "add"}
    assert (found["silu"], found["mul"], found["add"]) == (1, 1, 2)
    assert isinstance(folded.norm, NoNorm) == (norm not in ("tapernorm_internal", "taperln_internal"))


@pytest.mark.parametrize(
    ("norm", "left"),
    [
        # Two sites; x·(1/rms) is a product, and one more is gate ⊙ up.
        ("rmsnorm", {"pow": 2, "mean": 2, "add": 4, "rsqrt": 2, "mul": 3, "silu": 1}),
        ("lns", {"pow": 2, "mean": 2, "add": 4, "rsqrt": 2, "mul": 3, "silu": 1}),
        ("layernorm", {"native_layer_norm": 2, "add": 2, "mul": 1, "silu": 1}),
        ("dyt", {"tanh": 2, "add": 2, "mul": 3, "silu": 1}),
    ],
)
def test_what_is_left_of_a_norm_multiplies_no_gain(norm: str, left: dict[str, int]) -> None:
    found = operations(fold(trained(norm)).blocks[0])
    matrices = {name for name in found if "attention" in name} | {"mm", "addmm"}
    assert {name: count for name, count in found.items() if name not in matrices | MOVES} == left
    more = operations(trained(norm).blocks[0])
    assert more["mul"] > found["mul"] or norm == "layernorm"


def test_the_original_and_the_copy_go_separate_ways() -> None:
    """Only storage is shared: a cast of the one does not reach the other; the tied head has its own matrix."""
    model = trained("tapernorm_all")
    expected = logits(model)
    folded = fold(model).to(torch.bfloat16)
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert torch.equal(logits(model), expected)
    folded = fold(model)
    assert model.lm_head.weight is model.embed_tokens.weight
    assert folded.embed_tokens.weight.data_ptr() == model.embed_tokens.weight.data_ptr()
    assert folded.lm_head.weight is not folded.embed_tokens.weight
    assert model.config.tie_word_embeddings
    assert not folded.config.tie_word_embeddings
    assert not any(weight.requires_grad for weight in folded.parameters())


@pytest.mark.parametrize("norm", ["tapernorm_all", "fake_ln", "dyt", "bhyt"])
def test_its_state_has_plain_names_and_can_be_read_back(norm: str) -> None:
    folded = fold(trained(norm))
    state = {name: tensor.clone() for name, tensor in folded.state_dict().items()}
    original = set(build(NORMS[norm], tie_word_embeddings=False).state_dict())
    assert all(name in original or name.endswith("_proj.bias") or name == "lm_head.bias" for name in state)
    other = deepcopy(folded)
    with torch.no_grad():
        for weight in other.parameters():
            weight.zero_()
    other.load_state_dict(state)
    assert torch.equal(logits(other), logits(folded))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_scale_of_the_embedding_goes_into_it(architecture: str) -> None:
    """Tied or not: the head has its own matrix by then. Positions that are added before the scale keep it."""
    model = trained("dyt", architecture)
    folded = fold(model)
    assert isinstance(folded.after_embedding, nn.Identity)
    torch.testing.assert_close(folded.embed_tokens.weight, model.embed_tokens.weight * model.after_embedding.scale)
    learned = train(build(NORMS["dyt"], positions="learned"), 5)
    folded = fold(learned)
    assert distance(logits(folded), logits(learned)) < 1e-5
    assert folded.embed_tokens.weight.data_ptr() == learned.embed_tokens.weight.data_ptr()


def test_a_life_that_is_not_over_is_folded_where_it_is_exact() -> None:
    """Before the taper and before the removal it is the norm; in between there is nothing to fold."""
    for name, start, half in (("tapernorm_all", 8, 20), ("taperln_internal", 8, 20), ("fake_ln", 15, 27)):
        model = train(build(NORMS[name]), STEPS, last=start)
        folded = fold(model)
        assert distance(logits(folded), logits(model)) < 1e-5
        assert operations(folded.blocks[0]).keys() & {"rsqrt", "native_layer_norm"}
        with pytest.raises(UserError, match=r"fold: .*(being tapered|half removed).* checkpoint from"):
            fold(train(build(NORMS[name]), STEPS, last=half))


def test_sites_of_fake_ln_are_gone_as_soon_as_they_are_switched() -> None:
    """All MLP norms at step 23, before any other."""
    model = train(build(NORMS["fake_ln"]), STEPS, last=23)
    folded = fold(model)
    assert distance(logits(folded), logits(model)) < 1e-5
    assert operations(folded.blocks[0])["native_layer_norm"] == 1


def test_norms_on_the_sum_stay_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    folded = fold(trained("mix_ln"))
    assert caplog.messages == ["fold: the norms of layer 0 cannot be folded and stay as they are"]
    assert isinstance(folded.blocks[0].mlp_norm, RMSNorm)
    assert not isinstance(folded.blocks[1].mlp_norm, RMSNorm)


def test_a_method_that_says_nothing_of_folding_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(nn.RMSNorm):
        def forward(self, x: Tensor, carry: None = None) -> Tensor:
            return super().forward(x)

    monkeypatch.setattr(RMSNormMethod, "mlp_norm", lambda *_: Silent(32))
    model = build({"method": "rmsnorm"})
    folded = fold(model)
    assert isinstance(folded.blocks[0].mlp_norm, Silent)
    assert distance(logits(folded), logits(model)) < 1e-5


@pytest.mark.parametrize(("dtype", "message"), [(torch.float32, "1e-05"), (torch.bfloat16, "1e-02")])
def test_a_fold_that_is_wrong_is_refused_with_the_numbers(dtype: torch.dtype, message: str) -> None:
    class Wrong(RMSNorm):
        def folded(self) -> Folded:
            return Folded(BareRMSNorm(self.eps), Affine(self.weight * 1.02))

    model = build({"method": "rmsnorm"})
    model.norm = Wrong(32, 1e-5)
    model.to(dtype)
    with pytest.raises(FoldError, match=rf"2\.\d\de-02 .*more than {message} in {dtype}"):
        fold(model)
    model.norm.weight.data.fill_(torch.nan)
    with pytest.raises(FoldError, match="nan"):
        fold(model)


def test_a_folded_model_is_not_folded_again() -> None:
    with pytest.raises(UserError, match="folded already"):
        fold(fold(trained("rmsnorm")))


@pytest.fixture
def traced_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The graphs as they are traced, run without generating code."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


COMPILED = [("tapernorm_internal", False), ("fake_ln", False), ("rmsnorm", True), ("bhyt", False)]


@pytest.mark.usefixtures("traced_only")
@pytest.mark.parametrize(("norm", "defer_scale"), COMPILED)
def test_one_graph_decodes_all_folded_blocks(norm: str, defer_scale: bool) -> None:
    folded = fold(trained(norm), defer_scale=defer_scale)
    assert greedy(folded, compile=True) == greedy(trained(norm))
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.full
@pytest.mark.parametrize(("norm", "defer_scale"), COMPILED)
def test_generated_code_decodes_a_folded_model_to_the_same_tokens(norm: str, defer_scale: bool) -> None:
    torch._dynamo.reset()
    folded = fold(trained(norm), defer_scale=defer_scale)
    assert greedy(folded, compile=True) == greedy(trained(norm))


@pytest.mark.usefixtures("traced_only")
def test_a_compiled_model_folds_like_an_eager_one() -> None:
    """The copy's blocks do not run the original's compiled forward, which is bound to the original's weights."""
    model = compile_model(deepcopy(trained("lns")))
    logits(model)
    folded = fold(model)
    assert torch.equal(logits(folded), logits(fold(trained("lns"))))
    assert torch.equal(logits(compile_model(folded)), logits(fold(trained("lns"))))
