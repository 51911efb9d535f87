"""Ray Train's recovery from a killed worker: seconds from SIGKILL to the first new step.

Runs in `.venv-peers` (`make peers`): ``python benchmarks/peers/ray_recovery.py KILLS``. Two
workers, DDP over gloo, a checkpoint every four steps on this disk, as our own benchmark has it;
Ray's default settings but ``max_failures``. Prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path


def worker(config: dict) -> None:
    """Train; say each step in a file that the killer reads."""
    import ray.train
    import torch
    from ray.train import Checkpoint
    from ray.train.torch import prepare_model

    context = ray.train.get_context()
    rank = context.get_world_rank()
    log = Path(config["log"])
    (log / f"pid-{rank}").write_text(str(os.getpid()))
    model = torch.nn.Sequential(
        torch.nn.Embedding(256, 64), torch.nn.Linear(64, 512), torch.nn.Linear(512, 256)
    )
    optimizer = torch.optim.AdamW(model.parameters())
    step = 0
    if (found := ray.train.get_checkpoint()) is not None:
        with found.as_directory() as directory:
            state = torch.load(Path(directory) / "state.pt", weights_only=True)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            step = state["step"]
    model = prepare_model(model)
    while step < config["steps"]:
        tokens = torch.randint(0, 256, (4, 64))
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if rank == 0:
            with (log / "steps").open("a") as file:
                file.write(f"{step} {time.time()}\n")
        if step % 4 == 0:
            with tempfile.TemporaryDirectory() as directory:
                saved = None
                if rank == 0:
                    state = {
                        "model": getattr(model, "module", model).state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "step": step,
                    }
                    torch.save(state, Path(directory) / "state.pt")
                    saved = Checkpoint.from_directory(directory)
                ray.train.report({"loss": float(loss)}, checkpoint=saved)
        time.sleep(0.02)


def main(kills: int) -> None:
    """Run one training with ``kills`` kills and print what each cost."""
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    with tempfile.TemporaryDirectory(prefix="ray-") as directory:
        log = Path(directory) / "log"
        log.mkdir()
        taken: list[float] = []
        over = threading.Event()

        def steps() -> list[tuple[int, float]]:
            path = log / "steps"
            lines = path.read_text().splitlines() if path.exists() else []
            return [(int(a), float(b)) for a, b in (each.split() for each in lines if " " in each)]

        def strike() -> None:
            reached = 0
            for _ in range(kills):
                while not over.is_set() and max((s for s, _ in steps()), default=0) < reached + 12:
                    time.sleep(0.02)
                if over.is_set():
                    return
                reached = max(s for s, _ in steps())
                os.kill(int((log / "pid-1").read_text()), signal.SIGKILL)
                struck = time.time()
                while not over.is_set():
                    new = [t for s, t in steps() if s > reached and t > struck + 0.2]
                    if new:
                        taken.append(new[0] - struck)
                        break
                    time.sleep(0.02)

        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
        thread = threading.Thread(target=strike, daemon=True)
        thread.start()
        TorchTrainer(
            worker,
            train_loop_config={"log": str(log), "steps": (kills + 2) * 16},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(
                storage_path=str(Path(directory) / "storage"),
                failure_config=FailureConfig(max_failures=kills + 1),
            ),
        ).fit()
        over.set()
        thread.join(10)
        version = ray.__version__
        ray.shutdown()
    sys.stdout.write(json.dumps({"version": version, "to_new_step_s": taken}) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
