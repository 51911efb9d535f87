"""Metrics of one rank, step by step: where time goes, throughput, stragglers, alerts.

The loop calls ``begin``, ``shared`` (this rank's input to the loop's one collective) and ``end``;
the values are sent in the step's report. Costs some tens of microseconds a step; the peak is
measured once a process, outside of any step's time. Does not depend on MLflow or Prometheus.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from paceline.config import TrainingSettings
from paceline.models import ModelConfig, ModelShape
from paceline.training.loop import Group
from paceline.training.metrics.alerts import WINDOW, AlertChange, Alerts, Straggler, stragglers
from paceline.training.metrics.device import (
    ForwardTimer,
    Utilisation,
    matmul_peak,
    memory,
)
from paceline.training.metrics.tracing import Tracer
from paceline.training.parallel import Parallel

RECENT = 20  # window of the time shares, in steps
HEAVY_EVERY = 10  # steps between measurements of memory, stragglers and accelerator
PROBE_EVERY = 100  # steps between probes of the all-reduce
PROBE_BYTES = 1024 * 1024


@dataclass
class _Step:
    seconds: float
    data_wait_s: float
    stall_s: float
    tokens: float


@dataclass
class StepMetrics:
    """The metrics of one rank.

    ``flops_per_token`` is 0 where it is unknown (a ``codeRef``'s model); then there is no MFU.
    ``peak`` returns the FLOP/s that this rank's device can reach; it is called once.
    """

    group: Group = field(default_factory=Group)
    modules: Sequence[nn.Module] = ()
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    flops_per_token: float = 0.0
    peak: Callable[[], float] | None = None
    alerts: Alerts = field(default_factory=Alerts)
    tracer: Tracer | None = None
    reduced: Callable[[], int] | None = None  # bytes of gradients given to reductions so far
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._busy = ForwardTimer(self.modules, self.device)
        self._window: deque[Sequence[float]] = deque(maxlen=WINDOW)  # seconds of steps, by rank
        self._recent: deque[_Step] = deque(maxlen=RECENT)
        self._utilisation = Utilisation(self.device, torch.get_num_threads())
        self._slow: list[Straggler] = []
        self._kept: dict[str, float] = {}  # values that are not measured in each step
        self._steps = 0
        self._started = 0.0
        self._waited = self._stalled = 0.0
        self._reduced = self.reduced() if self.reduced else 0

    @classmethod
    def of(
        cls,
        settings: TrainingSettings,
        parallel: Parallel,
        group: Group,
        device: torch.device,
        *,
        config: ModelConfig | None = None,
        seen: int | None = None,
        tracer: Tracer | None = None,
    ) -> StepMetrics:
        """Return the metrics of one rank of a job. ``config`` is given for our transformer only;
        ``seen`` is the number of tokens that each token may attend to (None: the context).

        Compiled modules are not hooked: a hook would break the graph.
        """
        dtype = getattr(torch, settings.precision)
        threads = torch.get_num_threads()
        return cls(
            group,
            () if settings.compile else parallel.modules,
            device,
            flops_per_token=0.0 if config is None else ModelShape.of(config).flops_per_token(seen),
            peak=lambda: matmul_peak(device.type, dtype, threads),
            alerts=Alerts(settings.checkpoints.max_stall_share),
            tracer=tracer,
            reduced=lambda: parallel.bytes_reduced,
        )

    def begin(self, step: int, data_wait_s: float, stall_s: float) -> None:
        """Start step ``step`` (from 1); the other arguments are totals so far, in seconds."""
        if self.tracer is not None:
            self.tracer.begin(step)
        self._started = time.perf_counter()
        self._waited, self._stalled = data_wait_s, stall_s

    def shared(self, data_wait_s: float) -> list[float]:
        """Return a slot for each rank; this rank's holds the seconds of its own work."""
        slots = [0.0] * self.group.world_size
        slots[self.group.rank] = self._busy.take() + data_wait_s - self._waited
        return slots

    def end(
        self, step: int, tokens: float, slots: Sequence[float], data_wait_s: float, stall_s: float
    ) -> dict[str, float]:
        """Return the metrics of step ``step``; ``slots`` are all ranks' ``shared`` slots, summed.

        ``tokens`` are those of the whole gang.
        """
        seconds = time.perf_counter() - self._started
        if self.tracer is not None:
            self.tracer.end(step)
        self._steps += 1
        waited, stalled = data_wait_s - self._waited, stall_s - self._stalled
        self._recent.append(_Step(seconds, waited, stalled, tokens))
        self._window.append(tuple(slots))
        figures = self._shares()
        if self._steps % HEAVY_EVERY == 1:
            self._look()
            if self._steps % PROBE_EVERY == 1 and self.group.world_size > 1:
                self._kept |= self._probe()
            figures |= self._kept
        figures |= {
            "step_seconds": seconds,
            "data_wait_s": waited,
            "busy_seconds": slots[self.group.rank] if slots else 0.0,
            "tokens_per_second": tokens / seconds if seconds > 0 else 0.0,
        }
        if self.reduced is not None:
            before, self._reduced = self._reduced, self.reduced()
            figures["reduced_bytes"] = float(self._reduced - before)
        peak = self._kept.get("matmul_peak_flops", 0.0)
        if peak and seconds > 0:
            mine = figures["tokens_per_second"] / self.group.world_size
            figures["mfu"] = mine * self.flops_per_token / peak
        return figures

    def changes(self, figures: dict[str, float]) -> list[AlertChange]:
        """Return the alerts that these metrics raise or clear."""
        return self.alerts.update(figures, self.clock())

    @property
    def slow(self) -> list[Straggler]:
        """Return the stragglers, slowest first."""
        return self._slow

    def close(self) -> None:
        """Remove the hooks; the trace of a step that did not end is dropped."""
        self._busy.close()
        if self.tracer is not None:
            self.tracer.close()

    def _shares(self) -> dict[str, float]:
        total = sum(each.seconds for each in self._recent) or 1.0
        return {
            "data_wait_share": sum(each.data_wait_s for each in self._recent) / total,
            "checkpoint_stall_share": sum(each.stall_s for each in self._recent) / total,
        }

    def _look(self) -> None:
        self._kept |= memory(self.device)
        utilisation = self._utilisation.take()
        if utilisation is not None:
            self._kept["utilisation"] = utilisation
        self._slow = stragglers(self._window)
        if self.peak is not None and self.flops_per_token and "matmul_peak_flops" not in self._kept:
            self._kept["matmul_peak_flops"] = self.peak()

    def _probe(self) -> dict[str, float]:
        """Time one all-reduce; the loop's collective has just synchronised all ranks."""
        payload = torch.zeros(PROBE_BYTES // 4, device=self.device)
        started = time.perf_counter()
        dist.all_reduce(payload)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        seconds = time.perf_counter() - started
        return {
            "reduce_probe_seconds": seconds,
            "reduce_bytes_per_second": PROBE_BYTES / seconds if seconds > 0 else 0.0,
        }
