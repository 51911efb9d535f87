"""Clients that ask for things all the time and write down what they were told.

Each thread has a client of its own, without patience: every attempt is one line of the history.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from benchmarks.leaders.cluster import Cluster
from benchmarks.leaders.history import Final, History, Invocation, Kind
from paceline.client import AccessClient, CoordinatorClient
from paceline.errors import NotFound, PacelineError, TemporaryError
from paceline.schemas import (
    CreateDeployment,
    EventName,
    Heartbeat,
    RegisterWorker,
    StageRecord,
    WorkerStatus,
    digest_of,
)

PAUSE_S = (0.05, 0.25)
RETRY_S = (0.02, 0.12)
ATTEMPTS = 400  # of one thing, before it is given up with an unknown outcome
GIVE_UP = 0.05  # share of things that are given up after one failed attempt
AGAIN = 0.2  # share of things that are asked for once more after they were acknowledged
STAGE = "failover"
AUDIT_S = 20.0  # until the audit history has what the outbox holds


class Load:
    """Threads that write, and the history of what they did."""

    def __init__(self, cluster: Cluster, source_url: str, *, seed: int = 0) -> None:
        self.history = History()
        self.accepted: list[tuple[float, float]] = []  # of the probe: began, ended
        self.read_failures: list[str] = []
        self._cluster, self._source_url = cluster, source_url
        self._stopping = threading.Event()
        bodies = [self._probe, self._create_and_cancel, self._put, self._register, self._beat]
        bodies += [self._beat]
        self._threads = [
            threading.Thread(target=self._run, args=(body, f"{body.__name__[1:]}{n}", seed + n))
            for n, body in enumerate(bodies)
        ]
        self.broken: list[str] = []

    def start(self) -> None:
        """Begin."""
        for each in self._threads:
            each.start()

    def stop(self) -> None:
        """End, each thread after the attempt that is under way."""
        self._stopping.set()
        for each in self._threads:
            each.join(60)

    def _run(
        self, body: Callable[[CoordinatorClient, str, random.Random], None], name: str, seed: int
    ) -> None:
        client = self._cluster.client(timeout_s=10.0)
        try:
            body(client, name, random.Random(seed))
        except Exception as error:  # noqa: BLE001 (told at the end of the run)
            self.broken.append(f"{name}: {type(error).__name__}: {error}")
        finally:
            client.close()

    def _try(
        self,
        kind: Kind,
        key: str,
        call: Callable[[], Any],
        chance: random.Random,
        *,
        value: int = 0,
        told: Callable[[Any], dict[str, object]] = lambda _: {},
    ) -> Any:
        """Attempt until it is answered; return the answer, None where it was given up."""
        for _ in range(ATTEMPTS):
            began_s = time.monotonic()
            answer: Any = None
            more: dict[str, object] = {}
            try:
                answer = call()
                outcome, more = "acknowledged", told(answer)
            except TemporaryError:
                outcome = "unknown"
            except PacelineError as error:
                outcome = "refused"
                self.broken.append(f"{kind} {key}: {error}")
            fields = {"kind": kind, "key": key, "outcome": outcome, "value": value} | more
            times = {"began_s": began_s, "ended_s": time.monotonic()}
            self.history.add(Invocation(**(fields | times)))  # type: ignore[arg-type]
            if outcome == "acknowledged":
                return answer if answer is not None else True
            if outcome == "refused" or self._stopping.is_set() or chance.random() < GIVE_UP:
                return None
            time.sleep(chance.uniform(*RETRY_S))
        return None

    def _probe(self, client: CoordinatorClient, name: str, chance: random.Random) -> None:
        """Write as often as it goes, to find out when writes are accepted again."""
        call = _registration(name, 1)
        while not self._stopping.is_set():
            began_s = time.monotonic()
            try:
                client.register(call)
            except TemporaryError:
                time.sleep(chance.uniform(*RETRY_S))
            else:
                self.accepted.append((began_s, time.monotonic()))
                time.sleep(0.03)

    def _create_and_cancel(
        self, client: CoordinatorClient, name: str, chance: random.Random
    ) -> None:
        number = 0
        while not self._stopping.is_set():
            number += 1
            key = f"{name}-{number}"
            body = CreateDeployment(
                model_id="m",
                version="v1",
                source_url=self._source_url,
                target_workers=(f"nobody-{number % 7}",),  # it never registers: init for good
                run_id=key,
            )

            def create(body: CreateDeployment = body, key: str = key) -> Any:
                return client.create(body, key)

            answer = self._try(
                "create", key, create, chance, told=lambda a: {"answer": a.deployment_id}
            )
            if answer is not None:
                deployment_id: str = answer.deployment_id
                self._read_back(deployment_id)
                if chance.random() < AGAIN:
                    self._try(
                        "create", key, create, chance, told=lambda a: {"answer": a.deployment_id}
                    )
                if number % 4:  # most are cancelled, so that the list does not grow for ever
                    self._try(
                        "cancel", deployment_id, lambda d=deployment_id: client.cancel(d), chance
                    )
            time.sleep(chance.uniform(*PAUSE_S) * 4)

    def _read_back(self, deployment_id: str) -> None:
        """Whoever answers at all must know what was acknowledged: also a standby."""
        for url in self._cluster.urls:
            reader = CoordinatorClient(url, self._cluster.token, 2.0)
            try:
                reader.deployment(deployment_id)
            except NotFound:
                self.read_failures.append(f"{deployment_id} is not known at {url}")
            except TemporaryError:
                pass  # dead, frozen or cut off: it says nothing wrong
            finally:
                reader.close()

    def _put(self, client: CoordinatorClient, name: str, chance: random.Random) -> None:
        value = 0
        while not self._stopping.is_set():
            value += 1
            record = _stage_record(f"{name}-{value % 5}", value)
            self._try(
                "put",
                record.input_digest,
                lambda r=record: client.ledger_put(r),
                chance,
                value=value,
            )
            time.sleep(chance.uniform(*PAUSE_S))

    def _register(self, client: CoordinatorClient, name: str, chance: random.Random) -> None:
        incarnation = 0
        while not self._stopping.is_set():
            incarnation += 1
            call = _registration(name, incarnation)
            self._try(
                "register", name, lambda c=call: client.register(c), chance, value=incarnation
            )
            time.sleep(chance.uniform(*PAUSE_S))

    def _beat(self, client: CoordinatorClient, name: str, chance: random.Random) -> None:
        beat = Heartbeat(worker_id=name, status=WorkerStatus.IDLE, incarnation=1)
        while client.epoch == 0 and not self._stopping.is_set():
            client.register(_registration(name, 1))
        while not self._stopping.is_set():
            self._try(
                "beat",
                name,
                lambda: client.heartbeat(beat),
                chance,
                told=lambda a: {"epoch": a.epoch},
            )
            time.sleep(chance.uniform(*PAUSE_S))


def _registration(worker_id: str, incarnation: int) -> RegisterWorker:
    return RegisterWorker(
        worker_id=worker_id,
        hostname="h",
        rack="r",
        available_storage=1,
        address="127.0.0.1:9",
        incarnation=incarnation,
        link_mbit=8,
    )


def _stage_record(key: str, value: int) -> StageRecord:
    registration = _registration(key, 1)
    return StageRecord(
        stage=STAGE,
        input_digest=digest_of(registration),
        output={"value": value},
        output_digest=digest_of(registration),
        run_id="failover",
        seconds=0.0,
        finished_at=0.0,
    )


def final_of(cluster: Cluster, history: History) -> Final:
    """Return what the cluster shows now, asked of its leader."""
    client = cluster.client(patience_s=30.0)
    client.register(_registration("auditor", 1))  # finds the leader, who knows everything
    keys = {each.key for each in history.all() if each.kind == "put"}
    ledger = {}
    for key in keys:
        record = client.ledger_get(STAGE, key)
        if record is not None:
            ledger[key] = int(str(record.output["value"]))
    deployments = client.deployments()
    others = {each.deployment_id for each in deployments if each.run_id is None}
    ours = {each.deployment_id for each in deployments} - others
    final = Final(
        deployments=tuple(
            (each.deployment_id, each.run_id, each.status.value)
            for each in deployments
            if each.run_id is not None
        ),
        incarnations={each.worker_id: each.incarnation for each in client.workers()},
        ledger=ledger,
        created=_told_of(cluster, ours, others),
    )
    client.close()
    return final


def _told_of(cluster: Cluster, wanted: set[str], others: set[str]) -> Counter[str]:
    """Return how often the audit history tells of each creation, once it had time to catch up."""
    client = AccessClient.of(cluster.runtime, patience_s=30.0)
    until_s = time.monotonic() + AUDIT_S
    while True:
        found: Counter[str] = Counter()
        after = 0
        names = [EventName.DEPLOYMENT_CREATED.value]
        while page := client.audit(after=after, limit=500, names=names):
            found.update(each.deployment_id for each in page if each.deployment_id is not None)
            after = page[-1].seq
        if wanted <= found.keys() or time.monotonic() > until_s:
            client.close()
            return Counter({each: n for each, n in found.items() if each not in others})
        time.sleep(0.2)
