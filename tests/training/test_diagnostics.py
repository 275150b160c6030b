"""Each quantity of diagnostics.csv against a computation of its own, and that looking changes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

from llmstack.checkpoint import DiagnosticsFile, DiagnosticsRow
from llmstack.data import EMBEDDED, PackedBlocks, SampleOrder, prepare_source
from llmstack.data.embedded import embedded_tokenizer
from llmstack.model import Llama, ModelConfig
from llmstack.tokenizer import BosEosPolicy
from llmstack.training.diagnostics import TOKENS, Quantity, diagnose, gradient_norms, stream_quantities
from tests.e2e.job import finished, fit_here
from tests.training.conftest import Fit
from tests.training.test_resume import DROPOUT, rows, stop_at_five

VOCAB, LENGTH, WIDTH, EOS = 61, 24, 32, 5


def model(norm: str, **options: Any) -> Llama:
    """Three layers, grouped-query, every parameter its own number, so that nothing is right by chance."""
    torch.manual_seed(0)
    built = Llama(
        ModelConfig(
            vocab_size=VOCAB,
            hidden_size=WIDTH,
            num_layers=3,
            num_heads=4,
            num_kv_heads=2,
            intermediate_size=48,
            tie_word_embeddings=False,
            initialisation="fan_in",
            norm={"method": norm, **options},
        )
    )
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return built


def batch(rows: int = 2) -> dict[str, Tensor]:
    ids = torch.randint(VOCAB, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    ids[0, 7] = ids[1, 0] = EOS
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:].contiguous()}


def inputs_of(built: Llama, module: nn.Module, samples: dict[str, Tensor]) -> Tensor:
    """What a module reads, as the plain forward pass of these two rows has it."""
    found: list[Tensor] = []
    handle = module.register_forward_pre_hook(lambda module, inputs: found.append(inputs[0].detach()))
    with torch.no_grad():
        built.hidden_states(samples["input_ids"], document_ids=samples.get("document_ids"))
    handle.remove()
    return found[0]


def near(expected: Any, rel: float = 1e-5) -> Any:
    return pytest.approx(float(torch.as_tensor(expected, dtype=torch.float64).detach()), rel=rel)


def test_a_gaussian_has_its_moments() -> None:
    """E|x| = σ·sqrt(2/π) and kurtosis 3, about its mean; a token set apart is seen by itself."""
    x = 5 * torch.randn(4, 512, 256, generator=torch.Generator().manual_seed(0))
    found = stream_quantities(x, torch.zeros(4, 512, dtype=torch.bool))
    assert found["stream_mean_abs"] == near(5 * math.sqrt(2 / math.pi), 5e-3)
    assert found["stream_variance"] == near(25, 1e-2)
    assert found["stream_rms"] == near(5, 5e-3)
    assert found["stream_kurtosis"] == near(3, 1e-2)
    assert found["stream_eos_rms"].isnan()
    assert stream_quantities(x + 40, torch.zeros(4, 512, dtype=torch.bool))["stream_kurtosis"] == near(3, 1e-2)
    x[:, 0] *= 10
    x[2, 17] *= 100
    is_eos = torch.zeros(4, 512, dtype=torch.bool)
    is_eos[2, 17] = True
    found = stream_quantities(x, is_eos)
    assert found["stream_first_token_rms"] == near(50, 5e-2)
    assert found["stream_eos_rms"] == near(500, 1e-1)
    assert found["stream_max_abs"] == x.abs().max()


@pytest.mark.parametrize("norm", ["bhyt", "post_ln"])
def test_the_stream_is_what_blocks_and_final_norm_read(norm: str) -> None:
    built, samples = model(norm), batch(rows=5)
    found = diagnose(built, samples, eos_id=EOS)
    looked_at = {name: tensor[:2] for name, tensor in samples.items()}
    for layer, reader in enumerate([*built.blocks, built.norm]):
        x = inputs_of(built, reader, looked_at).double().numpy()
        eos = x[looked_at["input_ids"].numpy() == EOS]
        expected = {
            "mean_abs": np.abs(x).mean(),
            "variance": x.var(),
            "rms": np.sqrt((x**2).mean()),
            "max_abs": np.abs(x).max(),
            "kurtosis": ((x - x.mean()) ** 4).mean() / x.var() ** 2,
            "first_token_rms": np.sqrt((x[:, 0] ** 2).mean()),
            "eos_rms": np.sqrt((eos**2).mean()),
        }
        for name, value in expected.items():
            assert found[Quantity(layer, "", f"stream_{name}")] == near(value), name
    assert Quantity(len(built.blocks) + 1, "", "stream_rms") not in found
    assert not any(quantity.name == "stream_eos_rms" for quantity in diagnose(built, samples))


def test_lambda_saturation_and_both_variances_of_bhyt() -> None:
    """Two documents in a row of the batch: the second one's tokens attend to as few as the first one's."""
    built, samples = model("bhyt", lambda_attention=25.0, lambda_mlp=18.0, lambda_final=20.0, train_length=100), batch()
    samples["document_ids"] = torch.zeros(2, LENGTH, dtype=torch.int64)
    samples["document_ids"][1, 10:] = 1
    attended = torch.arange(1, LENGTH + 1).repeat(2, 1)
    attended[1, 10:] -= 10
    built.config.norm_method.initialise(built)  # c_attn, of these weights
    found = diagnose(built, samples)
    for layer, block in enumerate(built.blocks):
        first, second, attention = block.attention_norm, block.mlp_norm, block.attention
        x, x_two = (inputs_of(built, site, samples).double() for site in (first, second))
        expanded = attention.v_proj.weight.view(2, 8, WIDTH).repeat_interleave(2, dim=0).reshape(WIDTH, WIDTH)
        gain = (attention.o_proj.weight @ expanded).pow(2).sum().double() * (first.lam / 10) ** 2 / WIDTH
        v1, exact = x.pow(2).mean(-1), x_two.pow(2).mean(-1)
        carried, causal = v1 + gain / 100, v1 + gain / attended
        expected = {
            ("attention", "lambda"): first.lam,
            ("mlp", "lambda"): second.lam,
            ("attention", "tanh_saturation"): saturated(first.lam / 10 * x / (v1 + 1e-6).sqrt()[..., None]),
            ("mlp", "tanh_saturation"): saturated(second.lam / 10 * x_two / (carried + 1e-6).sqrt()[..., None]),
            ("mlp", "variance_exact"): exact.mean(),
            ("mlp", "variance_approximated"): carried.mean(),
            ("mlp", "variance_approximated_causal"): causal.mean(),
            ("mlp", "variance_pearson"): correlation(exact, carried),
            ("mlp", "variance_pearson_causal"): correlation(exact, causal),
        }
        for (site, name), value in expected.items():
            assert found[Quantity(layer, site, name)] == near(value), (site, name)
        assert 0.01 < found[Quantity(layer, "mlp", "tanh_saturation")] < 0.99
        assert abs(correlation(exact, carried) - correlation(exact, causal)) > 1e-3
    h = inputs_of(built, built.norm, samples).double()
    by_hand = saturated(built.norm.lam / 10 * h / (h.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt())
    assert found[Quantity(None, "final", "tanh_saturation")] == near(by_hand)
    assert found[Quantity(None, "final", "lambda")] == near(built.norm.lam)


def saturated(argument: Tensor) -> Tensor:
    return (torch.tanh(argument).abs() > 0.99).double().mean()


def correlation(a: Tensor, b: Tensor) -> float:
    return float(np.corrcoef(a.detach().flatten(), b.detach().flatten())[0, 1])


def test_the_statistics_of_bhyt_star_are_those_of_its_paper_form() -> None:
    built, samples = model("bhyt_star", lambda_attention=25.0, mu_term=True), batch()
    site, found = built.blocks[1].attention_norm, diagnose(built, samples)
    x = inputs_of(built, site, samples).double()
    scale = 10 * (x.var(-1, correction=0, keepdim=True) + 1e-6).sqrt() + x.mean(-1, keepdim=True).abs()
    assert found[Quantity(1, "attention", "tanh_saturation")] == near(saturated(site.lam * x / scale))
    assert not any("variance_" in name and site == "mlp" for _, site, name in found)


def test_alpha_and_saturation_of_dyt() -> None:
    built, samples = model("dyt"), batch()
    found = diagnose(built, samples)
    for layer, name, site in [
        (2, "attention", built.blocks[2].attention_norm),
        (2, "mlp", built.blocks[2].mlp_norm),
        (None, "final", built.norm),
    ]:
        assert found[Quantity(layer, name, "alpha")] == near(site.alpha)
        share = saturated(site.alpha * inputs_of(built, site, samples).double())
        assert 0 < found[Quantity(layer, name, "tanh_saturation")] == near(share)


@pytest.mark.parametrize("norm", ["tapernorm_all", "taperln_all"])
def test_gate_and_scale_ratio_of_tapered_sites(norm: str) -> None:
    """c·r(h), or c·σ(h) of the LayerNorm form, once c is known."""
    built, samples = model(norm), batch()
    assert not any(quantity.name == "scale_ratio" for quantity in diagnose(built, samples))
    places = [(1, "attention", built.blocks[1].attention_norm), (1, "mlp", built.blocks[1].mlp_norm)]
    for number, (layer, name, site) in enumerate([*places, (None, "final", built.norm)]):
        site.c.fill_(0.3 + number)
        site.set_gate(0.7 - 0.1 * number)
        found = diagnose(built, samples)
        h = inputs_of(built, site, samples).double()
        h = h - h.mean(-1, keepdim=True) if norm == "taperln_all" else h
        assert found[Quantity(layer, name, "gate")] == near(0.7 - 0.1 * number)
        assert found[Quantity(layer, name, "scale_ratio")] == near(
            (0.3 + number) * (h.pow(2).mean(-1) + 1e-5).sqrt().mean()
        )


def test_the_frozen_scales_of_fake_ln() -> None:
    built, samples = model("fake_ln"), batch()
    assert not any("frozen" in quantity.name for quantity in diagnose(built, samples))
    built.blocks[0].attention_norm.frozen_scale_v.scale.fill_(1.5)
    built.blocks[0].attention_norm.frozen_scale.scale.fill_(2.5)
    built.norm.frozen_scale.scale.fill_(3.5)
    frozen = {quantity: value for quantity, value in diagnose(built, samples).items() if "frozen" in quantity.name}
    assert frozen == {
        Quantity(0, "attention", "frozen_scale"): 2.5,
        Quantity(0, "attention", "frozen_scale_v"): 1.5,
        Quantity(None, "final", "frozen_scale"): 3.5,
    }


def prepare_linear(built: Llama) -> None:
    built.norm.c.fill_(0.8)
    built.norm.origin.copy_(built.norm.weight.detach())
    built.norm.set_gate(0.0)


def prepare_half_tapered(built: Llama) -> None:
    prepare_linear(built)
    built.norm.set_gate(0.4)


def prepare_frozen(built: Llama) -> None:
    built.norm.frozen_scale.scale.fill_(0.9)
    built.norm.frozen_scale.first_scale.fill_(0.5)


@pytest.mark.parametrize(
    ("norm", "prepare"),
    [
        ("rmsnorm", lambda built: None),
        ("dyt", lambda built: None),
        ("post_ln", lambda built: None),
        ("taperln_all", prepare_half_tapered),
        ("tapernorm_all", prepare_linear),
        ("fake_ln", prepare_frozen),
    ],
)
def test_scale_logits_and_radial_gradient_of_the_last_state(norm: str, prepare: Callable[[Llama], None]) -> None:
    """Finite differences of each token's loss under h -> s·h, over the tokens that have a label."""
    built, samples = model(norm), batch()
    prepare(built)
    built.double()
    samples["labels"][0, :9] = -100
    found = diagnose(built, samples)
    h, valid = inputs_of(built, built.norm, samples), samples["labels"] != -100
    assert valid.sum() < TOKENS

    def loss(s: float) -> Tensor:
        with torch.no_grad():
            logits = built.lm_head(built.norm(s * h))
        return F.cross_entropy(logits[valid], samples["labels"][valid], reduction="none")

    step = 1e-5
    radial = ((loss(1 + step) - loss(1 - step)) / (2 * step) / h.norm(dim=-1)[valid]).mean()
    assert found[Quantity(None, "final", "radial_gradient")] == pytest.approx(float(radial), rel=1e-5, abs=1e-9)
    scale = np.sqrt((h.numpy() ** 2).mean(-1) + 1e-5)
    assert found[Quantity(None, "final", "scale_mean")] == near(scale.mean())
    assert found[Quantity(None, "final", "scale_p99")] == near(np.quantile(scale, 0.99))
    logits = built(samples["input_ids"])
    assert found[Quantity(None, "final", "max_abs_logit")] == near(logits[valid].abs().max())


def test_the_logits_of_more_tokens_are_never_built() -> None:
    built, seen = model("rmsnorm"), []
    built.lm_head.register_forward_hook(lambda module, inputs, logits: seen.append(logits.shape))
    many = {name: tensor.repeat(2, 5) for name, tensor in batch().items()}
    found = diagnose(built, many)
    assert seen == [(TOKENS, VOCAB)]
    many["labels"].fill_(-100)
    without = diagnose(built, many)
    assert set(found) - set(without) == {Quantity(None, "final", "radial_gradient")}


def test_the_entropy_of_attention() -> None:
    """Of softmax(Q·Kᵀ/sqrt(d)) within each document, written out, with the rotation as complex numbers."""
    built, samples = model("rmsnorm"), batch()
    samples["document_ids"] = (torch.arange(LENGTH) >= 11).long().repeat(2, 1)
    found = diagnose(built, samples, attention=True)
    position = torch.arange(LENGTH) - 11 * samples["document_ids"][0]
    turn = torch.polar(torch.ones(LENGTH, 4), position[:, None] * 10000 ** (-torch.arange(4) / 4))
    for layer, block in enumerate(built.blocks):
        with torch.no_grad():
            u = block.attention_norm(inputs_of(built, block.attention_norm, samples))[0]
            entropies = []
            for head in range(4):
                q = u @ block.attention.q_proj.weight[8 * head : 8 * head + 8].T
                k = u @ block.attention.k_proj.weight[8 * (head // 2) : 8 * (head // 2) + 8].T
                q, k = (torch.complex(z[..., :4], z[..., 4:]) * turn for z in (q, k))
                scores = (q @ k.mH).real / math.sqrt(8)
                for start, stop in ((0, 11), (11, LENGTH)):
                    for query in range(start, stop):
                        p = scores[:, query, start : query + 1].softmax(-1)
                        entropies.append(-(p * p.log()).sum(-1))
        assert found[Quantity(layer, "", "attention_entropy")] == near(torch.stack(entropies).mean())
    assert not any(quantity.name == "attention_entropy" for quantity in diagnose(built, samples))


def test_gradient_norms_by_part() -> None:
    built, samples = model("dyt"), batch()
    F.cross_entropy(built(samples["input_ids"]).flatten(0, 1), samples["labels"].flatten()).backward()
    found = gradient_norms(built, lambda parameter: parameter.grad)

    def norm(*names: str) -> Any:
        own = [p.grad.flatten() for name, p in built.named_parameters() if name.startswith(names)]
        return near(torch.cat(own).norm())

    assert found == {
        **{Quantity(layer, "", "gradient_norm"): norm(f"layers.{layer}.") for layer in range(3)},
        Quantity(None, "embedding", "gradient_norm"): norm("embed_tokens.", "after_embedding."),
        Quantity(None, "head", "gradient_norm"): norm("norm.", "lm_head."),
    }


def test_looking_leaves_the_model_as_it_was() -> None:
    built, samples = model("bhyt"), batch()
    built.lm_head(built.hidden_states(samples["input_ids"]), samples["labels"], 2 * LENGTH).backward()
    before = {name: (p.detach().clone(), p.grad.clone()) for name, p in built.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in built.named_buffers()}
    random = torch.get_rng_state()
    diagnose(built, samples, eos_id=EOS, attention=True)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(module.training for module in built.modules())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in built.modules())
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in built.named_buffers())
    for name, p in built.named_parameters():
        assert torch.equal(p, before[name][0])
        assert torch.equal(p.grad, before[name][1])


ALWAYS = ("--run.diagnose_every", "1", "--run.diagnose_attention", "true")
STEPS = ("--trainer.max_steps", "6", "--trainer.accumulate_grad_batches", "2", "--trainer.gradient_clip_val", "0.1")


def looks(run: Path) -> list[DiagnosticsRow]:
    return DiagnosticsFile(run / "diagnostics.csv").read()


def check_gradients(run: Path) -> None:
    """The parts make up the whole as metrics.csv has it, of all micro-batches and ranks, before clipping."""
    found = looks(run)
    for step, whole in rows(run, ("step", "grad_norm")):
        parts = [row.value for row in found if row.step == step and row.name == "gradient_norm"]
        assert len(parts) == 4
        assert math.hypot(*parts) == near(whole)
        assert whole > 0.1, "clipping was meant to bite"


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
def test_a_run_is_the_same_bit_for_bit_whether_it_is_watched_or_not(fit: Fit, tmp_path: Path, compile: bool) -> None:
    """With dropout and recomputation on; and nothing is compiled that was not."""
    options, graphs = (*STEPS, *DROPOUT, "--model.activation_checkpointing", "full"), []
    for name, how in (("plain", ("--run.diagnose_every", "null")), ("watched", ALWAYS)):
        torch._dynamo.reset()
        counters.clear()
        assert fit(name, *options, *how, compile=compile) == 0
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1]
    assert bool(graphs[0]) == compile
    assert rows(tmp_path / "watched") == rows(tmp_path / "plain")
    assert not (tmp_path / "plain" / "diagnostics.csv").exists()
    check_gradients(tmp_path / "watched")
    names = {row.name for row in looks(tmp_path / "watched")}
    assert {"attention_entropy", "radial_gradient", "variance_pearson_causal"} <= names


def test_a_resumed_run_cuts_and_repeats_its_rows(fit: Fit, tmp_path: Path) -> None:
    steps = ("--trainer.max_steps", "10", "--run.checkpoint_every", "5")
    assert fit("whole", *steps, "--run.diagnose_every", "2") == 0
    assert [*dict.fromkeys(row.step for row in looks(tmp_path / "whole"))] == [2, 4, 6, 8, 10]
    stop_at_five(tmp_path / "whole", tmp_path / "parts")
    stop_at_five(tmp_path / "whole", tmp_path / "other")
    assert fit("parts", *steps, "--run.diagnose_every", "2") == 0
    texts = [(tmp_path / name / "diagnostics.csv").read_text() for name in ("whole", "parts")]
    assert texts[0] == texts[1]
    assert fit("other", *steps, "--run.diagnose_every", "5") == 0
    assert [*dict.fromkeys(row.step for row in looks(tmp_path / "other"))] == [2, 4, 10]


def test_a_skipped_step_writes_nothing(fit: Fit, tmp_path: Path) -> None:
    """With a rate of 1e30 no step after the first has a finite gradient."""
    rate = ("--model.optimizer.lr", "1e30", "--model.optimizer.warmup_ratio", "0", "--run.abort_after_skipped", "2")
    assert fit("run", "--trainer.max_steps", "5", *rate, *ALWAYS) == 1
    assert {row.step for row in looks(tmp_path / "run")} == {1}


def test_eos_tokens_are_those_of_the_tokenizer(fit: Fit, tmp_path: Path) -> None:
    """Steps without one in rank 0's two rows, the samples that the order names, have no such row."""
    assert (
        fit("run", "--trainer.max_steps", "6", "--data.block_size", "512", "--data.micro_batch_size", "2", *ALWAYS) == 0
    )
    tokenizer = embedded_tokenizer(512)
    blocks = PackedBlocks(prepare_source(EMBEDDED, tokenizer, BosEosPolicy.default(tokenizer)), "train", 512)
    ids = [blocks[int(index)]["input_ids"] for index in SampleOrder(len(blocks), 0)(np.arange(12))]
    with_eos = {sample // 2 + 1 for sample, row in enumerate(ids) if (row == tokenizer.eos_id).any()}
    assert 0 < len(with_eos) < 6
    assert {row.step for row in looks(tmp_path / "run") if row.name == "stream_eos_rms"} == with_eos


def test_bf16_shows_what_fp32_does(fit: Fit, tmp_path: Path) -> None:
    assert fit("fp32", *STEPS, *ALWAYS) == 0
    assert fit("bf16", *STEPS, *ALWAYS, "--trainer.precision", "bf16-mixed") == 0
    compare(looks(tmp_path / "bf16"), looks(tmp_path / "fp32"), 0.03)
    assert fit("plain", *STEPS, "--run.diagnose_every", "null", "--trainer.precision", "bf16-mixed") == 0
    assert rows(tmp_path / "bf16") == rows(tmp_path / "plain")


def compare(found: list[DiagnosticsRow], expected: list[DiagnosticsRow], tolerance: float) -> None:
    """The same quantities, and the same values but for rounding.

    A radial gradient is a small difference of large terms, so that of its size is not asked.
    """
    assert [row[:-1] for row in found] == [row[:-1] for row in expected]
    for one, other in zip(found, expected, strict=True):
        slack = {"radial_gradient": 0.1, "stream_kurtosis": 10 * tolerance}.get(one.name, 0.0)
        assert one.value == pytest.approx(other.value, rel=tolerance, abs=slack * tolerance), one


SHARD_EVERYTHING = [
    *("--trainer.strategy.init_args.config", '{"zero_optimization": {"stage3_param_persistence_threshold": 0}}'),
]


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_many_ranks_see_what_one_process_does(tmp_path: Path, strategy: str) -> None:
    """Rank 0's two rows are the first two of a single process. Compiled, and whatever can be sharded is."""
    steps = ("--trainer.max_steps", "3", "--trainer.gradient_clip_val", "0.1", *ALWAYS)
    assert fit_here(tmp_path / "alone", "-c", "trainer/cpu.yaml", "--data.micro_batch_size", "4", *steps)[0] == 0
    ranks = ["-c", f"trainer/{strategy}.yaml", "--trainer.devices", "2", *steps]
    ranks += SHARD_EVERYTHING if strategy == "zero3" else []
    compiled = ("--trainer.precision", "32-true", "--model.compile", "true", "--data.micro_batch_size", "2")
    finished(tmp_path / "many", *ranks, *compiled)
    compare(looks(tmp_path / "many"), looks(tmp_path / "alone"), 2e-3)
    check_gradients(tmp_path / "many")
    # One row at a time now, so that other numbers are seen.
    low = (
        "--trainer.precision",
        "bf16-mixed",
        "--data.micro_batch_size",
        "1",
        "--trainer.accumulate_grad_batches",
        "2",
    )
    finished(tmp_path / "low", *ranks, *low)
    assert [row[:-1] for row in looks(tmp_path / "low")] == [row[:-1] for row in looks(tmp_path / "alone")]
    check_gradients(tmp_path / "low")
