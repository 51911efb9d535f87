"""No candidate is judged on what it was trained on: copies of held-out documents in its training
snapshot refuse, and so does evidence that does not say."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from paceline.config import DataSettings, GateSettings, Runtime, TrainingSettings
from paceline.data import Snapshot, build_snapshot, documents
from paceline.errors import CorruptData, InvalidInput
from paceline.evaluation import (
    decide,
    find_overlap,
    overlap,  # its sizes are made small
)
from paceline.manifest import Manifest, build_manifest
from paceline.registry import Registry
from paceline.schemas import Overlap, TaskOverlap, TaskScore, TrainingData, TrainJob, TrainResult
from paceline.storage import DiskStore, ObjectStore
from paceline.tasks import evaluate, train
from paceline.tasks._support import sealed_records
from paceline.training import config_digest, training_inputs
from tests.evaluation.reports import CLEAN, LINEAGE, TRAINING_SNAPSHOT, interval, passing
from tests.registry.bundles import make_evidence
from tests.security.test_a_forged_report_is_refused import Bucket, run_of, trained
from tests.support.hugging_face import CHATML, write_tokenizer
from tests.support.shared import Rejected
from tests.support.stack import Ended, paceline

SETTINGS = DataSettings(held_out_share=0.25, shard_bytes=4096, purpose="tests")
GATE = GateSettings(max_bits_per_byte=3.0, except_baselines=("ngram", "gzip", "xz"))


def text_of(number: int) -> str:
    return "".join(f"line {number * 7 + n} says {n**3}\n" for n in range(40 + number))


def snapshot_of(files: dict[str, bytes], root: Path, settings: DataSettings = SETTINGS) -> Snapshot:
    name = hashlib.sha256(repr(sorted(files)).encode()).hexdigest()[:8]
    source = root / f"texts-{name}"
    source.mkdir()
    for path, text in files.items():
        (source / path).write_bytes(text)
    return build_snapshot(str(source), (root / "data").as_uri(), settings, store())


def store() -> ObjectStore:
    return DiskStore()


def held_out_of(snapshot: Snapshot, root: Path) -> list[tuple[str, bytes]]:
    found = documents(snapshot, "held-out", store(), root / "cache")
    return [(each.path, each.text) for each in found]


@pytest.fixture
def judged_on(tmp_path: Path) -> Snapshot:
    return snapshot_of({f"file-{n}.txt": text_of(n).encode() for n in range(24)}, tmp_path)


def test_a_snapshot_shares_no_document_between_its_splits(
    judged_on: Snapshot, tmp_path: Path
) -> None:
    held_out = held_out_of(judged_on, tmp_path)
    found = find_overlap(held_out, judged_on, store(), tmp_path / "cache")
    assert (found.found, found.examples) == (0, ())
    assert found.held_out_documents == len(held_out) >= 3
    assert found.training_documents == 24 - len(held_out)
    assert len(judged_on.of_split("train")) > 2, "several shards were read"


@pytest.mark.parametrize(
    "change",
    [lambda text: text, lambda text: b"\n" + text.replace(b" ", b"  ").replace(b"\n", b" \r\n")],
    ids=["renamed", "blanks"],
)
def test_renamed_copies_in_another_snapshot_are_found(
    judged_on: Snapshot, tmp_path: Path, change: Any
) -> None:
    held_out = held_out_of(judged_on, tmp_path)
    files = {f"new-{n}.txt": text_of(100 + n).encode() for n in range(40)}
    for number, (_, text) in enumerate(held_out):
        for copy in range(12):  # each but the first is told apart by its last line
            mark = f"copy {copy}".encode() if copy else b""
            files[f"copy-{number}-{copy}.txt"] = change(text) + mark
    settings = SETTINGS.model_copy(update={"held_out_share": 0.01, "seed": 4})
    training = snapshot_of(files, tmp_path, settings)
    keys = {key for key, _ in held_out_of(training, tmp_path)}
    assert keys.isdisjoint(f"copy-{n}-0.txt" for n in range(len(held_out)))
    found = find_overlap(held_out, training, store(), tmp_path / "cache")
    assert found.snapshot_digest == training.digest
    assert found.found == len(held_out)
    assert 0 < len(found.examples) <= 5
    for example in found.examples:
        key, _, copy = example.partition(" = ")
        assert key in dict(held_out)
        assert copy.startswith("copy-")
        assert copy.endswith("-0.txt")


HEADER = b"# licensed to somebody else, 2026\n"


@pytest.mark.parametrize(
    "edit",
    [
        lambda text: HEADER + text,
        lambda text: HEADER + text.split(b"\n", 1)[1],  # its first line is another
        lambda text: text.upper() + b"the end",
        lambda text: text[: len(text) * 2 // 3],
        lambda text: b"".join(text_of(900 + n).encode() for n in range(50)) + text,
    ],
    ids=["header", "first line", "case", "two thirds", "part of a longer file"],
)
def test_lightly_edited_copies_are_found_and_refused(
    judged_on: Snapshot, tmp_path: Path, edit: Any
) -> None:
    held_out = held_out_of(judged_on, tmp_path)
    files = {f"new-{n}.txt": text_of(100 + n).encode() for n in range(40)}
    clean = snapshot_of(files, tmp_path, SETTINGS)
    files |= {f"mine-{n}.txt": edit(text) for n, (_, text) in enumerate(held_out)}
    settings = SETTINGS.model_copy(update={"held_out_share": 0.01, "seed": 4})
    training = snapshot_of(files, tmp_path, settings)
    kept = {key for key, _ in held_out_of(training, tmp_path)}
    edited = sum(f"mine-{n}.txt" not in kept for n in range(len(held_out)))
    found = find_overlap(held_out, training, store(), tmp_path / "cache")
    assert (found.found, found.overlapping) == (0, edited)
    assert edited >= 3
    assert found.overlapping_examples[0].split()[0] in dict(held_out)
    dirty = found.model_copy(update={"snapshot_digest": TRAINING_SNAPSHOT})
    (name,) = refusals(overlaps=(dirty,))
    assert name == f"held-out documents that overlap with snapshot {TRAINING_SNAPSHOT[:12]}"
    before = find_overlap(held_out, clean, store(), tmp_path / "cache")
    assert (before.found, before.overlapping) == (0, 0)


@pytest.mark.parametrize(
    ("held", "edited", "found"),
    [
        ("Land {0}: its capital is town {1}.", "land {0} its capital is TOWN {1}!", True),
        ("Land {0}: its capital is town {1}.", "Land {0}: its port is town {1}.", False),
        ("What is {0} + {1}? Tell me.", "What is {0} - {1}? Tell me.", False),
        ("It is {0}{1} metres.", "It is {0}.{1} metres", False),
        ("Yes, {0}.", "Yes, {0}!", False),  # too short for more than copies
    ],
    ids=["marks", "a word", "a sign", "a decimal point", "very short"],
)
def test_short_texts_are_compared_without_marks_and_case(
    tmp_path: Path, held: str, edited: str, found: bool
) -> None:
    held_out = [(f"{n}", held.format(n, n * 7 + 1).encode()) for n in range(10, 20)]
    files = {f"{n}.txt": edited.format(n, n * 7 + 1).encode() for n in range(10, 20)}
    files |= {"other.txt": b"held out", "another.txt": b"held out, too"}
    training = snapshot_of(files, tmp_path, SETTINGS.model_copy(update={"held_out_share": 0.01}))
    kept = {key for key, _ in held_out_of(training, tmp_path)}
    seen = find_overlap(held_out, training, store(), tmp_path / "cache")
    assert seen.found == 0
    assert seen.overlapping == (sum(f"{n}.txt" not in kept for n in range(10, 20)) if found else 0)


def test_overlap_is_the_same_across_blocks_shards_and_samples(
    judged_on: Snapshot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A document's text counts wherever it lies; sampling changes the share a little."""
    held_out = held_out_of(judged_on, tmp_path)
    wide = b"".join(text for _, text in held_out)
    training = snapshot_of(
        {"all.txt": wide, **{f"n-{n}.txt": text_of(200 + n).encode() for n in range(9)}},
        tmp_path,
        SETTINGS.model_copy(update={"held_out_share": 0.01, "seed": 4}),
    )
    for block, most in ((64, 1 << 22), (1000, 1 << 22), (1 << 20, 1 << 22), (1 << 20, 500)):
        monkeypatch.setattr(overlap, "_BLOCK_BYTES", block)
        monkeypatch.setattr(overlap, "MAX_SHINGLES", most)
        monkeypatch.setattr(overlap, "MIN_SHINGLES", 4)
        found = find_overlap(held_out, training, store(), tmp_path / "cache")
        assert (found.found, found.overlapping) == (0, len(held_out)), (block, most)


def test_a_report_of_before_says_nothing_of_overlap_and_is_refused() -> None:
    old = CLEAN.model_dump(mode="json")
    del old["overlapping"]
    (name,) = refusals(overlaps=(Overlap.model_validate(old),))
    assert name.startswith("held-out documents that overlap")
    assert Overlap.model_validate(old).model_dump(mode="json") == old, "its digest stays"


def test_the_policy_says_how_many_may_overlap() -> None:
    for overlapping, passes in ((2, True), (3, False)):  # of 40; 5 %
        near = CLEAN.model_copy(update={"overlapping": overlapping})
        assert (refusals(overlaps=(near,)) == {}) is passes


def test_one_copy_among_many_documents_is_enough(judged_on: Snapshot, tmp_path: Path) -> None:
    held_out = held_out_of(judged_on, tmp_path)
    files = {f"new-{n}.txt": text_of(100 + n).encode() for n in range(30)}
    files["notes.txt"] = held_out[0][1]
    for seed in range(50):  # one that puts the copy into the training split
        if not _is_held_out("notes.txt", seed):
            break
    training = snapshot_of(files, tmp_path, SETTINGS.model_copy(update={"seed": seed}))
    found = find_overlap(held_out, training, store(), tmp_path / "cache")
    assert (found.found, found.examples) == (1, (f"{held_out[0][0]} = notes.txt",))


def _is_held_out(key: str, seed: int) -> bool:
    from paceline.data import in_held_out

    return in_held_out(key, SETTINGS.held_out_share, seed)


def test_near_copies_of_one_source_fall_on_one_side(tmp_path: Path) -> None:
    files = {f"file-{n}.txt": text_of(n).encode() for n in range(24)}
    files |= {f"dos-{n}.txt": text_of(n).replace("\n", "\r\n").encode() for n in range(24)}
    built = snapshot_of(files, tmp_path)
    assert (built.record.documents, built.record.duplicates) == (24, 24)


def test_tokens_are_compared_as_text(judged_on: Snapshot, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([text_of(n) for n in range(8)], trainer)
    made.save(str(tmp_path / "tokenizer.json"))
    held_out = held_out_of(judged_on, tmp_path)
    files = {f"copy-{n}.txt": text + b"\n" for n, (_, text) in enumerate(held_out)}
    files |= {f"new-{n}.txt": text_of(100 + n).encode() for n in range(9)}
    settings = SETTINGS.model_copy(
        update={"tokenizer": str(tmp_path / "tokenizer.json"), "held_out_share": 0.01, "seed": 4}
    )
    training = snapshot_of(files, tmp_path, settings)
    assert training.vocabulary.kind == "tokenizers"
    kept = {key for key, _ in held_out_of(training, tmp_path)}
    found = find_overlap(held_out, training, store(), tmp_path / "cache")
    assert found.found == len(held_out) - sum(f"copy-{n}.txt" in kept for n in range(len(held_out)))
    assert found.found > 0


def sums(numbers: Iterable[int], instruction: str = "") -> list[tuple[str, str]]:
    """Return rows of a task: prompt, and answer as it follows."""
    return [(f"{instruction}What is {n} and {n * 37}?", f" It is {n * 38}.") for n in numbers]


LONG = "Answer the following question about two numbers in one short sentence of your own. " * 2


@pytest.mark.parametrize("instruction", ["", LONG], ids=["short", "with an instruction"])
@pytest.mark.parametrize(
    "train_on",
    [
        lambda rows: {f"row-{n}.txt": prompt + said for n, (prompt, said) in enumerate(rows)},
        lambda rows: {f"{n}.txt": (p + said).upper() + "!" for n, (p, said) in enumerate(rows)},
        lambda rows: {"notes.txt": "\n".join(f"* {prompt}{said}" for prompt, said in rows)},
    ],
    ids=["each", "other case", "one file"],
)
def test_rows_of_tasks_in_the_training_data_are_found(
    tmp_path: Path, instruction: str, train_on: Any
) -> None:
    """What all rows share, an instruction, says nothing: rows of a training split have it too."""
    tasks = {"seen": sums(range(100, 140), instruction), "unseen": sums(range(9), instruction)}
    texts = train_on(tasks["seen"]) | {
        f"other-{n}.txt": prompt + said
        for n, (prompt, said) in enumerate(sums(range(200, 260), instruction))
    }
    files = {name: text.encode() for name, text in texts.items()}
    training = snapshot_of(files, tmp_path, SETTINGS.model_copy(update={"held_out_share": 0.01}))
    kept = {key for key, _ in held_out_of(training, tmp_path)}
    found = find_overlap([], training, store(), tmp_path / "cache", tasks=tasks)
    seen, unseen = found.tasks
    missing = sum(not name.startswith("other") for name in kept)
    assert (seen.task, seen.rows, seen.found) == ("seen", 40, 40 - missing)
    assert "notes.txt" not in kept
    assert seen.examples[0].startswith("row ")
    assert (unseen.task, unseen.rows, unseen.found) == ("unseen", 9, 0)


def test_of_many_rows_some_are_drawn_and_compared_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overlap, "MAX_SHINGLES", 10_000)
    rows = sums(range(1000, 2000))
    files = {f"row-{n}.txt": (prompt + said).encode() for n, (prompt, said) in enumerate(rows)}
    training = snapshot_of(files, tmp_path, SETTINGS.model_copy(update={"held_out_share": 0.01}))
    tasks = {"seen": rows, "unseen": sums(range(100))}
    seen, unseen = find_overlap([], training, store(), tmp_path / "cache", tasks=tasks).tasks
    assert 30 < seen.rows < 900 and seen.found > 0.9 * seen.rows
    assert 0 < unseen.rows <= 100 and unseen.found == 0


def test_rows_of_tasks_are_found_in_conversations(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    rows = sums(range(100, 140))
    write_tokenizer(tmp_path, [prompt + said for prompt, said in rows], template=CHATML)
    source = tmp_path / "chat.jsonl"
    asked = {"role": "system", "content": "Be brief."}
    with source.open("w") as file:
        for number, (prompt, said) in enumerate(rows):
            user = {"role": "user", "content": prompt}
            answer = {"role": "assistant", "content": said.strip()}
            file.write(json.dumps({"key": f"{number}", "messages": [asked, user, answer]}) + "\n")
    settings = DataSettings(
        format="jsonl", tokenizer=str(tmp_path / "tokenizer.json"), held_out_share=0.1
    )
    training = build_snapshot(str(source), (tmp_path / "data").as_uri(), settings, store())
    tasks = {"seen": rows, "unseen": sums(range(9))}
    seen, unseen = find_overlap([], training, store(), tmp_path / "cache", tasks=tasks).tasks
    held_out = sum(each.documents for each in training.of_split("held-out"))
    assert (seen.found, unseen.found) == (40 - held_out, 0)


def test_a_shard_that_cannot_be_read_is_no_clean_shard(judged_on: Snapshot, tmp_path: Path) -> None:
    held_out = held_out_of(judged_on, tmp_path)
    bad = judged_on.of_split("train")[1]
    path = DiskStore.path_of(judged_on.shard_url(bad))
    path.write_bytes(b"\0" * bad.bytes)
    with pytest.raises(CorruptData):
        find_overlap(held_out, judged_on, store(), tmp_path / "fresh")
    found = find_overlap(held_out, judged_on, store(), tmp_path / "fresh", quarantined=[bad.sha256])
    assert found.training_documents == 24 - len(held_out) - bad.documents


# ── the gate ─────────────────────────────────────────────────────────────────────────────────────


def refusals(lineage: dict[str, str | None] | None = None, **changes: Any) -> dict[str, str]:
    report = passing().model_copy(update=changes)
    decision = decide(report, GATE, champion="champion", lineage=lineage or LINEAGE)
    return {each.name: each.got for each in decision.checks if not each.passed}


COMPARED = "held-out documents compared with the training data"


def test_copies_refuse_with_how_many_and_a_few_of_them() -> None:
    assert refusals() == {}
    pairs = tuple(f"a{n}.py = copy-{n}.py" for n in range(5))
    dirty = CLEAN.model_copy(update={"found": 9, "examples": pairs})
    got = refusals(overlaps=(dirty,))
    assert list(got) == ["held-out documents in the training data"]
    assert "9 of 40" in got["held-out documents in the training data"]
    assert "a0.py = copy-0.py" in got["held-out documents in the training data"]


def test_rows_of_a_task_in_the_training_data_refuse() -> None:
    task = TaskScore(
        task="t",
        metric="acc",
        documents=40,
        scores={"candidate": interval(0.9)},
        difference_to={"champion": interval(0.3)},
    )
    name = f"rows of task t in snapshot {TRAINING_SNAPSHOT[:12]}"
    for found, got in ((2, {}), (3, {name: "3 of 40, 7.5% (row 1 = my.txt, …)"})):
        rows = TaskOverlap(task="t", rows=40, found=found, examples=("row 1 = my.txt",))
        near = CLEAN.model_copy(update={"tasks": (rows,)})
        assert refusals(tasks=(task,), overlaps=(near,)) == got
    assert refusals(tasks=(task,)) == {name: "missing"}, "an older report does not say"


def test_a_report_that_does_not_say_is_refused() -> None:
    assert refusals(overlaps=None) == {COMPARED: "missing"}
    assert refusals(overlaps=()) == {COMPARED: "missing"}
    gone = {"training data": "no snapshot here"}
    assert refusals(overlaps=None, failures=gone) == {COMPARED: "no snapshot here"}
    other = CLEAN.model_copy(update={"snapshot_digest": "8" * 64})
    assert list(refusals(overlaps=(other,))) == [COMPARED]


def test_a_training_without_its_snapshot_is_refused() -> None:
    for value in (None, ""):
        got = refusals(LINEAGE | {"training_snapshot_digest": value})
        assert set(got) == {COMPARED, "lineage: training snapshot digest"}


def test_what_a_version_before_was_trained_on_counts() -> None:
    before = Overlap(
        snapshot_digest="8" * 64, held_out_documents=4, training_documents=9, found=1,
        examples=("a = b",), overlapping=0,
    )  # fmt: skip
    assert list(refusals(overlaps=(CLEAN, before))) == ["held-out documents in the training data"]


# ── lineage ──────────────────────────────────────────────────────────────────────────────────────


def test_a_result_names_what_it_was_trained_on() -> None:
    job = TrainJob(
        job_id="job-1",
        run_id="run-20260101-000000-eeeeee",
        state_dir="/state",
        model_id="bytelm",
        version="v1",
        manifest_digest="b" * 64,
        snapshot_url="s3://b/data",
        snapshot_digest=TRAINING_SNAPSHOT,
        purpose="tests",
        checkpoint_url="s3://b/checkpoints",
        settings=TrainingSettings(steps=2),
    )
    named = training_inputs(job)
    assert named["snapshot_digest"] == TRAINING_SNAPSHOT
    assert set(named) <= set(TrainResult.model_fields)
    for field, value in (("snapshot_digest", "8" * 64), ("manifest_digest", "9" * 64)):
        other = job.model_copy(update={field: value})
        assert config_digest(other) != config_digest(job), "an older result is filled in by it"


def test_every_snapshot_back_to_the_first_version_is_compared() -> None:
    """A version that learned held-out files hands them on to what is trained from it."""
    run = run_of(Bucket())
    second = make_evidence("bytelm", "2").model_copy(
        update={"training_snapshot_url": "s3://b/8", "training_snapshot_digest": "8" * 64}
    )
    # of an older version: it does not say what it was trained on
    first = make_evidence("bytelm", "1").model_copy(update={"base_manifest_digest": "0" * 64})
    evidence = {"2": second, "1": first}
    versions = {
        "b" * 64: SimpleNamespace(version="2"),
        second.base_manifest_digest: SimpleNamespace(version="1"),
    }
    run.__dict__["registry"] = SimpleNamespace(
        by_manifest=lambda _, digest: versions.get(digest),
        evidence=lambda _, version: evidence[version],
    )
    base = cast(
        Manifest, SimpleNamespace(model_id="bytelm", version="3", digest="b" * 64, files=())
    )
    found = evaluate.trained_on(run, base, trained())
    assert [each.snapshot_digest for each in found] == [TRAINING_SNAPSHOT, "8" * 64]
    assert found[1] == TrainingData(snapshot_url="s3://b/8", snapshot_digest="8" * 64)
    other = trained().model_copy(update={"base_manifest_digest": "1" * 64})
    with pytest.raises(InvalidInput, match="was not trained from this version"):
        evaluate.trained_on(run, base, other)


def published(model_id: str, content: bytes, root: Path) -> Manifest:
    directory = root / model_id
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(content)
    return build_manifest(directory, model_id=model_id, version="1", link_mbit=80)


def test_a_base_that_was_published_by_hand_keeps_what_it_was_trained_on(tmp_path: Path) -> None:
    """Its training is found by the weights, whatever the model's name, and so is what that one
    began with: an export that was trained on held-out files, published as a base of its own."""
    run = run_of(Bucket())
    run.__dict__["registry"] = SimpleNamespace(by_manifest=lambda *_: None)
    first, clean = published("first", b"0", tmp_path), published("clean", b"1", tmp_path)
    exported = published("export", b"2", tmp_path)

    def training(digit: str, base: Manifest, weights: str) -> TrainResult:
        inputs = {"snapshot_url": f"s3://b/{digit}", "snapshot_digest": digit * 64}
        more = {"base_manifest_digest": base.digest, "weights_digest": weights}
        return trained().model_copy(update=inputs | more)

    weights = [sealed_records.weights_of(each) for each in (first, clean, exported)]
    train._keep_descent(run, first, training("8", first, weights[1]))  # on held-out files
    train._keep_descent(run, clean, training("9", clean, weights[2]))
    by_hand = published("acme", b"2", tmp_path)
    last = training("7", by_hand, "c" * 64)
    found = evaluate.trained_on(run, by_hand, last)
    assert [each.snapshot_digest[0] for each in found] == ["7", "9", "8"]
    # the same weights from a training of no steps: what was recorded first stays
    train._keep_descent(run, by_hand, training("6", by_hand, weights[2]))
    assert evaluate.trained_on(run, by_hand, last) == found
    train._keep_descent(run, by_hand, training("6", by_hand, "d" * 64))
    other = published("other", b"3", tmp_path)
    alone = evaluate.trained_on(run, other, training("7", other, "c" * 64))
    assert [each.snapshot_digest[0] for each in alone] == ["7"]


def test_weights_of_no_steps_do_not_end_the_search(tmp_path: Path) -> None:
    run = run_of(Bucket())
    run.__dict__["registry"] = SimpleNamespace(by_manifest=lambda *_: None)
    base = published("base", b"0", tmp_path)
    same = trained().model_copy(
        update={
            "base_manifest_digest": base.digest,
            "weights_digest": sealed_records.weights_of(base),
        }
    )
    train._keep_descent(run, base, same)
    (found,) = evaluate.trained_on(run, base, same)
    assert found.snapshot_digest == TRAINING_SNAPSHOT


# ── through the command line ─────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.xdist_group("installation")
@pytest.mark.timeout(600)
def test_the_command_line_promotes_nothing_that_saw_the_held_out_files(
    stack: Runtime, lifecycle: Ended, rejected: Rejected
) -> None:
    registry, model = Registry.from_runtime(stack), rejected.model
    before = registry.champion(model)
    assert rejected.job["snapshot_digest"] == rejected.snapshot["digest"]
    compared = rejected.report["overlaps"][0]  # then what its base was trained on
    assert compared["snapshot_digest"] == rejected.snapshot["digest"]
    assert compared["held_out_documents"] == len(rejected.held_out)
    # some copies are held out there, too
    assert compared["found"] > len(rejected.held_out) // 2
    digest = rejected.report["report_digest"]
    ended = paceline("promote", model, "--report", digest, "--json", state=stack.state_dir)
    assert ended.code == 3, ended.err
    error = ended.answer["error"]
    assert error["code"] == "GateRefused"
    assert f"{compared['found']} of {len(rejected.held_out)} in snapshot" in error["got"]
    assert any(name in error["got"] for name in rejected.held_out)
    assert registry.champion(model) == before
    evidence = registry.evidence(model, lifecycle.answer["registry"]["registry_version"])
    assert evidence.training_snapshot_digest == lifecycle.answer["data"]["digest"]
