"""Adapters of peft beside frozen linears, whole and quantised by bitsandbytes: three real steps on the CPU, every
storage counted, as in ``test_torch_engines``."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from real_engines import LAYERS, expected, measured, run_of  # noqa: E402

from bridge_memory import RunSpec, SpecError  # noqa: E402
from bridge_memory.spec import OptimizerSpec, PeftSpec  # noqa: E402
from bridge_memory.spec.transformers import TransformersSpec  # noqa: E402

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ADAMW = OptimizerSpec(optimizer="adamw")


def quantized(model: Any, bits: int, *, double: bool = False) -> Any:
    """Every linear but the output layer, as transformers replaces them."""
    import bitsandbytes as bnb

    for name, module in list(model.named_modules()):
        if not isinstance(module, torch.nn.Linear) or name == "lm_head":
            continue
        sizes = module.in_features, module.out_features
        if bits == 4:
            new = bnb.nn.Linear4bit(*sizes, bias=False, compute_dtype=torch.bfloat16)
            new.weight = bnb.nn.Params4bit(
                module.weight.data, requires_grad=False, compress_statistics=double, quant_type="nf4", module=new
            )
        else:
            new = bnb.nn.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False)
            new.load_state_dict(module.state_dict())
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, new.to("cpu"))
    setattr(model, f"is_loaded_in_{bits}bit", True)
    return model


def side_by_side(
    *, bits: int = 0, double: bool = False, targets: Any = ALL, adapter: bool = True, prepared: bool = False,
    reentrant: bool | None = None,
) -> None:  # fmt: skip
    """``reentrant``: with gradient checkpointing, of this kind."""
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    def prepare(model: Any) -> Any:
        if bits:
            model = quantized(model, bits, double=double)
        if prepared:
            model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        config = LoraConfig(r=16, target_modules=targets if isinstance(targets, str) else list(targets))
        return get_peft_model(model, config, autocast_adapter_dtype=adapter).train()

    real = measured(lambda m: m, dtype="bfloat16", prepare=prepare)
    options: dict[str, Any] = {"autocast_adapter_dtype": adapter, "prepare_model_for_kbit_training": prepared}
    if bits:
        options[f"load_in_{bits}bit"] = True
    if bits == 4:
        options |= {"bnb_4bit_compute_dtype": "bf16", "bnb_4bit_use_double_quant": double}
    if reentrant is not None:
        options |= {"gradient_checkpointing": True, "use_reentrant": reentrant}
    named = (targets,) if isinstance(targets, str) else targets
    ours = expected(
        run_of("single", dtype="bf16", transformers_options=options, optimizer=ADAMW,
               peft=PeftSpec(scheme="lora", dim=16, target_modules=named))
    )
    # Beside: a step counter an adapter's weight, the rotary embedding's frequencies, the batch, a shared table.
    adapters = 2 * (len(named) if named != ("all-linear",) else len(ALL)) * LAYERS
    assert 0 <= real.after_step - ours["state"] <= 512 * adapters + 2048 + 1024
    for phase in ("forward", "backward", "step"):
        assert ours[phase] == pytest.approx(getattr(real, phase), rel=0.01), phase


@pytest.mark.parametrize("adapter", [True, False])
def test_lora(adapter: bool) -> None:
    """Adapters, their gradients and moments in fp32 beside weights in bf16, or in bf16."""
    side_by_side(adapter=adapter)


def test_all_linear() -> None:
    side_by_side(targets="all-linear")


@pytest.mark.parametrize("double", [False, True])
def test_nf4(double: bool) -> None:
    pytest.importorskip("bitsandbytes")
    side_by_side(bits=4, double=double)


@pytest.mark.parametrize("reentrant", [False, True])
def test_nf4_with_checkpoints(reentrant: bool) -> None:
    pytest.importorskip("bitsandbytes")
    side_by_side(bits=4, reentrant=reentrant)


def test_nf4_of_some_linears_with_checkpoints() -> None:
    """The last linear keeps nothing that a checkpoint could see."""
    pytest.importorskip("bitsandbytes")
    side_by_side(bits=4, targets=("q_proj", "v_proj"), reentrant=False)


def test_nf4_after_prepare_model_for_kbit_training() -> None:
    """Embeddings, norms, the output layer and hidden states in fp32."""
    pytest.importorskip("bitsandbytes")
    side_by_side(bits=4, prepared=True)


def test_int8() -> None:
    pytest.importorskip("bitsandbytes")
    side_by_side(bits=8)


def test_weights_of_a_llama_by_hand() -> None:
    """Llama-3.2-1B: 16 layers of 60,817,408 elements in linears, half a byte each; a scale of 4 bytes for 64, or one of
    a byte, and one of 4 bytes for 256 of those."""
    linears = 16 * (2 * 2048 * 2048 + 2 * 512 * 2048 + 3 * 8192 * 2048)
    adapters = 4 * 16 * 16 * (2048 + 2048 + 2048 + 512)
    rest = 2 * (128256 * 2048 + 33 * 2048) + adapters
    for double, scales in ((False, 4 / 64), (True, 1 / 64 + 4 / 64 / 256)):
        run = qlora(bnb_4bit_use_double_quant=double)
        from bridge_memory import estimate

        weights = next(c for c in estimate(run).stages[0].components if c.name == "weights")
        by_hand = linears * (0.5 + scales) + rest
        # Tables, the mean of scales, and the rounding of 112 linears' small tensors.
        assert 0 <= weights.bytes - by_hand <= 112 * 5 * 1024


def qlora(**fields: Any) -> RunSpec:
    return run_of_model(TransformersSpec(load_in_4bit=True, **fields))


def run_of_model(hf: TransformersSpec, **groups: Any) -> RunSpec:
    from bridge_memory import ImplementationSpec
    from bridge_memory.spec import DataParallelSpec

    peft = PeftSpec(scheme="lora", dim=16, target_modules=("q_proj", "v_proj"))
    given = {"peft": peft, "data_parallel": DataParallelSpec(engine="single"), "optimizer": ADAMW, **groups}
    return RunSpec(
        model="meta-llama/Llama-3.2-1B", implementation=ImplementationSpec(transformer_impl="transformers"),
        transformers=hf, **given,
    )


@pytest.mark.parametrize(
    ("hf", "groups", "said"),
    [
        ({"load_in_4bit": True, "load_in_8bit": True}, {}, "load_in_8bit"),
        ({"load_in_4bit": True}, {"peft": PeftSpec()}, "nothing would train"),
        ({"load_in_8bit": True, "bnb_4bit_use_double_quant": True}, {}, "bnb_4bit_use_double_quant"),
        ({"bnb_4bit_use_double_quant": True}, {}, "does nothing without load_in_4bit"),
        ({"prepare_model_for_kbit_training": True}, {}, "does nothing without load_in_4bit or load_in_8bit"),
        ({}, {"peft": PeftSpec(use_dora=True)}, "use_dora"),
        ({}, {"peft": PeftSpec(scheme="lora", dim=8, target_modules=("linear_qkv",))}, "names no linear"),
    ],
)
def test_what_it_cannot_do_is_refused(hf: dict[str, Any], groups: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        run_of_model(TransformersSpec(**hf), **groups)


def test_quantised_weights_are_not_divided() -> None:
    from bridge_memory.spec import DataParallelSpec, ParallelSpec

    with pytest.raises(SpecError, match="fsdp2"):
        run_of_model(
            TransformersSpec(load_in_4bit=True), data_parallel=DataParallelSpec(engine="fsdp2"),
            parallel=ParallelSpec(world_size=2),
        )


def test_targets_that_match_nothing_are_refused_beside_megatrons_layers_too() -> None:
    peft = PeftSpec(scheme="lora", dim=8, target_modules=("q_proj", "v_proj"))
    with pytest.raises(SpecError, match="names no linear of this model: nothing would train; use some of linear_qkv"):
        RunSpec(model="meta-llama/Llama-3.2-1B", peft=peft)


def test_a_rank_of_0_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    from bridge_memory.cli import main

    assert main(["estimate", "Llama-3.2-1B", "--num-gpus", "1", "--peft", "lora", "--lora-dim", "0"]) == 2
    assert capsys.readouterr().err.strip().count("\n") == 0
