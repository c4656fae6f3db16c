"""An estimate starts in no time: nothing heavy is imported on its way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
#: Each takes longer to import than an estimate, or is shared with a training container's pins.
HEAVY = (
    "torch", "transformers", "megatron", "mbridge", "pydantic", "numpy", "huggingface_hub", "yaml", "rich",
)  # fmt: skip
COMMANDS = {
    "text": ["estimate", "meta-llama/Meta-Llama-3-8B", "--num-gpus", "8", "--tp", "2"],
    "experts": ["estimate", "deepseek-ai/DeepSeek-V3", "--tp", "2", "--pp", "16", "--ep", "64", "--etp", "1",
                "--num-gpus", "1024", "--pipeline-model-parallel-layout", "Etttt|(tttt|)*14tmL", "--verbose"],
    "json": ["estimate", "Qwen/Qwen3-30B-A3B", "--num-gpus", "8", "--ep", "8", "--json"],
    "models": ["models"],
    "gpus": ["gpus"],
    "refused": ["estimate", "meta-llama/Meta-Llama-3-8B", "--tp", "3", "--num-gpus", "3"],
}  # fmt: skip


def imported_by(code: str, *arguments: str) -> set[str]:
    """Modules, and their packages, that are loaded once ``code`` has run in a fresh interpreter, output in a pipe."""
    report = "\nimport sys; print(*sorted({n for m in sys.modules for n in (m, m.split('.')[0])}), file=sys.stderr)"
    process = subprocess.run(
        [sys.executable, "-c", code + report, *arguments], capture_output=True, text=True, cwd=ROOT, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    return set(process.stderr.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_imports_nothing_heavy(command: str) -> None:
    code = "import sys; from bridge_memory.cli import main; main(sys.argv[1:])"
    loaded = imported_by(code, *COMMANDS[command])
    assert "bridge_memory" in loaded
    assert not loaded & set(HEAVY)


def test_a_search_imports_no_more_than_numpy() -> None:
    pytest.importorskip("numpy")
    code = "import sys; from bridge_memory.cli import main; main(sys.argv[1:])"
    search = ["search", "meta-llama/Llama-3.2-1B", "--num-gpus", "2", "--gpu", "H100", "--global-batch-size", "8"]
    loaded = imported_by(code, *search) - imported_by("import numpy")  # some of its releases import all of it
    assert not loaded & {"numpy.ma", *HEAVY}


def test_the_package_imports_nothing_heavy() -> None:
    loaded = imported_by("import bridge_memory as b; b.RunSpec, b.estimate, b.resolve_model, b.list_presets()")
    assert not loaded & set(HEAVY)


def test_the_script_works_from_anywhere_without_an_installation(tmp_path: Path) -> None:
    """A fresh clone: not installed, not the current folder."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    process = subprocess.run(
        [sys.executable, "-I", "-S", str(ROOT / "scripts" / "estimate_from_hf.py"), "openai-community/gpt2"],
        capture_output=True, text=True, cwd=tmp_path, env=environment,
    )
    assert process.returncode == 0, process.stderr
    assert "124.44 M parameters" in process.stdout


def test_a_terminal_is_served_without_rich_too(tmp_path: Path) -> None:
    """A clone without an installation may have no rich: the terminal then gets plain text, not a traceback."""
    code = (
        "import io, sys; sys.modules['rich'] = None\n"
        "class Terminal(io.StringIO):\n"
        "    def isatty(self): return True\n"
        "from bridge_memory.report.document import Bullets\n"
        "from bridge_memory.report.printing import print_blocks\n"
        "out = Terminal(); print_blocks([Bullets('Assumed', ('nothing',))], out)\n"
        "assert '  - nothing' in out.getvalue()"
    )
    imported_by(code)


def test_what_the_face_names_is_there() -> None:
    import bridge_memory

    assert all(hasattr(bridge_memory, name) for name in bridge_memory.__all__)
    assert callable(bridge_memory.estimate)
    assert issubclass(bridge_memory.SpecError, ValueError)
