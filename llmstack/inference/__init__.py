"""Generation with torch alone: ``Generator(model, max_length).stream(prompt_ids, max_new_tokens)``."""

from llmstack.inference.generate import Generator
from llmstack.inference.requests import Completion, Request, Token
from llmstack.inference.sampling import Sampler, Sampling
from llmstack.inference.speculation import PromptLookup

__all__ = ["Completion", "Generator", "PromptLookup", "Request", "Sampler", "Sampling", "Token"]
