"""What the commands answer: exit code and words."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmtrain_operator.cli import run
from llmtrain_operator.cli.main import main
from llmtrain_operator.cli.say import UsageError

JOB: dict[str, Any] = {
    "apiVersion": "llmtrain.dev/v1alpha1",
    "kind": "LLMTrainJob",
    "metadata": {"name": "hello"},
    "spec": {
        "workers": {"image": "image", "accelerator": {"count": 0}, "device": "cpu"},
        "model": {"preset": "tiny"},
        "training": {"steps": 10},
        "data": {"sources": [{"uri": "builtin://python-stdlib"}]},
        "checkpoint": {"store": "pvc://checkpoints/hello"},
    },
}
GOOD = json.dumps(JOB)
HUGE = {"model": {"preset": "llama-8b"}, "parallelism": {"planFor": "cpu"}}
"""For the planner there is no layout that fits."""
MISTAKES = """
apiVersion: llmtrain.dev/v1alpha1
kind: LLMTrainJob
metadata: {name: hello}
spec:
  workers: {replicas: 0, image: image}
  model: {presett: tiny}
  training: {steps: 10, optimizer: {learningRate: 6e-5}}
  data: {sources: [{uri: "s3://bucket"}]}
  checkpoint: {store: "pvc://checkpoints/hello"}
"""


def with_spec(**fields: Any) -> str:
    return json.dumps({**JOB, "spec": {**JOB["spec"], **fields}})


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(text: str | bytes, name: str = "job.yaml") -> str:
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return write


# --- validate


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        (GOOD, 0, "hello: valid"),
        (f"{GOOD}\n---\n{GOOD}", 0, "(document 2): hello: valid"),
        (f"---\n{GOOD}\n---\n", 0, "hello: valid"),
        ("", 2, "holds no document; write one LLMTrainJob"),
        ("# nothing", 2, "holds no document"),
        ("a: [1", 2, "no valid YAML"),
        ("a: 1\na: 2", 2, "keep one of the two"),
        ("- a", 2, "is a list, not a mapping"),
        ("just words", 2, "is a text, not a mapping"),
        (b"\xff\xfe\xfa", 2, "job.yaml"),
        (GOOD.replace("LLMTrainJob", "LLMTrainJobs"), 1, "kind"),
        ("metadata: 3", 1, "(no name): "),
        ("metadata: {generateName: hello-}", 1, "hello-"),
    ],
    ids=[
        "valid",
        "two documents",
        "empty documents beside it",
        "empty file",
        "only a comment",
        "no YAML",
        "a key twice",
        "a list",
        "a text",
        "no text",
        "another kind",
        "no name",
        "a generated name",
    ],
)
def test_validate(text: str | bytes, code: int, said: str, write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", write(text)]) == code
    output = capsys.readouterr()
    assert said in (output.out if code < 2 else output.err)


def test_validate_shows_all_mistakes_with_field_value_allowed_and_fix(
    write: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", write(MISTAKES)]) == 1
    output = capsys.readouterr().out
    for field, value, fix in (
        ("spec.workers.replicas", "0", "change the value"),
        ("spec.model.presett", "presett", "did you mean preset?"),
        ("spec.data.sources[0].uri", "s3://bucket", ""),
    ):
        [line] = [line for line in output.splitlines() if line.strip().startswith(f"{field}:")]
        assert value in line
        assert "allowed: " in line
        assert f"fix: {fix}" in line
    assert "learningRate" not in output, "6e-5 is a number"


def test_validate_says_that_the_planner_finds_no_layout(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", write(with_spec(**HUGE))]) == 1
    said = capsys.readouterr().out
    assert "spec.parallelism.planFor: no layout fits cpu; allowed: 8.0 GB for all ranks of a worker together;" in said
    assert " GB a rank, " in said and "; fix: " in said


def test_validate_goes_on_after_a_file_that_cannot_be_read(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "/nowhere/job.yaml", write(MISTAKES), write(GOOD, "good.yaml")]) == 2
    output = capsys.readouterr()
    assert "/nowhere/job.yaml: No such file or directory" in output.err
    assert "spec.workers.replicas" in output.out
    assert "good.yaml: hello: valid" in output.out


def test_validate_reads_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(GOOD))
    assert main(["validate", "-"]) == 0
    assert "-: hello: valid" in capsys.readouterr().out


def test_a_folder_is_no_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(tmp_path)]) == 2
    assert "Is a directory" in capsys.readouterr().err


def test_validate_needs_only_the_base_packages(write: Any) -> None:
    blocked = ("aiohttp", "kopf", "kubernetes", "torch", "prometheus_client")
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked}))\n"
        "from llmtrain_operator.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program]
    file = write(GOOD)
    assert subprocess.run([*command, "validate", file], check=False).returncode == 0
    refused = subprocess.run([*command, "run", "--local", file], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "aiohttp is not installed: pip install 'llmtrain[operator,trainer]'" in refused.stderr


def test_validate_shows_the_mistakes_beside_a_document_that_is_none(
    write: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", write(f"{GOOD}\n---\n{MISTAKES}\n---\nwords\n---\n{GOOD}\n---\na: [1")]) == 2
    output = capsys.readouterr()
    assert "(document 1): hello: valid" in output.out
    assert "spec.model.presett" in output.out
    assert "(document 4): hello: valid" in output.out
    assert "document 3 is a text, not a mapping" in output.err
    assert "no valid YAML" in output.err


@pytest.mark.parametrize(
    ("file", "fix"),
    [
        ("/nowhere/job.yaml", "No such file or directory; give the path of a file that exists"),
        ("/", "Is a directory; give the files in it"),
        ("/proc/version/job.yaml", "Not a directory; give a file that you can read"),
    ],
)
def test_a_file_that_cannot_be_read_has_a_fix(file: str, fix: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", file]) == 2
    assert f"{file}: {fix}" in capsys.readouterr().err


def test_a_file_that_is_no_utf_8_has_a_fix(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", write(b"a: \xff")]) == 2
    assert "is no UTF-8 text (byte 0xff at 3); save it as UTF-8" in capsys.readouterr().err


# --- run


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        (f"{GOOD}\n---\n{GOOD}", [], "holds 2 documents; give one job at a time"),
        (MISTAKES, [], "spec.workers.replicas"),
        (with_spec(suspend=True), [], "spec.suspend is true"),
        (with_spec(managedBy="kueue.example/controller"), [], "spec.managedBy is 'kueue.example/controller'"),
        (json.dumps({**JOB, "metadata": {"generateName": "a-"}}), [], "metadata.name is missing"),
        (with_spec(**HUGE), [], "spec.parallelism.planFor: no layout fits cpu; allowed: 8.0 GB for all ranks"),
        (GOOD, ["--volume", "nonsense"], "must be CLAIM=FOLDER"),
        (GOOD, ["--volume", "=x"], "must be CLAIM=FOLDER"),
        (GOOD, ["--volume", "a=/x", "--volume", "a=/y"], "give it once"),
        (GOOD, ["--volume", "corpus=/tmp"], "the job uses no claim 'corpus'"),
        (GOOD, ["--volume", "checkpoints=/nowhere/at/all"], "there is no such folder"),
        (GOOD, ["--state", "/proc/version"], "--state /proc/version"),
    ],
    ids=[
        "two documents",
        "mistakes",
        "suspended",
        "another manager",
        "no name",
        "no layout for the planner to choose",
        "volume without claim",
        "volume with an empty claim",
        "volume twice",
        "volume of no claim",
        "volume without folder",
        "state is a file",
    ],
)
def test_run_refuses(
    text: str, options: list[str], said: str, write: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = [] if "--state" in options else ["--state", str(tmp_path / "state")]
    assert main(["run", "--local", write(text), *state, *options]) == 2
    assert said in capsys.readouterr().err


def test_run_needs_local(write: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", write(GOOD)])
    assert ended.value.code == 2


def test_run_names_the_extra_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from llmtrain_api.job import LLMTrainJob

    monkeypatch.setattr(run, "NEEDED_MODULES", ("no_such_module",))
    with pytest.raises(
        UsageError, match=r"no_such_module is not installed: pip install 'llmtrain\[operator,trainer\]'"
    ):
        run.refuse_what_would_not_run(LLMTrainJob.parse(JOB))


# --- what comes in and goes out

PROGRAM = "import sys; from llmtrain_operator.cli.main import main; sys.exit(main(sys.argv[1:]))"


def shell(line: str, file: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["sh", "-c", f'"$0" -c "$1" {line}', sys.executable, PROGRAM, file]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
def test_a_full_disk_is_no_traceback(unbuffered: str, write: Any) -> None:
    done = shell('validate "$2" > /dev/full', write(GOOD), PYTHONUNBUFFERED=unbuffered)
    assert (done.returncode, done.stderr) == (
        1,
        "llmtrain validate: standard output: No space left on device; write it where there is space\n",
    )


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("validate - <&-", 2, "-: standard input is closed; pipe a manifest into it, or give a file\n"),
        ('validate "$2" >&-', 0, ""),
        ("validate /nowhere >&- 2>&-", 2, ""),
        ("validate /nowhere 2>/dev/full", 2, ""),
    ],
    ids=["input", "output", "output and errors", "errors full"],
)
def test_a_closed_stream_is_no_traceback(line: str, code: int, said: str, write: Any) -> None:
    done = shell(line, write(GOOD))
    assert (done.returncode, done.stderr) == (code, said)


@pytest.mark.parametrize(("name", "shown"), [("\\uD800", "\\ud800"), ("\\u00e9", "\\xe9")], ids=["surrogate", "accent"])
def test_what_the_terminal_cannot_show_is_escaped(name: str, shown: str, write: Any) -> None:
    done = shell('validate "$2"', write(GOOD.replace('"hello"', f'"{name}"')), PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (1, "")
    assert f"{shown}: 1 problem" in done.stdout


def test_a_closed_pipe_is_no_traceback(write: Any) -> None:
    file = write(GOOD)
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "validate", *[file] * 3], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1
