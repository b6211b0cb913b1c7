"""`sdmlm serve` as a process: ready, stopping, and what it says when it cannot start."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from cli_checks import fails
from server_checks import ask, chat, process, trained, wait_until

from sdmlm import SDMEstimator


def test_it_finishes_what_it_has_begun_and_logs_no_text(tmp_path: Path) -> None:
    folder = shutil.copytree(trained(), tmp_path / "my-model")
    with process(str(folder), "--alpha", "0.7") as (running, url), ThreadPoolExecutor(4) as pool:
        assert ask(url, "/v1/models").json["data"][0]["id"] == "my-model"
        assert ask(url, "/v1/sdm").json["alpha"] == 0.7
        assert chat(url, "abc=").json["choices"][0]["sdm"]["alpha"] == 0.7
        assert chat(url, "secretsecret" * 40).status == 400
        # More rows than a batch holds: some run, others wait.
        long = [pool.submit(chat, url, "abc=", n=60, temperature=2.0, max_tokens=60) for _ in range(3)]
        wait_until(lambda: b"sdmlm_queue_length 0" not in ask(url, "/metrics").body)
        running.send_signal(signal.SIGTERM)
        answers = [each.result() for each in long]
        assert [a.status for a in answers] == [200] * 3
        assert all(len(a.json["choices"]) == 60 for a in answers)
        assert running.wait(30) == 0
        with pytest.raises(OSError, match="refused"):
            ask(url, "/health")
        assert running.stdout is not None
        assert running.stderr is not None
        assert "secret" not in running.stdout.read() + running.stderr.read()


def test_the_key_comes_from_the_environment() -> None:
    with process(str(trained()), env={"SDMLM_API_KEY": "secret"}) as (running, url):
        assert ask(url, "/v1/models").status == 401
        assert ask(url, "/v1/models", headers={"Authorization": "Bearer secret"}).status == 200
        running.send_signal(signal.SIGINT)
        assert running.wait(30) == 0


def test_a_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = fails(capsys, "serve", "no model is loaded for this", "--port", port)
    assert f"port {port} (Address already in use)" in said
    assert "--port" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--port", "99999"], "port is 99999"),
        (["--host", "nowhere.invalid"], "The host nowhere.invalid is not known"),
        (["--max-batch", "0"], "max_batch is 0"),
        (["--timeout", "-1"], "timeout is -1"),
        (["--upstream", "localhost"], "is no address"),
        (["--upstream", "http://localhost/v1"], "--upstream-model"),
        (["--upstream-model", "m"], "go only with --upstream"),
        (
            ["--upstream", "http://x/v1", "--upstream-model", "m", "--upstream-api-key-env", "SDMLM_NO_SUCH"],
            "SDMLM_NO_SUCH",
        ),
        (["--api-key", ""], "API key"),
        (["--alpha", "0.3"], "alpha"),
        (["--device", "nonsense"], "nonsense"),
    ],
)
def test_bad_options(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert said in fails(capsys, "serve", str(trained()), "--port", "0", *arguments)


def test_models_that_cannot_be_served(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def refused(folder: Path) -> str:
        return fails(capsys, "serve", str(folder), "--port", "0")

    assert "missing" in refused(tmp_path / "missing")
    folder = Path(shutil.copytree(trained(), tmp_path / "model"))
    (tensors,) = (folder / "sdm").glob("*.safetensors")
    whole = tensors.read_bytes()
    tensors.write_bytes(whole[:-8])
    assert "sdm" in refused(folder)
    tensors.write_bytes(whole)
    (folder / "sdm" / "lm.json").write_text("{")
    assert "sdm" in refused(folder)
    shutil.rmtree(folder / "sdm")
    assert "sdmlm calibrate" in refused(folder)


def test_help_comes_at_once() -> None:
    code = (
        "import sys\nfrom sdmlm.cli import main\n"
        "try: main(['serve', '--help'])\n"
        "finally: print({'torch', 'transformers', 'fastapi', 'uvicorn', 'numpy'} & {*sys.modules}, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "set()\n"
    for option in ("--host", "--port", "--api-key", "--upstream-model", "--max-queue", "--timeout", "examples:"):
        assert option in done.stdout


def test_an_empty_key_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It would look protected and be open to anybody."""
    for empty in ("", " "):
        monkeypatch.setenv("SDMLM_API_KEY", empty)
        assert "SDMLM_API_KEY is set but empty" in fails(capsys, "serve", str(tmp_path))
    monkeypatch.delenv("SDMLM_API_KEY")
    assert "must be plain characters" in fails(capsys, "serve", str(tmp_path), "--api-key", "")


def test_the_folder_of_an_estimator_is_called_by_its_name(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 40)
    X = rng.normal(size=(40, 4)) + 3 * y[:, None]
    SDMEstimator.published(exemplar_dim=4, epochs=1, rounds=1, progress=False).fit(X, y).save_pretrained(
        tmp_path / "estimator"
    )
    said = fails(capsys, "serve", str(tmp_path / "estimator"), "--port", "0")
    assert "is a saved SDMEstimator, which judges embeddings, not a language model" in said
    assert "sdmlm score" in said
    assert "calibrate" not in said


@pytest.mark.skipif(sys.platform != "linux", reason="--restart works on Linux")
def test_restart(tmp_path: Path) -> None:
    """Killed, it is there again on the same port, with the feedback; clients that come meanwhile wait."""
    folder = shutil.copytree(trained(), tmp_path / "model")
    given = {"prompt": "abc=", "completion": "abd.", "label": False}

    def child_of(running: subprocess.Popen[str]) -> int:
        children = Path(f"/proc/{running.pid}/task/{running.pid}/children")
        wait_until(lambda: children.read_text() != "")
        return int(children.read_text())

    with process(str(folder), "--restart") as (running, url):
        first = child_of(running)
        id = ask(url, "/v1/feedback", given).json["id"]
        os.kill(first, signal.SIGKILL)
        assert chat(url, "abc=").status == 200  # it waited
        assert child_of(running) != first
        document = {"prompt": "abc=", "completion": "abd.", "sdm": {"neighbors": 1}}
        assert ask(url, "/v1/verify", document).json["data"][0]["exemplars"][0]["id"] == id
        assert ask(url, "/v1/feedback", given).json["id"] == id
        running.send_signal(signal.SIGINT)
        assert running.wait(60) == 0
        assert running.stderr is not None
        assert "the server was killed (signal 9): starting it again" in running.stderr.read()
    with process(str(folder), "--restart") as (running, url):
        running.kill()  # nobody is left to start it again: the child ends too

        def gone() -> bool:
            try:
                return ask(url, "/health").status == 0
            except OSError:
                return True

        wait_until(gone, 60)


@pytest.mark.skipif(sys.platform != "linux", reason="--restart works on Linux")
def test_restart_passes_on_what_went_wrong(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sdmlm.cli", "serve", str(tmp_path), "--port", "0", "--restart"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "has no sdm/ folder" in done.stderr
    assert done.stderr.count("sdmlm:") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="--restart works on Linux")
@pytest.mark.parametrize(
    ("serve", "status", "said"),
    [
        ("os.kill(os.getpid(), 9)", 1, "The server was killed 5 times in a row (signal 9): giving up."),
        ("sys.exit(3)", 3, ""),
        ("None", 0, ""),
    ],
)
def test_a_server_that_is_killed_again_and_again(serve: str, status: int, said: str) -> None:
    code = (
        "import os, sys\nfrom sdmlm.server import supervisor\nsupervisor.NEEDED = ()\n"
        f"supervisor.keep_running(lambda: {serve}, print)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == status
    assert said in done.stderr
    assert done.stdout.count("starting it again") == (4 if said else 0)
