"""Generation with torch alone: ``Generator(model, max_length).stream(prompt_ids, max_new_tokens)``."""

from llmstack.inference.generate import Generator
from llmstack.inference.sampling import Sampler, Sampling

__all__ = ["Generator", "Sampler", "Sampling"]
