"""The example of a GitHub Action, by its own entry script: a repository, an event, and the comment that it prints."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples" / "github_action"
ARGUMENTS = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 16 --hidden-size 2048 --num-attention-heads 32 "
    "--seq-length 4096 --max-position-embeddings 4096 --micro-batch-size {} --vocab-size 32000 --bf16\n"
)


@pytest.fixture
def repository(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A repository in which a pull request doubled the micro batch of a script, and the job's environment."""

    def git(*words: str) -> str:
        mail = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        return subprocess.run(["git", *mail, *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    (tmp_path / "launch.sh").write_text(ARGUMENTS.format(1))
    (tmp_path / "same.sh").write_text(ARGUMENTS.format(1))
    git("add", ".")
    git("commit", "-qm", "base")
    (tmp_path / "launch.sh").write_text(ARGUMENTS.format(2))
    event = tmp_path / "event.json"
    event.write_text(json.dumps({"pull_request": {"number": 7, "base": {"sha": git("rev-parse", "HEAD").strip()}}}))
    root = str(Path(__file__).parents[1])
    return tmp_path, {**os.environ, "GITHUB_EVENT_PATH": str(event), "PYTHONPATH": root}


def commented(repository: tuple[Path, dict[str, str]], *words: str) -> subprocess.CompletedProcess[str]:
    folder, environment = repository
    return subprocess.run(
        [sys.executable, str(FOLDER / "comment.py"), "--print", *words], cwd=folder, env=environment,
        capture_output=True, text=True,
    )  # fmt: skip


def test_the_comment_says_what_changed_and_which_bytes_follow(repository: tuple[Path, dict[str, str]]) -> None:
    done = commented(repository, "launch.sh", "same.sh")
    assert done.returncode == 0, done.stderr
    assert "micro\\_batch\\_size" in done.stdout and "activations: attention" in done.stdout
    assert "same.sh" not in done.stdout
    assert re.search(r"\+\d+\.\d\d GiB", done.stdout) and "<!-- bridge-memory -->" in done.stdout


def test_it_fails_where_a_peak_grows_beyond_the_tolerance(repository: tuple[Path, dict[str, str]]) -> None:
    assert commented(repository, "--tolerance", "1", "launch.sh").returncode == 1
    assert commented(repository, "--tolerance", "1", "same.sh").returncode == 0


def test_a_file_that_cannot_be_read_is_said_in_the_comment(repository: tuple[Path, dict[str, str]]) -> None:
    (repository[0] / "launch.sh").write_text("echo hello\n")
    done = commented(repository, "launch.sh", "gone.sh")
    assert done.returncode == 0 and "`launch.sh`: " in done.stdout


def test_without_a_pull_request_it_says_so(repository: tuple[Path, dict[str, str]]) -> None:
    folder, environment = repository
    del environment["GITHUB_EVENT_PATH"]
    done = commented((folder, environment), "launch.sh")
    assert done.returncode == 2 and "pull request" in done.stderr


def test_the_action_gives_its_script_what_it_takes() -> None:
    yaml = pytest.importorskip("yaml")
    action = yaml.safe_load((FOLDER / "action.yml").read_text())
    step = action["runs"]["steps"][0]
    assert {f"${{{{ inputs.{name} }}}}" for name in action["inputs"]} <= set(step["env"].values())
    assert "comment.py" in step["run"]
    (job,) = yaml.safe_load((FOLDER / "workflow.yml").read_text())["jobs"].values()
    given = job["steps"][1]["with"]
    assert set(given) <= set(action["inputs"])
