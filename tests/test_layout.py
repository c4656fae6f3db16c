"""Where layers go, against megatron-core's own functions."""

from __future__ import annotations

import random
import re
from types import SimpleNamespace

import pytest

from bridge_memory.spec import LayerSpec, ModelSpec, ParallelSpec, SpecError
from bridge_memory.spec.layout import Layout, layout
from bridge_memory.spec.layout_string import layout_string, parse_layout_string


def model(num_layers: int, mtp_num_layers: int = 0, hybrid: bool = False) -> ModelSpec:
    layer = LayerSpec(mixer=None, ffn=None)
    return ModelSpec(
        name="m", model_type="llama", hidden_size=64, vocab_size=128, layers=(layer,) * num_layers,
        mtp_num_layers=mtp_num_layers, mtp_layer=layer if mtp_num_layers else None, hybrid=hybrid,
    )  # fmt: skip


def spec(pp: int, vpp: int | None = None, **fields: object) -> ParallelSpec:
    return ParallelSpec(
        world_size=pp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        **fields,  # type: ignore[arg-type]
    )


def layers_of(found: Layout) -> list[list[list[int]]]:
    return [[list(chunk.layers) for chunk in stage] for stage in found.stages]


def sizes_of(found: Layout) -> list[int]:
    return [sum(len(chunk.layers) for chunk in stage) for stage in found.stages]


# --------------------------------------------------------------------------------------------------
# megatron-core's answer
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def core():
    torch = pytest.importorskip("torch")
    pytest.importorskip("megatron.core")
    from megatron.core import parallel_state
    from megatron.core.transformer import transformer_block, transformer_layer
    from megatron.core.transformer.transformer_config import TransformerConfig

    def answer(num_layers: int, mtp: int, pp: int, vpp: int | None, **fields: object) -> list[list[list[int]]]:
        config = TransformerConfig(
            num_layers=num_layers, hidden_size=64, num_attention_heads=4, pipeline_dtype=torch.bfloat16,
            pipeline_model_parallel_size=pp, virtual_pipeline_model_parallel_size=vpp,
            mtp_num_layers=mtp or None, **fields,
        )  # fmt: skip
        vpp = config.virtual_pipeline_model_parallel_size
        parallel_state.set_virtual_pipeline_model_parallel_world_size(vpp)
        try:
            rows = []
            for rank in range(pp):
                row = []
                for stage in range(vpp) if vpp else [None]:
                    table = config.pipeline_model_parallel_layout
                    if table is not None:
                        row.append(table.get_layer_id_list(vp_stage=stage, pp_rank=rank))
                        continue
                    n = transformer_block.get_num_layers_to_build(config, vp_stage=stage, pp_rank=rank)
                    at = transformer_layer.get_transformer_layer_offset(config, vp_stage=stage, pp_rank=rank)
                    row.append(list(range(at, at + n)))
                rows.append(row)
            return rows
        finally:
            parallel_state.set_virtual_pipeline_model_parallel_world_size(None)

    return answer


REFUSALS = (ValueError, AssertionError, ZeroDivisionError)


def test_every_split_is_megatron_cores_or_both_refuse(core):
    """Even, uneven and account_for splits with and without virtual stages: the same layers in each chunk."""
    draw = random.Random(2)
    accepted = refused = 0
    for _ in range(1500):
        pp = draw.choice([1, 2, 2, 3, 4, 4, 6, 8])
        vpp = None if pp == 1 else draw.choice([None, None, 2, 3])
        fields: dict[str, object] = {}
        kind = draw.choice(["even", "uneven", "uneven", "slots"])
        k = draw.randrange(1, 4)
        num_layers = pp * (vpp or 1) * k
        if kind == "uneven":
            # Build one that fits, then disturb some.
            unit = vpp or 1
            first, last = (draw.choice([None, unit * draw.randrange(1, 4)]) for _ in range(2))
            others = pp - (first is not None) - (last is not None)
            num_layers = max(1, (first or 0) + (last or 0) + max(0, others) * unit * k)
            fields = {
                "num_layers_in_first_pipeline_stage": first,
                "num_layers_in_last_pipeline_stage": last,
            }
        elif kind == "slots":
            embedding, loss = draw.random() < 0.7, draw.random() < 0.7
            num_layers = max(1, num_layers - embedding - loss)
            fields = {
                "account_for_embedding_in_pipeline_split": embedding,
                "account_for_loss_in_pipeline_split": loss,
            }
        if draw.random() < 0.2:
            num_layers = max(1, num_layers + draw.choice([-1, 1, 2]))
        try:
            wanted = core(num_layers, 0, pp, vpp, **fields)
            if sum(len(chunk) for stage in wanted for chunk in stage) != num_layers:
                wanted = None  # a first and a last stage over one rank: megatron-core builds only the last
        except REFUSALS:
            wanted = None
        if wanted is None:
            refused += 1
            with pytest.raises(SpecError):
                layout(model(num_layers), spec(pp, vpp, **fields))
        else:
            accepted += 1
            found = layout(model(num_layers), spec(pp, vpp, **fields))
            assert layers_of(found) == wanted, (num_layers, pp, vpp, fields)
    assert accepted > 500
    assert refused > 100


def test_every_layout_string_is_megatron_cores_or_both_refuse(core):
    """Random strings, right and slightly wrong ones, with MTP and with virtual stages."""
    draw = random.Random(3)
    accepted = refused = 0
    for _ in range(1500):
        pp, v = draw.choice([1, 2, 3, 4, 8]), draw.choice([1, 1, 2, 3])
        if pp == 1:
            v = 1
        mtp = draw.choice([0, 0, 1, 2])
        stages = ["t" * draw.randrange(0, 4) for _ in range(pp * v)]
        num_layers = sum(map(len, stages))
        stages[0] = "E" + stages[0]
        stages[-1] += "m" * mtp + "L"
        text = "|".join(stages)
        if mtp and draw.random() < 0.4:
            text = re.sub("m+", "", text)
            text = text[:-2] + "m" * mtp + "|L" if text.endswith("|L") else text
        if draw.random() < 0.25 and text:
            at = draw.randrange(len(text))
            text = text[:at] + draw.choice(["", "t", "m", "E", "L", "|", "x", ","]) + text[at + 1 :]
        if draw.random() < 0.5:
            text = re.sub(r"(t)\1+", lambda m: f"t*{len(m.group())}", text)
        if not num_layers:
            continue
        vpp = draw.choice([None, v if v > 1 else None])
        try:
            wanted = core(num_layers, mtp, pp, vpp, pipeline_model_parallel_layout=text)
        except REFUSALS:
            wanted = None
        parallel = spec(pp, vpp, pipeline_model_parallel_layout=text)
        if wanted is None or (pp == 1 and "|" in text) or text.replace(",", "").startswith("|"):
            # Two that megatron-core takes and then cannot run as written: virtual stages without a pipeline
            # (initialize_model_parallel), and an empty first stage, which builds the embedding all the same.
            refused += 1
            with pytest.raises(SpecError):
                layout(model(num_layers, mtp), parallel)
        else:
            accepted += 1
            found = layout(model(num_layers, mtp), parallel)
            assert layers_of(found) == wanted, text
            assert sum(len(c.mtp) for stage in found.stages for c in stage) == mtp
    assert accepted > 500
    assert refused > 100


def test_layout_strings_are_parsed_as_megatron_core_parses_them():
    """Brackets first, then single letters; a bracket may hold stage borders and repetitions."""
    pytest.importorskip("megatron.core")
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    draw = random.Random(4)
    parsed = 0
    for _ in range(3000):
        text = "".join(draw.choice(["E", "t", "t", "m", "L", "|", "(", ")*2", "*3", "(tt|)*2", ","]) for _ in range(8))
        try:
            wanted = PipelineParallelLayerLayout.parse_str_to_list(text)
        except AssertionError:
            with pytest.raises(SpecError, match="pipeline_model_parallel_layout"):
                parse_layout_string(text)
        else:
            parsed += 1
            names = [[layer.name for layer in stage] for stage in wanted]
            letters = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
            assert parse_layout_string(text) == ["".join(letters[n] for n in stage) for stage in names]
            # The nested list form says the same.
            assert layout_string(wanted) == layout_string(names) == "|".join(parse_layout_string(text))
    assert parsed > 500


def test_a_hybrid_model_is_split_as_mamba_stack_splits_it():
    """MambaStack takes a slice of the pattern: evenly, or with a first and a last stage of their own."""
    pytest.importorskip("megatron.core")
    try:
        from megatron.core.ssm.mamba_block import MambaStack
    except Exception as error:  # its imports want Transformer Engine
        pytest.skip(f"megatron.core.ssm.mamba_block: {error}")

    for num_layers, pp, first, last in (
        (52, 4, None, None), (52, 1, None, None), (118, 4, 29, 29), (118, 8, 20, None), (61, 4, None, 16),
        (30, 2, 12, 18), (30, 2, 12, None),
    ):  # fmt: skip
        found = layout(
            model(num_layers, hybrid=True),
            spec(pp, num_layers_in_first_pipeline_stage=first, num_layers_in_last_pipeline_stage=last),
        )
        for rank in range(pp):
            stack = SimpleNamespace(
                config=SimpleNamespace(
                    num_layers=num_layers, virtual_pipeline_model_parallel_size=None,
                    num_layers_in_first_pipeline_stage=first, num_layers_in_last_pipeline_stage=last,
                ),
                pp_group=SimpleNamespace(rank=lambda rank=rank: rank, size=lambda pp=pp: pp),
            )  # fmt: skip
            offset, mine = MambaStack._select_layers_for_pipeline_parallel(stack, list(range(num_layers)))
            assert list(found.stages[rank][0].layers) == mine
            assert mine[0] == offset


# --------------------------------------------------------------------------------------------------
# Ends of the model
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vpp", [None, 2])
def test_the_embedding_is_on_the_first_chunk_and_loss_and_mtp_on_the_last(vpp):
    """``is_pipeline_first_stage`` and ``is_pipeline_last_stage`` with virtual stages counted in."""
    found = layout(model(16, mtp_num_layers=2), spec(4, vpp))
    flat = [chunk for c in range(vpp or 1) for chunk in (stage[c] for stage in found.stages)]
    assert [chunk.embedding for chunk in flat] == [True] + [False] * (len(flat) - 1)
    assert [chunk.output for chunk in flat] == [False] * (len(flat) - 1) + [True]
    assert [chunk.mtp for chunk in flat] == [()] * (len(flat) - 1) + [(0, 1)]


def test_mtp_may_have_a_stage_of_its_own():
    """NVIDIA's DeepSeek-V3 string: over 16 ranks, MTP and loss each alone in the last two chunks."""
    found = layout(model(61, mtp_num_layers=1), spec(16, pipeline_model_parallel_layout="Et*3|(tt|)*29,m|L"))
    assert found.virtual_pipeline_model_parallel_size == 2
    assert found.stages[0][0].embedding
    assert sizes_of(found) == [5, *[4] * 13, 2, 2]
    alone, loss = found.stages[14][1], found.stages[15][1]
    assert (alone.layers, alone.mtp, alone.output) == ((), (0,), False)
    assert (loss.layers, loss.mtp, loss.output) == ((), (), True)


def test_account_for_both_ends_takes_one_layer_from_each():
    """30 layers over 4 stages count as 32 slots: 7 + 8 + 8 + 7."""
    found = layout(
        model(30),
        spec(4, account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True),
    )
    assert sizes_of(found) == [7, 8, 8, 7]


# --------------------------------------------------------------------------------------------------
# Refusals
# --------------------------------------------------------------------------------------------------


def test_61_layers_over_4_stages_names_the_split_to_use():
    with pytest.raises(SpecError) as error:
        layout(model(61), spec(4))
    assert str(error.value) == (
        "num_layers (61) is not divisible by pipeline_model_parallel_size (4); "
        "set num_layers_in_last_pipeline_stage to 16 (15+15+15+16)"
    )
    found = layout(model(61), spec(4, num_layers_in_last_pipeline_stage=16))
    assert sizes_of(found) == [15, 15, 15, 16]


FIELDS = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "virtual_pipeline_model_parallel_size",
    "pipeline_model_parallel_size",
)


def follow(advice: str, fields: dict[str, object]) -> dict[str, object]:
    """The spec's fields after doing what the message says."""
    fields = dict(fields)
    if advice.startswith("drop it"):
        fields = {k: x for k, x in fields.items() if not k.startswith("num_layers_in_")}
    text = re.search(r"pipeline_model_parallel_layout to '([^']+)'", advice)
    if text:
        fields["pipeline_model_parallel_layout"] = text.group(1)
        return fields
    for name in ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"):
        if name in advice:
            fields[name] = True
    if "num_layers_in_" in advice:
        fields = {k: x for k, x in fields.items() if not k.startswith("num_layers_in_")}
    for name in FIELDS:
        value = re.search(rf"(?<![a-z_]){name} to (\d+|None)", advice)
        if value:
            fields[name] = None if value.group(1) == "None" else int(value.group(1))
    return fields


def test_the_split_that_a_refusal_names_works():
    """Every refusal of a number of layers says what to set; setting it gives a layout of all the layers."""
    draw = random.Random(5)
    followed = 0
    for _ in range(4000):
        num_layers, pp = draw.randrange(1, 130), draw.choice([1, 2, 3, 4, 5, 8, 16])
        hybrid = draw.random() < 0.2
        fields: dict[str, object] = {"pipeline_model_parallel_size": pp}
        if pp > 1 and not hybrid:
            fields["virtual_pipeline_model_parallel_size"] = draw.choice([None, None, 2, 3, 4])
        for name in FIELDS[:2]:
            if draw.random() < 0.3:
                fields[name] = draw.randrange(1, 20)
        mtp = draw.choice([0, 0, 1])
        try:
            layout(model(num_layers, mtp, hybrid), ParallelSpec(**fields))  # type: ignore[arg-type]
        except SpecError as error:
            message = str(error)
            assert "\n" not in message
            assert any(name in message for name in ("num_layers", *FIELDS))
            advice = message.split("; ")[-1]
            if advice in ("drop them", "set only one of the two"):
                continue
            followed += 1
            found = layout(model(num_layers, mtp, hybrid), ParallelSpec(**follow(advice, fields)))  # type: ignore[arg-type]
            assert sum(sizes_of(found)) == num_layers, (message, fields)
    assert followed > 1000


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_layers_in_first_pipeline_stage": 4, "account_for_loss_in_pipeline_split": True}, "drop one"),
        ({"pipeline_model_parallel_layout": "Et*8|t*8|t*8|t*8L", "num_layers_in_first_pipeline_stage": 8},
         "drop those"),
        ({"pipeline_model_parallel_layout": "Et*8|t*8|t*16L"}, "3 stages"),
        ({"pipeline_model_parallel_layout": "Et*8|t*8|t*8|t*7L"}, r"31 t \(num_layers\); write 32"),
        ({"pipeline_model_parallel_layout": "Et*8|t*8|t*8|t*8Lz"}, "'z'"),
        ({"pipeline_model_parallel_layout": "t*8E|t*8|t*8|t*8L"}, "begin with E"),
        ({"pipeline_model_parallel_layout": "Et*8|t*8|t*8|Lt*8"}, "end with L"),
        ({"pipeline_model_parallel_layout": "Et*8|t*8|t*8|t*8mL"}, r"1 m \(mtp_num_layers\); write 0"),
        ({"pipeline_model_parallel_layout": "Et*8|t*8|t*8|t*8L", "virtual_pipeline_model_parallel_size": 2},
         "set that to None"),
        ({"pipeline_model_parallel_layout": "E(t*99999)*99999L"}, "at most 100000 layers"),
        ({"pipeline_model_parallel_layout": "Et*" + "9" * 5000}, "at most 100000 layers"),
    ],
)  # fmt: skip
def test_contradictions_are_refused_in_one_line(fields, said):
    with pytest.raises(SpecError, match=said) as error:
        layout(model(32), ParallelSpec(pipeline_model_parallel_size=4, **fields))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


def test_a_hybrid_model_takes_no_virtual_stages_slots_or_strings():
    """MambaStack asserts the first and ignores the others, which would leave layers out."""
    for vpp, fields in (
        (2, {}),
        (None, {"account_for_loss_in_pipeline_split": True}),
        (None, {"pipeline_model_parallel_layout": "Et*8|t*8|t*8|t*8L"}),
    ):
        with pytest.raises(SpecError, match=r"hybrid \(Mamba\)"):
            layout(model(32, hybrid=True), spec(4, vpp, **fields))


def test_a_layout_is_worked_out_once():
    """A search lays the same split out hundreds of thousands of times."""
    assert layout(model(120), spec(8, 3)) is layout(model(120), spec(8, 3))
