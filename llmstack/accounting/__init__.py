"""Parameters, FLOPs and memory of a model, computed in one place."""

from llmstack.accounting.flops import training_flops_per_token
from llmstack.accounting.parameters import ParameterCount, count_parameters
from llmstack.model import cache_bytes

__all__ = ["ParameterCount", "cache_bytes", "count_parameters", "training_flops_per_token"]
