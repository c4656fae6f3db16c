"""How bytes are known belongs to each tensor: fitted ones say measured, those that rest on balanced routing assumed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from bridge_memory import Component, ImplementationSpec, RunSpec, explain, resolve_model
from bridge_memory.components import Part, Provenance, Role

#: Layers of Qwen3-30B-A3B, tokens, experts, experts a token, and their width.
LAYERS, N, E, K, F = 48, 4096, 128, 8, 768


def activations(run: RunSpec) -> list[Component]:
    return [c for c in explain(run, 0).components if c.role is Role.ACTIVATION]


def test_a_dropout_add_keeps_its_mask_alone() -> None:
    """One byte an element of [4096, 2048], after attention and MLP of each of the 16 layers of Llama-3.2-1B."""
    plain = resolve_model("meta-llama/Llama-3.2-1B")
    kept = []
    for probability in (0.1, 0.0):
        found = activations(RunSpec(model=replace(plain, hidden_dropout=probability)))
        kept.append(sum(c.bytes for c in found if c.part in (Part.ATTENTION, Part.MLP)))
    assert kept[0] - kept[1] == 16 * 2 * 4096 * 2048


def test_a_routers_tables_are_a_formula_and_its_experts_tokens_an_assumption() -> None:
    """int64 indices and fp32 scores of the chosen [N, k], fp32 scores of all experts [N, E]; fc1 made 2 f and the
    activation f for each of N k tokens in bf16."""
    found = {(c.part, c.provenance): c.bytes for c in activations(RunSpec(model="Qwen/Qwen3-30B-A3B"))}
    assert found[Part.MOE_ROUTER, Provenance.FORMULA] == LAYERS * N * (K * (8 + 4) + E * 4)
    assert found[Part.MOE_EXPERTS, Provenance.ASSUMED] == LAYERS * N * K * 3 * F * 2
    assert (Part.MOE_EXPERTS, Provenance.FORMULA) not in found


def test_a_part_is_listed_once_for_each_way_in_which_it_is_known() -> None:
    found = activations(RunSpec(model="Qwen/Qwen3-30B-A3B"))
    assert max(Counter((c.part, c.provenance) for c in found).values()) == 1
    assert all(c.routed is (c.provenance is Provenance.ASSUMED) for c in found)


def test_experts_of_fixed_capacity_assume_nothing() -> None:
    padded = ImplementationSpec(moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True)
    found = activations(RunSpec(model="Qwen/Qwen3-30B-A3B", implementation=padded))
    assert {c.provenance for c in found} == {Provenance.FORMULA}
