"""Refusals of the command line are in its flags, as they were typed."""

from __future__ import annotations

import re

import pytest

from bridge_memory.arguments.as_typed import as_typed
from bridge_memory.arguments.flags import FLAGS, SPECS, Flag
from bridge_memory.cli import main
from bridge_memory.spec.fields import called, rules_of


def name_of(field: str) -> str:
    group, _, member = field.partition(".")
    return called(SPECS[group], member)


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.field)
def test_a_field_is_the_spelling_that_was_typed(flag: object) -> None:
    name, spellings = name_of(flag.field), flag.names.split()  # type: ignore[attr-defined]
    message = f"{name} (7) is wrong; lower it"
    assert as_typed(message, []) == f"{spellings[0]} (7) is wrong; lower it"
    for spelling in spellings:
        for argv in ([spelling, "7"], [f"{spelling}=7"]):
            assert as_typed(message, argv) == f"{spelling} (7) is wrong; lower it"


@pytest.mark.parametrize(
    ("refusal", "argv", "said"),
    [
        ("expert_tensor_parallel_size (8) is too large; lower it", "--tp 8",
         "--etp (8, that of --tp) is too large; lower it"),
        ("expert_tensor_parallel_size (8) is too large; lower it", "--tp 4 --etp 8",
         "--etp (8) is too large; lower it"),
        ("use_distributed_optimizer (True) is not supported with optimizer muon; set it to False", "--optimizer muon",
         "--use-distributed-optimizer (the default) is not supported with --optimizer muon; add "
         "--no-use-distributed-optimizer"),
        ("use_distributed_optimizer (False) is not supported with engine megatron_fsdp; set it to True",
         "--no-use-distributed-optimizer", "--no-use-distributed-optimizer is not supported with --engine "
         "megatron_fsdp; drop --no-use-distributed-optimizer"),
        ("overlap_param_gather (True) needs use_distributed_optimizer; set that to True or drop it",
         "--overlap-param-gather", "--overlap-param-gather needs --use-distributed-optimizer; add it or drop it"),
        ("fp8_param (True) needs fp8; set fp8 to hybrid or e4m3, or drop fp8_param", "--fp8-param",
         "--fp8-param needs --fp8; set --fp8 to hybrid or e4m3, or drop --fp8-param"),
        ("transformer_engine (2.4) is not here; set transformer_impl to transformer_engine", "",
         "--transformer-engine (2.4) is not here; set --transformer-impl to transformer_engine"),
        ("the optimizer keeps fp8 copies; torch has none", "", "the optimizer keeps fp8 copies; torch has none"),
        ("num_layers (61) is not divisible by pipeline_model_parallel_size (4)", "--pp 4",
         "num_layers (61) is not divisible by --pp (4)"),
        ("num_layers (61) is not divisible by pipeline_model_parallel_size (4)", "--pp 4 --num-layers 61",
         "--num-layers (61) is not divisible by --pp (4)"),
        ("params_dtype (fp16) is not supported with optimizer muon; use bf16", "--fp16 --optimizer muon",
         "--fp16 (fp16) is not supported with --optimizer muon; use bf16"),
        ("main_grads_dtype (fp32) is more than grad_reduce_in_fp32 (False)", "--grad-reduce-in-bf16",
         "--main-grads-dtype (fp32) is more than --grad-reduce-in-bf16"),
        ("seq_length (3) is not divisible by tensor_model_parallel_size (2)",
         "--megatron-args --tensor-model-parallel-size=2",
         "seq_length (3) is not divisible by --tensor-model-parallel-size (2)"),
    ],
)
def test_switches_words_and_megatrons_arguments(refusal: str, argv: str, said: str) -> None:
    assert as_typed(refusal, argv.split()) == said


def test_a_stage_of_the_pipeline_is_not_deepspeeds() -> None:
    assert as_typed("stage (9) is not one of the pipeline's", ["--stage", "9"]).startswith("--stage (9)")
    assert as_typed("stage (9) is not a stage of ZeRO", ["--zero-stage", "9"]).startswith("--zero-stage (9)")


def test_no_fields_name_is_another_ones_flag() -> None:
    """A flag that stands in a message is not taken for a field in it."""
    every = " and ".join(spelling for flag in FLAGS for spelling in flag.names.split())
    assert as_typed(every, []) == every
    names = {name_of(flag.field) for flag in FLAGS}
    assert not names & set(re.findall(r"(?<!-)\b[a-z]+(?:_[a-z0-9]+)+\b", as_typed(" (1); ".join(names), [])))


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.field)
def test_a_flag_on_its_own_is_refused_as_a_flag(flag: Flag, capsys: pytest.CaptureFixture[str]) -> None:
    """Where the other flags leave it without effect, or it does not fit the model."""
    group, _, field = flag.field.partition(".")
    rule = rules_of(SPECS[group])[field]
    spelling = flag.names.split()[0]
    if bool in rule.types:
        given = [spelling]
    elif rule.names:
        given = [spelling, rule.names[-1]]
    else:
        given = [spelling, "1"]
    code = main(["estimate", "meta-llama/Llama-3.2-1B", "--num-gpus", "1", *given, "--brief"])
    refusal = capsys.readouterr().err
    assert code == (2 if refusal else 0)
    assert not re.match(r"bridge-memory: error: [a-z]+[._]", refusal), refusal
