"""Programs in processes of their own that need not import torch again: forks of a process that has.

What imports torch, transformers and DeepSpeed starts in five seconds of a processor's time; a fork has them at once,
and nothing of what another fork made of them.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

#: Imports the modules that it is given, then forks for each line of stdin. What modules print when they are imported
#: does not get among the answers: an exit code a line.
_SERVER = """
import importlib, json, os, sys, traceback, warnings

warnings.simplefilter("ignore")
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
for name in sys.argv[1:]:
    importlib.import_module(name)
for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if not child:
        for stream in (1, 2):
            os.dup2(os.open(job["files"][stream - 1], os.O_WRONLY), stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        code = 0
        try:
            exec(compile(job["program"], "<program>", "exec"), {"__name__": "__main__"})
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answers, flush=True)
"""
ROOT = Path(__file__).resolve().parents[1]


@cache
def _server(modules: tuple[str, ...]) -> subprocess.Popen[str]:
    """It ends with this process, which closes its stdin."""
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    return subprocess.Popen(
        [sys.executable, "-c", _SERVER, *modules], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True, bufsize=1, cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": path},
    )  # fmt: skip


def run(program: str, *modules: str, seconds: float = 900) -> subprocess.CompletedProcess[str]:
    """``program`` in a fork of a process that imported ``modules``. Raises TimeoutError."""
    server = _server(modules)
    assert server.stdin is not None and server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / "out", Path(folder) / "err"]
        for file in files:
            file.touch()
        server.stdin.write(json.dumps({"program": program, "files": list(map(str, files))}) + "\n")
        if not select.select([server.stdout], [], [], seconds)[0]:
            server.kill()
            _server.cache_clear()
            raise TimeoutError(f"no end within {seconds:g} s of {program}")
        code = server.stdout.readline()
        assert code, f"no process that imports {', '.join(modules)}"
        out, err = (file.read_text(encoding="utf-8") for file in files)
        return subprocess.CompletedProcess(program, int(code), out, err)
