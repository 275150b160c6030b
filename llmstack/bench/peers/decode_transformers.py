"""Greedy decoding by transformers' own ``generate``: dynamic cache, static cache, or static and compiled."""

import json
import sys
import time

import torch
from serving import resident, serve
from transformers import AutoModelForCausalLM


class Clock:
    """A streamer that notes when tokens come; the first call brings the prompt."""

    def __init__(self):
        self.began, self.seconds, self.prompt_seen = time.perf_counter(), [], False

    def put(self, ids):
        if self.prompt_seen:
            self.seconds.append(time.perf_counter() - self.began)
        self.prompt_seen = True

    def end(self):
        pass


def main():
    spec = json.loads(sys.argv[1])
    if spec["threads"]:
        torch.set_num_threads(spec["threads"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    before, began = resident(), time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(spec["folder"], dtype=getattr(torch, spec["dtype"])).to(device).eval()
    model.generation_config.eos_token_id = None
    options = {"do_sample": False, "min_new_tokens": spec["new"], "max_new_tokens": spec["new"], "pad_token_id": 0}
    if spec["mode"] != "dynamic":
        options |= {"cache_implementation": "static", "disable_compile": True}
    if spec["mode"] == "compiled":
        model.forward = torch.compile(model.forward, dynamic=False)
    ids = torch.tensor(spec["prompts"], device=device)

    @torch.inference_mode()
    def answer():
        clock = Clock() if ids.shape[0] == 1 else None
        began = time.perf_counter()
        if clock is not None:
            found = model.generate(ids, streamer=clock, **options)
            return clock.seconds, found[0, ids.shape[1] :].tolist()
        # Several rows cannot be streamed: one token, then all, tells what the others took.
        model.generate(ids, **{**options, "min_new_tokens": 1, "max_new_tokens": 1})
        first = time.perf_counter() - began
        again = time.perf_counter()
        found = model.generate(ids, **options)
        rest = (time.perf_counter() - again - first) / (spec["new"] - 1)
        return [first + rest * index for index in range(spec["new"])], found[0, ids.shape[1] :].tolist()

    serve(answer, device, before, began)


main()
