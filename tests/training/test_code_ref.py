"""A task of one's own: what is refused before any of it runs, what it can see, that it learns."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.carried_state.byte_gru import RecurrentBytes, make
from paceline.config import scrub_variables
from paceline.data import Batch
from paceline.errors import (
    AccessDenied,
    CorruptData,
    InvalidInput,
    ServiceUnavailable,
    TrainingFailed,
)
from paceline.training import run_job
from paceline.training.loop import Workload
from paceline.training.user_code import (
    Task,
    check,
    fetch,
    load,
    module_digest,
    parse,
    require_allowed,
    tree_digest,
)
from tests.support.carried_state import BYTE_GRU, SOURCE
from tests.support.web import serving
from tests.training.conftest import Camp

TINY = Task(parameters=10_000, vocabulary=256)
GOOD = """
from examples.carried_state.byte_gru import make as byte_gru

def make(task):
    return byte_gru(task)

def raising(task):
    raise RuntimeError("no such table: users")

def nothing(task):
    return {"model": 1}

NOT_A_FUNCTION = 3
"""


def directory_of(root: Path, name: str, text: str = GOOD) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    (root / f"{name}.py").write_text(text)
    return root


def reference(directory: Path, module: str, function: str = "make") -> str:
    return f"file://{directory}@sha256:{tree_digest(directory)}#{module}:{function}"


def commit_of(root: Path, name: str) -> tuple[str, str]:
    """A repository with one commit; its URL and the commit."""
    directory_of(root, name)
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", "a task"]):
        subprocess.run(["git", "-C", str(root), *words], check=True)
    done = subprocess.run(
        ["git", "-C", str(root), "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    )
    return f"git+file://{root}", done.stdout.strip()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("json:loads", "not pinned"),
        ("json:loads@sha256:", "not pinned"),
        ("paceline.models:new_model", "not pinned"),
        ("json:loads@sha256:abc", "not pinned"),
        ("file:///srv/tasks#task:make", "not pinned"),
        ("git+https://example.org/r.git@main#task:make", "not pinned"),
        ("git+https://example.org/r.git@" + "a" * 39 + "#task:make", "not pinned"),
        ("git+https://u:p@example.org/r.git@" + "a" * 40 + "#task:make", "credentials"),
        ("git+ssh://example.org/r.git@" + "a" * 40 + "#task:make", "cannot be read"),
        ("file://relative@sha256:" + "a" * 64 + "#task:make", "not absolute"),
        ("git+file://srv/tasks@" + "a" * 40 + "#task:make", "not absolute"),
        ("git+file:///srv/%00@" + "a" * 40 + "#task:make", "control characters"),
        ("task", "cannot be read"),
        ("task:make; import os", "cannot be read"),
        ("", "cannot be read"),
    ],
)
def test_a_malformed_or_unpinned_reference_is_refused_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        parse(text)


@pytest.mark.parametrize(
    ("directory", "host"),
    [("{}", "https://git.example.org/team/"), ("file://{}/", "https://git.example.org/team")],
)
def test_only_sources_on_the_list_are_allowed(tmp_path: Path, directory: str, host: str) -> None:
    pin = "a" * 64
    commit = "b" * 40
    inside, beside = tmp_path / "tasks" / "one", tmp_path / "tasks-of-others"
    inside.mkdir(parents=True)
    beside.mkdir()
    (tmp_path / "tasks" / "out").symlink_to(beside)
    allowed = (directory.format(tmp_path / "tasks"), "mine.tasks", host)
    for text in (
        f"file://{inside}@sha256:{pin}#task:make",
        f"mine.tasks:make@sha256:{pin}",
        f"mine.tasks.gru:make@sha256:{pin}",
        f"git+https://git.example.org/team/r.git@{commit}#task:make",
        f"file://{tmp_path}/%74asks/a%20task%40home@sha256:{pin}#task:make",
        f"git+file://{inside}@{commit}#task:make",
    ):
        require_allowed(parse(text), allowed)
    for text in (
        f"file://{beside}@sha256:{pin}#task:make",
        f"file://{inside}/../../tasks-of-others@sha256:{pin}#task:make",
        f"file://{tmp_path}/tasks/out@sha256:{pin}#task:make",
        f"file://{inside}/%2e%2e/%2E./tasks-of-others@sha256:{pin}#task:make",
        f"git+file://{inside}/%2e%2e/.%2e/tasks-of-others@{commit}#task:make",
        f"git+https://git.example.org/team/%2e%2e/other/r.git@{commit}#task:make",
        f"mine.tasksuite:make@sha256:{pin}",
        f"mine:make@sha256:{pin}",
        BYTE_GRU,
        f"git+https://git.example.org/teamster/r.git@{commit}#task:make",
        f"git+https://git.example.org/team/../other/r.git@{commit}#task:make",
        f"git+https://evil.org/https://git.example.org/team/@{commit}#task:make",
    ):
        with pytest.raises(AccessDenied, match="not allowed"):
            require_allowed(parse(text), allowed)


def test_the_example_is_a_workload(camp: Camp) -> None:
    cache = camp.runtime.node_dir("node-0") / "code"  # a module is loaded from one place
    workload = load(BYTE_GRU, (SOURCE,), cache, TINY, scrub_environment=False)
    assert isinstance(workload, Workload)
    first, second = workload.build(), workload.build()
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), "the same seed, the same bits"


def test_a_directory_is_copied_by_its_digest_and_checked_each_time(tmp_path: Path) -> None:
    source = directory_of(tmp_path / "my täsks@home", "task_one")
    text = reference(source, "task_one")
    ref, cache = parse(text), tmp_path / "cache"
    tree = fetch(ref, cache)
    assert parse(text.replace(" ", "%20").replace("@home", "%40home")).directory == source
    assert tree is not None and (tree / "task_one.py").read_text() == GOOD
    (source / "task_one.py").write_text("raise SystemExit(9)")
    assert fetch(ref, cache) == tree, "what was fetched is kept, whatever its source becomes"
    with pytest.raises(CorruptData, match="pinned"):
        fetch(ref, tmp_path / "another-cache")
    (tree / "task_one.py").write_text(GOOD + "\nprint('changed')\n")
    with pytest.raises(CorruptData, match="changed on disk"):
        fetch(ref, cache)


def test_an_installed_module_is_checked_against_its_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "own_package_a"
    directory_of(package, "task")
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    digest = module_digest("own_package_a.task")
    text = f"own_package_a.task:make@sha256:{digest}"
    assert fetch(parse(text), tmp_path / "cache") is None
    load(text, ("own_package_a",), tmp_path / "cache", TINY, scrub_environment=False)
    (package / "other.py").write_text("x = 1")
    with pytest.raises(CorruptData, match="pinned"):
        fetch(parse(text), tmp_path / "cache")


def test_a_commit_is_fetched_without_a_repository_unless_it_is_unknown(
    tmp_path: Path,
) -> None:
    url, commit = commit_of(tmp_path / "my répository", "task_of_git")
    text = f"{url}@{commit}#task_of_git:make"
    tree = fetch(parse(text), tmp_path / "cache")
    assert tree is not None and not (tree / ".git").exists()
    workload = load(
        text, (f"file://{tmp_path}/",), tmp_path / "cache", TINY, scrub_environment=False
    )
    assert isinstance(workload, Workload)
    escaped = url.replace(" ", "%20").replace("é", "%C3%A9")
    assert fetch(parse(f"{escaped}@{commit}#task_of_git:make"), tmp_path / "cache")
    with pytest.raises(AccessDenied, match="on no branch or tag"):
        fetch(parse(f"{url}@{'0' * 40}#task_of_git:make"), tmp_path / "cache")
    with pytest.raises(ServiceUnavailable, match="cannot be fetched"):
        fetch(parse(f"{url}-away@{commit}#task_of_git:make"), tmp_path / "cache")


def test_a_commit_that_is_only_proposed_is_not_fetched(tmp_path: Path) -> None:
    """A server has commits in refs/pull/… that anybody sends; a merged one need not be the last."""
    root = tmp_path / "repository"
    url, merged = commit_of(root, "task_of_git")
    _, proposed = commit_of(root, "task_of_others")
    git = ["git", "-C", str(root)]
    subprocess.run([*git, "update-ref", "refs/pull/1/head", proposed], check=True)
    subprocess.run([*git, "reset", "-q", "--hard", merged], check=True)
    _, newest = commit_of(root, "task_of_git_too")
    for each in (merged, newest):
        assert fetch(parse(f"{url}@{each}#task_of_git:make"), tmp_path / "cache")
    with pytest.raises(AccessDenied, match="on no branch or tag"):
        fetch(parse(f"{url}@{proposed}#task_of_others:make"), tmp_path / "cache")
    subprocess.run([*git, "tag", "v1", proposed], check=True)
    assert fetch(parse(f"{url}@{proposed}#task_of_others:make"), tmp_path / "cache")


def test_any_repository_ends_with_a_tree_or_one_error(tmp_path: Path) -> None:
    """A branch has a name in another encoding; of a shallow repository parents are missing."""
    root, shallow = tmp_path / "repository", tmp_path / "shallow"
    url, first = commit_of(root, "task_of_git")
    branch = os.fsencode("caf\udce9")
    subprocess.run(["git", "-C", str(root), "branch", branch], check=True)
    _, tip = commit_of(root, "task_of_git_too")
    for each in (tip, first):
        assert fetch(parse(f"{url}@{each}#task_of_git:make"), tmp_path / "cache")
    subprocess.run(["git", "clone", "-q", "--depth", "1", f"file://{root}", shallow], check=True)
    url = f"git+file://{shallow}"
    assert fetch(parse(f"{url}@{tip}#task_of_git:make"), tmp_path / "cache")
    with pytest.raises((AccessDenied, ServiceUnavailable)):
        fetch(parse(f"{url}@{first}#task_of_git:make"), tmp_path / "cache")


def test_a_redirect_of_git_is_not_followed(tmp_path: Path) -> None:
    ref = parse(f"git+https://host/r.git@{'a' * 40}#task:make")
    with serving(lambda _: (404, b"")) as other:
        moved = {"Location": f"{other.url}/r.git/info/refs?service=git-upload-pack"}
        with serving(lambda _: (302, b"", moved)) as allowed:
            with pytest.raises(ServiceUnavailable, match="cannot be fetched"):
                fetch(replace(ref, url=f"{allowed.url}/r.git"), tmp_path / "cache")
            assert allowed.calls and not other.calls


def test_a_name_that_is_taken_is_refused_before_it_runs(tmp_path: Path) -> None:
    for name in ("json", "numpy"):
        source = directory_of(tmp_path / name, name, "raise SystemExit(9)")
        with pytest.raises(InvalidInput, match="hidden by another"):
            load(
                reference(source, name), (str(tmp_path),), tmp_path / "cache", TINY,
                scrub_environment=False,
            )  # fmt: skip


def test_user_code_finds_no_credentials_in_its_environment() -> None:
    kept = {"PATH": "/bin", "RANK": "1", "OMP_NUM_THREADS": "1", "PACELINE_WORKER_ID": "n"}
    secret = {
        "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_PROFILE": "x", "HF_TOKEN": "x",
        "PACELINE_STATE": "x", "PACELINE_REDIS_PASSWORD": "x", "MLFLOW_TRACKING_PASSWORD": "x",
        "PREFECT_API_AUTH_STRING": "x", "GOOGLE_APPLICATION_CREDENTIALS": "x", "SSH_AUTH_SOCK": "x",
        "TORCH_HUB_TOKEN": "x", "DATABASE_URL": "x", "KUBECONFIG": "x",
    }  # fmt: skip
    environment = kept | secret
    assert set(scrub_variables(environment)) == set(secret)
    assert environment == kept


def test_code_that_raises_or_returns_another_type_is_refused_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    watcher = """
import os
def make(task):
    assert not [n for n in os.environ if n.startswith("AWS_")]
    class W:
        def build(self): return 3
        def inputs(self, batch, device): ...
        def loss_sum(self, outputs, *targets): ...
    return W()
def dies(task):
    os._exit(7)
"""
    source = directory_of(tmp_path / "tasks", "task_checked", watcher)
    for function, kind, why in (
        ("make", InvalidInput, "builds no model"),
        ("dies", TrainingFailed, "exit code 7"),
    ):
        with pytest.raises(kind, match=why):
            check(reference(source, "task_checked", function), (str(source),), tmp_path, TINY)
    assert os.environ["AWS_SECRET_ACCESS_KEY"] == "hidden", "the driver keeps its own"


def test_what_returns_no_workload_is_refused_by_the_rank_too(tmp_path: Path) -> None:
    source = directory_of(tmp_path / "tasks", "task_loaded")
    directory_of(tmp_path / "tasks", "task_broken", "import no_such_module_anywhere")
    for module, function, kind, why in (
        ("task_loaded", "nothing", InvalidInput, "without build, inputs, loss_sum"),
        ("task_loaded", "raising", TrainingFailed, "no such table: users"),
        ("task_loaded", "absent", InvalidInput, "names no function"),
        ("task_loaded", "NOT_A_FUNCTION", InvalidInput, "names no function"),
        ("task_broken", "make", TrainingFailed, "no_such_module_anywhere"),
    ):
        with pytest.raises(kind, match=why):
            load(
                reference(source, module, function), (str(source),), tmp_path / "cache", TINY,
                scrub_environment=False,
            )  # fmt: skip


def test_what_does_not_end_is_given_up(tmp_path: Path) -> None:
    endless = "import time\ntime.sleep(600)\ndef make(task): ..."
    source = directory_of(tmp_path / "tasks", "task_endless", endless)
    with pytest.raises(TrainingFailed, match="does not come to an end"):
        check(
            reference(source, "task_endless"), (str(source),), tmp_path / "cache", TINY,
            deadline_s=1.0,
        )  # fmt: skip


def test_the_digest_command_prints_what_pins(tmp_path: Path) -> None:
    source = directory_of(tmp_path / "tasks", "task_digest")
    command = [sys.executable, "-m", "paceline.training.code_digest", str(source)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == f"sha256:{tree_digest(source)}"


def test_a_job_learns_by_its_own_code_and_unusable_code_is_refused_early(
    camp: Camp, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = dict(os.environ)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "ambient")
    own = {"code_ref": BYTE_GRU, "data": {"batching": "carried", "purpose": "tests"}}
    try:
        code, said = camp.run_alone(camp.job("own", steps=4, **own))
        assert "AWS_SECRET_ACCESS_KEY" not in os.environ, "a rank of user code has no such thing"
    finally:
        os.environ.clear()
        os.environ.update(before)
    assert code == 0
    assert said.losses[-1] < said.losses[0] - 1

    class NoLauncher:
        def open_nodes(self, *_: object, **__: object) -> None:
            raise AssertionError("ranks were started")

    for settings, kind, why in (
        ({"code_ref": "json:loads@sha256:" + "a" * 64}, AccessDenied, "not allowed"),
        ({"code_ref": "json:loads"}, InvalidInput, "not pinned"),
        ({"code_ref": BYTE_GRU.replace(":make", ":CarriedState")}, TrainingFailed, "raised"),
        ({"synchrony": {"kind": "parameter-server"}}, InvalidInput, "too few ranks"),
    ):
        with pytest.raises(kind, match=why):
            run_job(camp.job("refused", **settings), camp.nodes, NoLauncher())  # type: ignore[arg-type]


# ------------------------------------------------------------------------- the example learns


def cut(document: np.ndarray, context: int, number: int) -> Batch:
    row = document[number * context : (number + 1) * context + 1]
    return Batch(
        step=number,
        inputs_BT=row[None, :-1],
        targets_BT=row[None, 1:],
        weights_BT=np.ones((1, context), np.float32),
        rows=range(1),
        global_tokens=float(context),
        carries_B=np.array([number > 0]),
    )


def test_cuts_of_a_document_give_the_losses_of_the_whole() -> None:
    document = np.random.default_rng(0).integers(0, 256, 97).astype(np.uint8)
    workload = make(TINY)
    model = workload.build().double()
    cpu = torch.device("cpu")

    def loss(batch: Batch) -> float:
        inputs = workload.inputs(batch, cpu)
        tokens_BT, state_BLD = inputs.args
        outputs = model(tokens_BT, state_BLD.double())
        return float(workload.loss_sum(outputs, *inputs.targets).detach())

    whole = loss(cut(document, 96, 0))
    parts = [loss(cut(document, 32, number)) for number in range(3)]
    assert sum(parts) == pytest.approx(whole, rel=1e-5)
    fresh = [loss(cut(document[32 * n :], 32, 0)) for n in range(3)]
    assert abs(sum(fresh) - whole) > 1e-3, "without the carried state it is another loss"


def test_an_evaluation_leaves_the_carried_states_alone() -> None:
    document = np.random.default_rng(1).integers(0, 256, 65).astype(np.uint8)
    workload = make(TINY)
    model = workload.build()
    cpu = torch.device("cpu")

    def outputs(batch: Batch) -> torch.Tensor:
        inputs = workload.inputs(batch, cpu)
        found = model(*inputs.args)
        workload.loss_sum(found, *inputs.targets)
        return found[0]

    outputs(cut(document, 32, 0))
    expected = outputs(cut(document, 32, 1))
    outputs(cut(document, 32, 0))
    with torch.no_grad():
        outputs(cut(document[::-1].copy(), 32, 0))
    assert torch.equal(outputs(cut(document, 32, 1)), expected)


def test_the_recurrent_model_learns_and_its_scan_is_the_recurrence() -> None:
    torch.manual_seed(0)
    model = RecurrentBytes(16, 16)
    tokens_BT = torch.randint(0, 16, (2, 12))
    state_BLD = model.initial_state(2)
    at_once, last_BLD = model(tokens_BT, state_BLD)
    for t in range(12):
        one, state_BLD = model(tokens_BT[:, t : t + 1], state_BLD)
        assert torch.allclose(one[:, 0], at_once[:, t], atol=1e-5)
    assert torch.allclose(state_BLD, last_BLD, atol=1e-5)
    document = np.tile(np.arange(13, dtype=np.uint8), 20)
    workload = make(TINY)
    learner = workload.build()
    optimizer = torch.optim.Adam(learner.parameters(), lr=1e-2)
    losses = []
    for step in range(30):
        inputs = workload.inputs(cut(document, 64, step % 3), torch.device("cpu"))
        loss = workload.loss_sum(learner(*inputs.args), *inputs.targets) / 64
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
