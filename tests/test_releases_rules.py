"""Rules that depend on a release: named in one place, each used, and one policy for releases nobody knows."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import bridge_memory
from bridge_memory import releases
from bridge_memory.cli import main
from bridge_memory.estimation import estimate, explain
from bridge_memory.readers.megatron_args import run_from_megatron_args
from bridge_memory.releases import RELEASES, Rule, Running, parse_release, release_in, since
from bridge_memory.spec import ImplementationSpec, RunSpec, SpecError

PACKAGE = Path(bridge_memory.__file__).parent
RULES = {name: rule for name, rule in vars(releases).items() if isinstance(rule, Rule)}
#: Where the estimate is made: releases are asked there by the name of a rule only.
ESTIMATE = ("inventory", "workspaces", "engines", "spec", "schedule")
MIB = 1 << 20


def sources() -> list[Path]:
    return [path for path in PACKAGE.rglob("*.py") if path != Path(releases.__file__)]


# ---- one place ----


@pytest.mark.slow
def test_every_rule_is_used() -> None:
    nodes = (node for path in sources() for node in ast.walk(ast.parse(path.read_text())))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    assert len(RULES) > 30
    assert not RULES.keys() - names


def compares_a_release(node: ast.AST) -> bool:
    """A comparison by size with two whole numbers, or with what is called a release."""
    if not isinstance(node, ast.Compare) or not any(
        isinstance(op, (ast.Lt, ast.LtE, ast.Gt, ast.GtE)) for op in node.ops
    ):
        return False
    sides = [node.left, *node.comparators]
    fields = ("megatron_core", "transformer_engine", "torch")
    return any(
        (isinstance(x, ast.Tuple) and len(x.elts) == 2 and all(isinstance(e, ast.Constant) for e in x.elts))
        or (isinstance(x, ast.Attribute) and x.attr in fields)
        for x in sides
    )


def test_no_release_is_compared_outside() -> None:
    assert compares_a_release(ast.parse("core < (0, 14)", mode="eval").body)
    assert compares_a_release(ast.parse("impl.megatron_core >= SINCE", mode="eval").body)
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in sources()
        if path.relative_to(PACKAGE).parts[0] in ESTIMATE
        for node in ast.walk(ast.parse(path.read_text()))
        if compares_a_release(node)
    ]
    assert found == []


def test_every_rule_has_a_comment_above() -> None:
    lines = Path(releases.__file__).read_text().splitlines()
    for name in RULES:
        at = next(n for n, line in enumerate(lines) if line.startswith(f"{name} = "))
        assert lines[at - 1].startswith("#: ")


# ---- the policy ----


def test_a_rule_holds_from_its_release_on() -> None:
    rule = since(core=(0, 15))
    assert [rule(Running(core)) for core in ((0, 14), (0, 15), (0, 16))] == [False, True, True]
    both = since(core=(0, 14), te=(2, 6))
    assert both(Running((0, 14), (2, 6))) and both(Running((0, 14)))
    assert not both(Running((0, 13), (2, 6))) and not both(Running((0, 14), (2, 5)))


@pytest.mark.parametrize("name", RULES)
def test_unknown_releases_are_their_nearest_known_ones(name: str) -> None:
    rule = RULES[name]
    oldest, newest = RELEASES
    assert rule.core is None or oldest < rule.core <= newest
    assert rule(Running((9, 9))) == rule(Running(newest))
    assert rule(Running((0, 1))) == rule(Running(oldest))
    # An unset Transformer Engine or PyTorch is today's.
    measured_te = Running(newest, releases.DEFAULT_TRANSFORMER_ENGINE)
    measured_torch = Running(newest, None, releases.DEFAULT_TORCH)
    assert rule(Running(newest)) == rule(measured_te) == rule(measured_torch)


def test_a_rule_says_its_releases_in_words() -> None:
    assert str(since(core=(0, 14), te=(2, 6))) == "megatron-core 0.14 and Transformer Engine 2.6"
    assert (str(since(torch=(2, 12))), since(core=(0, 9)).number) == ("PyTorch 2.12", "0.9")


# ---- texts ----


@pytest.mark.parametrize(
    ("text", "release"),
    [
        ("0.16", (0, 16)), ("0.16.1", (0, 16)), ("v0.16.1", (0, 16)), ("0.15.0rc8", (0, 15)), ("0.16rc0", (0, 16)),
        ("2.9.0a0+145a3a7bda.nv25.10", (2, 9)), ("2.13.0+cpu", (2, 13)), ("2.11.0+4329ff8", (2, 11)), (" 2.5 ", (2, 5)),
        ("2.14.0.dev20260701+cu130", (2, 14)), ("1.13.0.post1", (1, 13)),
    ],
)  # fmt: skip
def test_texts_of_releases(text: str, release: tuple[int, int]) -> None:
    assert parse_release(text) == release_in(text) == release


@pytest.mark.parametrize(
    "text", ["", "2", "two", "2.", ".16", "0.16x", "0.16 or so", "-0.16", "0,16", "0.1_6", "\u0662.\u0663", "main",
             "99999.1", "0.16\n0.17", "x" * 500],
)  # fmt: skip
def test_texts_that_are_no_release(text: str) -> None:
    with pytest.raises(ValueError, match=r"^torch .*is not a release such as 2\.11$") as error:
        parse_release(text, "torch")
    assert "\n" not in str(error.value) and len(str(error.value)) < 100
    assert release_in(text) is None


def test_what_says_no_release_is_none() -> None:
    assert release_in(None) is None


# ---- the ways in ----

RUN = ["estimate", "Qwen3-8B", "--num-gpus", "8", "--tp", "2"]


def test_flags_reach_the_run_and_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--megatron-core", "0.15", "--transformer-engine", "v2.5.0", "--torch", "2.8.0+cu128"]
    assert main([*RUN, "-v", *flags]) == 0
    report = " ".join(capsys.readouterr().out.split())
    assert "megatron-core 0.15, Transformer Engine 2.5, torch 2.8" in report
    assert main(RUN) == 0
    plain = " ".join(capsys.readouterr().out.split())
    assert "megatron-core 0.19 (assumed), Transformer Engine 2.20 (assumed), torch 2.11 (assumed)" in plain


@pytest.mark.parametrize(
    ("flag", "like"), [("--megatron-core", "0.16"), ("--transformer-engine", "2.20"), ("--torch", "2.11")]
)
@pytest.mark.parametrize("text", ["new", "", "2"])
def test_a_bad_text_is_one_line(flag: str, like: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RUN, flag, text]) == 2
    out, err = capsys.readouterr()
    assert not out and len(err.splitlines()) == 1
    assert f"{flag} ('{text}') is not" in err and f"not a release such as {like}" in err


def test_transformer_engine_of_a_local_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RUN, "--transformer-impl", "local", "--transformer-engine", "2.5"]) == 2
    assert "--transformer-engine does nothing without --transformer-impl transformer_engine" in capsys.readouterr().err


GPT = (
    "--num-layers 2 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024 "
    "--micro-batch-size 1 --global-batch-size 8 --bf16 --num-experts 2 --disable-bias-linear --hidden-dropout 0.1"
)


def test_megatron_arguments_take_releases() -> None:
    impl = run_from_megatron_args(
        GPT, world_size=8, megatron_core="0.15.0rc8", transformer_engine="2.5", torch="2.8.0a0+nv25.06"
    ).implementation
    assert (impl.megatron_core, impl.transformer_engine, impl.torch) == ((0, 15), (2, 5), (2, 8))
    with pytest.raises(SpecError, match=r"^transformer_engine .*is not a release"):
        run_from_megatron_args(GPT, world_size=8, transformer_engine="main")


def test_a_process_is_asked_for_what_it_imported_and_imports_nothing() -> None:
    program = (
        "import sys, types\n"
        "from bridge_memory.readers.config_container import _imported\n"
        "assert _imported('torch') is None and 'torch' not in sys.modules\n"
        "sys.modules['torch'] = types.SimpleNamespace(__version__='2.12.0a0+nv26.04')\n"
        "sys.modules['transformer_engine'] = types.SimpleNamespace()\n"
        "assert _imported('torch') == (2, 12) and _imported('transformer_engine') is None\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=PACKAGE.parent)


# ---- PyTorch's rules ----


def cublas(gpu: str, torch: str | None, config: str | None = None) -> float:
    """MiB of torch's cuBLAS workspaces of a stage with the output layer."""
    env = {} if config is None else {"CUBLAS_WORKSPACE_CONFIG": config}
    run = run_from_megatron_args(GPT, world_size=8, gpu=gpu, torch=torch, env=env)
    (stage,) = estimate(run).stages
    return sum(c.bytes for c in stage.components if c.name.startswith("torch's cuBLAS workspaces")) / MIB


@pytest.mark.parametrize(
    ("gpu", "torch", "mib"),
    [
        ("B200", "2.11", 2 * 8.125), ("B200", "2.12", 2 * 32), ("B200", "2.14", 2 * 32), ("B200", None, 2 * 8.125),
        ("H100", "2.11", 2 * 32), ("H100", "2.12", 2 * 32), ("A100", "2.11", 2 * 8.125), ("A100", "2.14", 2 * 8.125),
        ("H100", "2.15", 0), ("B200", "2.15", 0), ("A100", "2.15", 0),
    ],
)  # fmt: skip
def test_cublas_workspaces_follow_torchs_release(gpu: str, torch: str | None, mib: float) -> None:
    """What ``parseChosenWorkspaceSize`` returns in the wheels of 2.11 (32 MiB for compute capability 9 alone), 2.12
    (9, 10 and 12) and 2.14 (9 to 12), else 2 x 4096 + 8 x 16 KiB; one a thread. 2.15 keeps none between products."""
    assert cublas(gpu, torch) == mib


def test_a_cublas_workspace_that_was_asked_for_is_the_same_in_every_release_that_keeps_it() -> None:
    assert cublas("B200", "2.12", ":4096:2") == cublas("B200", "2.11", ":4096:2") == 2 * 8
    assert cublas("B200", "2.15", ":4096:2") == 0


@pytest.mark.parametrize(("torch", "mib"), [((1, 13), 0), ((2, 0), 2 * 8.125), (None, 2 * 8.125)])
def test_cublas_workspaces_are_of_torchs_allocator_from_2_0_on(torch: tuple[int, int] | None, mib: float) -> None:
    """Two of :4096:2:16:8, 8.125 MiB each, on a V100; in 1.13 cuBLAS allocated its own."""
    impl = ImplementationSpec(gpu_arch="volta", transformer_impl="local", torch=torch)
    run = RunSpec(model="meta-llama/Llama-3.2-1B", implementation=impl)
    found = sum(c.bytes for c in explain(run, 0).components if c.name.startswith("torch's cuBLAS workspaces"))
    assert found == mib * 2**20
