"""The learning rate of each step: a warm-up, then a cosine, a line, or a plateau with a decay.

Pure arithmetic: the rate is a function of (step, settings) alone, so that nothing of it has to be
saved and a resumed run goes on at the very same rate. Knows no torch.

Sources: cosine (arXiv 1608.03983), warmup-stable-decay (2404.06395).
"""

from __future__ import annotations

import math

from paceline.profile import TrainingSettings


def learning_rate(step: int, steps: int, settings: TrainingSettings) -> float:
    """Return the rate of step ``step`` (from 0) of ``steps``.

    It rises in equal parts through ``warmup_steps``, of which the last has the full rate, and never
    after them; it ends near ``final_share`` of the full rate, and stays there beyond ``steps``.
    """
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    start = settings.warmup_steps
    if settings.schedule == "wsd":
        start = max(start, steps - math.ceil(settings.decay_share * steps))
    done = min(1.0, max(0, step - start) / max(1, steps - start))
    left = 0.5 * (1 + math.cos(math.pi * done)) if settings.schedule == "cosine" else 1 - done
    return settings.learning_rate * (settings.final_share + (1 - settings.final_share) * left)
