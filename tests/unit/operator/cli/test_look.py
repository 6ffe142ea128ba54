"""`llmtrain status`: of a local run from its folder, of a cluster's job over HTTP."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from llmtrain_operator.cli import look
from llmtrain_operator.cli.main import main
from llmtrain_operator.local.records import Records
from tests.support.jobs import make_job

PATH = "/apis/llmtrain.dev/v1alpha1/namespaces/lab/llmtrainjobs/demo"


def manifest(state: str, **status: Any) -> dict[str, Any]:
    return {**make_job("demo", "lab").build().to_wire(), "status": {"state": state, **status}}


# --- on this machine


@pytest.fixture
def records(tmp_path: Path) -> Records:
    made = Records(tmp_path, "lab", "demo")
    made.folder.mkdir()
    return made


def local(tmp_path: Path, *options: str) -> int:
    return main(["status", "demo", "--local", "-n", "lab", "--state", str(tmp_path), *options])


def test_a_local_run_with_the_losses_of_its_store(
    records: Records, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = {"step": 2, "steps": 100, "tokens": "1", "loss": "1", "tokensPerSecond": "1"}
    at = {"updatedAt": "2026-11-30T10:20:30Z"}
    records.save_job(manifest("Training", progress={**progress, **at}))
    records.save_volumes({"checkpoints": str(tmp_path)})
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "metrics.jsonl").write_text('{"step": 1, "loss": 2}\n{"step": 2, "loss": 1}\n')
    assert local(tmp_path) == 0
    output = capsys.readouterr().out
    assert "lab/demo  Training" in output
    assert "\u2588\u2581" in output


@pytest.mark.parametrize(("state", "code"), [("Succeeded", 0), ("Failed", 1)])
def test_watching_ends_with_the_job(state: str, code: int, records: Records, tmp_path: Path) -> None:
    records.save_job(manifest(state))
    assert local(tmp_path, "-w") == code
    assert local(tmp_path) == 0, "without watching, that it can be shown is success"


def test_no_such_local_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert local(tmp_path) == 2
    assert "lab.demo holds no job; start one with `llmtrain run --local FILE`" in capsys.readouterr().err


def test_a_damaged_local_run(records: Records, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (records.folder / "job.json").write_text("{")
    assert local(tmp_path) == 2
    assert "job.json is damaged" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"status": {"attempt": "many"}}, "is damaged (status.attempt: Input should be a valid integer"),
        ({"spec": {}}, "is damaged (spec.workers: Field required; "),
    ],
    ids=["status", "spec"],
)
def test_a_damaged_job_has_its_fields_named(
    change: dict[str, Any], said: str, records: Records, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records.save_job({**manifest("Training"), **change})
    assert local(tmp_path) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert said in line


def test_a_damaged_job_nested_too_deep(records: Records, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (records.folder / "job.json").write_text("[" * 100_000)
    assert local(tmp_path) == 2
    assert "job.json is damaged" in capsys.readouterr().err


DESERTED = "no controller is alive; go on with the same `llmtrain run --local` command"


@pytest.mark.parametrize("lock", [True, False], ids=["lock let go", "no lock"])
def test_a_job_that_nobody_controls(
    lock: bool, records: Records, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if lock:
        records.acquire()
        records.release()
    records.save_job(manifest("Training"))
    assert local(tmp_path) == 0
    assert DESERTED in capsys.readouterr().out.splitlines()
    assert local(tmp_path, "-w") == 1
    assert DESERTED in capsys.readouterr().out.splitlines()
    records.acquire()  # looking holds nothing


@pytest.mark.parametrize("state", ["Training", "Succeeded"])
def test_a_job_that_is_controlled_or_has_ended_is_not_deserted(
    state: str, records: Records, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if state == "Training":
        records.acquire()
    records.save_job(manifest(state))
    assert local(tmp_path) == 0
    assert DESERTED not in capsys.readouterr().out
    records.release()


def test_watching_ends_when_the_controller_does(
    records: Records, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def sleep(seconds: float) -> None:
        shown.append(capsys.readouterr().out)
        if len(shown) == 3:
            records.release()

    shown: list[str] = []
    monkeypatch.setattr(look.time, "sleep", sleep)
    records.acquire()
    records.save_job(manifest("Training"))
    assert local(tmp_path, "-w") == 1
    assert "lab/demo  Training" in shown[0], "through a pipe the first screen comes at once"
    assert shown[1:] == ["", ""], "the same is not shown again"
    assert DESERTED in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("name", ["..", "a/b", ""])
def test_what_is_no_name_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", name, "--local", "--state", str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


# --- on a cluster


class Cluster:
    """An API server that gives one answer after the other; the last one again and again."""

    def __init__(self, answers: list[tuple[int, dict[str, Any]]]) -> None:
        self.answers = answers
        self.asked: list[str] = []
        cluster = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                cluster.asked.append(self.path)
                answers = cluster.answers
                status, body = answers.pop(0) if len(answers) > 1 else answers[0]
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def kubeconfig(self, folder: Path) -> str:
        host, port = self.server.server_address[:2]
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": f"http://{host!s}:{port}"}}],
            "users": [{"name": "test", "user": {"token": "token"}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": "lab"}}],
        }
        file = folder / "kubeconfig"
        file.write_text(json.dumps(config))
        return str(file)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    made: list[Cluster] = []
    monkeypatch.setattr(look, "PERIOD_SECONDS", 0.01)

    def make(*answers: tuple[int, dict[str, Any]]) -> Cluster:
        made.append(Cluster(list(answers)))
        return made[-1]

    yield make
    for each in made:
        each.server.shutdown()
        each.server.server_close()


def test_a_job_of_the_context_s_namespace(cluster: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = cluster((200, manifest("Training")))
    assert main(["status", "demo", "--kubeconfig", server.kubeconfig(tmp_path)]) == 0
    assert server.asked == [PATH]
    assert "lab/demo  Training" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (404, "lab/demo: 404 Not Found; kubectl get llmtrainjobs -A lists all jobs"),
        (403, "lab/demo: 403 Forbidden; ask for the right to get llmtrainjobs"),
        (503, "the API server answers 503"),
    ],
)
def test_answers_without_a_job(
    status: int, said: str, cluster: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = cluster((status, {}))
    assert main(["status", "demo", "--kubeconfig", server.kubeconfig(tmp_path)]) == 2
    assert said in capsys.readouterr().err


def test_an_object_that_is_no_job(cluster: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = cluster((200, {"kind": "LLMTrainJob", "metadata": {"name": "demo"}}))
    assert main(["status", "demo", "--kubeconfig", server.kubeconfig(tmp_path)]) == 2
    assert "lab/demo cannot be read" in capsys.readouterr().err


def test_nobody_listens(cluster: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = cluster((200, {}))
    file = server.kubeconfig(tmp_path)
    server.server.shutdown()
    server.server.server_close()
    assert main(["status", "demo", "--kubeconfig", file]) == 2
    assert "the cluster cannot be reached" in capsys.readouterr().err


def test_no_kubeconfig(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "demo", "--kubeconfig", str(tmp_path / "none")]) == 2
    assert "--kubeconfig: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        "x",
        "clusters: [",
        "[]",
        "\xff",
        "current-context: a\ncontexts: [1]\n",
        "{current-context: a, contexts: [{name: a, context: 5}]}",
        "{current-context: a, contexts: [{name: a, context: {cluster: c, user: u}}], "
        "clusters: [{name: c, cluster: {server: 5}}], users: [{name: u, user: {}}]}",
    ],
    ids=["text", "no YAML", "list", "no UTF-8", "contexts", "context", "server"],
)
def test_a_file_that_is_no_kubeconfig(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config"
    file.write_bytes(text.encode("latin-1"))
    assert main(["status", "demo", "--kubeconfig", str(file)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert str(file) in line
    assert line.endswith("; give the file of a cluster that runs llmtrain, or --local")


def test_watching_waits_out_an_api_server_that_is_away(cluster: Any, tmp_path: Path) -> None:
    server = cluster(
        (200, manifest("Training")), (503, {}), (429, {}), (200, manifest("Restarting")), (200, manifest("Failed"))
    )
    assert main(["status", "demo", "-w", "--kubeconfig", server.kubeconfig(tmp_path)]) == 1
    assert len(server.asked) >= 5


def test_what_cannot_be_read_is_shown_as_last_seen() -> None:
    job = make_job("demo", "lab").build()
    console = Console(record=True, width=120)
    console.print(look._stale(look.Sight(job, ()), look.Away("the cluster cannot be reached: timed out")))
    text = console.export_text()
    assert "lab/demo" in text
    assert "as last seen; the cluster cannot be reached: timed out; trying again" in text
