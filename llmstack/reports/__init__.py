"""Tables and pictures that compare runs. Only ``write_report`` needs matplotlib."""

from llmstack.reports.runs import Run, read_runs
from llmstack.reports.table import GroupNumbers, RunNumbers, group_numbers, run_numbers

__all__ = ["GroupNumbers", "Run", "RunNumbers", "group_numbers", "read_runs", "run_numbers"]
