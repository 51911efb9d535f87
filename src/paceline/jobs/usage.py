"""What a job's attempts hold and cost, from its record alone: the running ledger and the budget.

An attempt holds its nodes from the moment when they are reserved until its flow run has ended. Both
are in the stored record, so the next leader counts the same seconds. Pure functions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from paceline.config import PriceSettings
from paceline.errors import InvalidInput
from paceline.jobs.cost import HOUR_S, cost_of, money
from paceline.jobs.placement import Host
from paceline.schemas import (
    KEPT_USAGES,
    TIME_CLASSES,
    JobReport,
    JobState,
    JobUsage,
    LossCause,
    TrainingJob,
    TrainingUsage,
)

WARN_SHARE = 0.8  # of a budget


def start_usage(
    job: TrainingJob, hosts: Sequence[Host], ranks: Mapping[str, int], at: float, *, whole: bool
) -> tuple[JobUsage, ...]:
    """Return the job's usage with a new attempt, which holds ``hosts`` from ``at`` on: as many
    slots of each as it has ``ranks`` there, or all of them where the engine gives ``whole`` nodes.
    """
    held: Counter[str] = Counter()
    on_spot = 0
    for host in hosts:
        count = 1 if host.kind == "cpu" else host.slots if whole else ranks[host.name]
        held[host.kind] += count
        on_spot += count if host.pool == "spot" else 0
    held_slots, slots = sum(ranks.values()), sum(host.slots for host in hosts)
    shares = not whole and held_slots < slots and "cpu" in held
    usage = JobUsage(
        attempt=job.attempt + (not job.adopted),
        accelerators=dict(held),
        ranks=held_slots,
        node_share=held_slots / slots if shares else None,
        spot_share=on_spot / sum(held.values()),
        since=at,
        queued_s=max(0.0, at - job.updated_at),
    )
    return _merge_oldest((*job.usage, usage))


def end_usage(
    job: TrainingJob, state: JobState, at: float, cause: LossCause
) -> tuple[JobUsage, ...]:
    """Return the job's usage once its attempt has ended with ``state``."""
    *earlier, last = job.usage
    held_s = max(0.0, at - last.since)
    report = report_of(job)
    update = {
        "held_s": held_s,
        "by_class": _classes(report, held_s, lost_s(job) if cause not in ("", "preempted") else 0),
        "steps": report.made_steps if report else 0,
        "began_step": report.began_step if report else None,
        "ended": state,
        "read_bytes": report.read_bytes if report else None,
        "written_bytes": report.written_bytes if report else None,
        "flow_run_id": job.flow_run_id or "",
    }
    return _with_unseen_steps((*earlier, last.model_copy(update=update)))


def _with_unseen_steps(usages: tuple[JobUsage, ...]) -> tuple[JobUsage, ...]:
    """Return ``usages`` with the steps that ranks made and saved after their flow was killed: the
    last attempt began after them.
    """
    began, goes_on = usages[0].began_step, usages[-1].began_step
    if len(usages) == 1 or began is None or goes_on is None:
        return usages
    *earlier, before, last = usages
    unseen = max(0, goes_on - began - sum(each.steps for each in usages[:-1]))
    return (*earlier, before.model_copy(update={"steps": before.steps + unseen}), last)


def is_held(job: TrainingJob) -> bool:
    """Return whether an attempt of the job holds nodes, as its usage says."""
    return bool(job.usage) and job.usage[-1].held_s is None


def flow_runs(job: TrainingJob) -> dict[int, str]:
    """Return the flow run of each attempt that has had one, oldest first."""
    found = {each.attempt: each.flow_run_id for each in job.usage if each.flow_run_id}
    return found | ({job.attempt: job.flow_run_id} if job.flow_run_id else {})


def report_of(job: TrainingJob) -> JobReport | None:
    """Return the report of the job's present flow run."""
    report = job.report
    return report if report and report.flow_run_id == (job.flow_run_id or "") else None


def lost_s(job: TrainingJob) -> float:
    """Return the seconds of the present attempt's work that no checkpoint has."""
    report = report_of(job)
    if report is None:
        return 0.0
    saved = max((each.created_at for each in report.checkpoints), default=0.0)
    return min(report.seconds.get("useful", 0.0), max(0.0, report.at - saved))


def _classes(report: JobReport | None, held_s: float, lost_s: float = 0.0) -> dict[str, float]:
    """Return ``held_s`` by class of time; what no report accounts for is start and end."""
    seconds = report.seconds if report is not None else {}
    found = {name: seconds.get(name, 0.0) for name in TIME_CLASSES}
    found["useful"] -= lost_s
    found["recovery"] += lost_s
    found["idle"] += max(0.0, held_s - sum(found.values()))
    return found


def _merge_oldest(usages: tuple[JobUsage, ...]) -> tuple[JobUsage, ...]:
    """Return ``usages`` with the two oldest that held the same in one, if they are many."""

    def what(each: JobUsage) -> tuple[object, ...]:
        return each.accelerators, each.ranks, each.node_share, each.spot_share

    first, *others = usages
    same = [each for each in others[:-1] if what(each) == what(first)]
    if len(usages) <= KEPT_USAGES or not same:
        return usages
    names = {*first.by_class, *same[0].by_class}
    both = {n: first.by_class.get(n, 0.0) + same[0].by_class.get(n, 0.0) for n in names}
    update = {
        "since": first.since,
        "queued_s": first.queued_s + same[0].queued_s,
        "held_s": (first.held_s or 0.0) + (same[0].held_s or 0.0),
        "by_class": both,
        "steps": first.steps + same[0].steps,
        "read_bytes": _added(first.read_bytes, same[0].read_bytes),
        "written_bytes": _added(first.written_bytes, same[0].written_bytes),
        "began_step": first.began_step,
    }
    return tuple(each.model_copy(update=update) if each is same[0] else each for each in others)


def _added(one: int | None, other: int | None) -> int | None:
    return other if one is None else one + (other or 0)


# -- costs


def attempts_of(job: TrainingJob, now: float) -> list[TrainingUsage]:
    """Return what each attempt of the job used until ``now``, the newest first."""
    found = []
    for each in reversed(job.usage):
        held_s = max(0.0, now - each.since) if each.held_s is None else each.held_s
        report = report_of(job) if each.held_s is None else None
        moved = report or each
        # The checkpoints are the job's: an attempt goes on from those of the one before.
        newest = each is job.usage[-1]
        saved = job.report.checkpoints if job.report and newest else ()
        found.append(
            TrainingUsage(
                run_id=job.run_id,
                job_id=(job.report.training_id if job.report else "") or job.job_id,
                model_id=job.spec.model_id,
                started_at=each.since,
                steps=report.made_steps if report else each.steps,
                seconds=held_s,
                by_class=each.by_class or _classes(report, held_s),
                accelerators=each.accelerators,
                ranks=each.ranks,
                node_share=each.node_share,
                spot_share=each.spot_share,
                queued_job_id=job.job_id,
                attempt=each.attempt,
                state=each.ended or job.state,
                team=job.spec.team,
                project=job.spec.project,
                queue_s=each.queued_s,
                egress_bytes=moved.read_bytes,
                written_bytes=moved.written_bytes,
                checkpoint_bytes=sum(one.bytes for one in saved) or None,
                kept_s=each.since + held_s - job.usage[0].since if newest else None,
                estimate=job.estimate if newest else None,
            )
        )
    return found


def recorded(
    jobs: Iterable[TrainingJob], finished: Sequence[TrainingUsage], now: float
) -> list[TrainingUsage]:
    """Return every attempt of ``jobs`` and every training in ``finished``, the newest first.

    The newest attempt of a job whose training is in ``finished`` has its figures (tokens, classes
    of time), for as long as the job held its nodes.
    """
    results = {each.run_id: each for each in finished}
    rows = []
    for job in jobs:
        for each in attempts_of(job, now):
            result = results.pop(job.run_id, None)
            rows.append(each if result is None else _finished(each, result))
    rows += results.values()
    return sorted(rows, key=lambda each: -(each.started_at or 0.0))


def _finished(attempt: TrainingUsage, result: TrainingUsage) -> TrainingUsage:
    """Return ``result`` as the attempt's: the nodes were held before and after its process."""
    own = (
        *("queued_job_id", "attempt", "state", "team", "project", "queue_s", "estimate"),
        *("accelerators", "ranks", "node_share", "spot_share", "written_bytes", "kept_s"),
    )
    update = {name: getattr(attempt, name) for name in own}
    if attempt.egress_bytes is not None:
        update["egress_bytes"] = attempt.egress_bytes
    more = max(0.0, attempt.seconds - result.seconds)
    by_class = dict(result.by_class)
    if by_class:
        by_class["idle"] = by_class.get("idle", 0.0) + more
    update |= {"seconds": result.seconds + more, "by_class": by_class}
    return result.model_copy(update=update)


def used(
    job: TrainingJob, prices: PriceSettings, now: float
) -> tuple[float, float | None, float | None]:
    """Return the hours for which the job has held nodes so far, their kWh and what they cost; None
    where an accelerator that it held has no watts, or no price."""
    costs = [cost_of(each, prices) for each in attempts_of(job, now)]

    def total(found: list[float | None]) -> float | None:
        known = [each for each in found if each is not None]
        return sum(known) if len(known) == len(found) else None

    hours = sum(each.seconds for each in costs) / HOUR_S
    return hours, total([each.energy_kwh for each in costs]), total([each.total for each in costs])


def require_prices(budget: float | None, prices: PriceSettings) -> None:
    """Raise InvalidInput for a budget that could not be counted."""
    if budget and not prices.per_hour:
        raise InvalidInput(
            "a budget needs prices",
            got=f"{budget:g} {prices.currency}",
            wanted="prices.per_hour in the installation's profile",
            where="budget",
        )


def uncounted(job: TrainingJob) -> str:
    """Return why no budget is counted by a job whose cost is not known."""
    kinds = ", ".join(sorted({kind for each in job.usage for kind in each.accelerators}))
    return f"the budget cannot be counted: no price in [prices] per_hour for {kinds}"


def budget_reason(job: TrainingJob, prices: PriceSettings, now: float) -> tuple[bool, str]:
    """Return whether the job's budget is spent, and what to note of it; "": nothing."""
    budget = job.spec.budget
    if not budget or not job.usage:
        return False, ""
    _, _, cost = used(job, prices, now)
    if cost is None:
        return False, uncounted(job)
    if cost < WARN_SHARE * budget:
        return False, ""
    figures = f"{money(cost)} of {money(budget)} {prices.currency}"
    if cost < budget:
        return False, f"{cost / budget:.0%} of the budget is spent: {figures}"
    return True, f"the budget is spent: {figures}; `paceline jobs resume --budget` raises it"
