"""The model: torch only. ``Llama(ModelConfig.preset("374m"))(input_ids) -> logits``."""

from llmstack.model.config import ModelConfig, RopeScaling
from llmstack.model.kv_cache import KVCache, cache_bytes
from llmstack.model.llama import Llama

__all__ = ["KVCache", "Llama", "ModelConfig", "RopeScaling", "cache_bytes"]
