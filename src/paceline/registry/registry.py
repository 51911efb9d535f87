"""Registry: promotion, rollback and retraction of a model's champion version.

An alias names only a version that passed its gate on the manifest digest it carries (I10). MLflow
sets one alias at a time without compare-and-swap, so a promotion first writes the tag
``paceline.promoted_over`` with the version it replaces. If it is killed between two steps, the same
call completes it, and ``rollback`` or ``retract`` undo it. Two concurrent promotions of one model
are detected by reading the aliases back, not prevented; the flows hold a lock for that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.config import Runtime
from paceline.errors import Conflict, CorruptData, GateRefused, NotFound
from paceline.registry import lineage
from paceline.registry.lineage import CHAMPION, PREVIOUS, Promotion
from paceline.registry.versions import Versions
from paceline.schemas import digest_of
from paceline.schemas.training import Evidence


class Registry(Versions):
    """One installation's MLflow: its runs, its model versions and their aliases."""

    @classmethod
    def from_runtime(cls, runtime: Runtime) -> Registry:
        """Return the registry of a running installation."""
        return cls(runtime.endpoints.mlflow_url, runtime.secrets.mlflow_auth)

    def promote(
        self,
        model_id: str,
        version: str,
        evidence: Evidence,
        *,
        guard: Callable[[], None] | None = None,
    ) -> Promotion:
        """Make ``version`` the champion, and return the aliases as read back afterwards.

        ``evidence`` must be the evidence bound to the version; only an approver may be added.
        ``guard`` is called just before the switch and stops it by raising (a cancelled run, I11).
        Raises GateRefused, NotFound, and Conflict if another process moved the alias meanwhile.
        """
        target = self.call("get_model_version", model_id, version)
        self._require_earned(model_id, target, evidence)
        self._require_stored(model_id, target, evidence.approver)
        digest = self._bind_approver(model_id, target, evidence)
        old = self._alias(model_id, CHAMPION)
        if old == version:  # an earlier call got this far; its tag has the replaced version
            old = target.tags.get(lineage.TAG_PROMOTED_OVER) or None
        else:
            self._tag(model_id, version, lineage.TAG_PROMOTED_OVER, old or "")
        self._point(model_id, PREVIOUS, old)
        if self._alias(model_id, CHAMPION) != version:
            if guard is not None:
                guard()
            self._point(model_id, CHAMPION, version)
        return self._read_back(model_id, version, old, digest)

    def rollback(self, model_id: str, *, from_version: str | None = None) -> Promotion:
        """Restore the previous champion, and return the aliases as read back afterwards.

        With ``from_version`` it acts only while that version is champion, so that a repeated call
        does not go back twice. A promotion that was killed before its switch is undone: the
        champion stays. Raises NotFound if there was no previous champion.
        """
        number = self._alias(model_id, CHAMPION)
        if number is None:
            raise NotFound(f"{model_id} has no champion", do="Promote a version first.")
        over = self._promoted_over(model_id, number)
        interrupted = self._alias(model_id, PREVIOUS) == number
        if interrupted or (from_version is not None and from_version != number):
            self._point(model_id, PREVIOUS, over)
            return self._read_back(
                model_id, number, over, self.version(model_id, number).evidence_digest
            )
        if over is None:
            raise NotFound(
                f"{model_id} has no previous champion",
                got=f"version {number}, the first one",
                do="Promote another version, or retract this one.",
            )
        return self._step_down(model_id, number, over)

    def has_predecessor(self, model_id: str, version: str) -> bool:
        """Return whether ``version`` replaced a champion that ``rollback`` can restore."""
        return self._promoted_over(model_id, version) is not None

    def retract(self, model_id: str, version: str) -> None:
        """Undo the promotion of ``version``, also an incomplete one; for a transaction's rollback.

        Unlike ``rollback`` it leaves a model without a champion if there was none before.
        """
        number = self._alias(model_id, CHAMPION)
        if number == version:
            over = self._promoted_over(model_id, version)
            if over is not None:
                self._step_down(model_id, version, over)
                return
            self._tag(model_id, version, lineage.TAG_ROLLED_BACK, "true")
            self._point(model_id, CHAMPION, None)
        elif number is not None and self._alias(model_id, PREVIOUS) == number:
            self._point(model_id, PREVIOUS, self._promoted_over(model_id, number))

    def _step_down(self, model_id: str, number: str, over: str) -> Promotion:
        restored = self._trusted(model_id, over)
        self._tag(model_id, number, lineage.TAG_ROLLED_BACK, "true")
        # The champion alias moves first. If killed here, `previous` names the champion itself; the
        # next call detects that as `interrupted` and repairs it.
        self._point(model_id, CHAMPION, over)
        before = self._promoted_over(model_id, over)
        self._point(model_id, PREVIOUS, before)
        return self._read_back(model_id, over, before, restored.evidence_digest)

    def _read_back(
        self, model_id: str, version: str, previous: str | None, digest: str
    ) -> Promotion:
        seen = (self._alias(model_id, CHAMPION), self._alias(model_id, PREVIOUS))
        if seen != (version, previous):
            raise Conflict(
                "somebody else moved this model's aliases",
                got=f"champion {seen[0]}, previous {seen[1]}",
                wanted=f"champion {version}, previous {previous}",
                where=model_id,
                do="Look at the registry, then promote or roll back again.",
            )
        return Promotion(
            model_id=model_id,
            version=version,
            alias=CHAMPION,
            previous_version=previous,
            evidence_digest=digest,
        )

    def _require_stored(self, model_id: str, target: Any, approver: str | None) -> None:
        where = f"models:/{model_id}/{target.version}"
        try:
            stored = self.evidence(model_id, str(target.version))
        except (CorruptData, NotFound) as error:
            raise GateRefused(
                "the stored evidence cannot be trusted", got=error.one_line(), where=where
            ) from error
        if stored.approver and stored.approver != approver:
            raise GateRefused(
                "somebody else approved this version",
                got=approver or "no approver",
                wanted=stored.approver,
                where=where,
            )

    def _bind_approver(self, model_id: str, target: Any, evidence: Evidence) -> str:
        digest = digest_of(evidence)
        if target.tags.get(lineage.TAG_EVIDENCE) != digest:
            self._store_evidence(target.run_id, evidence)
            self._tag(model_id, target.version, lineage.TAG_APPROVER, evidence.approver or "")
            self._tag(model_id, target.version, lineage.TAG_EVIDENCE, digest)  # last: it binds
        return digest
