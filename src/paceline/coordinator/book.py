"""The deployments that are kept, by what is asked of them: by worker, by model, by key, by time.

It decides nothing; whoever changes a deployment tells it what that means for its lists.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from paceline.coordinator.deployment import DeploymentRun
from paceline.coordinator.messages import KeepKey
from paceline.errors import Conflict, NotFound


class Book:
    """All deployments of a fleet, oldest first, and the idempotency keys that made them."""

    def __init__(self) -> None:
        self.keys: dict[str, KeepKey] = {}
        self.ticking: set[str] = set()  # which the passing of time may change
        self._runs: dict[str, DeploymentRun] = {}
        self._open: dict[str, set[str]] = {}  # which a worker may still hear about
        self._keys_of: dict[str, set[str]] = {}

    def __iter__(self) -> Iterator[DeploymentRun]:
        return iter(self._runs.values())

    def __len__(self) -> int:
        return len(self._runs)

    def find(self, deployment_id: str) -> DeploymentRun | None:
        """Return the deployment, or None."""
        return self._runs.get(deployment_id)

    def run(self, deployment_id: str) -> DeploymentRun:
        """Return the deployment; raises NotFound."""
        run = self._runs.get(deployment_id)
        if run is None:
            raise NotFound("no such deployment", got=deployment_id[:200])
        return run

    def add(self, run: DeploymentRun, *, announced: bool) -> None:
        """Take in a deployment; its workers hear of it where it is ``announced``."""
        identity, digest = run.deployment.deployment_id, run.deployment.manifest_digest
        for other in self._runs.values():
            if other.deployment.manifest_digest == digest:
                run.manifest = (
                    other.manifest
                )  # 120,000 pieces are 15 MB: the same, not an equal one
                break
        self._runs[identity] = run
        self.retime(run)
        if announced:
            self.announce(run, run.parts)

    def retime(self, run: DeploymentRun) -> None:
        """Note whether the passing of time may change the deployment."""
        identity = run.deployment.deployment_id
        switch = run.memo.switch
        if not run.final or (switch is not None and switch.open):
            self.ticking.add(identity)
        else:
            self.ticking.discard(identity)

    def announce(self, run: DeploymentRun, workers: Iterable[str]) -> None:
        """Have ``workers`` hear of the deployment."""
        identity = run.deployment.deployment_id
        for worker_id in workers:
            self._open.setdefault(worker_id, set()).add(identity)

    def close(self, worker_id: str, deployment_id: str) -> None:
        """Have a worker hear no more of a deployment."""
        self._open[worker_id].discard(deployment_id)

    def open_runs(self, worker_id: str) -> list[DeploymentRun]:
        """Return what a worker may still hear about, in a fixed order."""
        opened = self._open.get(worker_id)
        if not opened:
            return []
        if len(opened) == 1:
            return [self._runs[next(iter(opened))]]
        return [self._runs[deployment_id] for deployment_id in sorted(opened)]

    def drop(self, run: DeploymentRun) -> None:
        """Forget a deployment and the keys that made it."""
        identity = run.deployment.deployment_id
        del self._runs[identity]
        self.ticking.discard(identity)
        for worker_id in run.parts:
            opened = self._open.get(worker_id)
            if opened is not None:
                opened.discard(identity)
        for key in self._keys_of.pop(identity, ()):
            del self.keys[key]

    def forget(self, worker_id: str) -> None:
        """Keep nothing of a worker that no deployment names."""
        self._open.pop(worker_id, None)

    def history(self, model_id: str) -> list[DeploymentRun]:
        """Return the model's activations that were not rolled back, the newest first."""
        found = [r for r in self if r.memo.number and r.deployment.model_id == model_id]
        return sorted(found, key=lambda run: -run.memo.number)

    def active(self, model_id: str, workers: Collection[str]) -> dict[str, DeploymentRun]:
        """Return which deployment is active on each of ``workers``, where one is."""
        left = set(workers)
        found: dict[str, DeploymentRun] = {}
        for run in self.history(model_id):
            here = left & run.holders()
            found |= dict.fromkeys(here, run)
            left -= here
            if not left:
                break
        return found

    def keep_key(self, key: KeepKey) -> None:
        """Remember what a key made."""
        self.keys[key.key] = key
        self._keys_of.setdefault(key.deployment_id, set()).add(key.key)

    def known_key(self, key: str | None, body_digest: str) -> DeploymentRun | None:
        """Return what this key made, or None; raises Conflict where it came with another body."""
        kept = self.keys.get(key) if key is not None else None
        if kept is None:
            return None
        if kept.body_digest != body_digest:
            raise Conflict(
                "this Idempotency-Key was used with another request",
                got=key,
                wanted=f"the body that made {kept.deployment_id}, or a new key",
                do="Use a new key for a new request.",
            )
        return self._runs[kept.deployment_id]
