"""The time model: work against counts by hand, order against what must be slower, ranking against measured runs."""

from __future__ import annotations

from math import ceil
from pathlib import Path
from statistics import median

import pytest

from bridge_memory import BatchSpec, ParallelSpec, RecomputeSpec, RunSpec, SpecError
from bridge_memory.accuracy.ranking import pairs_in_order, score_groups, spearman
from bridge_memory.accuracy.speed_fit import left_out
from bridge_memory.accuracy.throughput import MeasuredRun, Unread, measured, read_throughput
from bridge_memory.plan.megatron.space import useful_modules
from bridge_memory.spec import AttentionSpec, LayerSpec, MambaSpec, MLPSpec, MoESpec
from bridge_memory.spec.layout import layout
from bridge_memory.speed.constants import DEFAULT, FITTED_ON, Constants
from bridge_memory.speed.hardware import HARDWARE, hardware_of
from bridge_memory.speed.megatron.kernels import Kernels, kernels_of
from bridge_memory.speed.megatron.step_time import LEAST_EXPOSED, Parts, Step, StepTime, not_timed, step_time
from bridge_memory.speed.megatron.work import Product, Work, layer_work, output_work
from bridge_memory.tapes.context import context_of

CORPUS = Path(__file__).parent.parent / "data" / "throughput" / "runs.jsonl"
H100 = hardware_of("H100")


def run(model: str = "meta-llama/Llama-3.1-8B", **fields: object) -> RunSpec:
    base = RunSpec(model=model, parallel=ParallelSpec(world_size=64), batch=BatchSpec(global_batch_size=512))
    return base.with_fields(**fields)


@pytest.mark.parametrize("tp", (1, 2, 4))
def test_products_are_two_flops_a_parameter_and_token(tp: int) -> None:
    """Llama-3.1-8B by hand: 8,030,261,248 parameters, of which norms and the embedding take no product."""
    r = run(tensor_model_parallel_size=tp)
    ctx = context_of(r)
    layers = sum(
        p.flops for layer in r.model.layers for half in layer_work(layer, r, ctx, kernels_of(r)) for p in half.products
    )
    head = sum(p.flops for p in output_work(r.model, ctx).products)
    matrices = 8_030_261_248 - 128256 * 4096 - 65 * 4096
    assert layers + head == pytest.approx(2 * matrices * 4096 / tp, rel=1e-3)  # the padded vocabulary is larger


def test_experts_work_on_as_many_tokens_as_are_routed() -> None:
    """Qwen3-30B-A3B: 8 experts of 3 x 2048 x 768 a token, whatever EP and TP are; the router, q, k, v and o beside."""
    for fields in (
        {}, {"expert_model_parallel_size": 8}, {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
        {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2, "expert_model_parallel_size": 4},
    ):  # fmt: skip
        r = run("Qwen/Qwen3-30B-A3B", **fields)
        ctx, tp = context_of(r), r.parallel.tp
        _, ffn = layer_work(r.model.layers[0], r, ctx, kernels_of(r))
        flops = sum(p.flops for p in ffn.products)
        assert flops * tp == pytest.approx(2 * 4096 * (8 * 3 * 2048 * 768 + 2048 * 128), rel=1e-9), fields


def test_attention_is_half_of_the_square() -> None:
    """Causal: 2 products of s x s / 2 by 128, for 32 heads."""
    r = run()
    mixer, _ = layer_work(r.model.layers[0], r, context_of(r), kernels_of(r))
    assert mixer.attention == 2 * 2 * 4096 * 4096 / 2 * 32 * 128


def test_products_run_in_whole_rounds_of_tiles() -> None:
    """By hand: 132 processors of an H100 make 256 x 128 each; a result of 33 x 4 such tiles is one round, one column
    more is another, and the time of a round is that of all processors' tiles."""
    rates = Step(run(), H100).passes.rates
    one, more = Product(33 * 256, 4 * 128, 4096), Product(33 * 256, 4 * 128 + 1, 4096)
    terms = (4096 + DEFAULT.gemm_half_inner) / 4096
    assert rates.product(one) == pytest.approx(one.flops * terms / (H100.flops * DEFAULT.gemm_hopper))
    assert rates.product(more) == pytest.approx(2 * rates.product(one))
    # Lying tiles: 17 rounds of 128 rows by 2 of 256 columns are 34, upright ones 9 x 4 are 36; both one round.
    assert rates.product(Product(17 * 128, 512, 4096)) == pytest.approx(rates.product(one))
    # Of 132 experts with one row each, every one has a tile.
    assert rates.product(Product(1, 128, 4096, times=132)) == pytest.approx(rates.product(one))


def test_gradients_are_added_where_they_are_kept() -> None:
    """A [4096, 4096] weight, bf16, buffers in fp32: in the product's kernel 4 read and 4 written in place of 2; beside
    it the result is read once more."""
    work = Work((Product(4096, 4096, 4096),))
    for fused, width in ((True, 6), (False, 10)):
        passes = Step(run(gradient_accumulation_fusion=fused), H100).passes
        _, backward = passes._half(work)
        assert backward.traffic == pytest.approx(width * 4096 * 4096 / passes.rates.memory)


def test_an_exchange_with_experts_uses_both_links() -> None:
    """By hand: of 16 ranks 7 others are in the node and 8 beside it, of 15 to which as much is sent. DeepEP: with one
    of 16 experts on a rank the other node has none of a token's 8 in one of 12,870 choices, and a copy, of 2e9 bytes,
    goes to it once; by NVLink it goes to half of the 14 ranks that it does not begin at."""
    rates = Step(run(), H100).passes.rates
    sent = 15e9
    routed = MoESpec(num_experts=16, topk=8, moe_ffn_hidden_size=64)
    for copies, far, near in ((None, 8e9, 7e9), (routed, 2e9 * (1 - 1 / 12870), 14e9)):
        work = Work(expert_parallel=sent, expert_copies=copies)
        slowest = max(far / (H100.network * DEFAULT.network_exchange), near / rates.nvlink_exchange)
        assert rates.all_to_all(work, 16, 1) == pytest.approx(slowest)
    assert rates.all_to_all(Work(expert_parallel=sent), 8, 1) == pytest.approx(sent / rates.nvlink_exchange)


@pytest.mark.parametrize(
    ("ranks", "stride", "near"), [(64, 1, 64), (72, 1, 72), (128, 1, 64), (128, 2, 32), (144, 1, 72)]
)
def test_ranks_are_spread_evenly_over_domains(ranks: int, stride: int, near: int) -> None:
    """Domains of 72: of ``ranks`` as many are in each of as few as hold them; every other rank is sent a copy."""
    rates = Step(run(gpu_arch="blackwell"), HARDWARE["GB300"]).passes.rates
    far = (ranks - near) * 1e9 / (HARDWARE["GB300"].network * DEFAULT.network_exchange)
    inside = (near - 1) * 1e9 / rates.nvlink_exchange
    found = rates.all_to_all(Work(expert_parallel=(ranks - 1) * 1e9), ranks, stride)
    assert found == pytest.approx(max(far, inside))


def test_a_gather_over_several_domains_leaves_each_by_all_adapters() -> None:
    """16 ranks on two H100 nodes: a ring passes each node's border once, which eight adapters of 50 GB/s share, faster
    than NVLink is fitted to be; each of its collectives waits for the network twice."""
    rates = Step(run(), H100).passes.rates
    assert 8 * rates.network > rates.nvlink
    assert rates.gathered(8e9, 3, 16) == pytest.approx(8e9 / rates.nvlink + 3 * 2 * DEFAULT.network_latency)
    slow = Step(run(), H100._replace(network=1e9)).passes.rates
    assert slow.gathered(8e9, 3, 16) == pytest.approx(8e9 / (8 * slow.network) + 6 * DEFAULT.network_latency)
    assert rates.gathered(8e9, 3, 8) == pytest.approx(8e9 / rates.nvlink + 3 * DEFAULT.nvlink_latency)


def test_an_allgather_dispatcher_sends_every_token_to_every_rank() -> None:
    """Qwen3-30B-A3B on 64 ranks: 63 times 2,048 elements of 4,096 tokens there and back, where an all-to-all sends 8
    copies of 63/64 of them."""
    def exchanged(dispatcher: str) -> float:
        r = experts(moe_token_dispatcher_type=dispatcher)
        return layer_work(r.model.layers[0], r, context_of(r), kernels_of(r)).feed_forward.expert_parallel

    tokens = 2 * 4096 * 2048 * 2
    assert exchanged("allgather") == 63 * tokens and exchanged("alltoall") == pytest.approx(8 * 63 / 64 * tokens)


def test_deepep_takes_tokens_as_they_are() -> None:
    """Qwen3-30B-A3B on 64 ranks, 4,096 tokens of 2,048: before an all-to-all a token is read once and written 8
    times, after it 8 copies are sorted by expert, and both undone. DeepEP's are read once a rank, of two of 128 experts
    each, and written for each expert."""
    def traffic(dispatcher: str) -> float:
        r = experts(moe_token_dispatcher_type=dispatcher)
        return layer_work(r.model.layers[0], r, context_of(r), kernels_of(r)).feed_forward.traffic

    ranks = 64 * (1 - 120 * 119 / (128 * 127))  # none of a token's 8 is one of two
    rows = 2 * (1 + 8) + 4 * 8 - 2 * (ranks + 8)
    assert traffic("alltoall") - traffic("flex") == pytest.approx(rows * 4096 * 2048 * 2)


def test_deepep_has_as_many_processors_as_it_is_given() -> None:
    """Its 20 copy 340 GB/s, of which an H100's link is less, and a GB200's more; HybridEP needs none for that."""
    def rate(gpu: str, backend: str = "deepep", **fields: object) -> float:
        flex = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": backend}
        return Step(experts(**flex, **fields), HARDWARE[gpu]).passes.rates.nvlink_exchange

    link = DEFAULT.nvlink_exchange * 900e9
    assert rate("H100") == rate("H100", "hybridep") == link / 2
    assert rate("GB200") == 340e9 and rate("GB200", moe_flex_dispatcher_num_sms=10) == 170e9
    assert rate("GB200", "hybridep") == link


def experts(**fields: object) -> RunSpec:
    parallel = ParallelSpec(world_size=64, expert_model_parallel_size=64)
    batch = BatchSpec(seq_length=4096, global_batch_size=256)
    return RunSpec(model="Qwen/Qwen3-30B-A3B", parallel=parallel, batch=batch).with_fields(**fields)


def test_no_recomputation_is_free() -> None:
    """Of every module that frees something, and most of what holds the others."""
    base = RunSpec(model="deepseek-ai/DeepSeek-V2-Lite", parallel=ParallelSpec(world_size=8),
                   batch=BatchSpec(global_batch_size=32))  # fmt: skip
    times = {
        module: step_time(base.with_fields(recompute_granularity="selective", recompute_modules=(module,)), H100)
        for module in (*useful_modules(base), "core_attn")
    }
    plain = step_time(base, H100).seconds
    for module, time in times.items():
        assert time.recomputation > 0 and time.seconds - plain == pytest.approx(time.recomputation), module
    assert times["moe"].seconds > times["shared_experts"].seconds
    # Two experts of 1,408, of a model of 2,048, 4,096 tokens, in 26 of 27 layers, 4 microbatches: three products.
    flops = 2 * 3 * 4096 * 2048 * 2816 * 26 * 4
    rates = Step(base, H100).passes.rates
    assert times["shared_experts"].recomputation > flops / rates.flops


def test_context_parallelism_is_not_free() -> None:
    """Half of a sequence of twice the micro batch is as many tokens: what is left are the parts of attention that are
    added up, by hand: the first copied, the second read, the sum read and written."""
    one = run(micro_batch_size=1)
    two = run(micro_batch_size=2, context_parallel_size=2)
    works = [layer_work(r.model.layers[0], r, context_of(r), kernels_of(r)).mixer for r in (one, two)]
    assert works[1].traffic - works[0].traffic == (2 + 3) * 4096 * 32 * 128 * 2
    assert step_time(two, H100).seconds > step_time(one, H100).seconds


def test_what_context_parallelism_shows_by_how_it_sends() -> None:
    """Llama-3.1-8B at 32k over 4 ranks of a node: a ring of keys and values that attention hides; their gather, which
    nothing hides, and in backward twice; queries, keys and values, and back, by heads."""
    def shown(how: str) -> float:
        r = run(context_parallel_size=4, seq_length=32768, cp_comm_type=how)
        return step_time(r, H100).passes.context_parallel / r.num_microbatches / 32

    rates, tokens = Step(run(), H100).passes.rates, 32768 // 4
    kv, queries = tokens * 8 * 256 * 2, tokens * 32 * 256 * 2
    assert shown("p2p") == 0
    assert shown("all_gather") == pytest.approx(3 * (3 * kv / rates.nvlink + 3 * DEFAULT.nvlink_latency))
    assert shown("a2a") == pytest.approx(2 * (0.75 * (kv + queries) / rates.nvlink + 2 * DEFAULT.nvlink_latency))


@pytest.mark.parametrize("gpu", ("A100-80GB", "H100", "B200", "GB200"))
def test_more_ranks_of_communication_take_no_less(gpu: str) -> None:
    """Seconds of sending alone, over a node and beyond it, never fall as a group grows."""
    def sent(**fields: object) -> list[float]:
        name, sizes = next(iter(fields.items()))
        assert isinstance(sizes, tuple)
        base = experts(expert_model_parallel_size=1) if name.startswith("expert") else run(world_size=64)
        times = [step_time(base.with_fields(global_batch_size=256, **{name: n}), hardware_of(gpu)) for n in sizes]
        return [t.passes.tensor_parallel + t.passes.expert_parallel + t.passes.context_parallel for t in times]

    for fields in ({"tensor_model_parallel_size": (1, 2, 4, 8, 16, 32)}, {"context_parallel_size": (1, 2, 4, 8, 16)},
                   {"expert_model_parallel_size": (1, 2, 4, 8, 16, 32, 64)}):  # fmt: skip
        found = sent(**fields)
        assert found == sorted(found) and found[0] == 0


def test_unfused_attention_makes_all_scores_and_wants_aligned_heads() -> None:
    """Twice the causal half; heads of 108 elements of 2 bytes are no multiple of 16 bytes, and an A100 has a sixteenth
    of its tensor cores' rate for them (19.5 of 312 TFLOP/s)."""
    def flops(heads: int, **fields: object) -> float:
        layer = LayerSpec(AttentionSpec(heads, heads, 13824 // heads), MLPSpec(4 * 13824, gated=False))
        r = run(**fields)
        return layer_work(layer, r, context_of(r), kernels_of(r)).mixer.attention

    assert flops(96, attention_backend="unfused") == 2 * flops(96)
    assert flops(128, attention_backend="unfused") == 16 * 2 * flops(128)


def test_messages_between_stages() -> None:
    """Of two stages each waits for two messages a microbatch, of four the middle ones for four where a call sends or
    receives; in parts of tensor-parallel ranks a quarter of the bytes goes over the network, and is gathered."""
    def hops(kernels: Kernels, pp: int) -> float:
        r = run(pipeline_model_parallel_size=pp, tensor_model_parallel_size=4, sequence_parallel=False)
        step = Step(r, H100, kernels=kernels)
        return step.time().pipeline / step._hop() / r.num_microbatches

    assert [hops(Kernels(), pp) for pp in (2, 4)] == pytest.approx([2, 2])
    assert [hops(Kernels(separate_sends=True), pp) for pp in (2, 4)] == pytest.approx([2, 4])
    r = run(pipeline_model_parallel_size=4, tensor_model_parallel_size=4, sequence_parallel=False)
    whole, parts = (Step(r, H100, kernels=k) for k in (Kernels(), Kernels(pipeline_in_parts=True)))
    rates, nbytes = whole.passes.rates, 4096 * 4096 * 2
    network, nvlink = DEFAULT.network_latency, DEFAULT.nvlink_latency
    assert whole._hop() == pytest.approx(nbytes / rates.network + network)
    assert parts._hop() == pytest.approx(nbytes / 4 / rates.network + network + 0.75 * nbytes / rates.nvlink + nvlink)


def test_messages_of_virtual_stages_are_hidden_as_far_as_a_link_goes() -> None:
    """16 chunks of one layer send as often; on a network a thousand times slower the link is the limit."""
    r = run(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=16)
    assert step_time(r, H100).pipeline == 0
    slow = H100._replace(network=H100.network / 1000)
    t, hop = step_time(r, slow), Step(r, slow)._hop()
    assert t.pipeline + t.passes.total == pytest.approx(r.num_microbatches * 16 * hop)


def test_a_host_that_waits_for_every_kernel() -> None:
    """Llama-3.1-8B, 32 layers: one pass forward, two backward, once more where layers are recomputed."""
    for fields, passes in (({}, 3), ({"recompute_granularity": "full", "recompute_method": "uniform",
                                      "recompute_num_layers": 1}, 4)):  # fmt: skip
        t = step_time(run(**fields), H100, kernels=Kernels(blocking_launches=True))
        # The output layer counts as one half of a layer.
        assert t.passes.host == pytest.approx(8 * (32 * passes + 1.5) * DEFAULT.layer_blocking)


def test_what_is_recomputed_is_entered_again() -> None:
    """Half of a layer's host time for each region: the attention; the norm before the experts (Transformer Engine fuses
    the other into the linear after it); an MoE layer's activation. The batch is so large that launching is hidden."""
    def host(*modules: str) -> float:
        r = run("Qwen/Qwen3-30B-A3B", expert_model_parallel_size=8, micro_batch_size=8, **(
            {"recompute_granularity": "selective", "recompute_modules": modules} if modules else {}))
        return step_time(r, H100).passes.host / (48 * r.num_microbatches * DEFAULT.layer / 2)

    assert host("core_attn") - host() == pytest.approx(1)
    assert host("layernorm") - host() == pytest.approx(1)
    assert host("moe_act") - host() == pytest.approx(1)
    assert host("layernorm", "moe_act") - host() == pytest.approx(2)
    assert host("moe") - host() == pytest.approx(1)


def test_the_parts_add_up() -> None:
    t = step_time(run(pipeline_model_parallel_size=4, tensor_model_parallel_size=2), H100)
    assert t.seconds == pytest.approx(
        sum(t.passes) + t.bubble + t.pipeline + t.data_parallel + t.optimizer
    ) and min(t.passes.total, t.bubble, t.pipeline, t.data_parallel, t.optimizer) > 0


def test_the_bubble_is_that_of_the_paper() -> None:
    """(p - 1) / (v m) of the ideal time where all stages are equal (Narayanan et al. 2021, section 2.2); here they are,
    but for the head."""
    free = Constants()._replace(network=1e9, network_latency=0.0)
    for vpp, share in ((None, 7 / 64), (2, 7 / 128)):
        r = run(pipeline_model_parallel_size=8, virtual_pipeline_model_parallel_size=vpp, world_size=64)
        step = Step(r, H100, free)
        t = step.time()
        stage_without_head = t.bubble * (vpp or 1) / 7
        assert r.num_microbatches == 64
        assert t.bubble == pytest.approx(share * 64 * stage_without_head, rel=1e-6)
        assert t.passes.total > 64 * stage_without_head


@pytest.mark.parametrize(
    ("slow", "fast"),
    (
        ({"recompute": RecomputeSpec(granularity="full", method="uniform", num_layers=1)}, {}),
        ({"tensor_model_parallel_size": 8}, {"tensor_model_parallel_size": 2}),
        (
            {"pipeline_model_parallel_size": 8},
            {"pipeline_model_parallel_size": 8, "virtual_pipeline_model_parallel_size": 4},
        ),
        ({}, {"fp8": "hybrid"}),
        ({"overlap_grad_reduce": False}, {"overlap_grad_reduce": True}),
        ({"attention_backend": "unfused"}, {}),
    ),
)  # fmt: skip
def test_what_must_be_slower_is(slow: dict[str, object], fast: dict[str, object]) -> None:
    assert step_time(run(**slow), H100).seconds > step_time(run(**fast), H100).seconds


def test_full_recomputation_is_one_more_forward_pass() -> None:
    plain, again = step_time(run(), H100), step_time(
        run(recompute=RecomputeSpec(granularity="full", method="uniform", num_layers=1)), H100
    )
    assert again.recomputation == pytest.approx(again.seconds - plain.seconds, rel=1e-3)
    assert 0.2 < again.recomputation / plain.seconds < 0.36


def test_hardware_is_in_plain_units() -> None:
    """An H100 of 989.4 TFLOP/s, 3350 GB/s and 900 GB/s of NVLink in both directions."""
    h = HARDWARE["H100"]
    assert (h.flops, h.memory, h.nvlink, h.network) == (989.4e12, 3350e9, 450e9, 50e9)
    with pytest.raises(SpecError, match="TPU"):
        hardware_of("TPU")


def test_what_a_graph_launches_takes_no_host_time() -> None:
    """Qwen3-30B-A3B, a micro batch of one: a graph of attention leaves the experts to the host, one of the iteration
    leaves nothing; a batch of eight hides all but the fixed part."""
    def host(micro: int = 1, **fields: object) -> float:
        r = experts(expert_model_parallel_size=8, micro_batch_size=micro, global_batch_size=1024, **fields)
        return step_time(r, HARDWARE["GB200"]).passes.host / r.num_microbatches

    attention = host(cuda_graph_impl="transformer_engine", cuda_graph_modules=("attn",))
    router = host(cuda_graph_impl="transformer_engine", cuda_graph_modules=("attn", "moe_router"))
    assert host() > attention > router > 0
    assert host(cuda_graph_impl="full_iteration") == 0 == host(cuda_graph_impl="transformer_engine")
    fixed = 48 * 2 * DEFAULT.layer * 3 / 2 + 3 / 2 * DEFAULT.layer
    assert host(16) == pytest.approx(fixed, rel=0.02) and host() > 2 * fixed


def test_overlapped_exchanges_are_hidden_by_what_is_computed_beside_them() -> None:
    """Inside of a node they are the shorter, between eight nodes the longer."""
    def passes(ep: int, on: bool) -> Parts:
        return step_time(experts(expert_model_parallel_size=ep, overlap_moe_expert_parallel_comm=on), H100).passes

    near, far = ((passes(ep, False), passes(ep, True)) for ep in (4, 64))
    shown = DEFAULT.expert_parallel_exposed
    assert near[1].expert_parallel == pytest.approx(shown * near[0].expert_parallel)
    computing = far[0].products + far[0].attention + far[0].traffic
    assert far[0].expert_parallel > computing
    # The output layer's share of what is computed has nothing beside it.
    hidden = far[0].expert_parallel - far[1].expert_parallel
    assert 0.8 * (1 - shown) * computing < hidden < (1 - shown) * computing


def test_no_host_waits_for_the_counts_of_a_graph_of_the_iteration() -> None:
    """Of Qwen3-30B-A3B's 48 layers each waits once a microbatch; backward knows the counts."""
    def sent(**fields: object) -> float:
        return step_time(experts(**fields), HARDWARE["GB200"]).passes.expert_parallel

    graph = {"cuda_graph_impl": "full_iteration"}
    assert sent() - sent(**graph) == pytest.approx(4 * 48 * DEFAULT.exchange_latency)


def test_hybrid_ep_sends_maps_and_probabilities_of_all_experts() -> None:
    """Qwen3-30B-A3B on 64 ranks of a GB200's domain: forward a byte for each of 4,096 tokens and 128 experts from 63
    others; both ways every copy of 2,048 elements in bf16, and with one of two exchanges 128 numbers in fp32."""
    fields = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"}
    r, gpu, c = experts(**fields), HARDWARE["GB200"], DEFAULT
    copies = 63 / 64 * 64 * (1 - 120 * 119 / (128 * 127))
    one_way = 4096 * copies * (2 * 2048 * 2 + 128 * 4) / (c.nvlink_exchange * gpu.nvlink) + 2 * c.nvlink_latency
    gathered = 63 * 4096 * 128 / (c.nvlink_sharp * gpu.nvlink) + c.nvlink_latency
    a_layer = 2 * one_way + gathered + c.exchange_latency
    assert step_time(r, gpu).passes.expert_parallel == pytest.approx(4 * 48 * a_layer)


def test_casts_are_not_a_part_of_products() -> None:
    """Llama-3.1-8B, 4,096 tokens: inputs of QKV and fc1 are cast by the norms before them, those of the other two, of
    4,096 and 14,336, are read in bf16 and written twice in eight bits; gradients of all four outputs likewise. With a
    scale of the tensor's own all of them are read twice, and no norm knows it."""
    def casts(recipe: str) -> tuple[float, float]:
        r = run(fp8="hybrid", gpu_arch="blackwell", **{"precision.fp8_recipe": recipe})
        halves = layer_work(r.model.layers[0], r, context_of(r), kernels_of(r))
        return sum(w.casts for w in halves), sum(w.casts_backward for w in halves)

    outputs = 6144 + 4096 + 2 * 14336 + 4096
    assert casts("mxfp8") == (4 * 4096 * (4096 + 14336), 4 * 4096 * outputs)
    assert casts("tensorwise") == (6 * 4096 * (3 * 4096 + 14336), 6 * 4096 * outputs)


def test_kernels_of_a_graph_begin_one_after_the_other() -> None:
    """What the GPU takes between kernels stays where no host launches them: products of 16 experts on four streams, and
    4 in one kernel, of Qwen3-30B-A3B on 8 ranks."""
    def work(**fields: object) -> Work:
        r = experts(expert_model_parallel_size=8, **fields)
        return layer_work(r.model.layers[0], r, context_of(r), kernels_of(r)).feed_forward

    plain, graph = work(), work(cuda_graph_impl="full_iteration")
    assert plain.kernels == graph.kernels and plain.launches > graph.launches == 0
    assert plain.kernels == plain.launches + 2 * 16 / 4
    r = run()
    more = [step_time(r, H100, DEFAULT._replace(kernel=x)).passes.traffic for x in (0.0, 1e-6)]
    kernels = sum(w.kernels for w in layer_work(r.model.layers[0], r, context_of(r), kernels_of(r)))
    assert more[1] - more[0] == pytest.approx(3 * 32 * r.num_microbatches * kernels * 1e-6)


def test_the_loss_reads_and_writes_what_its_kernels_do() -> None:
    """Bytes a logit: Transformer Engine's reads twice and writes in bf16, backward reads and writes; Megatron's has a
    copy in fp32, whose kernels are counted in ``cross_entropy.py``."""
    def passes(**fields: object) -> float:
        r = run(**fields)
        ctx = context_of(r)
        return 3 * output_work(r.model, ctx).traffic / (ctx.tokens * ctx.padded_vocab)

    fused = {"cross_entropy_loss_fusion": True}
    found = passes(), passes(**fused), passes(**fused, cross_entropy_fusion_impl="te")
    assert found == pytest.approx((52.0, 28.0, 10.0))


def test_the_ends_of_a_tile_take_as_long_in_eight_bits() -> None:
    """GB200, twice as fast in eight bits: what a product without terms takes is the same, beside the shares reached."""
    r = run(fp8="hybrid", gpu_arch="blackwell", **TENSORWISE)
    rates = Step(r, HARDWARE["GB200"], DEFAULT._replace(gemm_fp8_blackwell=1.0)).passes.rates
    eight, sixteen = (rates.product(Product(4096, 4096, 0, quantized=on)) for on in (True, False))
    assert eight == pytest.approx(sixteen) and eight > 0
    eight, sixteen = (rates.product(Product(4096, 4096, 10**9, quantized=on)) for on in (True, False))
    assert eight == pytest.approx(sixteen / 2, rel=1e-6)


def test_experts_fill_their_last_tile_by_half() -> None:
    """1,024 rows on average are eight and a half tiles of 128, whole rows of a linear eight."""
    rates = Step(experts(), H100).passes.rates
    linear = Product(1024, 2048, 768, times=132)
    assert rates.product(linear._replace(expert=True)) / rates.product(linear) == pytest.approx(8.5 / 8)


def test_frozen_weights_have_no_gradient_products() -> None:
    """With adapters two products of three are left, none of which is added to a gradient, and nothing is reduced."""
    def time(**fields: object) -> StepTime:
        return step_time(run(micro_batch_size=4, **fields), H100)

    plain, frozen = time(), time(**{"peft.scheme": "lora", "peft.dim": 16})
    assert frozen.passes.products == pytest.approx(plain.passes.products * 2 / 3, rel=0.03)
    assert frozen.passes.traffic < plain.passes.traffic and frozen.optimizer < plain.optimizer / 50
    assert not_timed(run(**{"peft.scheme": "lora", "peft.dim": 16})) == ()


TENSORWISE = {"precision.fp8_recipe": "tensorwise"}


def test_four_bit_products_are_faster_where_the_card_has_them() -> None:
    """GB300: 15,000 TFLOP/s in four bits and 5,000 in eight (data sheet); GB200: 10,000 and 5,000."""
    def products(gpu: str, **fields: object) -> float:
        r = run("meta-llama/Llama-3.1-70B", gpu_arch="blackwell", **fields)
        return step_time(r, HARDWARE[gpu], DEFAULT._replace(gemm_half_inner=0.0)).passes.products

    for gpu, more in (("GB200", 2.0), ("GB300", 3.0)):
        eight, four = products(gpu, fp8="hybrid", **TENSORWISE), products(gpu, fp4="e2m1")
        assert eight / four == pytest.approx(more * DEFAULT.gemm_fp4 / DEFAULT.gemm_fp8_blackwell, rel=0.08)
    scaled = products("GB200", fp8="e4m3", **{"precision.fp8_recipe": "mxfp8"})
    assert scaled * DEFAULT.block_scaled == pytest.approx(
        products("GB200", fp8="hybrid", **TENSORWISE), rel=0.02
    )


def test_quantized_linears_gather_a_byte_an_element() -> None:
    """A gather of s b h elements forward, and a reduce-scatter in bf16: 2 + 2 bytes, in fp8 1 + 2; without sequence
    parallelism an all-reduce in bf16."""
    def sent(**fields: object) -> float:
        r = run(tensor_model_parallel_size=4, **fields)
        return layer_work(r.model.layers[0], r, context_of(r), kernels_of(r)).mixer.tensor_parallel

    tokens = 4096 * 4096
    assert sent() == 4 * tokens and sent(fp8="hybrid") == 3 * tokens
    assert sent(fp8="hybrid", sequence_parallel=False) == 4 * tokens
    assert sent(fp4="e2m1", gpu_arch="blackwell") == (2 + 0.5 + 1 / 16) * tokens


def test_a_scan_by_hand() -> None:
    """Nemotron-3-Nano: 64 heads of 64, a state of 128, 8 groups, chunks of 128. A token's scores in its chunk take
    2 x 128 x 8 x 128 operations, their product with the values 2 x 128 x 4,096, both sides of the state 4 x 4,096 x
    128."""
    r = run("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16")
    mixer = next(layer for layer in r.model.layers if isinstance(layer.mixer, MambaSpec))
    scan = layer_work(mixer, r, context_of(r), kernels_of(r)).mixer.scan
    assert scan == 4096 * (2 * 128 * 8 * 128 + 2 * 128 * 4096 + 4 * 4096 * 128)


def test_biases_of_experts_pass_through_memory_in_fp32() -> None:
    """GPT-OSS: 4 experts of 2,880 a token; 28 bytes forward and 36 backward, unless the operation fuser adds them. Its
    gates are clamped: both halves read and written twice, 16 bytes, and 30 with the masks of three bounds backward."""
    def traffic(**fields: object) -> float:
        r = run("openai/gpt-oss-120b", **fields)
        return layer_work(r.model.layers[0], r, context_of(r), kernels_of(r)).feed_forward.traffic

    fused = traffic(use_transformer_engine_op_fuser=True, megatron_core=(0, 19))
    biases, clamps = 28 + 36 - 1, 16 + 30 + 2
    assert 3 * (traffic() - fused) == pytest.approx((biases + clamps) * 4096 * 4 * 2880)


def test_an_exchange_over_efa_takes_longer() -> None:
    """Qwen3-30B-A3B on 16 ranks, two nodes: NCCL's exchanges and DeepEP's each wait, and reach less of the network."""
    for dispatcher, latency in (("alltoall", DEFAULT.efa_latency), ("flex", DEFAULT.efa_latency_deepep)):
        r = experts(expert_model_parallel_size=16, moe_token_dispatcher_type=dispatcher)
        usual, efa = (Step(r, H100, kernels=kernels_of(r)._replace(efa=on)).passes.rates for on in (False, True))
        w = layer_work(r.model.layers[0], r, context_of(r), kernels_of(r)).feed_forward
        far = efa.all_to_all(w, 16, 1) - 2 * latency
        assert far >= (usual.all_to_all(w, 16, 1) - 2 * DEFAULT.network_latency) > 0
        assert efa.all_to_all(w, 8, 1) == usual.all_to_all(w, 8, 1)  # inside a node there is no network


def test_torch_s_grouped_products_are_one_launch_in_bf16() -> None:
    r = experts(expert_model_parallel_size=4, fp8="hybrid")
    one, each = (
        layer_work(r.model.layers[0], r, context_of(r), kernels_of(r)._replace(grouped_experts=on)).feed_forward
        for on in (True, False)
    )
    assert one.expert_launches == 0 and each.expert_launches == 2 * 2 * 32  # two linears, a cast each, 32 experts
    assert not any(p.quantized for p in one.products if p.expert)
    assert all(p.quantized for p in each.products if p.expert)


# ---- measured runs ----


@pytest.fixture(scope="module")
def rows() -> list[MeasuredRun]:
    return [r for r in read_throughput(CORPUS) if isinstance(r, MeasuredRun)]


def test_groups_that_were_not_fitted_are_ranked(rows: list[MeasuredRun]) -> None:
    """Targets of the project: median Spearman 0.85, median regret 2 %, 90th percentile 10 %."""
    scores = score_groups(rows, lambda r: step_time(r.run, r.hardware, DEFAULT, r.kernels).seconds)
    unseen = [s for s in scores if s.group not in FITTED_ON]
    assert len(unseen) >= 10
    assert median(s.spearman for s in unseen) >= 0.85 and median(s.regret for s in unseen) <= 0.02
    assert sorted(s.regret for s in unseen)[ceil(0.9 * len(unseen)) - 1] <= 0.10


SLOW = 1e9, 2e9


def _by_link(**fields: object) -> tuple[float, float]:
    """Seconds of a step over links to host memory of ``SLOW`` bytes a second, which hide nothing."""
    one, other = (step_time(run(**fields), H100._replace(host_link=rate)).seconds for rate in SLOW)
    return one, other


@pytest.mark.parametrize("tp", (1, 2))
def test_offloaded_activations_by_hand(tp: int) -> None:
    """Llama-3.1-8B, 32 layers: 4096 tokens' queries (4096 wide), keys and values (1024 each), in bf16, out and in. What
    attention makes is saved by the projection too and stays; 8 microbatches."""
    one, other = _by_link(offload_modules=("core_attn",), tensor_model_parallel_size=tp, global_batch_size=512 // tp)
    nbytes = 32 * 8 * 4096 * (4096 + 2 * 1024) * 2 / tp
    assert one - other == pytest.approx(2 * nbytes / DEFAULT.host_link * (1 / SLOW[0] - 1 / SLOW[1]), rel=1e-9)
    fields = {"tensor_model_parallel_size": tp, "global_batch_size": 512 // tp}
    there, plain = step_time(run(offload_modules=("core_attn",), **fields), H100), step_time(run(**fields), H100)
    hidden = 2 * nbytes / DEFAULT.host_link / H100.host_link
    assert there.passes.offload == pytest.approx(LEAST_EXPOSED * hidden, rel=1e-9)
    assert there.seconds == pytest.approx(plain.seconds + there.passes.offload)


def test_a_copy_is_no_faster_than_host_memory() -> None:
    """A GPU's share of it, where that is less than its link: of a MI250X, say. The same bytes as above."""
    there = [
        step_time(run(offload_modules=("core_attn",), global_batch_size=512), H100._replace(host_memory=rate)).seconds
        for rate in SLOW
    ]
    nbytes = 32 * 8 * 4096 * (4096 + 2 * 1024) * 2
    longer = 2 * nbytes / DEFAULT.host_memory * (1 / SLOW[0] - 1 / SLOW[1])
    assert there[0] - there[1] == pytest.approx(longer, rel=1e-9)


def test_layers_that_run_again_offload_nothing() -> None:
    full = {"recompute_granularity": "full", "recompute_method": "block", "offload_modules": ("core_attn",)}
    for layers in (8, 32):
        one, other = _by_link(**full, recompute_num_layers=layers)
        plain, less = _by_link(offload_modules=("core_attn",))
        assert one - other == pytest.approx((plain - less) * (32 - layers) / 32, rel=1e-9, abs=1e-9)


def test_an_offloaded_optimizer_by_hand() -> None:
    """A shard of 8,030,261,248 / 64 elements: 4 bytes out and 4 in, or 2 of weights without main parameters on the GPU;
    28 bytes in host memory."""
    shard = 8_030_261_248 / 64
    for fraction in (0.25, 1.0):
        for fused, width in ((False, 8), (True, 6)):
            one = run(optimizer_cpu_offload=True, optimizer_offload_fraction=fraction,
                      use_precision_aware_optimizer=fused)  # fmt: skip
            moved = shard * fraction * width / (64e9 * DEFAULT.host_link)
            there = shard * fraction * 28 / (77e9 * DEFAULT.host_memory)
            assert step_time(one, H100).optimizer == pytest.approx(moved + there, rel=2e-3), (fraction, fused)
    none = run(optimizer_cpu_offload=True, optimizer_offload_fraction=0.0)
    assert step_time(none, H100).optimizer == pytest.approx(step_time(run(), H100).optimizer)


def test_whole_layers_are_offloaded_beside_all_layers() -> None:
    """Half as many layers take half as long where nothing hides them, and nothing but the least where all can."""
    times = [_by_link(cpu_offloading_num_layers=n) for n in (4, 8)]
    (few, fewer), (many, more) = times
    assert many - more == pytest.approx(2 * (few - fewer), rel=1e-9)
    one = step_time(run(cpu_offloading_num_layers=1), H100)
    assert 0 < one.passes.offload < 0.01 * one.seconds


def test_the_constants_are_within_reach_of_the_hardware() -> None:
    shares = [name for name in Constants._fields if name.startswith(("gemm", "attention", "memory", "n"))]
    for name in (n for n in shares if not n.endswith(("latency", "inner"))):
        # On Blackwell a share of what sixteen-bit products reach, which are the further from their peak.
        of = {"gemm_fp8_blackwell": DEFAULT.gemm_blackwell_ultra, "gemm_fp8": DEFAULT.gemm_hopper}.get(name, 1.0)
        assert 0.2 < getattr(DEFAULT, name) * of < 1, name


def test_models_are_read_by_their_sizes() -> None:
    """LLaMA-30B has 60 layers of 6656 with 52 heads and 17920 in the MLP (Touvron et al. 2023, table 2); an embedding
    of 128,000 rows weighs as much as 1.6 of its layers, so that four stages of 15.8 are 14, 16, 16 and 14 layers at
    best, the heaviest of 16; DeepSpeed deals 78 layers to 12 stages as 11 sevens and a one; sequence parallelism of one
    rank is none."""
    row = {
        "id": 1, "gpu": "A100 80GB", "gpus": 64, "framework": "AA-Scaling (ZeRO-1)", "task": "pretrain",
        "model": "LLaMA-30B", "model_facts": {"hidden": 6656, "layers": 60, "heads": 52, "ffn": 17920},
        "tp": 1, "pp": 4, "mbs": 1, "gbs": 2048, "seq": 2048, "step_time_s": 100.0,
        "attention": "flash_attention2 + RMS kernel", "sequence_parallel": True, "recompute": "none",
    }  # fmt: skip
    found = measured(row)
    assert isinstance(found, MeasuredRun)
    model, ctx = found.run.model, context_of(found.run)
    mixer, feed_forward = layer_work(model.layers[0], found.run, ctx, found.kernels)
    flops = sum(p.flops for p in (*mixer.products, *feed_forward.products))
    assert (len(model.layers), model.vocab_size) == (60, 128000)
    assert flops == 2 * 2048 * (4 * 6656 * 6656 + 3 * 6656 * 17920)
    assert [c.num_layers for (c,) in layout(model, found.run.parallel).stages] == [14, 16, 16, 14]
    # Twenty stages of four layers at most would leave some empty: 63 things are three fours and 17 threes.
    many = measured({**row, "pp": 20, "gpus": 80})
    assert isinstance(many, MeasuredRun)
    stages = layout(model, many.run.parallel).stages
    assert [c.num_layers for (c,) in stages] == [3, 4, 4, *[3] * 16, 1]
    assert not found.run.parallel.sp and not found.run.data_parallel.grad_reduce_in_fp32
    bloom = {**row, "source": "bigscience", "framework": "Megatron-DeepSpeed", "model": "GPT 182B", "attention": None,
             "model_facts": {"hidden": 13824, "layers": 78, "heads": 64}, "pp": 12, "tp": 4, "gpus": 384}
    found = measured(bloom)
    assert isinstance(found, MeasuredRun)
    stages = layout(found.run.model, found.run.parallel).stages
    assert [c.num_layers for (c,) in stages] == [7] * 11 + [1]
    # In the section on rebalancing the embedding and the output layer, of BLOOM's vocabulary, are dealt as layers.
    facts = {"hidden": 14336, "layers": 70}
    found = measured({**bloom, "model": "GPT 176B", "model_facts": facts, "ref": "L947 (Rebalancing layers)"})
    assert isinstance(found, MeasuredRun)
    stages = layout(found.run.model, found.run.parallel).stages
    assert [c.num_layers for (c,) in stages] == [5] + [6] * 10 + [5] and found.run.model.vocab_size == 250880
    attention = found.run.model.layers[0].mixer
    assert isinstance(attention, AttentionSpec) and attention.num_attention_heads == 64
    found = measured({**row, "model": "Strange-30B"})
    assert isinstance(found, Unread) and "not what its layers are" in found.reason


@pytest.mark.slow
def test_groups_left_out_have_no_part_in_the_fit(rows: list[MeasuredRun]) -> None:
    """What was measured of a group does not change its own constants, and those of others it does."""
    named = sorted({s.group for s in score_groups(rows, lambda row: 1.0)})
    small = [r for r in rows if r.group in named[-4:] and r.seconds is not None]
    apart = sorted({r.group for r in small})[0]
    slower = [r._replace(seconds=1.2 * r.seconds) if r.group == apart and r.seconds else r for r in small]
    was, now = ({s.group: s for s in left_out(some, 4, rounds=2)} for some in (small, slower))
    assert was.keys() == now.keys() == set(named[-4:])
    assert 1 - now[apart].bias == pytest.approx((1 - was[apart].bias) / 1.2)
    assert any(now[g].bias != was[g].bias for g in was if g != apart)
    for folds in (1, 5):
        with pytest.raises(SpecError, match=f"--folds is {folds}"):
            left_out(small, folds)
    with pytest.raises(SpecError, match="two groups of 4 layouts or more, and 0 can be ranked"):
        left_out(small[:3], 2)


def test_rows_that_are_no_run_say_why() -> None:
    row = {"id": 1, "gpu": "H100", "gpus": 8, "framework": "Megatron-LM", "task": "pretrain", "model": "LLAMA3_8B"}
    found = measured(row)
    assert isinstance(found, Unread) and "tp and pp and mbs and gbs and seq not stated" in found.reason
    known = {**row, "tp": 1, "pp": 1, "mbs": 1, "gbs": 128, "seq": 8192, "tokens_per_s_per_gpu": 16384.0}
    found = measured(known)
    assert isinstance(found, MeasuredRun) and found.seconds == 8.0
    assert isinstance(measured({**known, "gpu": "TPU v5"}), Unread)
    # 6 FLOPs a token and weight of a matrix, and 6 x 4096 x 8192 x 32 of causal attention, at 400 TFLOP/s a GPU.
    found = measured({**known, "task": "sft", "tokens_per_s_per_gpu": None, "tflops_per_gpu": 400.0})
    assert isinstance(found, MeasuredRun) and found.seconds is not None
    matrices = 8_030_261_248 - 128256 * 4096 - 65 * 4096
    token = 6 * matrices + 6 * 4096 * 8192 * 32
    assert found.seconds == pytest.approx(token * 8192 * 128 / (400e12 * 8), rel=1e-3)
    found = measured({**known, "task": "lora"})
    assert isinstance(found, Unread) and found.reason == "task lora: its adapters are not stated"
    assert isinstance(measured({**known, "status": "OOM"}), MeasuredRun)


def test_spearman_by_hand() -> None:
    """1 - 6 sum d^2 / (n (n^2 - 1)) for ranks without ties: d = (0, 1, -1, 0) gives 0.8."""
    assert spearman([1, 2, 3, 4], [10, 30, 20, 40]) == pytest.approx(0.8)
    assert spearman([1, 2, 3], [3, 2, 1]) == -1 and spearman([1, 1, 1], [1, 2, 3]) == 0


def test_pairs_that_are_a_tie_are_not_counted() -> None:
    """100 and 104 are one; 100 and 106, 104 and 110, 100 and 110 are apart, 106 and 110 are not."""
    assert pairs_in_order([1, 2, 3, 4], [100, 104, 106, 110]) == (3, 3)
    assert pairs_in_order([4, 2, 3, 1], [100, 104, 106, 110]) == (3, 0)
    assert pairs_in_order([2, 1, 3, 4], [100, 104, 106, 110]) == (3, 3)
    assert pairs_in_order([1, 1], [1, 2]) == (1, 0)
