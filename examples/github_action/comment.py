"""Comment on a pull request what it changes in the memory of training configurations.

    python comment.py [--gpu H100] [--with "--num-gpus 64"] [--tolerance PERCENT] [--print] FILE...

In a job of GitHub Actions it reads the event (GITHUB_EVENT_PATH) for the pull request and its base, and writes one
comment, which it replaces when the pull request changes. ``--print`` writes the comment to standard output instead.
Exit codes: 0, 1 where a peak grows by more than ``--tolerance``, 2 for wrong input.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

#: By which the comment is found again; not seen.
MARK = "<!-- bridge-memory -->"
TITLE = "### GPU memory"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--gpu", default="H100")
    parser.add_argument("--with", dest="also", default="", metavar="FLAGS")
    parser.add_argument("--tolerance", default="", metavar="PERCENT")
    parser.add_argument("--print", action="store_true", dest="printed")
    args = parser.parse_args(argv)
    try:
        event = json.loads(Path(os.environ["GITHUB_EVENT_PATH"]).read_text())
        base, number = event["pull_request"]["base"]["sha"], event["pull_request"]["number"]
    except (KeyError, OSError, ValueError) as error:
        print(f"comment.py: no pull request ({error}); run it on: pull_request", file=sys.stderr)
        return 2
    parts, worst = [], 0
    for name in args.files:
        text, code = section(name, base, args)
        worst = max(worst, code)
        parts += [text] if text else []
    body = "\n\n".join([MARK, TITLE, *(parts or ["No configuration changed."])]) + "\n"
    if args.printed:
        print(body, end="")
    else:
        comment(body, number)
    return worst


def section(name: str, base: str, args: argparse.Namespace) -> tuple[str, int]:
    """(Markdown of one file, "" where it did not change; exit code)."""
    after = Path(name)
    shown = subprocess.run(["git", "show", f"{base}:{name}"], capture_output=True)
    before = shown.stdout if shown.returncode == 0 else None
    now = after.read_bytes() if after.is_file() else None
    if before == now:
        return "", 0
    if now is None:
        return f"`{name}` is gone.", 0
    with tempfile.TemporaryDirectory() as folder:
        words = ["--gpu", args.gpu, "--with", args.also, "--format", "md"]
        if args.tolerance:
            words += ["--tolerance", args.tolerance]
        old = Path(folder) / f"before_{after.name}"
        old.write_bytes(now if before is None else before)
        done = subprocess.run(
            [sys.executable, "-m", "bridge_memory", "diff", str(old), str(after), *words],
            capture_output=True, text=True,
        )  # fmt: skip
    if done.returncode not in (0, 1):
        return f"`{name}`: {done.stderr.strip().rpartition('error: ')[2]}", 0
    new = " (new: compared with itself)" if before is None else ""
    text = f"<details open><summary><code>{name}</code>{new}</summary>\n\n{done.stdout.strip()}\n\n</details>"
    return text, done.returncode


def comment(body: str, number: int) -> None:
    """Write the comment, or replace the one that an earlier run wrote."""
    root = f"{os.environ.get('GITHUB_API_URL', 'https://api.github.com')}/repos/{os.environ['GITHUB_REPOSITORY']}/issues"
    known = [one for one in asked("GET", f"{root}/{number}/comments?per_page=100") if MARK in one.get("body", "")]
    if known:
        asked("PATCH", f"{root}/comments/{known[0]['id']}", {"body": body})
    else:
        asked("POST", f"{root}/{number}/comments", {"body": body})


def asked(method: str, address: str, data: dict[str, str] | None = None) -> Any:
    request = urllib.request.Request(
        address, method=method, data=None if data is None else json.dumps(data).encode(),
        headers={"Authorization": f"Bearer {os.environ['GITHUB_TOKEN']}", "Accept": "application/vnd.github+json"},
    )  # fmt: skip
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


if __name__ == "__main__":
    sys.exit(main())
