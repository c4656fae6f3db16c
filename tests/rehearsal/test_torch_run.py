"""``rehearse --engine``: the real engines of torch and DeepSpeed phase by phase, beside the estimate."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any

import forked
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from bridge_memory.cli import main

DEEPSPEED = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed")
DEEPSPEED_SLOW = (DEEPSPEED, pytest.mark.slow)
#: On two ranks.
TWO_MICROBATCHES = ("--global-batch-size", "4")
MODEL = ("Qwen/Qwen2.5-0.5B", "--num-layers", "2", "--seq-length", "128")


def rehearsed(*argv: str) -> dict[str, Any]:
    """Name of a phase -> its row."""
    return {row["name"]: row for row in answered(*MODEL, *argv)["rows"]}


def answered(*argv: str) -> dict[str, Any]:
    """The command's JSON; in a process of its own, since DeepSpeed keeps its groups."""
    program = f"from bridge_memory.cli import main; raise SystemExit(main({['rehearse', *argv, '--json']!r}))"
    of_deepspeed = ("deepspeed",) if any(word.startswith("zero") for word in argv) else ()
    done = forked.run(program, "torch", "transformers", *of_deepspeed)
    assert done.returncode == 0, done.stderr[-2000:]
    text = done.stdout
    found: dict[str, Any] = json.loads(text[text.index("{\n"):])
    return found


@pytest.mark.parametrize(
    "argv",
    [
        ("--engine", "single"),
        ("--engine", "fsdp2", "--num-gpus", "4", "--fsdp-param-dtype", "bf16", "--fsdp-reduce-dtype", "fp32"),
        pytest.param(("--engine", "ddp", "--num-gpus", "2"), marks=pytest.mark.slow),
        pytest.param(("--engine", "fsdp1", "--num-gpus", "2"), marks=pytest.mark.slow),
        pytest.param(("--engine", "zero1", "--num-gpus", "2"), marks=DEEPSPEED),
        pytest.param(("--engine", "zero2", "--num-gpus", "2"), marks=DEEPSPEED),
        pytest.param(("--engine", "zero2", "--num-gpus", "8"), marks=DEEPSPEED),
        pytest.param(("--engine", "zero3", "--num-gpus", "2"), marks=DEEPSPEED),
        pytest.param(("--engine", "zero1", "--num-gpus", "2", *TWO_MICROBATCHES), marks=DEEPSPEED),
        pytest.param(("--engine", "zero2", "--num-gpus", "2", *TWO_MICROBATCHES), marks=DEEPSPEED),
        pytest.param(("--engine", "zero3", "--num-gpus", "2", *TWO_MICROBATCHES), marks=DEEPSPEED_SLOW),
        pytest.param(
            ("--engine", "zero2", "--num-gpus", "2", *TWO_MICROBATCHES, "--grad-accum-dtype", "fp32"),
            marks=DEEPSPEED_SLOW,
        ),
        pytest.param(
            ("--engine", "zero1", "--num-gpus", "2", *TWO_MICROBATCHES, "--overlap-comm"), marks=DEEPSPEED_SLOW
        ),
        pytest.param(
            ("--engine", "zero2", "--num-gpus", "4", "--reduce-bucket-size", "20000000"), marks=DEEPSPEED_SLOW
        ),
        pytest.param(("--engine", "zero2", "--num-gpus", "4", "--no-contiguous-gradients"), marks=DEEPSPEED_SLOW),
        pytest.param(
            ("--engine", "zero1", "--num-gpus", "4", "--precision", "fp16", "--grad-accum-dtype", "fp32"),
            marks=DEEPSPEED,
        ),
        pytest.param(
            ("--engine", "zero1", "--num-gpus", "2", *TWO_MICROBATCHES, "--precision", "fp16", "--grad-accum-dtype",
             "fp32", "--overlap-comm"),
            marks=DEEPSPEED_SLOW,
        ),
        pytest.param(("--engine", "ddp", "--num-gpus", "2", *TWO_MICROBATCHES), marks=pytest.mark.slow),
        pytest.param(
            ("--engine", "ddp", "--num-gpus", "2", *TWO_MICROBATCHES, "--gradient-as-bucket-view"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--engine", "ddp", "--num-gpus", "2", "--ddp-find-unused-parameters", "--precision", "fp32"),
            marks=pytest.mark.slow,
        ),
        pytest.param(("--engine", "fsdp2", "--num-gpus", "2", *TWO_MICROBATCHES), marks=pytest.mark.slow),
        pytest.param(
            ("--engine", "zero3", "--num-gpus", "2", "--stage3-max-reuse-distance", "0"), marks=DEEPSPEED_SLOW
        ),
    ],
    ids=lambda argv: "-".join(word.lstrip("-") for word in argv if word != "--engine"),
)
def test_every_phase_is_within_a_hundredth(argv: tuple[str, ...]) -> None:
    """The model's embedding is its output layer's too, and its gradients never fill DeepSpeed's default bucket."""
    rows = rehearsed(*argv)
    compared = [row for row in rows.values() if row["difference"] is not None]
    assert {"forward", "backward", "optimizer step"} <= {row["name"] for row in compared}
    for row in compared:
        assert row["predicted"] == pytest.approx(row["found"], rel=0.01), row


#: So small that a table of the angles of 2,048 positions, or the routing of their tokens, is a large part of it.
SMALL = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 1000,
    "max_position_embeddings": 4096,
}  # fmt: skip
EXPERTS = {"model_type": "qwen3_moe", "moe_intermediate_size": 256, "num_experts": 16, "num_experts_per_tok": 4}


@pytest.mark.parametrize("changes", [{}, EXPERTS], ids=("llama", "qwen3_moe"))
def test_no_buffer_of_megatron_core_is_counted_for_layers_of_transformers(changes: dict[str, Any]) -> None:
    """Neither its cached rotary table, 512 KiB here, nor what its MoE dispatchers hold, 192 KiB."""
    config = json.dumps({**SMALL, **changes})
    argv = ("--custom-config", config, "--engine", "single", "--num-gpus", "1", "--seq-length", "2048")
    for row in answered(*argv)["rows"]:
        assert abs(row["difference"]) < 128 << 10, row


@pytest.mark.parametrize("trainer", ["torchtune", "torchtitan"])
def test_layers_of_other_trainers_are_not_rehearsed_as_transformers(
    trainer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ("--custom-config", json.dumps(SMALL), "--engine", "single", "--transformer-impl", trainer)
    assert main(["rehearse", *argv]) == 2
    assert f"--transformer-impl ({trainer}) is not what rehearse" in capsys.readouterr().err


@pytest.mark.parametrize("overlap", [(), ("--overlap-comm",)], ids=("", "overlap"))
@pytest.mark.parametrize("contiguous", [(), ("--no-contiguous-gradients",)], ids=("", "not_contiguous"))
@pytest.mark.parametrize(
    ("engine", "model", "gpus", "bucket"),
    [
        pytest.param("zero1", "Qwen/Qwen2.5-0.5B", "4", "100000000", marks=DEEPSPEED_SLOW, id="zero1-tied"),
        pytest.param("zero2", "Qwen/Qwen2.5-0.5B", "4", "100000000", marks=DEEPSPEED, id="zero2-tied"),
        pytest.param("zero1", "mistralai/Mistral-7B-v0.3", "8", "100000000", marks=DEEPSPEED_SLOW, id="zero1-untied"),
        pytest.param("zero2", "mistralai/Mistral-7B-v0.3", "4", "120000000", marks=DEEPSPEED_SLOW, id="zero2-untied"),
    ],
)
def test_a_table_that_is_larger_than_its_bucket(
    engine: str, model: str, gpus: str, bucket: str, contiguous: tuple[str, ...], overlap: tuple[str, ...]
) -> None:
    """136 and 134 million elements: copied into no buffer, reduced slice by slice; stage 1 frees none of it before the
    end of backward."""
    argv = ("--num-layers", "2", "--seq-length", "128", "--num-gpus", gpus, "--reduce-bucket-size", bucket)
    for row in answered(model, "--engine", engine, *argv, *contiguous, *overlap)["rows"]:
        if row["difference"] is not None:
            assert row["predicted"] == pytest.approx(row["found"], rel=0.01), row


@pytest.mark.skipif(find_spec("peft") is None, reason="needs peft")
@pytest.mark.parametrize(
    "argv",
    [
        ("--engine", "fsdp1", "--num-gpus", "2"),
        ("--engine", "fsdp2", "--num-gpus", "4", "--fsdp-param-dtype", "bf16", "--fsdp-reduce-dtype", "fp32"),
        pytest.param(("--engine", "zero3", "--num-gpus", "2"), marks=DEEPSPEED),
        pytest.param(("--engine", "fsdp2", "--num-gpus", "4", "--num-layers", "1"), marks=pytest.mark.slow),
        pytest.param(
            ("--engine", "zero2", "--num-gpus", "4", "--reduce-bucket-size", "20000000"), marks=DEEPSPEED_SLOW
        ),
    ],
    ids=lambda argv: "-".join(word.lstrip("-") for word in argv if word != "--engine"),
)
def test_adapters_are_kept_and_moved_in_their_own_dtype(argv: tuple[str, ...]) -> None:
    """fp32 beside bf16 weights, as peft makes them and has FSDP1 wrap them; DeepSpeed casts them."""
    for row in rehearsed(*argv, "--peft", "lora").values():
        assert row["predicted"] == pytest.approx(row["found"], rel=0.01), row


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--engine", "fsdp2", "--stage", "0"), "--stage is for megatron-core's engines"),
        (("--engine", "ddp", "--device", "cuda"), "--device cuda is for megatron-core's engines"),
        (("--engine", "single", "--attn-implementation", "flash_attention_2"), "runs on a GPU alone"),
        (
            ("--engine", "fsdp1", "--num-gpus", "2", "--peft", "lora", "--fsdp-auto-wrap-policy", "NO_WRAP"),
            "--fsdp-auto-wrap-policy (NO_WRAP) puts frozen and trained weights in one flat parameter",
        ),
        (("--engine", "zero3", "--num-gpus", "2", "--rank", "2"), "--rank (2) is not one of 0 to 1"),
    ],
)
def test_what_it_cannot_do_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...], words: str
) -> None:
    if "zero3" in argv and find_spec("deepspeed") is None:
        words = "runs the real deepspeed, which is not installed"
    assert main(["rehearse", MODEL[0], *argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and words in err


@pytest.mark.parametrize(
    "argv",
    [
        ("--engine", "fsdp2", "--num-gpus", "8", "--precision", "fp32", "--fsdp-param-dtype", "bf16",
         "--fsdp-reduce-dtype", "fp32"),
        pytest.param(("--engine", "single"), marks=pytest.mark.slow),
    ],
    ids=("fsdp2", "single"),
)  # fmt: skip
def test_reserved_memory_of_the_estimate_is_that_of_the_real_engine(argv: tuple[str, ...]) -> None:
    """Both replayed through torch's allocator: storages that the estimate counts, and those that the engine makes."""
    found = answered("meta-llama/Llama-3.2-3B", "--num-layers", "3", "--seq-length", "2048", *argv)
    real, predicted = found["reserved"], found["predicted_reserved"]
    for kind in ("segments", "expandable_segments"):
        assert predicted[kind] == pytest.approx(real[kind], rel=0.01)
    assert predicted["streams_expandable_segments"].keys() == real["streams_expandable_segments"].keys()


def test_an_engine_whose_streams_are_unknown_is_not_replayed() -> None:
    found = answered(*MODEL, "--engine", "fsdp1", "--num-gpus", "2")
    assert found["reserved"] is None and found["predicted_reserved"] is None
    assert any("record_stream" in note for note in found["notes"])
