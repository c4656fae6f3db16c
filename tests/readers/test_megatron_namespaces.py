"""Megatron-LM's parsed arguments are the words that were parsed.

``tests/data/megatron_lm_arguments.json`` holds what Megatron-LM 0.19.2 itself makes of command lines: its parser's
defaults and options, and the namespaces that ``validate_args`` leaves (``scripts/maintain/megatron_lm_namespaces.py``).
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import fields
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import bridge_memory.readers
from bridge_memory.estimation import estimate
from bridge_memory.readers.config_container import run_from_config_container
from bridge_memory.readers.megatron_args import container, run_from_megatron_args
from bridge_memory.readers.megatron_args.arguments import READ, by_destination
from bridge_memory.spec import RunSpec, SpecError

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "megatron_lm_arguments.json").read_text())
CORE = "0.19"


def namespace(name: str) -> SimpleNamespace:
    run = RECORDED["runs"][name]
    values = {**RECORDED["defaults"], **run["namespace"]}
    return SimpleNamespace(**{k: v for k, v in values.items() if k not in run["removed"]})


def told_twice(name: str) -> tuple[RunSpec, RunSpec]:
    recorded = RECORDED["runs"][name]
    words = run_from_megatron_args(recorded["arguments"], world_size=recorded["world_size"], megatron_core=CORE)
    return words, run_from_megatron_args(namespace(name), megatron_core=CORE)


@pytest.mark.parametrize("name", RECORDED["runs"])
def test_the_words_and_what_megatron_lm_makes_of_them_are_one_run(name: str) -> None:
    words, parsed = told_twice(name)
    for group in fields(RunSpec):
        told, found = getattr(words, group.name), getattr(parsed, group.name)
        if (name, group.name) == ("defaults", "model"):
            # A tokenizer's vocabulary is known to the namespace after padding alone.
            assert found.vocab_size == told.padded_vocab_size(1) and not found.make_vocab_size_divisible_by
            continue
        assert found == told, group.name


def test_a_namespace_of_real_objects_is_the_one_that_was_printed() -> None:
    """A log holds "torch.bfloat16" and "AttnBackend.auto" where ``get_args()`` holds the objects."""
    torch = pytest.importorskip("torch")

    class AttnBackend(Enum):
        auto = 5

    printed, live = namespace("precision-aware"), namespace("precision-aware")
    live.attention_backend = AttnBackend.auto
    for key, value in vars(live).items():
        if isinstance(value, str) and value.startswith("torch."):
            setattr(live, key, getattr(torch, value.removeprefix("torch.")))
    assert live.exp_avg_sq_dtype is torch.uint8
    assert run_from_megatron_args(live) == run_from_megatron_args(printed)


def test_a_live_namespace_is_read_through_its_container() -> None:
    """``install()`` prints Bridge's line of the container that the run is read from."""
    args = namespace("virtual")
    made = container(args)
    assert container(made) is made
    # What this process has imported is its own, and a container is taken for Megatron Bridge's.
    found = run_from_config_container(made, megatron_core=(0, 19)).with_fields(
        torch=None, transformer_engine=None, adopt_optim_states=False
    )
    assert found == run_from_megatron_args(args, megatron_core=CORE)
    assert made.logger.log_interval == 100


def test_a_namespace_whose_tokenizer_is_not_built_has_no_vocabulary() -> None:
    args = namespace("defaults")
    args.padded_vocab_size = None
    with pytest.raises(SpecError, match="vocab_size is not set"):
        run_from_megatron_args(args, megatron_core=CORE)


# ---- names ----


def test_a_plain_namespace_has_no_gap_and_an_unknown_name_only_when_it_is_on() -> None:
    assert not told_twice("llama")[1].not_modelled
    args = namespace("llama")
    args.my_own, args.my_other, args.fp16_lm_cross_entropy = True, None, True
    unmodelled = run_from_megatron_args(args, megatron_core=CORE).not_modelled
    assert len(unmodelled) == 2 and any("--my-own" in line for line in unmodelled)


@pytest.mark.parametrize("name", [name for name in RECORDED["runs"] if name.startswith("example: ")])
def test_megatron_lms_own_examples_have_no_gap(name: str) -> None:
    words, parsed = told_twice(name)
    assert not words.not_modelled and not parsed.not_modelled


def test_megatron_lms_own_examples_are_what_they_are_called() -> None:
    """Parameters: 175 billion by Brown et al. 2020 (table 2.1), 8.03 and 46.7 billion by the models' cards."""
    for name, billions in (("GPT-3 175B", 174.6), ("Llama 3 8B in fp8", 8.03), ("Mixtral 8x7B", 46.7)):
        found = estimate(told_twice(f"example: {name}")[1])
        assert found.parameters / 1e9 == pytest.approx(billions, rel=2e-3), name


def test_what_is_set_and_not_modelled_is_listed_from_words_and_from_the_namespace() -> None:
    words, parsed = told_twice("nothing of this is modelled")
    listed = [line.split(":")[0].split()[0] for line in parsed.not_modelled]
    assert listed == [
        "--clone-scatter-output-in-embedding", "--disable-jit-fuser", "--eval-micro-batch-size", "--use-mup",
    ]  # fmt: skip
    assert words.not_modelled == parsed.not_modelled


def test_every_argument_that_is_read_is_asked_for() -> None:
    """By name, somewhere in the readers beside the list itself."""
    folder = Path(bridge_memory.readers.__file__).parent
    asked: set[str] = set()
    for path in (*folder.glob("*.py"), *folder.glob("megatron_args/*.py")):
        if path.name == "arguments.py":
            continue
        tree = ast.parse(path.read_text())
        said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said:
                asked |= set(re.findall(r"\w+", node.value))
    assert not READ - asked


@pytest.mark.parametrize(
    ("option", "value", "found"),
    [
        ("disable_bias_linear", True, {"add_bias_linear": False}),
        ("disable_bias_linear", False, {}),
        ("add_bias_linear", False, {"add_bias_linear": False}),
        ("no_rope_fusion", "true", {"apply_rope_fusion": False}),
        ("no_preserve_fp32_weights", True, {"preserve_fp32_weights": False}),
        ("fp8_format", "e4m3", {"fp8": "e4m3"}),
        ("swiglu", False, {}),
        ("no_save_optim", True, {"no_save_optim": True}),
    ],
)
def test_an_option_finds_its_destination(option: str, value: Any, found: dict[str, Any]) -> None:
    assert by_destination({option: value}) == found
