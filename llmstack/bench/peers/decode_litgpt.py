"""Greedy decoding by litgpt: its model with its static cache, one row, eager or with the decoding step compiled."""

import json
import sys
import time
from pathlib import Path

import torch
from litgpt.config import Config
from litgpt.model import GPT
from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama
from safetensors.torch import load_file
from serving import resident, serve


def config_of(folder):
    given = json.loads((folder / "config.json").read_text())
    head = given.get("head_dim") or given["hidden_size"] // given["num_attention_heads"]
    rope = given.get("rope_parameters") or given.get("rope_scaling") or {}
    adjustments = None
    if rope.get("rope_type") == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor")
        adjustments = {name: rope[name] for name in names}
        adjustments["original_max_seq_len"] = rope["original_max_position_embeddings"]
    return Config(
        name="bench",
        block_size=given["max_position_embeddings"],
        vocab_size=given["vocab_size"],
        padded_vocab_size=given["vocab_size"],
        n_layer=given["num_hidden_layers"],
        n_head=given["num_attention_heads"],
        n_query_groups=given["num_key_value_heads"],
        n_embd=given["hidden_size"],
        head_size=head,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        norm_eps=given["rms_norm_eps"],
        mlp_class_name="LLaMAMLP",
        intermediate_size=given["intermediate_size"],
        rope_base=rope.get("rope_theta") or given.get("rope_theta"),
        rope_adjustments=adjustments,
    )


def main():
    spec = json.loads(sys.argv[1])
    if spec["threads"]:
        torch.set_num_threads(spec["threads"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, spec["dtype"])
    assert len(spec["prompts"]) == 1, "litgpt decodes one row"
    before, began = resident(), time.perf_counter()
    folder = Path(spec["folder"])
    config = config_of(folder)
    given = {}
    for file in sorted(folder.glob("*.safetensors")):
        given |= load_file(file)
    if "lm_head.weight" not in given:
        given["lm_head.weight"] = given["model.embed_tokens.weight"]
    weights = {}
    copy_weights_hf_llama(config, {}, weights, given)
    with torch.device("meta"):
        model = GPT(config)
    model.load_state_dict(weights, assign=True)
    del given, weights
    model.max_seq_length = spec["max_length"]
    model.cos, model.sin = model.rope_cache(device=device)
    model.to(device).eval()
    model.set_kv_cache(batch_size=1, device=device, dtype=dtype)
    prompt = torch.tensor(spec["prompts"], device=device)

    def step(ids, positions):
        return model(ids, positions)[:, -1].argmax(-1, keepdim=True)

    decode = torch.compile(step, dynamic=False) if spec["mode"] == "compiled" else step

    @torch.inference_mode()
    def answer():
        began, seconds, found = time.perf_counter(), [], []
        token = step(prompt, torch.arange(prompt.shape[1], device=device))
        for index in range(spec["new"]):
            found.append(int(token))
            seconds.append(time.perf_counter() - began)
            if index + 1 < spec["new"]:
                token = decode(token, torch.tensor([prompt.shape[1] + index], device=device))
        return seconds, found

    serve(answer, device, before, began)


main()
