"""Every command as a person finds it: a group, an example that parses, one meaning, completion."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from paceline.api import PrefectStarter
from paceline.cli import flows
from paceline.cli.commands import COMMANDS, GROUPS, group_of, leaves
from paceline.cli.flows import FlowCall, _pages, flow_name, made_and_next, require_inputs
from paceline.cli.main import cli
from paceline.cli.options import again, next_line, one_of, or_newest_made, print_table, remember
from paceline.cli.progress import StageBars
from paceline.config import Endpoints, Profile, Runtime, Secrets, save_runtime
from paceline.errors import AccessDenied, InvalidInput, NotFound
from paceline.schemas import PRINTED, SCHEMAS, FlowAnswer, VerifyAnswer, flow_answer
from paceline.tasks._support.run import StageUpdate
from tests.api.conftest import make_runtime
from tests.support.command import paceline, short_of


def walked(command: click.Command, *words: str) -> list[tuple[tuple[str, ...], click.Command]]:
    """Return every command that is no group, by what is typed."""
    if not isinstance(command, click.Group):
        return [(words, command)]
    context = click.Context(command)
    found = []
    for name in command.list_commands(context):
        child = command.get_command(context, name)
        assert child is not None
        found += walked(child, *words, name)
    return found


EVERY = walked(cli)


def test_the_help_of_each_command_has_an_example() -> None:
    for words, _ in EVERY:
        done = paceline(*words, "--help")
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"Usage: paceline {' '.join(words)} ")
        _, _, example = done.stdout.partition("For example:\n")
        assert example.strip().startswith("paceline "), words


def groups(group: click.Group, *words: str) -> list[tuple[tuple[str, ...], click.Group]]:
    """Return ``group`` and the groups below it, by what is typed."""
    context, found = click.Context(group), [(words, group)]
    for name in group.list_commands(context):
        child = group.get_command(context, name)
        found += groups(child, *words, name) if isinstance(child, click.Group) else []
    return found


def test_the_help_of_each_group_has_an_example_and_whole_lines() -> None:
    for words, _ in groups(cli):
        shown = paceline(*words, "--help").stdout
        _, _, example = shown.partition("For example:\n")
        assert len(example.strip().removeprefix("paceline ").split()) > 1, (words, example)
        assert "..." not in shown.partition("\n\n")[2], f"{words}: no line is cut"


def test_each_option_has_a_help() -> None:
    for words, command in EVERY:
        for each in command.params:
            assert not isinstance(each, click.Option) or each.help, (words, each.opts)


def test_each_example_is_accepted_by_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for each in ("my-model", "texts", "dcp"):
        (tmp_path / each).mkdir()
    shown = {str(command.epilog).partition("For example:\n")[2] for _, command in EVERY}
    lines = [line.strip() for each in shown for line in each.replace("\\\n", "").splitlines()]
    assert len(lines) > len(COMMANDS)
    for line in lines:
        context: click.Context | None = None
        command: click.Command = cli
        typed = shlex.split(line.partition(" > ")[0])[1:]
        while isinstance(command, click.Group):
            parent = click.Context(command, context)
            _, found, typed = command.resolve_command(parent, typed)
            assert found is not None, line
            context, command = parent, found
        command.make_context(line, typed, context)  # raises for an option that it has not


def test_each_word_is_in_one_group_or_starts_the_help() -> None:
    grouped = [words for name in GROUPS for words in group_of(name).entries.values()]
    short = [each for each in grouped if each in COMMANDS]
    assert len(short) == len(set(short))
    listed = paceline("--help").stdout
    for word in set(COMMANDS) - set(short):
        assert f"\n  {word} " in listed
    for name in GROUPS:
        assert f"\n  {name} " in listed
        for words in group_of(name).entries:
            assert words in listed


def test_a_command_has_the_same_options_in_short_form_and_in_its_group() -> None:
    by_words = dict(EVERY)
    for name in GROUPS:
        for typed, words in group_of(name).entries.items():
            if words in COMMANDS:
                for short, command in leaves(words, by_words.get((words,)) or click.Group(words)):
                    longer = by_words[name, typed, *short.split()[1:]]
                    assert [each.opts for each in longer.params] == [
                        each.opts for each in command.params
                    ]


def test_train_means_this_machine_and_names_the_other_command() -> None:
    here, there = (paceline(*each, "--help").stdout for each in (["train"], ["training", "start"]))
    assert "--text" in here
    assert "--text" not in there
    assert "MODEL_ID VERSION" in there
    assert ("--purpose" in here, "--purpose" in there) == (False, True)
    refused = paceline("train", "m", "1", "--ranks", "2")
    assert refused.returncode == 2
    assert "got m 1" in refused.stderr
    assert "paceline training start MODEL_ID VERSION --snapshot URL" in refused.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_and_completes_without_imports(shell: str) -> None:
    script = paceline("completion", shell).stdout
    assert "_PACELINE_COMPLETE" in script
    code = (
        "import sys\n"
        "from paceline.cli import run\n"
        "try:\n    run()\n"
        "finally:\n    print({'pydantic', 'rich', 'torch', 'prefect'} & {*sys.modules} or '')\n"
    )
    asked = {
        "_PACELINE_COMPLETE": f"{shell}_complete",
        "COMP_WORDS": "paceline deployment ca",
        "COMP_CWORD": "ca" if shell == "fish" else "2",
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **asked}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert "cancel" in done.stdout
    assert "watch" not in done.stdout
    assert "{" not in done.stdout, done.stdout


BAD = ["where nonsense", "evaluate nonsense", "promote a/b", "rollback ../x", "model rollback ../x"]


@pytest.mark.parametrize("words", BAD)
def test_a_bad_id_is_refused_at_once(tmp_path: Path, words: str) -> None:
    done = paceline(*words.split(), "--json", "--state", tmp_path)
    assert done.returncode == 2, done.stderr
    assert json.loads(done.stdout)["status"] == "failed"


@pytest.mark.parametrize("columns", [80, 120])
def test_a_long_message_leaves_bar_percentage_and_time_on_the_line(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    with StageBars() as bars:
        bars(StageUpdate(stage="rollout-relay", fraction=0.3, message="[x] long " * 30))
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().err)
    line = [each.strip() for each in re.split(r"[\r\n]", text) if "rollout" in each][-1]
    assert len(line) <= columns
    assert re.search(r"━.* 30% 0:00:00 \[x\] long .*…$", line)


def test_progress_without_a_terminal_and_with_no_color_has_no_escapes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    update = StageUpdate(stage="relay", fraction=1.0, message="done", done=True)
    with StageBars() as bars:
        bars(update)
    assert "\x1b" not in capsys.readouterr().err
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    with StageBars() as bars:
        bars(update)
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", capsys.readouterr().err), "a colour"


def test_without_a_terminal_what_a_stage_waits_for_is_a_line_at_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with StageBars() as bars:
        for fraction, message in ((0.0, "started"), (0.0, "waits"), (0.0, "waits"), (0.1, "moves")):
            bars(StageUpdate(stage="train", fraction=fraction, message=message))
    said = [each.split()[-1] for each in capsys.readouterr().err.splitlines()]
    assert said == ["started", "waits"]


def test_each_command_with_json_has_a_schema_of_what_it_prints() -> None:
    prints = {short_of(words) for words, command in EVERY if "--json" in opts_of(command)}
    assert prints == PRINTED.keys()
    assert {name for names in PRINTED.values() for name in names} <= SCHEMAS.keys()


def opts_of(command: click.Command) -> set[str]:
    return {opt for each in command.params for opt in each.opts}


def test_an_id_by_its_beginning() -> None:
    known = ("3f1c-a", "3f1c-b", "77aa-c", "77aa")
    assert one_of("deployment", "3f1c-b", known) == "3f1c-b"
    assert one_of("deployment", "77aa", known) == "77aa", "a whole id, though another begins so"
    with pytest.raises(InvalidInput, match=r"several deployments.*3f1c-a.*3f1c-b"):
        one_of("deployment", "3f", known)
    with pytest.raises(NotFound, match="no such deployment"):
        one_of("deployment", "9", known)


def test_a_flow_ends_with_what_it_made_and_the_next_command() -> None:
    def ends(flow: str, given: dict[str, Any], **result: Any) -> list[str]:
        name = flow_name(flow)
        return made_and_next(flow, given, flow_answer(name, "run-1", [], result))

    url = "s3://b/data/1"
    lines = ends("publish.build_snapshot", {}, url=url)
    assert lines[0] == f"made:     {url}"
    assert lines[1].endswith(f"--snapshot {url}")
    judged = ends("evaluate.evaluate_model", {"model_id": "org/m"}, report_digest="d")
    moved = {"model_id": "m", "version": "2", "relay": {"workers": 4, "deployment_id": "d-1"}}
    for switched, then in (({"active": 4}, "status"), (None, "activate d-1")):
        lines = ends("distribute.distribute_model", {}, **moved, activate=switched)
        assert lines[0].startswith("made:     m 2, nodes: 4")
        assert lines[1] == f"next:     paceline {then}"
    assert judged[1] == "next:     paceline promote org/m --report run-1"
    asked = {"model_id": "org/m", "version": "1", "snapshot_url": url, "evaluate_on": url}
    trained = ends("train.train_model", asked, export_url="s3://b/e", report_digest="d")
    assert trained[1] == "next:     paceline promote org/m --report run-1", "it is judged"
    assert ends("train.train_model", {}) == [], "the ledger dropped it"


def test_a_flow_ends_with_its_own_pages_or_the_servers_start_pages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url = "http://127.0.0.1:9"
    known = Endpoints(prefect_api_url=f"{url}/api", prefect_ui_url=url, mlflow_url=url,
                      coordinator_url=url)  # fmt: skip
    here = Runtime(profile=Profile(), state_dir=tmp_path, endpoints=known, secrets=Secrets())
    run = "run-20261120-153600-9f3a1c"
    assert _pages(here, run, {}) == {"prefect": url, "mlflow": url}, "none of them answers"
    monkeypatch.setattr(PrefectStarter, "page_of_run", lambda _self, which: f"{url}/{which}")
    assert _pages(here, run, {"links": {"prefect": url}})["prefect"] == f"{url}/{run}"


def test_a_result_is_its_flows_record_or_has_another_versions_fields() -> None:
    given = {"verified": 4, "nodes": ["n"], "seconds": 1.0, "manifest_digest": "d", "more": 1}
    found = flow_answer("verify-model", "run-1", ["a note"], given)
    assert isinstance(found, VerifyAnswer)
    assert (found.verified, found.notes, found["more"]) == (4, ("a note",), 1)
    older = flow_answer("verify-model", "run-1", None, {"verified": 4})
    assert (type(older), older["verified"], older.notes) == (FlowAnswer, 4, ())


def test_the_command_that_goes_on_names_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "lifecycle", "--data", "my texts"])
    assert again("run-1") == "paceline lifecycle --data 'my texts' --run-id run-1"
    for typed in (["--run-id=run-"], ["--run-id", "run-"]):  # a beginning, which may become two
        monkeypatch.setattr(sys, "argv", ["x", "lifecycle", *typed, "--json"])
        assert again("run-1") == "paceline lifecycle --json --run-id run-1"


def test_a_table_wider_than_the_terminal_is_a_block_a_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [("node-1", "alive", "8 × H100 " * 8), ("node-2", "lost", "x")]
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "80")
    print_table(("worker", "state", "machine"), rows)
    said = capsys.readouterr().out
    assert "node-1\n  state      alive\n" in said
    assert rows[0][2].strip() in said
    monkeypatch.setenv("COLUMNS", "160")
    print_table(("worker", "state", "machine"), rows)
    assert "━" in capsys.readouterr().out


INTO, URL, RUN = "With --into, on this machine", "With URL", "Without URL, as a run"
OF_DIRECTORY, OF_SOURCE = "A directory, with URL", "A source of a hub or registry"
NAMED = ("--model", "org/m", "--version", "1")
FORMS = {  # what is typed → headings of the command's other forms
    "distribute org/m 1": (INTO,),
    "distribute my-model --into nodes": ("Without --into, on an installation",),
    "publish my-model --model org/m --version 1": (URL, OF_DIRECTORY, OF_SOURCE),
    "publish my-model s3://b/p --model org/m --version 1": (OF_SOURCE, RUN),
    "publish hf://org/m s3://b/p": (OF_DIRECTORY, RUN),
    "cost": ("Estimate with --steps",),
    "doctor --servers": ("Without --servers",),
}


def sample(option: click.Option, path: Path) -> list[str]:
    """Return the option as it is typed, with a value that it accepts."""
    if option.is_flag:
        return [option.opts[0]]
    metavars = {"SIZE": "1GB", "SPEED": "1Gbps", "KEY=VALUE": "a.b=1", "KIND COUNT": "cpu 2"}
    number = isinstance(option.type, click.types.IntParamType | click.types.FloatParamType)
    if isinstance(option.type, click.Choice):
        value = str(option.type.choices[-1])
    else:
        kind, value = option.type, "3" if number else metavars.get(option.metavar or "")
        if isinstance(kind, click.Path):
            value = str(path if kind.dir_okay else path / "file")
    return [option.opts[0], *(value or "x").split(" ")]


@pytest.mark.parametrize("words", FORMS)
def test_an_option_of_another_form_is_refused_by_its_heading(words: str, tmp_path: Path) -> None:
    command = dict(EVERY)[words.split(maxsplit=1)[0],]
    checked = 0
    for heading in FORMS[words]:
        names = set(command.sections[heading].split()) - {"into"}  # type: ignore[attr-defined]
        for option in command.params:
            if option.name in names and isinstance(option, click.Option):
                typed = (*words.split(), *sample(option, tmp_path))
                done = paceline(*typed, PACELINE_STATE=str(tmp_path / "state"))
                assert done.returncode == 2, (typed, done.stderr)
                assert option.opts[0] in done.stderr
                assert f'to "{heading}"' in done.stderr or "installation's bucket" in done.stderr
                checked += 1
    assert checked


def test_distribute_passes_digest_and_allow_older_to_the_flow(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: dict[str, object] = {}
    monkeypatch.setattr(FlowCall, "run", lambda _self, _flow, **more: given.update(more) or 0)
    here = Runtime(
        profile=Profile(),
        state_dir=tmp_path,
        endpoints=Endpoints(prefect_api_url="http://127.0.0.1:9/api"),
        secrets=Secrets(coordinator_token="t"),
    )
    save_runtime(here)
    typed = ("distribute", "m", "1", "--digest", "ab", "--allow-older", "--state", tmp_path)
    assert paceline(*typed).returncode == 0
    assert (given["manifest_digest"], given["allow_older"]) == ("ab", True)


def test_last_is_what_this_user_made_last_on_that_installation(
    no_login: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, other = (
        Runtime(
            profile=Profile(), state_dir=tmp_path / name, endpoints=Endpoints(), secrets=Secrets()
        )
        for name in ("made", "other")
    )
    for each in (made, other):
        each.state_dir.mkdir()
        save_runtime(each)
    assert or_newest_made("s3://b/d", "url", made.state_dir) == "s3://b/d"
    remember(made, "publish.build_snapshot", {"url": "s3://b/1"})
    remember(made, "publish.build_snapshot", {"url": "s3://b/2", "notes": []})
    remember(made, "train.train_model", {"training_digest": "4" * 64, "job_id": "job-1"})
    remember(made, "train.publish_model", {"url": "s3://b/model"})
    assert or_newest_made("last", "url", made.state_dir) == "s3://b/2"
    assert or_newest_made("last", "job_id", made.state_dir) == "job-1"
    assert flows._digest_of("last", "training_digest", "train", made.state_dir) == "4" * 64
    with pytest.raises(NotFound, match="`paceline evaluate`"):  # that one was not judged
        flows._digest_of("last", "report_digest", "evaluate", made.state_dir)
    for flow, report in (("train.train_model", "6" * 64), ("evaluate.evaluate_model", "7" * 64)):
        remember(made, flow, {"report_digest": report})
        assert flows._digest_of("last", "report_digest", "evaluate", made.state_dir) == report
    assert (no_login / "paceline/last.json").stat().st_mode & 0o777 == 0o600
    with pytest.raises(NotFound, match=f"`paceline snapshot`.*{other.state_dir}"):
        or_newest_made("last", "url", other.state_dir)
    (no_login / "paceline/last.json").write_text("[")
    done = paceline("promote", "m", "--report", "last", "--state", made.state_dir)
    assert done.returncode == 1
    assert "Type `paceline evaluate` first" in done.stderr
    (no_login / "paceline/last.json").write_text(json.dumps({str(made.state_dir): "?"}))
    remember(made, "publish.build_snapshot", {"url": "s3://b/3"})
    if os.geteuid() == 0:
        os.chown(no_login / "paceline", 1, -1)
    remember(made, "publish.build_snapshot", {"url": "s3://b/3"})
    monkeypatch.setenv("XDG_CONFIG_HOME", "/proc/none")
    remember(made, "publish.build_snapshot", {"url": "s3://b/3"})  # and no error


def test_a_source_that_is_not_allowed_is_refused_before_prefect(tmp_path: Path) -> None:
    asked = {"model": "hf://org/name"}
    with pytest.raises(AccessDenied, match=r"got hf://org/name.*source_repositories"):
        require_inputs(make_runtime(tmp_path / "state"), asked)


def test_the_next_command_has_the_state_directory_that_was_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @click.command()
    @click.option("--state")
    def made(state: str | None) -> None:
        click.echo(next_line("lifecycle"))

    for words, more in (([], ""), (["--state", "a b"], " --state 'a b'")):
        monkeypatch.setattr("sys.argv", ["paceline", *words])
        said = CliRunner().invoke(made, words).output
        assert said == f"next:     paceline lifecycle{more}\n"


@pytest.mark.parametrize(
    ("given", "of"),
    [
        ({"directory": "{file}", "model_id": "m", "version": "1"}, "a model is a directory"),
        ({"data": "{file}"}, "a text is a directory"),
        ({"data": "{file}", "reading": {"format": "jsonl"}}, ""),
    ],
)
def test_a_file_where_a_directory_is_wanted_is_refused_before_prefect(
    tmp_path: Path, given: dict[str, Any], of: str
) -> None:
    (tmp_path / "one.txt").write_text("one")
    asked = {
        key: str(tmp_path / "one.txt") if value == "{file}" else value
        for key, value in given.items()
    }
    with pytest.raises(InvalidInput, match=of) if of else nullcontext():
        require_inputs(make_runtime(tmp_path / "state"), asked)
