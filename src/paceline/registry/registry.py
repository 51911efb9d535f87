"""Registry: versions and their evidence; promotion, rollback and retraction of the champion.

An alias names only a version that passed its gate on the manifest digest it carries (I10). MLflow
sets one alias at a time without compare-and-swap, so a promotion first writes the tag
``paceline.promoted_over`` with the version it replaces. If it is killed between two steps, the same
call completes it, and ``rollback`` or ``retract`` undo it. Two concurrent promotions of one model
are detected by reading the aliases back, not prevented; the flows hold a lock for that.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode

from pydantic import ValidationError

from paceline.config import Runtime
from paceline.errors import Conflict, CorruptData, GateRefused, InvalidInput, NotFound
from paceline.registry import lineage
from paceline.registry.lineage import CANDIDATE, CHAMPION, PREVIOUS, Promotion, RegisteredVersion
from paceline.registry.runs import RunLog
from paceline.schemas import JOB_ID, Evidence, canonical_json, digest_of


class Registry(RunLog):
    """One installation's MLflow: its runs, its model versions and their aliases."""

    @classmethod
    def from_runtime(cls, runtime: Runtime) -> Registry:
        """Return the registry of a running installation."""
        return cls(runtime.endpoints.mlflow_url, runtime.secrets.mlflow_auth)

    def register_candidate(
        self, model_id: str, source_url: str, evidence: Evidence, mlflow_run_id: str
    ) -> str:
        """Return the version of ``source_url`` with ``evidence``; create it if there is none.

        The bytes are not copied. The alias ``candidate`` is set only if the gate passed; a refused
        candidate is kept without an alias, so that people can see why.
        """
        if evidence.model_id != model_id:
            raise InvalidInput(
                "evidence is about another model", got=evidence.model_id, wanted=model_id
            )
        self._ensure_model(model_id)
        claim = lineage.claim_digest(evidence)
        version = self._find_by_tag(model_id, lineage.TAG_CLAIM, claim)
        if version is None:
            self._store_evidence(mlflow_run_id, evidence)
            tags = lineage.version_tags(evidence, source_url)
            created = self.call(
                "create_model_version",
                lineage.registered_name(model_id),
                source_url,
                run_id=mlflow_run_id,
                model_id=self._logged_model(model_id, mlflow_run_id, tags),
                tags=tags,
                description=lineage.version_description(model_id, source_url),
                await_creation_for=0,  # nothing is copied, so there is nothing to wait for
            )
            # A retried request may have created two; every caller uses the older one.
            version = self._find_by_tag(model_id, lineage.TAG_CLAIM, claim) or created
        if version.source != source_url:
            raise Conflict(
                "this evidence already stands for other bytes",
                got=source_url,
                wanted=version.source,
                where=f"models:/{model_id}/{version.version}",
            )
        if evidence.gate.passed and self._alias(model_id, CANDIDATE) != version.version:
            self._set_alias(model_id, CANDIDATE, str(version.version))
        return str(version.version)

    def version(self, model_id: str, version: str) -> RegisteredVersion:
        """Return one version without its evidence; raises NotFound."""
        return _registered(model_id, self._of("get_model_version", model_id, version))

    def evidence(self, model_id: str, version: str) -> Evidence:
        """Return the evidence bound to a version, its digest checked.

        Raises NotFound if none was bound, CorruptData if the stored bytes differ.
        """
        found = self.version(model_id, version)
        where = f"models:/{model_id}/{version}"
        if not found.evidence_digest:
            raise NotFound("this version has no evidence", where=where, do="Evaluate and gate it.")
        raw = self.read_artifact(found.mlflow_run_id, lineage.evidence_path(found.evidence_digest))
        digest = hashlib.sha256(raw).hexdigest()
        if digest != found.evidence_digest:
            raise CorruptData(
                "evidence was changed after it was bound",
                got=digest,
                wanted=found.evidence_digest,
                where=where,
            )
        try:
            return Evidence.model_validate_json(raw)
        except ValidationError as error:
            raise CorruptData(
                "evidence cannot be read", got=str(error).splitlines()[0], where=where
            ) from error

    def champion(self, model_id: str) -> RegisteredVersion | None:
        """Return the champion with its evidence, or None if there is none yet.

        Raises GateRefused if the alias points at a version that did not pass its gate.
        """
        try:
            number = self._alias(model_id, CHAMPION)
        except NotFound:  # no version of this model was ever registered
            return None
        return None if number is None else self._trusted(model_id, number)

    def by_manifest(self, model_id: str, manifest_digest: str) -> RegisteredVersion | None:
        """Return the version whose published bytes have ``manifest_digest``, or None."""
        found = self._find_by_tag(model_id, lineage.TAG_MANIFEST, manifest_digest)
        return None if found is None else _registered(model_id, found)

    def was_rolled_back(self, model_id: str, manifest_digest: str) -> bool:
        """Return whether the version with this manifest was champion and is still rolled back."""
        found = self._find_by_tag(model_id, lineage.TAG_MANIFEST, manifest_digest)
        if found is None or found.tags.get(lineage.TAG_ROLLED_BACK) != "true":
            return False
        return self._alias(model_id, lineage.CHAMPION) != str(found.version)

    def model_url(self, model_id: str, version: str | None = None) -> str:
        """Return the URL of the page in MLflow of a model or of one version."""
        page = f"{self.tracking_uri}/#/models/{lineage.registered_name(model_id)}"
        return f"{page}/versions/{version}" if version else page

    def page_of_training(self, model_id: str, training_id: str) -> str:
        """Return the page in MLflow of the newest version of ``model_id`` whose weights a training
        made; "" where none is registered. Imports no MLflow.

        Raises ServiceUnavailable, AccessDenied or NotFound.
        """
        if not re.fullmatch(JOB_ID, training_id):  # it becomes a part of the filter
            return ""
        name = lineage.registered_name(model_id)
        wanted = f"name = '{name}' and tag.`{lineage.TAG_JOB}` = '{training_id}'"
        found = self.rest("GET", f"/model-versions/search?{urlencode({'filter': wanted})}")
        numbers = [int(each["version"]) for each in found.get("model_versions", ())]
        return self.model_url(model_id, str(max(numbers))) if numbers else ""

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
        target = self._of("get_model_version", model_id, version)
        self._require_passed_gate(model_id, target, evidence)
        self._require_stored(model_id, target, evidence.approver)
        digest = self._bind_approver(model_id, target, evidence)
        old = self._alias(model_id, CHAMPION)
        if old == version:  # an earlier call got this far; its tag has the replaced version
            old = target.tags.get(lineage.TAG_PROMOTED_OVER) or None
        else:
            self._tag(model_id, version, lineage.TAG_PROMOTED_OVER, old or "")
        self._set_alias(model_id, PREVIOUS, old)
        if self._alias(model_id, CHAMPION) != version:
            if guard is not None:
                guard()
            self._set_alias(model_id, CHAMPION, version)
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
            self._set_alias(model_id, PREVIOUS, over)
            return self._read_back(
                model_id, number, over, self.version(model_id, number).evidence_digest
            )
        if over is None:
            raise NotFound(
                f"{model_id} has no previous champion",
                got=f"{self._named(model_id, number)}, the first champion",
                do="Promote another version, or retract this one.",
            )
        return self._restore_champion(model_id, number, over)

    def require_champion(self, model_id: str) -> None:
        """Raise NotFound where ``model_id`` has no champion; imports no MLflow."""
        query = urlencode({"name": lineage.registered_name(model_id)})
        try:
            found = self.rest("GET", f"/registered-models/get?{query}")["registered_model"]
        except NotFound as error:
            do = "Check the model's id; `paceline status` names models that were deployed."
            raise NotFound("no version of this model is registered", got=model_id, do=do) from error
        if CHAMPION not in {each["alias"] for each in found.get("aliases", [])}:
            raise NotFound(f"{model_id} has no champion", do="Promote a version first.")

    def has_predecessor(self, model_id: str, version: str) -> bool:
        """Return whether ``version`` replaced a champion that ``rollback`` can restore."""
        return self._promoted_over(model_id, version) is not None

    def retract(self, model_id: str, version: str, *, by_person: bool = True) -> None:
        """Undo the promotion of ``version``, also an incomplete one.

        Unlike ``rollback`` it leaves a model without a champion if there was none before. With
        ``by_person`` False (a transaction that failed) the version gets no mark of a rollback, so
        that the same promotion may be run again.
        """
        number = self._alias(model_id, CHAMPION)
        if number == version:
            over = self._promoted_over(model_id, version)
            if over is not None:
                self._restore_champion(model_id, version, over, by_person=by_person)
                return
            if by_person:
                self._tag(model_id, version, lineage.TAG_ROLLED_BACK, "true")
            self._set_alias(model_id, CHAMPION, None)
        elif number is not None and self._alias(model_id, PREVIOUS) == number:
            self._set_alias(model_id, PREVIOUS, self._promoted_over(model_id, number))

    def _restore_champion(
        self, model_id: str, number: str, over: str, *, by_person: bool = True
    ) -> Promotion:
        restored = self._trusted(model_id, over)
        if by_person:
            self._tag(model_id, number, lineage.TAG_ROLLED_BACK, "true")
        # The champion alias moves first. If killed here, `previous` names the champion itself; the
        # next call detects that as `interrupted` and repairs it.
        self._set_alias(model_id, CHAMPION, over)
        before = self._promoted_over(model_id, over)
        self._set_alias(model_id, PREVIOUS, before)
        return self._read_back(model_id, over, before, restored.evidence_digest)

    def _read_back(
        self, model_id: str, version: str, previous: str | None, digest: str
    ) -> Promotion:
        seen = (self._alias(model_id, CHAMPION), self._alias(model_id, PREVIOUS))
        if seen != (version, previous):
            raise Conflict(
                "somebody else moved this model's aliases",
                got=f"champion {seen[0]}, previous {seen[1]} (MLflow's version numbers)",
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
            for key, value in lineage.approval_tags(evidence.approval).items():
                self._tag(model_id, target.version, key, value)
            self._tag(model_id, target.version, lineage.TAG_EVIDENCE, digest)  # last: it binds
        return digest

    @staticmethod
    def _require_passed_gate(model_id: str, target: Any, evidence: Evidence) -> None:
        where = f"models:/{model_id}/{target.version}"
        failed = evidence.gate.reasons
        if not evidence.gate.passed or failed or not evidence.gate.checks:
            raise GateRefused(
                "this candidate did not pass its gate",
                got="; ".join(failed) or "no check that passed",
                where=where,
            )
        judged = evidence.evaluation.score("candidate")
        for what, got, wanted in (
            ("model", evidence.model_id, model_id),
            ("manifest", evidence.manifest_digest, target.tags.get(lineage.TAG_MANIFEST)),
            ("set of weights", judged and judged.weights_digest, evidence.weights_digest),
            ("snapshot", evidence.evaluation.snapshot_digest, evidence.snapshot_digest),
            ("evidence", lineage.claim_digest(evidence), target.tags.get(lineage.TAG_CLAIM)),
        ):
            if got != wanted:
                raise GateRefused(
                    f"the gate judged another {what} than this version is bound to",
                    got=got or "none",
                    wanted=wanted or "a bound digest",
                    where=where,
                )

    def _trusted(self, model_id: str, number: str) -> RegisteredVersion:
        target = self._of("get_model_version", model_id, number)
        try:
            evidence = self.evidence(model_id, number)
        except (CorruptData, NotFound) as error:
            raise GateRefused(
                f"{model_id} {self._named(model_id, number)} has no evidence to trust",
                got=error.one_line(),
                where=self.model_url(model_id, number),
            ) from error
        self._require_passed_gate(model_id, target, evidence)
        return _registered(model_id, target, evidence)

    def _store_evidence(self, mlflow_run_id: str, evidence: Evidence) -> None:
        text = canonical_json(evidence).decode()
        self.log_artifact_text(mlflow_run_id, text, lineage.evidence_path(digest_of(evidence)))

    def _of(self, method: str, model_id: str, *args: Any, **more: Any) -> Any:
        return self.call(method, lineage.registered_name(model_id), *args, **more)

    def _logged_model(self, model_id: str, mlflow_run_id: str, tags: dict[str, str]) -> str:
        """Return the id of the run's LoggedModel, which MLflow's pages of runs and models show."""
        from mlflow.entities import LoggedModelOutput

        experiment = self.call("get_run", mlflow_run_id).info.experiment_id
        wanted = f"tags.`{lineage.TAG_CLAIM}` = '{tags[lineage.TAG_CLAIM]}'"
        known = self.call("search_logged_models", [experiment], wanted, max_results=1)
        if known:
            return str(known[0].model_id)
        name = f"{lineage.registered_name(model_id)}-v{tags[lineage.TAG_VERSION]}"
        made = self.call(
            "create_logged_model",
            experiment,
            name=re.sub(r"[^\w-]", "-", name),  # MLflow's names of these have no dots
            source_run_id=mlflow_run_id,
            tags=tags,
            model_type="language model",
        )
        self.call("log_outputs", mlflow_run_id, [LoggedModelOutput(made.model_id, 0)])
        self.call("finalize_logged_model", made.model_id, "READY")
        return str(made.model_id)

    def _ensure_model(self, model_id: str) -> None:
        try:
            self._of("get_registered_model", model_id)
        except NotFound:
            try:
                self._of("create_registered_model", model_id)
            except Conflict:
                return  # another process was faster

    def _find_by_tag(self, model_id: str, tag: str, value: str) -> Any | None:
        if "'" in model_id or "'" in value:
            raise InvalidInput("not a name the registry could hold", got=f"{model_id} {value}")
        name = lineage.registered_name(model_id)
        found = self.call("search_model_versions", f"name = '{name}' and tag.`{tag}` = '{value}'")
        return min(found, key=lambda each: int(each.version), default=None)

    def _alias(self, model_id: str, alias: str) -> str | None:
        version = self._of("get_registered_model", model_id).aliases.get(alias)
        return None if version is None else str(version)

    def _named(self, model_id: str, number: str) -> str:
        """Return a version as published, with the number that MLflow gave it."""
        return f"{self.version(model_id, number).published_version} (version {number} in MLflow)"

    def _set_alias(self, model_id: str, alias: str, version: str | None) -> None:
        if version is not None:
            self._of("set_registered_model_alias", model_id, alias, version)
        elif self._alias(model_id, alias) is not None:
            self._of("delete_registered_model_alias", model_id, alias)

    def _promoted_over(self, model_id: str, version: str) -> str | None:
        tags = self._of("get_model_version", model_id, version).tags
        return tags.get(lineage.TAG_PROMOTED_OVER) or None

    def _tag(self, model_id: str, version: str, key: str, value: str) -> None:
        self._of("set_model_version_tag", model_id, version, key, value)


def _registered(model_id: str, found: Any, evidence: Evidence | None = None) -> RegisteredVersion:
    return RegisteredVersion(
        model_id=model_id,
        version=str(found.version),
        source_url=str(found.source),
        manifest_digest=found.tags.get(lineage.TAG_MANIFEST, ""),
        evidence_digest=found.tags.get(lineage.TAG_EVIDENCE, ""),
        run_id=found.tags.get(lineage.TAG_RUN_ID, ""),
        mlflow_run_id=str(found.run_id or ""),
        evidence=evidence,
    )
