"""How a run is spread over devices: DDP and DeepSpeed's ZeRO, the same on GPUs (NCCL) and on CPU ranks (gloo)."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from torch import nn

from llmstack.errors import Stopped, UserError
from llmstack.model.llama import Block
from llmstack.processes import end_with_parent
from llmstack.training.extension_builds import building_extensions

BUCKET = 50_000_000
"""Elements reduced or gathered at once, 200 MB in fp32: enough for full bandwidth, and the first is under way early in
the backward pass. DeepSpeed's own default, ten times that, would take 2 GB a buffer."""


class RankLauncher(_SubprocessScriptLauncher):
    """Starts this command once more for each further device of the node.

    Lightning's own launcher kills all ranks without a word when one has ended with any status but 0, also while
    others still save; here the watchdog sees to that. It watches once all ranks have met; before that, while they load
    libraries and wait for each other, the launcher does.
    """

    def __init__(self, cluster_environment: ClusterEnvironment, num_processes: int, num_nodes: int) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        self.all_met = threading.Event()
        """Set when others watch the ranks."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: L.Trainer | None = None, **kwargs: Any) -> Any:
        """Start the other ranks, then go on as the first."""
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            self._call_children_scripts()
        elif _STARTED_BY in os.environ:
            end_with_parent(int(os.environ[_STARTED_BY]))
        return function(*args, **kwargs)

    def _call_children_scripts(self) -> None:
        os.environ[_STARTED_BY] = str(os.getpid())
        if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > self.num_processes:
            # The ranks of a node share its cores.
            os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads() // self.num_processes)
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        super()._call_children_scripts()
        del os.environ[_STARTED_BY]
        threading.Thread(target=self._watch_until_all_met, name="launcher", daemon=True).start()

    def _watch_until_all_met(self) -> None:
        """End the job with the status of a rank that ends too early: the others would wait half an hour for it."""
        while not self.all_met.wait(0.5):
            for rank, process in enumerate(self.procs, start=1):
                status = process.poll()
                if status is None:
                    continue
                for other in self.procs:
                    other.kill()
                how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
                text = f"llmstack: rank {rank} (process {process.pid}) {how} before all ranks had met; the job ends\n"
                os.write(2, text.encode())
                os._exit(128 - status if status < 0 else status or 1)


_STARTED_BY = "LLMSTACK_STARTED_BY"
"""Variable that tells a rank the number of the process that started it."""


@contextmanager
def ending_together(trainer: L.Trainer) -> Iterator[None]:
    """Wait, at the end, for the ranks that this process has started; if it fails by itself, end them."""
    try:
        yield
    except Stopped:
        _wait_for_started(trainer)
        raise
    except BaseException:
        for process in _started(trainer):
            process.kill()
        raise
    _wait_for_started(trainer)


def _started(trainer: L.Trainer) -> list[subprocess.Popen[bytes]]:
    launcher = trainer.strategy.launcher
    return launcher.procs if isinstance(launcher, RankLauncher) else []


def _wait_for_started(trainer: L.Trainer) -> None:
    for process in _started(trainer):
        try:
            process.wait(timeout=_LAST_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()


_LAST_SECONDS = 60.0
"""All ranks have saved and agreed to end: more than this for leaving is a fault."""


class Ddp(DDPStrategy):
    """Every rank holds the whole model; gradients are averaged."""

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._launcher = RankLauncher(self.cluster_environment, self.num_processes, self.num_nodes)


class Zero(DeepSpeedStrategy):
    """ZeRO (Rajbhandari et al., arXiv 1910.02054): the ranks share the optimiser state (stage 1), the gradients, too
    (2), and the weights, too (3).

    Gradients are accumulated and reduced in fp32, whatever the compute dtype. With ``precision: bf16-mixed`` the
    weights themselves are cast (DeepSpeed's way, no autocast) and fp32 masters lie with the optimiser state.

    Args:
        stage: what is shared.
        offload: keep the optimiser state, and at stage 3 the weights, in host memory; DeepSpeed's CPU Adam steps them.
        config: more settings of DeepSpeed, a mapping or a JSON file; what the run itself decides is refused there.

    Raises:
        UserError: ``config`` is unreadable or contradicts what the trainer and the data decide.
    """

    def __init__(
        self,
        stage: Literal[1, 2, 3] = 2,
        offload: bool = False,
        config: dict[str, Any] | str | None = None,
    ) -> None:
        if not torch.cuda.is_available():
            # DeepSpeed looks at this once, when it is first imported.
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        # DeepSpeed builds with the ninja that lies beside this Python, which need not be on PATH; and with another
        # version's in its place it would build everything anew.
        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        super().__init__(config={})
        self.stage, self.offload = stage, offload
        self.extra = read_settings(config)

    @property
    def settings(self) -> dict[str, Any]:
        """DeepSpeed's configuration, complete once the run has decided it."""
        assert isinstance(self.config, dict)
        return self.config

    @property
    def on_cpu(self) -> bool:
        """Whether the ranks compute on the CPU."""
        return isinstance(self.accelerator, CPUAccelerator)

    def decide(self, trainer: L.Trainer, micro_batch_size: int) -> None:
        """Fix DeepSpeed's configuration: the one place where its batch, accumulation and clipping come from.

        Raises:
            UserError: the user's own settings contradict it.
        """
        own: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": micro_batch_size,
            "gradient_accumulation_steps": trainer.accumulate_grad_batches,
            "gradient_clipping": trainer.gradient_clip_val or 0.0,
            "bf16": {"enabled": trainer.precision == "bf16-mixed"},
            "zero_optimization": {"stage": self.stage, "memory_efficient_linear": False},
            "zero_allow_untested_optimizer": True,
        }
        _refuse_contradictions(own, self.extra)
        defaults: dict[str, Any] = {
            "communication_data_type": "fp32",
            "data_types": {"grad_accum_dtype": "fp32"},
            "zero_optimization": {
                # Reduction runs beside the backward pass on a stream of its own, which a CPU has not.
                "overlap_comm": not self.on_cpu,
                "contiguous_gradients": True,
                "reduce_scatter": not self.on_cpu,
                "reduce_bucket_size": BUCKET,
                "allgather_bucket_size": BUCKET,
            },
        }
        if self.offload:
            defaults["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": not self.on_cpu}
            if self.stage == 3:
                defaults["zero_optimization"]["offload_param"] = {"device": "cpu", "pin_memory": not self.on_cpu}
        self.config = _merged(_merged(defaults, self.extra), own)
        self._config_initialized = True

    def setup_environment(self) -> None:
        """As for DDP: the ranks may be CPU processes."""
        DDPStrategy.setup_environment(self)

    def setup_distributed(self) -> None:
        """Join the process group."""
        reset_seed()
        self.set_world_ranks()
        with building_extensions():
            self._init_deepspeed_distributed()

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._launcher = RankLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Nothing: the module builds a sharded model itself, one part at a time (see ``sharding.build_sharded``)."""
        yield

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Without DeepSpeed's division by the accumulation: Lightning has divided already."""
        return super().backward(closure_loss, optimizer, *args, scale_wrt_gas=False, **kwargs)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """DeepSpeed's; what a step that it skipped had accumulated is not carried into the next."""
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        if optimizer.overflow and self.offload and self.stage < 3:
            # DeepSpeed forgets this with offload, and would skip every step to come.
            for group in optimizer.averaged_gradients:
                optimizer.averaged_gradients[group] = None
        return result

    def _setup_model_and_optimizer(self, model: nn.Module, optimizer: Any, lr_scheduler: Any = None) -> tuple[Any, Any]:
        import deepspeed
        from deepspeed.utils import set_z3_leaf_modules

        if self.stage == 3:
            # A block's weights are gathered before its (compiled, perhaps recomputed) forward, never inside.
            set_z3_leaf_modules(model, [Block])
        with building_extensions():
            engine, wrapped, _, _ = deepspeed.initialize(
                args=argparse.Namespace(device_rank=self.local_rank),
                config=self.config,
                model=model,
                model_parameters=[p for p in model.parameters() if p.requires_grad],
                optimizer=optimizer,
                dist_init_required=False,
            )
        # Stages 1 and 2 look for gradients that are not finite only where this is set; stage 3 always does.
        wrapped.check_grad_overflow = True
        return engine, wrapped


def read_settings(config: dict[str, Any] | str | None) -> dict[str, Any]:
    """Settings of DeepSpeed, given as a mapping or in a JSON file.

    Raises:
        UserError: the file is unreadable.
    """
    if not isinstance(config, str):
        return dict(config or {})
    try:
        content = json.loads(Path(config).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"DeepSpeed configuration {config} is not readable: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"DeepSpeed configuration {config} is no mapping")
    return content


OWNERS = {
    "train_batch_size": "data.micro_batch_size, trainer.accumulate_grad_batches and the number of ranks",
    "train_micro_batch_size_per_gpu": "data.micro_batch_size",
    "gradient_accumulation_steps": "trainer.accumulate_grad_batches",
    "gradient_clipping": "trainer.gradient_clip_val",
    "optimizer": "model.optimizer",
    "scheduler": "model.optimizer",
    "fp16": "trainer.precision",
    "bf16.enabled": "trainer.precision",
    "amp": "trainer.precision",
    "activation_checkpointing": "model.activation_checkpointing",
    "zero_optimization.stage": "the strategy's stage",
    "zero_optimization.offload_optimizer": "the strategy's offload",
    "zero_optimization.offload_param": "the strategy's offload",
}
"""Settings of DeepSpeed that the run decides, and where."""


def _refuse_contradictions(own: dict[str, Any], extra: dict[str, Any]) -> None:
    missing = object()
    for setting, owner in OWNERS.items():
        given, decided = _at(extra, setting, missing), _at(own, setting, missing)
        if given is not missing and given != decided:
            there = "" if decided is missing else f", which makes it {json.dumps(decided)} here"
            raise UserError(
                f"the DeepSpeed configuration sets {setting} to {json.dumps(given)}, but {owner} decides that{there}: "
                "remove it there"
            )


def _at(values: Any, dotted: str, default: Any) -> Any:
    for key in dotted.split("."):
        if not isinstance(values, dict) or key not in values:
            return default
        values = values[key]
    return values


def _merged(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    result = dict(under)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(under.get(key), dict)
        result[key] = _merged(under[key], value) if both else value
    return result
