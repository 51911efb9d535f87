"""A model of one's own code is judged as others are, by a process of its own that alone runs it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from examples.carried_state.byte_gru import make
from paceline.config import (
    DataSettings,
    EvaluationSettings,
    GateSettings,
    Profile,
    SecuritySettings,
    TrainingSettings,
)
from paceline.data import FAILED, Snapshot, build_snapshot, documents, tokenizer_of
from paceline.errors import (
    AccessDenied,
    InvalidInput,
    SourceMissing,
    TrainingFailed,
    from_record,
)
from paceline.evaluation import (
    LINEAGE,
    AllowedCode,
    TextModel,
    choose_prefixes,
    compare,
    decide,
    download_model,
    windows,
)
from paceline.flows import train as train_flow
from paceline.models import is_pretrained, read_config, weights_digest
from paceline.schemas import EvaluationReport, EvaluationSpec, TrainingData
from paceline.tasks.evaluate import evaluate, require_judgeable
from paceline.training.loop import HasLogits
from paceline.training.user_code import Task, next_tokens, parse, tree_digest
from paceline.training.user_code.next_tokens import NextTokens
from tests.support.carried_state import BYTE_GRU, SOURCE
from tests.support.hugging_face import write_tokenizer
from tests.training.conftest import BUCKET, Camp

SETTINGS = EvaluationSettings(held_out_bytes=8192, bootstrap_samples=100, ngram_order=3)
PARAMETERS, CONTEXT = 30_000, 24


def code_cache(camp: Camp) -> Path:
    """The cache of the ranks in this process, where a module is loaded from one place."""
    return camp.runtime.node_dir("node-0") / "code"


def trained(camp: Camp, job_id: str, snapshot: Snapshot, into: Path) -> tuple[str, Path]:
    """Train the example for three steps in this process; its export's URL, and a copy of it."""
    job = camp.job(
        job_id, steps=3, code_ref=BYTE_GRU, task={"context": CONTEXT, "parameters": PARAMETERS},
        snapshot_url=snapshot.url, snapshot_digest=snapshot.digest,
    )  # fmt: skip
    before = dict(os.environ)
    try:
        code, said = camp.run_alone(job)
    finally:  # a rank of user code removes what it does not need
        os.environ.clear()
        os.environ.update(before)
    assert code == 0
    url = str(said.of("result")[0].data["export_url"])
    return url, download_model(url, into, camp.store)


@pytest.fixture(scope="module")
def export(camp: Camp, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    yield trained(camp, "judged", camp.snapshot, tmp_path_factory.mktemp("judged") / "export")


def bits_per_byte(camp: Camp, snapshot: Snapshot, export: Path, cache: Path) -> float:
    """The figure by torch alone, a document after the other."""
    tokenizer = tokenizer_of(snapshot, camp.store)
    vocabulary = snapshot.vocabulary
    task = Task(context=CONTEXT, parameters=PARAMETERS, vocabulary=vocabulary.vocab_size)
    workload = make(task)
    model = workload.build()
    model.load_state_dict(load_file(export / "model-00001-of-00001.safetensors"))
    read = documents(snapshot, "held-out", camp.store, cache, text_of=tokenizer.text)
    held_out = choose_prefixes([(each.path, each.text) for each in read], SETTINGS.held_out_bytes)
    bits = 0.0
    for each in held_out:
        (tokens,) = tokenizer.encode([each.text])
        assert not isinstance(tokens, str)
        targets_T = torch.from_numpy(tokens.astype(np.int64))
        inputs_T = torch.cat([torch.tensor([vocabulary.separator]), targets_T[:-1]])
        for window in windows(len(tokens), CONTEXT):
            with torch.no_grad():
                logits_TV = model(inputs_T[None, window.start : window.end], torch.zeros(
                    1, model.blocks, model.width))[0][0]  # fmt: skip
            nats_T = -torch.log_softmax(logits_TV.double(), -1).gather(
                1, targets_T[window.start : window.end, None]
            )
            bits += float(nats_T[window.fresh - window.start :].sum()) / np.log(2)
    return bits / sum(len(each.text) for each in held_out)


def test_its_bits_per_byte_are_as_computed_directly_and_pass_the_gate(
    camp: Camp, export: tuple[str, Path], base_dir: Path, tmp_path: Path
) -> None:
    url, directory = export
    learned = TrainingData(
        snapshot_url=camp.snapshot.url, snapshot_digest=camp.snapshot.digest, quarantined_shards=()
    )
    spec = EvaluationSpec(
        run_id="run-20261120-153600-9f3a1c", state_dir=str(camp.runtime.state_dir),
        snapshot_url=camp.snapshot.url, snapshot_digest=camp.snapshot.digest,
        models={"candidate": url, "base": str(base_dir)}, settings=SETTINGS, trained_on=(learned,),
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "paceline.evaluation.run"],
        input=spec.model_dump_json(), capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    report = EvaluationReport.model_validate(last["data"])
    assert not report.failures
    score = report.score("candidate")
    assert score is not None and score.serving is not None
    wanted = bits_per_byte(camp, camp.snapshot, directory, tmp_path / "cache")
    assert score.bits_per_byte.value == pytest.approx(wanted, abs=1e-5)
    assert set(score.difference_to) == {"base", "ngram", "gzip", "xz"}
    assert (score.dtype, score.format, score.context) == ("float32", "safetensors", CONTEXT)
    assert score.serving.peak_memory_bytes, "of the process that runs the module"
    policy = GateSettings(except_baselines=("ngram", "gzip", "xz"), max_overlap=1)
    lineage = dict.fromkeys(LINEAGE, "0" * 64) | {
        "weights_digest": weights_digest(directory),
        "snapshot_digest": camp.snapshot.digest,
        "training_snapshot_digest": camp.snapshot.digest,
    }
    decision = decide(report, policy, champion=None, lineage=lineage)
    assert decision.passed, decision.reasons


def test_an_export_carries_the_tokenizer_of_its_data(camp: Camp, tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path, ["line 1 of file 2 is 3"], 280) / "tokenizer.json"
    settings = DataSettings(tokenizer=str(tokenizer), held_out_share=0.2, purpose="tests")
    texts = camp.runtime.state_dir / "texts"
    snapshot = build_snapshot(str(texts), f"s3://{BUCKET}/data", settings, camp.store)
    _, directory = trained(camp, "judged-tokens", snapshot, tmp_path / "export")
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    allowed = AllowedCode((SOURCE,), code_cache(camp))
    report = compare(
        {"own": directory}, snapshot.url, camp.store, tmp_path / "cache", SETTINGS, allowed
    )
    assert not report.failures
    (score,) = [each for each in report.scores if each.name == "own"]
    wanted = bits_per_byte(camp, snapshot, directory, tmp_path / "cache")
    assert score.bits_per_byte.value == pytest.approx(wanted, abs=1e-5)
    assert score.tokens is not None and 0 < score.tokens < report.bytes


ENDS = """
from examples.carried_state.byte_gru import make as byte_gru

def make(task):
    return byte_gru(task)

def ends(task):
    import os
    os._exit(7)
"""


def changed(export: Path, into: Path, **config: Any) -> Path:
    """Copy ``export`` with changes to its config."""
    shutil.copytree(export, into)
    path = into / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return into


@pytest.mark.timeout(300)  # two processes
def test_what_cannot_be_judged_is_named_and_its_code_never_runs_here(
    camp: Camp, export: tuple[str, Path], tmp_path: Path
) -> None:
    """No allowed source, a process that ends, no config: one line each."""
    code = tmp_path / "tasks"
    code.mkdir()
    (code / "judged_task.py").write_text(ENDS)
    pin = tree_digest(code)
    refs = {
        "not-allowed": f"file:///srv@sha256:{pin}#judged_task:make",
        "ends": f"file://{code}@sha256:{pin}#judged_task:ends",
        "no-config": "",
    }
    models = {name: changed(export[1], tmp_path / name, code_ref=ref) for name, ref in refs.items()}
    (models["no-config"] / "config.json").unlink()
    allowed = AllowedCode((SOURCE, str(code)), code_cache(camp))
    found = compare(
        models, camp.snapshot.url, camp.store, tmp_path / "cache", SETTINGS, allowed
    ).failures
    assert {name: why.partition(":")[0] for name, why in found.items()} == {
        "not-allowed": "code reference is from a source that is not allowed",
        "ends": "code reference ended its process",
        "no-config": "model file is missing",
    }
    assert "exit code 7" in found["ends"]
    assert "judged_task" not in sys.modules


def test_weights_that_the_code_cannot_hold_or_that_are_not_finite_are_refused(
    camp: Camp, export: tuple[str, Path], tmp_path: Path
) -> None:
    """What the model's process answers, asked in this one; a huge module takes no memory."""
    huge = changed(export[1], tmp_path / "huge", parameters=10**13, vocab_size=4_194_304)
    nan = changed(export[1], tmp_path / "nan")
    weights = load_file(nan / "model-00001-of-00001.safetensors")
    weights["last_norm.weight"][3] = torch.nan
    save_file(weights, nan / "model-00001-of-00001.safetensors")
    for directory, words in (
        (huge, "weights do not fit the module that the code builds"),
        (nan, "weights are not finite: got NaN or infinity in last_norm.weight"),
    ):
        asked = {"directory": str(directory), "sources": [SOURCE], "cache": str(code_cache(camp))}
        with mock.patch.dict(os.environ):
            kind, answer = next_tokens._start("")(json.dumps(asked | {"device": "cpu"}).encode())
        assert kind == FAILED
        assert words in from_record(json.loads(answer)).one_line()


def test_it_is_not_taken_for_another_kind_of_model(export: tuple[str, Path]) -> None:
    directory = export[1]
    assert not is_pretrained(directory)
    with pytest.raises(InvalidInput, match="built by that code alone"):
        read_config(directory)
    with pytest.raises(InvalidInput, match="judged, and not opened otherwise"):
        TextModel.open(directory)


def test_an_unbuildable_candidate_is_refused_before_a_node_is_busy(
    camp: Camp, export: tuple[str, Path]
) -> None:
    base = camp.manifest_digest

    def judged(url: str, sources: tuple[str, ...]) -> None:
        profile = Profile(security=SecuritySettings(code_sources=sources))
        run = SimpleNamespace(store=camp.store, runtime=SimpleNamespace(profile=profile))
        models = {"candidate": {"url": url, "digest": base}}
        evaluate.fn(
            run, models, {"url": camp.snapshot.url, "digest": camp.snapshot.digest}, [],
            base=None, training_digest=base, trained_on=(),
        )  # type: ignore[call-overload] # fmt: skip

    with pytest.raises(AccessDenied, match="not allowed"):
        judged(export[0], ("my_package",))
    older = f"s3://{BUCKET}/older-export"
    for path in export[1].glob("*.safetensors*"):
        camp.store.upload_file(path, f"{older}/{path.name}")
    with pytest.raises(SourceMissing, match=r"no config.json.*Run the same `train` again"):
        judged(older, (SOURCE,))


# ------------------------------------------------------------- logits of the next token, or none


class Bytes(nn.Module):
    """Next-byte logits of the byte before, and what a case makes of them."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.case, self.table = case, nn.Embedding(256, 256)

    def forward(self, tokens_BT: Tensor) -> Any:
        """Return logits_BTV, or what is none."""
        logits_BTV = self.table(tokens_BT)
        if self.case == "pooled":
            return logits_BTV.mean(1)
        if self.case == "narrow":
            return logits_BTV[..., :100]
        if self.case == "sees-all":
            return logits_BTV + logits_BTV.mean(1, keepdim=True)
        if self.case == "raises":
            raise RuntimeError("no such table: users")
        return {"logits": logits_BTV} if self.case == "named" else logits_BTV


class NextByte:
    """A workload without ``logits``."""

    def inputs(self, batch: Any, device: torch.device) -> Any:
        """Return tokens; there is nothing else to see."""
        assert not batch.targets_BT.any() and batch.inputs_BT.dtype == np.uint8
        tokens_BT = torch.from_numpy(batch.inputs_BT.astype(np.int64)).to(device)
        return SimpleNamespace(args=(tokens_BT,), kwargs={})


class Named(NextByte):
    """One with it."""

    def logits(self, outputs: Any) -> Tensor:
        """Return those of the next token."""
        found: Tensor = outputs["logits"]
        return found


@pytest.mark.parametrize(
    ("case", "kind", "why"),
    [
        ("pooled", InvalidInput, r"no logits of the next token.*got Tensor \[2, 256\]"),
        ("narrow", InvalidInput, r"wanted a tensor \[2, 24, 256\]"),
        ("named", InvalidInput, r"got dict, wanted.*Give the workload a method logits"),
        ("sees-all", InvalidInput, "logits follow from later tokens"),
        ("raises", TrainingFailed, "no such table: users"),
    ],
)
def test_a_module_without_logits_of_the_next_token_is_refused(
    case: str, kind: type[Exception], why: str
) -> None:
    ref, task = parse(BYTE_GRU), Task(context=CONTEXT)
    with pytest.raises(kind, match=why):
        NextTokens(NextByte(), Bytes(case), ref, task)  # type: ignore[arg-type]


def test_a_method_names_the_logits_among_what_a_module_returns() -> None:
    task, module = Task(context=CONTEXT), Bytes("named")
    assert isinstance(Named(), HasLogits)
    opened = NextTokens(Named(), module, parse(BYTE_GRU), task)  # type: ignore[arg-type]
    tokens_BT = np.arange(10).reshape(2, 5)
    wanted_BTV = module.table(torch.from_numpy(tokens_BT))
    assert torch.equal(opened.logits(tokens_BT), wanted_BTV)


SILENT = """
from examples.carried_state.byte_gru import RecurrentWorkload

class Silent(RecurrentWorkload):
    logits = None

def make(task):
    return Silent(task.vocabulary, 16)
"""


def test_a_lifecycle_finds_out_before_it_trains(camp: Camp, tmp_path: Path) -> None:
    code = tmp_path / "tasks"
    code.mkdir()
    (code / "task_without_logits.py").write_text(SILENT)
    text = f"file://{code}@sha256:{tree_digest(code)}#task_without_logits:make"
    profile = Profile(
        training=TrainingSettings(code_ref=text),
        security=SecuritySettings(code_sources=(str(code), SOURCE)),
    )
    runtime = SimpleNamespace(profile=profile, state_dir=tmp_path)
    run: Any = SimpleNamespace(store=camp.store, runtime=runtime)
    with pytest.raises(InvalidInput, match=r"no logits of the next token.*got tuple"):
        require_judgeable(run, profile, camp.snapshot.url, "s3://b/m")
    ours = profile.training.model_copy(update={"code_ref": BYTE_GRU})
    require_judgeable(
        run, profile.model_copy(update={"training": ours}), camp.snapshot.url, "s3://b/m"
    )


HOLDS = """
import os
from pathlib import Path

from examples.carried_state.byte_gru import make as byte_gru

class Held:
    calls = 0

    def __init__(self, inner):
        self.inner = inner
        self.build, self.loss_sum, self.logits = inner.build, inner.loss_sum, inner.logits

    def inputs(self, batch, device):
        self.calls += 1
        hold = Path("{hold}")
        if self.calls > 1 and hold.exists():  # the first call is the probe
            written = hold.with_name("writing")
            written.write_text(str(os.getpid()))
            written.rename(hold.with_name("pid"))
            while hold.exists():
                pass
        return self.inner.inputs(batch, device)

def make(task):
    return Held(byte_gru(task))
"""


@pytest.mark.nightly
@pytest.mark.timeout(600)  # four processes
def test_a_killed_evaluator_leaves_nothing_and_the_same_command_goes_on(
    camp: Camp, export: tuple[str, Path], tmp_path: Path
) -> None:
    code, hold = tmp_path / "code", tmp_path / "hold"
    code.mkdir()
    hold.touch()
    (code / "task_that_holds.py").write_text(HOLDS.replace("{hold}", str(hold)))
    model = shutil.copytree(export[1], tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    config["code_ref"] = f"file://{code}@sha256:{tree_digest(code)}#task_that_holds:make"
    (model / "config.json").write_text(json.dumps(config))
    spec = EvaluationSpec(
        run_id="run-20261120-153600-9f3a1c", state_dir=str(camp.runtime.state_dir),
        snapshot_url=camp.snapshot.url, snapshot_digest=camp.snapshot.digest,
        models={"candidate": str(model)}, trained_on=(),
        settings=SETTINGS.model_copy(update={"held_out_bytes": 1024}),
    ).model_dump_json()  # fmt: skip
    command = [sys.executable, "-m", "paceline.evaluation.run"]
    work = camp.runtime.state_dir / "work"
    with camp.trusting(str(code), SOURCE):
        first = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
        assert first.stdin is not None
        first.stdin.write(spec)
        first.stdin.close()
        while not (pid := tmp_path / "pid").exists():
            assert first.poll() is None
            time.sleep(0.05)
        child = os.pidfd_open(int(pid.read_text()))
        try:
            first.kill()
            assert first.wait() == -9
            assert select.select([child], [], [], 60)[0], "its child is busy, and ends"
        finally:
            os.close(child)
        assert list(work.glob("scores-*")), "what a kill leaves"
        hold.unlink()
        again = subprocess.run(
            command, input=spec, capture_output=True, text=True, timeout=300, check=False
        )
    assert again.returncode == 0, again.stderr
    report = EvaluationReport.model_validate(json.loads(again.stdout.splitlines()[-1])["data"])
    assert not report.failures and report.score("candidate") is not None
    assert not list(work.glob("scores-*"))


def test_a_job_that_is_to_be_judged_finds_out_before_a_node_is_busy(
    camp: Camp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = Profile(security=SecuritySettings(code_sources=(SOURCE,)))
    runtime = camp.runtime.model_copy(update={"profile": profile})
    run: Any = SimpleNamespace(
        store=camp.store, runtime=runtime, state_dir=str(tmp_path), run_id="run-1"
    )
    link = SimpleNamespace(user="alice", hosts=("node-0",), sweep=None)

    def busy(*_: Any, **__: Any) -> None:
        raise TimeoutError("a node is busy")

    def unjudgeable(_: Any, asked: Profile, *__: Any) -> None:
        assert asked.training.code_ref == BYTE_GRU
        raise InvalidInput("no logits of the next token")

    monkeypatch.setattr(train_flow.Run, "open", lambda *_: run)
    monkeypatch.setattr(train_flow, "recorded", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(train_flow, "linked", lambda *_: contextlib.nullcontext(link))
    for each in ("permitted_snapshot", "require_own_expectations", "nest", "validate_data"):
        monkeypatch.setattr(train_flow, each, lambda *_: None)
    monkeypatch.setattr(train_flow, "distribute_model", busy)
    monkeypatch.setattr(train_flow, "require_judgeable", unjudgeable)
    asked = ("acme/own", "1", camp.snapshot.url)
    with pytest.raises(TimeoutError):  # not judged, it may be trained
        train_flow.train_model.fn(*asked, code_ref=BYTE_GRU)
    with pytest.raises(InvalidInput, match="no logits of the next token"):
        train_flow.train_model.fn(*asked, code_ref=BYTE_GRU, evaluate_on=camp.snapshot.url)
