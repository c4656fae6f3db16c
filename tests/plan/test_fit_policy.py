"""``fit`` of FSDP2: which operations of checkpointed layers are kept, and the policy that torch takes."""

from __future__ import annotations

import json
import random
from itertools import product
from typing import Any

import pytest

from bridge_memory import BatchSpec, DataParallelSpec, ParallelSpec, RunSpec, model_from_hf_config, peaks
from bridge_memory.cli import main
from bridge_memory.emit.policy import policy_source
from bridge_memory.plan.torch.fit import ATTENTION, Kept, Operation, Policy, candidates, most_saved
from bridge_memory.speed.hardware import hardware_of
from bridge_memory.speed.torch.step_time import layers_again, step_time

H100 = hardware_of("H100")
MODEL = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 160,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 96,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip


def checkpointed(model: Any = "meta-llama/Llama-3.1-8B", world: int = 8, **fields: Any) -> RunSpec:
    return RunSpec(
        model=model, parallel=ParallelSpec(world_size=world),
        batch=BatchSpec(seq_length=8192, micro_batch_size=2, global_batch_size=16 * world),
        data_parallel=DataParallelSpec(engine="fsdp2"),
    ).with_fields(**{"gradient_checkpointing": True, "use_reentrant": False, **fields})  # fmt: skip


@pytest.mark.parametrize("seed", range(12))
def test_no_other_choice_saves_more_time(seed: int) -> None:
    """Every number of layers of every operation is tried; of the first seeds in the sizes of a real layer."""
    pytest.importorskip("scipy")
    draw = random.Random(seed)
    if seed < 4:
        run = checkpointed()
        operations = [o._replace(layers=o.layers[:2]) for o in candidates(run, layers_again(run, H100))]
    else:
        operations = [
            Operation(str(n), n, tuple(range(draw.randint(1, 4))), draw.randint(1, 60) << 20, draw.random())
            for n in range(draw.randint(1, 5))
        ]
    every = sum(len(o.layers) * o.nbytes for o in operations)
    budget = draw.randint(0, every) if seed != 5 else every
    best = 0.0
    for numbers in product(*(range(len(o.layers) + 1) for o in operations)):
        if sum(n * o.nbytes for n, o in zip(numbers, operations, strict=True)) <= budget:
            best = max(best, sum(n * o.seconds for n, o in zip(numbers, operations, strict=True)))
    found = most_saved(operations, budget)
    assert sum(n * o.nbytes for n, o in zip(found, operations, strict=True)) <= budget
    assert sum(n * o.seconds for n, o in zip(found, operations, strict=True)) == pytest.approx(best, rel=1e-9)


def test_the_operations_of_a_layer_by_hand() -> None:
    """Llama-3.1-8B, 2 x 8192 tokens in bf16: 4096 wide queries, 1024 wide keys and values, 14336 wide gate and up. The
    last product is not among them: the recomputation stops before it."""
    run = checkpointed()
    found = {o.name: o for o in candidates(run, layers_again(run, H100))}
    tokens = 2 * 8192
    widths = {
        "self_attn.q_proj": 4096, "self_attn.k_proj": 1024, "self_attn.v_proj": 1024, "self_attn.o_proj": 4096,
        "mlp.gate_proj": 14336, "mlp.up_proj": 14336,
    }  # fmt: skip
    assert {name: o.nbytes for name, o in found.items() if name != ATTENTION} == {
        name: 2 * tokens * width for name, width in widths.items()
    }
    assert [found[name].product for name in widths] == list(range(6))
    assert found[ATTENTION].nbytes == tokens * (4096 * 2 + 32 * 4)
    assert all(o.layers == tuple(range(32)) for o in found.values())


@pytest.mark.parametrize("sequences", (1, 2))
def test_what_is_kept_adds_to_the_peak_as_of_torchtitans_policy(sequences: int) -> None:
    """Its "op" keeps attention and every second product (wq, wv, w1, w2); those peaks were compared with torchtitan's.
    They keep w2 too, which is no candidate of transformers' layers."""
    run = checkpointed(
        transformer_impl="torchtitan", use_reentrant=None, micro_batch_size=sequences, global_batch_size=64
    )
    op = run.with_fields(gradient_checkpointing=False, use_reentrant=None, selective_ac_option="op")
    of = {o.name: o.nbytes for o in candidates(checkpointed(), layers_again(checkpointed(), H100))}
    names = (ATTENTION, "self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj")
    kept = sum(of[name] for name in names) * sequences // 2 + sequences * 8192 * 4096 * 2
    assert peaks(run)[0].peak_bytes + 32 * kept == peaks(op)[0].peak_bytes


def test_all_again_takes_what_a_checkpoint_takes() -> None:
    """The seconds of the parts of a layer are together those of its recomputation."""
    run = checkpointed()
    (layer,) = layers_again(run, H100).values()
    total = sum(layer.products.values()) + layer.attention + layer.rest
    microbatches = run.num_microbatches
    assert step_time(run, H100).recomputation == pytest.approx(32 * microbatches * total, rel=1e-9)


FIT = [
    "fit", "meta-llama/Llama-3.1-8B", "--engine", "fsdp2", "--num-gpus", "8", "--micro-batch-size", "2", "--seq-length",
    "8192", "--global-batch-size", "64", "--gpu", "H100",
]  # fmt: skip


def test_what_is_kept_fits_and_is_faster(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("scipy")
    assert main([*FIT, "--json"]) == 0
    policy = json.loads(capsys.readouterr().out)["policy"]
    kept = sum(len(k["layers"]) * k["bytes_per_layer"] for k in policy["kept"])
    (stage,) = peaks(checkpointed().with_fields(global_batch_size=64))
    assert policy["least_peak_bytes"] == stage.peak_bytes and policy["peak_bytes"] == stage.peak_bytes + kept
    saved = sum(len(k["layers"]) * k["seconds_per_layer"] for k in policy["kept"])
    assert policy["whole_layers_step_seconds"] - policy["step_seconds"] == pytest.approx(4 * saved, rel=0.02)
    assert main([*FIT, "--headroom", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["policy"]["step_seconds"] > policy["step_seconds"]
    assert main([*FIT, "--headroom", "40"]) == 1


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--torch-compile"], "--torch-compile"), (["--emit", "flags"], "--emit flags"),
        (["--format", "csv"], "--format csv"), (["--engine", "zero3"], "engine (zero3)"),
        (["--engine", "megatron_ddp", "--emit", "policy"], "--emit policy"),
    ],
)  # fmt: skip
def test_what_has_no_policy_is_refused(more: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FIT, *more]) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1


def test_torch_takes_the_policy() -> None:
    """A small Llama on the CPU: gradients are those without checkpoints; backward runs each product twice for its
    gradients and once more where it is not kept; what the checkpoints keep has the bytes that are counted."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from torch.utils._python_dispatch import TorchDispatchMode

    run = checkpointed(model_from_hf_config(MODEL, "small"), world=1, params_dtype="fp32", seq_length=32)
    of = {o.name: o for o in candidates(run, layers_again(run, H100))}
    kept = (
        Kept(of["self_attn.q_proj"], 4), Kept(of["mlp.gate_proj"], 1), Kept(of["mlp.up_proj"], 3),
        Kept(of[ATTENTION], 2),
    )  # fmt: skip
    time = step_time(run, H100)
    source = policy_source(Policy(run, kept, 0, 0, 0, time, time))
    module: dict[str, Any] = {}
    exec(compile(source, "policy", "exec"), module)
    contexts = []
    made = module["create_selective_checkpoint_contexts"]

    def seen(policy: Any) -> Any:
        contexts.append(made(policy))
        return contexts[-1]

    module["create_selective_checkpoint_contexts"] = seen

    class Counted(TorchDispatchMode):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.products = self.attention = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.products += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
            self.attention += "scaled_dot_product" in str(func) and "backward" not in str(func)
            return func(*args, **(kwargs or {}))

    config = transformers.LlamaConfig(**{k: v for k, v in MODEL.items() if k not in ("model_type", "architectures")})
    tokens = torch.arange(64).reshape(2, 32) % 96
    gradients, counts = [], []
    for selective in (False, True):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
        if selective:
            module["checkpoint_layers"](model)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        if selective:
            storages = {
                value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
                for value in _tensors([context[0].storage for context in contexts], torch)
            }
            assert sum(storages.values()) == sum(k.number * k.operation.nbytes for k in kept)
        with Counted() as counted:
            loss.backward()
        counts.append((counted.products, counted.attention))
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    # Of six products in four layers eight are kept; the seventh is not run again.
    assert counts[1][0] - counts[0][0] == 4 * 6 - 8
    assert counts[1][1] - counts[0][1] == 4 - 2


def _tensors(found: Any, torch: Any) -> list[Any]:
    """Every tensor inside of dictionaries, lists and torch's wrappers of versions."""
    if isinstance(found, torch.Tensor):
        return [found]
    if isinstance(found, dict):
        found = found.values()
    elif not isinstance(found, (list, tuple)):
        return _tensors(found.val, torch) if hasattr(found, "val") else []
    return [tensor for each in found for tensor in _tensors(each, torch)]
