"""Records of evaluation: what is judged and how, scores, report, gate decision, evidence."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.config import EvaluationSettings, MeshSettings, MetricSettings
from paceline.schemas.base import ModelId, Record, Sha256, digest_of, is_empty, is_none
from paceline.schemas.records import Approval
from paceline.schemas.training import TrainingData

UNFINISHED = ", unfinished"  # in the key of such a RecordedScore


class RecordedScore(Record):
    """What one model or simple baseline scored, document by document, and what that follows from:
    the same subject under the same three other fields has the same figures. On tasks the digest is
    theirs, ``bits`` is empty, and ``facts`` are the figures by task and metric. Of a metric of user
    code it is its ``metric_digest``, and ``bits`` are its figures."""

    subject: str  # digest of a model's files, or a baseline's name and settings
    snapshot_digest: Sha256
    held_out_bytes: int
    scorer: str  # version of the code and of the libraries that scored
    bits: tuple[float, ...]
    facts: dict[str, object] = {}  # further fields of ModelScore
    run_id: str  # in which it was scored
    # of a scoring that has not ended: ``bits`` are those of its first rows
    unfinished: bool = Field(default=False, exclude_if=is_empty)

    @property
    def key(self) -> str:
        by = self.scorer + (UNFINISHED if self.unfinished else "")
        return score_key(self.subject, self.snapshot_digest, self.held_out_bytes, by)


def score_key(subject: str, snapshot_digest: str, held_out_bytes: int, scorer: str) -> str:
    """Return the key of a RecordedScore; of an unfinished one ``scorer`` ends in UNFINISHED."""
    return digest_of([subject, snapshot_digest, held_out_bytes, scorer])


def metric_digest(snapshot_digest: str, metric: MetricSettings) -> str:
    """Return what a RecordedScore has as the digest of the snapshot, where it is of ``metric``."""
    return digest_of([snapshot_digest, metric.code_ref, metric.max_new_tokens])


class MetricSample(Record):
    """A held-out document, or what assistants say in a conversation, and what one model makes of
    it: a metric of user code gets a list of these, and returns a figure for each."""

    name: str  # of the document, in the snapshot
    text: str  # what was scored; bytes that are not UTF-8 are "\ufffd"
    tokens: tuple[int, ...]  # of it, in the model's own vocabulary
    log_probs: tuple[float, ...]  # of each of them, in nats
    correct: tuple[bool, ...]  # whether each was the most likely one
    # With max_new_tokens: the text's first half, or a conversation before its last answer; what the
    # model writes after it, by the most likely tokens; and what stands there.
    prompt: str = ""
    prediction: str = ""
    reference: str = ""


class EvaluationSpec(Record):
    """Input of an evaluation process."""

    run_id: str
    state_dir: str = ""  # "": the node's own
    snapshot_url: str
    snapshot_digest: Sha256
    # name ("candidate", "base", "champion") → directory, s3://…, or node:MODEL/VERSION: the copy
    # that the evaluating node holds
    models: dict[str, str]
    settings: EvaluationSettings
    tasks_url: str = ""  # of the published directory of tasks; "": none
    tasks_digest: str = ""  # of its manifest
    trained_on: tuple[TrainingData, ...] = ()
    scorer: str = ""  # "": scores are not recorded
    known: tuple[RecordedScore, ...] = ()  # of earlier evaluations, and not computed again
    # Only the models on this part of the documents (number, of how many), and no report.
    share: tuple[int, int] | None = None
    mesh: MeshSettings = MeshSettings()  # of the ranks that score each model together
    failures: dict[str, str] = {}  # model → why ranks could not score it

    @property
    def tasks_scored(self) -> str:
        """Return what a RecordedScore has as the digest of the snapshot, where it is on tasks."""
        as_chat = self.settings.tasks_as_chat
        return digest_of([self.tasks_digest, "chat"]) if as_chat else self.tasks_digest

    @property
    def compared_digest(self) -> str:
        """Return what a RecordedScore has as the digest of the snapshot, where its facts are how
        much of that, and of the tasks, is in the training data."""
        of = [each.model_dump(mode="json") for each in self.trained_on]
        return digest_of([self.snapshot_digest, self.tasks_digest, of])


class Interval(Record):
    """A figure with its bootstrap confidence interval over held-out documents."""

    value: float
    low: float
    high: float


class Serving(Record):
    """What it costs to serve a model, as measured on one machine in float32."""

    machine: str  # its host name
    cpu: str  # its model's name
    gpu: str = ""  # that it ran on; "": the CPU
    threads: int  # of the CPU
    batch: int  # rows
    context: int  # tokens of a row
    prefill_ms: float  # one forward pass of the rows
    decode_ms_per_token: float  # one more token, with keys and values of the tokens before kept
    # of the whole process, or on the GPU, of all ranks; None: the kernel does not report it
    peak_memory_bytes: int | None
    ranks: int = Field(default=1, exclude_if=lambda count: count == 1)  # with a part of the weights
    # one forward pass of so many rows of the context; None in the report of an older version
    throughput_rows: int | None = Field(default=None, exclude_if=is_none)
    # the milliseconds of that pass
    throughput_ms: float | None = Field(default=None, exclude_if=is_none)

    @property
    def tokens_per_second(self) -> float | None:
        """Return how many tokens such a pass reads in a second; None where it was not measured."""
        if not self.throughput_rows or not self.throughput_ms:
            return None
        return 1000 * self.throughput_rows * self.context / self.throughput_ms


class _Compared(Record):
    """Paired differences of this figure to the named models': this one minus the other."""

    # other model → the difference, with its interval
    difference_to: dict[str, Interval] = Field(default={}, exclude_if=is_empty)
    # its name in reports of older versions, kept as it was: digests cover it
    gain_over: dict[str, Interval] | None = Field(default=None, exclude_if=is_none)

    @property
    def differences(self) -> dict[str, Interval]:
        """Return the differences, also of an older report."""
        return self.difference_to or self.gain_over or {}


class ModelScore(_Compared):
    """Scores of one model on the held-out split; of bits per byte and its differences, lower is
    better: a negative difference is an improvement."""

    name: str  # such as candidate, base, champion
    kind: Literal["transformer", "ngram", "compressor"]  # a model, or a baseline
    bits_per_byte: Interval  # of the text; lower is better
    latency_ms: float | None = None  # of one forward pass; None: not measured
    weights_digest: str | None = None  # None: a baseline
    dtype: str | None = None  # in which it was scored
    format: str | None = None  # of the weights that were loaded: "safetensors"
    model_bytes: int | None = None  # of the weights
    tokens: int | None = None  # of the model's own tokenizer, in the text that was scored
    # Of these tokens; they do not compare with those of another tokenizer.
    perplexity: float | None = Field(default=None, exclude_if=is_none)
    token_accuracy: float | None = Field(default=None, exclude_if=is_none)  # most likely = right
    # mean distance of how sure the model is of its most likely token to how often that is right
    calibration_error: float | None = Field(default=None, exclude_if=is_none)
    parameters: int | None = Field(default=None, exclude_if=is_none)  # how many
    context: int | None = Field(default=None, exclude_if=is_none)  # positions it was made for
    # tokens of the longest row that was scored; None in the report of an older version
    judged_context: int | None = Field(default=None, exclude_if=is_none)
    # what it costs to serve; None: not measured
    serving: Serving | None = Field(default=None, exclude_if=is_none)


class TaskScore(_Compared):
    """One metric of a task of lm-eval's: the mean of one figure a document. Higher is better, and
    so is a positive difference of the candidate."""

    task: str  # of lm-eval
    metric: str  # as "acc", or "exact_match,FILTER"
    documents: int  # that were scored
    scores: dict[str, Interval]  # by model


class MetricScore(_Compared):
    """A metric: the mean of its figures, one a document."""

    metric: str  # its name in the profile
    code_ref: str  # of user code; "paceline": ``preference_accuracy``
    higher_is_better: bool  # the direction of an improvement
    documents: int  # that have a figure
    scores: dict[str, Interval]  # by model
    slices: tuple[dict[str, object], ...] = Field(default=(), exclude_if=is_empty)  # as a report's


class TaskOverlap(Record):
    """How many rows of a task, prompt and right answer, are in a training split: as a copy, or in
    large part (``evaluation.overlap``)."""

    task: str  # of lm-eval
    rows: int  # that were compared
    found: int  # rows of which enough is in the training split
    examples: tuple[str, ...] = ()  # "row 3 = training key", or how much of the row


class Overlap(Record):
    """How many held-out documents are in the training split of one snapshot, by content: as a
    copy, or with at least half of their text (``evaluation.overlap``)."""

    snapshot_digest: Sha256  # of the training snapshot
    held_out_documents: int  # compared
    training_documents: int  # compared with
    found: int  # held-out documents with a copy in the training split
    examples: tuple[str, ...] = ()  # "held-out key = training key"
    # None in the report of an older version; copies count here, too
    overlapping: int | None = Field(default=None, exclude_if=is_none)
    # "held-out key 60%": the share found
    overlapping_examples: tuple[str, ...] = Field(default=(), exclude_if=is_empty)
    # the same for rows of lm-eval's tasks
    tasks: tuple[TaskOverlap, ...] = Field(default=(), exclude_if=is_empty)


class EvaluationReport(Record):
    """All scores on one snapshot's held-out split, and worst slices by document."""

    snapshot_digest: Sha256  # of the snapshot whose held-out split was scored
    documents: int  # that were scored
    bytes: int  # of their text
    scores: tuple[ModelScore, ...]  # of each model
    slices: tuple[dict[str, object], ...] = ()  # worst slices, by document and by fields
    failures: dict[str, str] = {}  # model without a score → reason
    seconds: float  # that the evaluation took
    # scores on tasks of lm-eval
    tasks: tuple[TaskScore, ...] = Field(default=(), exclude_if=is_empty)
    tasks_digest: str = Field(default="", exclude_if=is_empty)  # of their manifest
    # whether prompts of tasks were made with the chat template
    tasks_as_chat: bool = Field(default=False, exclude_if=is_empty)
    # one that has no figures is in ``failures``, as "metric NAME"
    metrics: tuple[MetricScore, ...] = Field(default=(), exclude_if=is_empty)
    of_assistants: bool = Field(default=False, exclude_if=is_empty)  # of conversations, their text
    # with what the models learned from; None: not compared
    overlaps: tuple[Overlap, ...] | None = Field(default=None, exclude_if=is_none)

    def score(self, name: str) -> ModelScore | None:
        """Return the score of the model ``name``, or None if it was not evaluated."""
        return next((each for each in self.scores if each.name == name), None)


class Evaluation(Record):
    """A recorded evaluation: its report and the inputs of the report."""

    model_id: ModelId
    base_version: str
    base_manifest_digest: Sha256
    training_digest: Sha256  # of the recorded training result
    snapshot_url: str
    models: dict[str, str]  # name → digest of the weights or the manifest
    report: EvaluationReport


class Evaluated(EvaluationReport):
    """A report and the digest of its Evaluation as the installation recorded it."""

    status: Literal["complete"] = "complete"
    report_digest: Sha256


class GateCheck(Record):
    name: str  # what is checked
    passed: bool  # whether it holds
    got: str  # what was found
    wanted: str  # what the policy requires


class GateDecision(Record):
    """Whether the candidate passed the promotion gate, and each check."""

    passed: bool  # whether every check passed
    checks: tuple[GateCheck, ...]  # with what each found
    # of the policy; None in the evidence of an older version
    policy_digest: Sha256 | None = Field(default=None, exclude_if=is_none)

    @property
    def reasons(self) -> list[str]:
        return [
            f"{each.name}: got {each.got}, wanted {each.wanted}"
            for each in self.checks
            if not each.passed
        ]


class Evidence(Record):
    """Evidence bound to a registered version: what is needed to trust or reproduce it."""

    run_id: str
    model_id: ModelId
    manifest_digest: Sha256  # of the published candidate
    weights_digest: Sha256  # of the candidate's weights
    base_version: str  # of the version that was trained
    base_manifest_digest: Sha256  # SHA-256 of its manifest
    snapshot_digest: Sha256  # of the snapshot that the candidate was judged on
    job_id: str
    training_config_digest: Sha256  # SHA-256 of the training's settings
    code_version: str  # of Paceline, with the digest of its sources
    evaluation: EvaluationReport  # the report that the gate decided from
    gate: GateDecision  # its decision
    approver: str | None = None  # who approved; None: no approval was needed
    # None in the evidence of an older version
    report_digest: Sha256 | None = Field(default=None, exclude_if=is_none)
    # of the record of the training
    training_digest: Sha256 | None = Field(default=None, exclude_if=is_none)
    # of the snapshot that was trained on
    training_snapshot_url: str | None = Field(default=None, exclude_if=is_none)
    # of that snapshot
    training_snapshot_digest: Sha256 | None = Field(default=None, exclude_if=is_none)
    approval: Approval | None = Field(default=None, exclude_if=is_none)  # ``approver`` is of it
    # who accepted the bad data that the training passed over, and in which job
    reviewed: tuple[str, ...] = Field(default=(), exclude_if=is_empty)
