"""Phrases of the values of options: precision, optimizer, recomputation, dispatcher, loss, graphs, data, attention.

Each is a general rule of one or a few words. Code of one fork is named among the unmodelled features, with its
direction where that is known.
"""

from __future__ import annotations

import re
from typing import Any

from bridge_memory.accuracy.described.draft import Draft, Phrase, UnknownWord, phrase
from bridge_memory.spec.parts import GRAPHED_MODULES, RECOMPUTE_MODULES
from bridge_memory.spec.unmodelled import UNKNOWN_SIZE, Effect

Match = re.Match[str]
#: An amount of memory that a text mentions beside what it says.
_AMOUNT = phrase(r"~?\d+(?:\.\d+)? ?(?:gib|gb|mib|mb)(?: (?:a|per) (?:rank|gpu))?(?: at (?:tp|pp|cp|ep|dp) ?\d+)?")
#: That a text is a doubt of whoever wrote it down, and the assumption that it makes.
DOUBTED = "the source, or whoever transcribed it, doubts a word of the row"
DOUBT = phrase(
    r"\?|maybe|probably|perhaps|likely|presumably|unclear|not (?:stated|printed|said)", lambda d, m: d.assume(DOUBTED)
)

# --------------------------------------------------------------------------------------------------
# Precision
# --------------------------------------------------------------------------------------------------

_DTYPES = {
    "bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "half": "fp16", "fp32": "fp32",
    "float32": "fp32", "fp8": "fp8", "float8": "fp8",
}  # fmt: skip
_DTYPE = "|".join(_DTYPES)
_MIXED = r"(?:[_ -]?mixed(?: precision)?)?"
_ON = r"(?:[ =:]*(?P<on>true|false|on|off|yes|no|1|0))?"
_RECIPES = {
    "current": "tensorwise", "current scaling": "tensorwise", "per-tensor current scaling": "tensorwise",
    "tensorwise": "tensorwise", "cs": "tensorwise", "delayed": "delayed", "delayed scaling": "delayed",
    "ds": "delayed", "blockwise": "blockwise", "block scaling": "blockwise", "subchannel": "blockwise",
    "subchannel scaling": "blockwise", "sc": "blockwise", "mx": "mxfp8",
}  # fmt: skip
_RECIPE = "|".join(sorted(_RECIPES, key=len, reverse=True))


def _is_on(match: Match) -> bool:
    return match.groupdict().get("on") not in ("false", "off", "no", "0")


def _dtype(draft: Draft, match: Match) -> None:
    draft.fact("params_dtype", _DTYPES[match["dtype"]])


def _gradients(draft: Draft, match: Match) -> None:
    dtype = _DTYPES[match["dtype"]]
    if dtype not in ("fp32", "bf16", "fp16"):
        raise UnknownWord("precision of gradients", match.group())
    draft.state("data_parallel.grad_reduce_in_fp32", dtype == "fp32")


def _fp8(draft: Draft, match: Match) -> None:
    found = match.groupdict()
    draft.fact("fp8", True)
    if found.get("recipe"):
        draft.state("precision.fp8_recipe", _RECIPES[found["recipe"]])


def _format(draft: Draft, match: Match) -> None:
    draft.fact("fp8", True)
    draft.state("precision.fp8", "e4m3" if match.group() == "e4m3" else "hybrid")


def _mxfp8(draft: Draft, match: Match) -> None:
    draft.fact("fp8", True)
    draft.state("precision.fp8_recipe", "mxfp8")


def _nvfp4(draft: Draft, match: Match) -> None:
    draft.state("precision.fp4", "e2m1")


def _fp8_param(draft: Draft, match: Match) -> None:
    draft.state("precision.fp8_param", _is_on(match))


def _params(draft: Draft, match: Match) -> None:
    """Beside fp8: the dtype in which its weights are stored."""
    dtype = _DTYPES[match["dtype"]]
    if dtype == "fp8":
        draft.state("precision.fp8_param", True)
    else:
        draft.fact("params_dtype", dtype)
        draft.state("precision.fp8_param", False)


def _ends(draft: Draft, match: Match) -> None:
    for end, name in (("first", "start"), ("last", "end")):
        if match.groupdict().get(end):
            draft.state(f"precision.num_layers_at_{name}_in_bf16", int(match[end]))


def _experts_in_bf16(draft: Draft, match: Match) -> None:
    draft.experts_in_bf16 = True


PRECISION: tuple[Phrase, ...] = (
    phrase(rf"(?P<dtype>{_DTYPE}){_MIXED}", lambda d, m: _fp8(d, m) if _DTYPES[m["dtype"]] == "fp8" else _dtype(d, m)),
    phrase(rf"(?P<dtype>{_DTYPE}) (?:main )?(?:grads?|gradients?|gradient buffers?|reductions?|reduce)", _gradients),
    phrase(rf"(?:main )?(?:grads?|gradients?|gradient buffers?|reductions?) (?:reduced )?(?:in )?(?P<dtype>{_DTYPE})",
           _gradients),
    phrase(rf"(?:grad_reduce_in_fp32|accumulate_allreduce_grads_in_fp32){_ON}",
           lambda d, m: d.state("data_parallel.grad_reduce_in_fp32", _is_on(m))),
    phrase(rf"(?:fp8|float8)[ _-](?P<recipe>{_RECIPE})", _fp8), phrase(rf"(?P<recipe>{_RECIPE}) (?:fp8|float8)", _fp8),
    phrase(rf"(?:fp8|float8) ?\((?P<recipe>{_RECIPE})\)", _fp8),
    phrase(rf"(?:bf16|fp16)[_ -]with[_ -]fp8[_ -](?P<recipe>{_RECIPE})(?:[_ -]scaling)?{_MIXED}", _fp8),
    phrase(r"(?:bf16|fp16)[_ -]with[_ -]fp8[_ -]hybrid", _format),
    phrase(r"hybrid|e4m3", _format),
    phrase(rf"mx[_ -]?fp8|fp8[_ -]mx|(?:bf16|fp16)[_ -]with[_ -]mxfp8{_MIXED}", _mxfp8),
    phrase(rf"nvfp4|(?:bf16|fp16)[_ -]with[_ -]nvfp4{_MIXED}", _nvfp4),
    phrase(rf"(?:fp8|mxfp8)[_ -]param(?:eter)?s?(?:[_ -](?:all[_ -])?gather)?{_ON}", _fp8_param),
    phrase(r"(?:no|without) (?:fp8|mxfp8)[_ -]param(?:eter)?s?(?:[_ -]gather)?",
           lambda d, m: d.state("precision.fp8_param", False)),
    phrase(rf"(?P<dtype>{_DTYPE}) (?:params?|parameters?|weights)", _params),
    phrase(rf"(?:params?|parameters?|weights) (?:in )?(?P<dtype>{_DTYPE})", _params),
    phrase(r"first (?P<first>\d{1,4})(?:[ /&+]|and|layers?)*last (?P<last>\d{1,4})(?: layers?)?(?: in)? bf16", _ends),
    phrase(r"first (?P<first>\d{1,4})(?: layers?)?(?: in)? bf16", _ends),
    phrase(r"last (?P<last>\d{1,4})(?: layers?)?(?: in)? bf16", _ends),
    phrase(r"(?:routed )?experts (?:in |stay |kept in )*bf16|bf16 (?:routed )?experts", _experts_in_bf16),
    phrase(r"dense(?: te)?(?: linears?| layers?)?(?: only)?", _experts_in_bf16), phrase(r"te linears?|linears?"),
    phrase(r"(?:dense(?: linears?)? ?(?:and|\+|&) ?)?(?:routed )?experts(?: in)? fp8|fp8(?: routed)? experts|"
           r"dense ?(?:and|\+|&) ?(?:routed )?experts|all linears", lambda d, m: d.fact("fp8", True)),
    phrase(r"amax history(?: len(?:gth)?)? ?\d{1,5}|max|most_recent|most recent|(?:margin|interval) \d+"),
    phrase(r"fp32 (?:local )?accumulation", lambda d, m: d.leave_out(
        "gradients that are added up in fp32 before their reduction: not counted", Effect.UP,
        "2 bytes for each parameter of a bucket")),
    phrase(r"row-?wise(?: scaling)?|tensor-?wise(?: scaling)?(?= float8|$)|incl(?:uding|\.)?(?= experts)"),
    phrase(r"fp8 (?:attention|dpa|dot product attention)", precision__fp8_dot_product_attention=True),
    phrase("amp|o1|o2|native"), phrase(r"true|on"),
)  # fmt: skip

# --------------------------------------------------------------------------------------------------
# The optimizer
# --------------------------------------------------------------------------------------------------


def _moments(draft: Draft, match: Match) -> None:
    dtype = _DTYPES[match["dtype"]]
    which = ("exp_avg", "exp_avg_sq") if match.groupdict().get("one") is None else (match["one"],)
    for name in which:
        draft.state(f"optimizer.{name}_dtype", dtype)


def _eight_bit(draft: Draft, match: Match) -> None:
    draft.fact("optimizer in 8 bit", True)


def _offloaded(draft: Draft, match: Match) -> None:
    share = match.groupdict().get("share")
    draft.fact("optimizer offloaded", share != "0")
    if share not in (None, "0", "100"):
        draft.state("optimizer.optimizer_offload_fraction", int(match["share"]) / 100)


def _main(draft: Draft, match: Match) -> None:
    what = "grads" if match["what"].startswith("grad") else "params"
    draft.state(f"optimizer.main_{what}_dtype", _DTYPES[match["dtype"]])


_BOTH = r"(?:exp_avg ?(?:/|,|and|&) ?exp_avg_sq|(?:both )?(?:adam )?(?:moments?|states?|optimizer states?))"
OPTIMIZER: tuple[Phrase, ...] = (
    phrase(r"(?:distributed )?(?:fused[ _]?)?adam", optimizer__optimizer="adam"),
    phrase(r"(?:fused[ _]?)?adamw", lambda d, m: d.fact("adamw", True)),
    phrase("(?:dist[_ ])?muon", optimizer__optimizer="muon"), phrase("sgd", optimizer__optimizer="sgd"),
    phrase("lion", optimizer__optimizer="lion"), phrase("adafactor", optimizer__optimizer="adafactor"),
    phrase(rf"(?:use[ _])?precision[ _-]aware(?:[ _]optimizer)?{_ON}",
           lambda d, m: d.state("optimizer.use_precision_aware_optimizer", _is_on(m))),
    phrase(rf"{_BOTH} (?:in )?(?P<dtype>{_DTYPE})", _moments), phrase(rf"(?P<dtype>{_DTYPE}) {_BOTH}", _moments),
    phrase(rf"(?P<one>exp_avg|exp_avg_sq)[ =:]*(?:in )?(?P<dtype>{_DTYPE})", _moments),
    phrase(rf"(?:main|master)[_ ](?P<what>grads|gradients|params|parameters|weights)"
           rf"(?:[_ ]dtype)?[ =:]*(?:in )?(?P<dtype>{_DTYPE})", _main),
    phrase(r"(?:no|without|non)[ -](?:a )?distributed optimizer", data_parallel__use_distributed_optimizer=False),
    phrase(rf"(?:use_)?(?:distributed|dist)[ _]?opt(?:imizer)?{_ON}|distributed|zero-?1",
           lambda d, m: d.state("data_parallel.use_distributed_optimizer", _is_on(m))),
    phrase(r"adamw?[ _-](?:bnb[ _-])?8 ?-?bit|8 ?-?bit[ _-]adamw?|(?:bnb|bitsandbytes)(?:[ _'s-]+8 ?-?bit)?",
           _eight_bit),
    phrase(r"(?:deepspeed)?cpu[_ ]?adamw?(?: offload(?:ed)?)?|(?:cpu |fully )?offload(?:ed|ing)?(?: to (?:cpu|host))?",
           _offloaded),
    phrase(r"layer[- ]wise(?: distributed optimizer)?", optimizer__use_layer_wise_distributed_optimizer=True),
    phrase(r"(?:cpu )?offload(?:ed|ing)?(?: to (?:cpu|host))? (?P<share>\d{1,3}) ?%", _offloaded),
    phrase("fused", lambda d, m: d.fact("optimizer of torch", "fused")),
    phrase("foreach", lambda d, m: d.fact("optimizer of torch", "foreach")),
    phrase(r"(?:lr|learning rate|weight decay|beta[12s]?|eps)[ =:]*[\d.e-]+"), DOUBT,
)  # fmt: skip

# --------------------------------------------------------------------------------------------------
# Recomputation
# --------------------------------------------------------------------------------------------------

#: What people call ``recompute_modules``.
_MODULES = {
    **{name: name for name in RECOMPUTE_MODULES}, "core attention": "core_attn", "core attn": "core_attn",
    "attention": "core_attn", "attn": "core_attn", "moe activation": "moe_act", "moe act": "moe_act",
    "moe_activation": "moe_act", "layer norm": "layernorm", "layernorms": "layernorm", "norms": "layernorm",
    "norm": "layernorm", "mla up proj": "mla_up_proj", "mla up projection": "mla_up_proj", "up_proj": "mla_up_proj",
    "shared experts": "shared_experts", "shared expert": "shared_experts", "shared_expert": "shared_experts",
    "moe layer": "moe", "moe layers": "moe",
}  # fmt: skip
_MODULE = "|".join(sorted(map(re.escape, _MODULES), key=len, reverse=True))


def _granularity(name: str) -> Any:
    return lambda draft, match: draft.fact("recompute", name)


def _full(draft: Draft, match: Match) -> None:
    draft.fact("recompute", "full")
    found = match.groupdict()
    if found.get("method"):
        draft.state("recompute.method", found["method"])
    if found.get("layers"):
        draft.state("recompute.num_layers", int(found["layers"]))
    if found.get("every"):
        draft.fact("layers that the recomputation names", int(found["every"]))


def _selective_ac(draft: Draft, match: Match) -> None:
    draft.fact("recompute", "selective_ac")
    draft.state("transformers.selective_ac_option", match["option"])


def _module(draft: Draft, match: Match) -> None:
    draft.facts.setdefault("recomputed modules", []).append(_MODULES[match["module"]])


def _of_experts(draft: Draft, match: Match) -> None:
    """Activation recomputation is Megatron's word for recomputation; ``moe_act`` is that of the activation function."""
    draft.facts.setdefault("recomputed modules", []).append("moe")
    draft.assume("recomputed activations of MoE are counted as whole MoE layers (moe), not the function (moe_act)")


_CHECKPOINTS = r"(?:act(?:ivation)?s?|gradient|layer)[ _-]?(?:checkpoint(?:ing|s)?|ckpt|recompute|recomputation)"
RECOMPUTE: tuple[Phrase, ...] = (
    phrase(
        r"full(?: (?:recompute|recomputation|ac|activation checkpointing))?(?:[ ,(:/]+(?P<method>uniform|block))?"
        r"(?:[ ,:(=]+(?P<layers>\d{1,5})(?: ?(?:of|/) ?(?P<every>\d{1,5}))?(?: ?layers?\b)?)?", _full),
    phrase(r"(?P<method>uniform|block)"
           r"(?:[ ,:(=]+(?P<layers>\d{1,5})(?: ?(?:of|/) ?(?P<every>\d{1,5}))?(?: ?layers?)?)?", _full),
    phrase(r"selective(?: (?:ac|recompute|recomputation))?", _granularity("selective")),
    phrase(r"selective (?:ac )?(?P<option>op|[1-9]\d{0,2})(?: layers?)?", _selective_ac),
    phrase(rf"moe {_CHECKPOINTS}", _of_experts),
    phrase(rf"(?P<module>{_MODULE})(?: (?:recompute|recomputation|recomputed))?", _module),
    phrase(rf"(?:deepspeed )?{_CHECKPOINTS}", _granularity("full")),
    phrase(rf"none|off|false|no(?: (?:recompute|recomputation|ac|{_CHECKPOINTS}))?|disabled|without(?: recomputation)?",
           _granularity("none")),
    phrase(r"(?:config|recipe|trainer|preset)(?: default)?", _granularity("the configuration's")),
    phrase(r"modules?|recompute|recomputation|activations?|layers?|true|(?:every )?layer|\d+ checkpoints?|s?ac"),
    DOUBT, _AMOUNT, phrase("(?P<option>op)", _selective_ac),
)  # fmt: skip

# --------------------------------------------------------------------------------------------------
# Experts, loss, graphs, attention, data
# --------------------------------------------------------------------------------------------------


def _backend(draft: Draft, match: Match) -> None:
    draft.state("implementation.moe_token_dispatcher_type", "flex")
    draft.state("implementation.moe_flex_dispatcher_backend", match["backend"].replace("-", ""))


DISPATCHER: tuple[Phrase, ...] = (
    phrase("all[-_ ]?to[-_ ]?all|a2a", implementation__moe_token_dispatcher_type="alltoall"),
    phrase("all[-_ ]?gather|ag", implementation__moe_token_dispatcher_type="allgather"),
    phrase("alltoall_seq", implementation__moe_token_dispatcher_type="alltoall_seq"),
    phrase("flex", implementation__moe_token_dispatcher_type="flex"),
    phrase("(?:flex ?)?(?P<backend>deep-?ep|hybrid-?ep)", _backend), DOUBT, phrase("backend|dispatcher"),
    phrase(r"(?P<n>\d{1,3}) sms?", lambda d, m: d.state("implementation.moe_flex_dispatcher_num_sms", int(m["n"]))),
)  # fmt: skip
def _of_a_fork(draft: Draft) -> None:
    draft.state("checkpoint.experts_in_one_tensor", True)
    draft.leave_out(
        "moe_experts_impl (a fork's experts over torch._grouped_mm): counted as Transformer Engine's grouped MLP, with "
        "the workspaces of its GEMM; as one tensor while they load",
        Effect.EITHER, "what routed experts save and make, in every MoE layer",
    )


EXPERTS: tuple[Phrase, ...] = (
    phrase(r"te(?:[_ ]?grouped(?:[_ ]?(?:gemm|mlp))?)?|grouped(?:[_ ]?gemm)?", implementation__moe_grouped_gemm=True),
    phrase("sequential|local", implementation__moe_grouped_gemm=False),
    phrase(
        r"torch[_ ]grouped(?:[_ ]mm)?|torch\._grouped_mm(?: experts)?|(?:repo-specific|fork|custom|own) experts",
        lambda d, m: _of_a_fork(d)),
    phrase("repo-specific|fork|custom|experts|impl"),
)  # fmt: skip


def _loss(on: bool, implementation: str | None = None) -> Any:
    def action(draft: Draft, match: Match) -> None:
        draft.state("implementation.cross_entropy_loss_fusion", on)
        if implementation:
            draft.state("implementation.cross_entropy_fusion_impl", implementation)

    return action


def _chunked(draft: Draft, match: Match) -> None:
    _loss(True, "linear")(draft, match)
    draft.leave_out(
        "chunked linear cross entropy (a fork's loss): counted as megatron-core's fused linear one", Effect.UP,
        "logits of one chunk in fp32, and their gradient",
    )


CROSS_ENTROPY: tuple[Phrase, ...] = (
    phrase(r"unfused|not fused|off|false|none|no", _loss(False)), phrase("fused|true|on", _loss(True)),
    phrase("te|transformer engine(?:'s)?", _loss(True, "te")), phrase("native", _loss(True, "native")),
    phrase("linear", _loss(True, "linear")), phrase(r"chunked(?: linear)?", _chunked),
    phrase(r"(?:fp32 |bf16 |fp16 )?logits|ce|loss|cross[ _-]entropy|fork|\d+ chunks|fusion|parallel"), _AMOUNT,
)  # fmt: skip


def _graph_module(draft: Draft, match: Match) -> None:
    draft.facts.setdefault("graphed modules", []).append(match.group())


def _graphs(name: str) -> Any:
    return lambda draft, match: draft.state("implementation.cuda_graph_impl", name)


GRAPHS: tuple[Phrase, ...] = (
    phrase(r"none|off|false|eager|no(?: cuda graphs?)?|disabled", _graphs("none")),
    phrase(r"transformer_engine|transformer engine|te", _graphs("transformer_engine")),
    phrase("local", _graphs("local")), phrase(r"full[_ ]iteration", _graphs("full_iteration")),
    phrase("|".join(sorted(GRAPHED_MODULES, key=len, reverse=True)), _graph_module),
    phrase(r"modules?|scope|graph(?:s|ed)?|cuda|cuda graphs?|\d+ (?:captured|graphable)(?: layers?)?|captured"), DOUBT,
)  # fmt: skip


def _attention(name: str) -> Any:
    return lambda draft, match: draft.fact("attention", name)


ATTENTION: tuple[Phrase, ...] = (
    phrase(r"flash(?:[_ -]?attention|[_ -]?attn)?(?:[_ -]?[23])?|fa[23]|true|on", _attention("flash")),
    phrase("fused|cudnn(?: fused)?", _attention("fused")), phrase("unfused|math", _attention("unfused")),
    phrase("local", _attention("local")), phrase("auto|none|default", _attention("auto")),
    phrase("sdpa|torch sdpa", _attention("sdpa")), phrase("eager", _attention("eager")), phrase("attention|kernel|te"),
)  # fmt: skip


def _packed(draft: Draft, match: Match) -> None:
    draft.state("batch.packed_sequences", True)


def _natural(draft: Draft, match: Match) -> None:
    draft.fact("routing", "natural")


DATA: tuple[Phrase, ...] = (
    phrase(r"(?:real|natural|web|synthetic|random|mock|dummy)(?: text| data| tokens)?|text|data|c4|squad|wikitext"),
    phrase("sft|chat|instructions?|pretraining"),
    phrase("natural routing|unbalanced routing|imbalanced routing", _natural),
    phrase(r"(?:balanced|forced|force-balanced|uniform) routing|forced load balancing"),
    phrase(r"packed(?: sequences?)?|(?:sequence )?packing|thd", _packed),
    phrase(r"unpacked|not packed|padded(?: to the longest)?|sbhd|bshd", batch__packed_sequences=False),
    phrase(r"\d{1,3}(?:,\d{3})+|\d+k?|tokens|sequences?|length"),
)  # fmt: skip


def _liger(draft: Draft, match: Match) -> None:
    draft.fact("liger", True)


EXTRAS: tuple[Phrase, ...] = (
    phrase(r"no liger(?: kernels?)?", lambda d, m: d.fact("liger", False)), phrase(r"liger(?: kernels?)?", _liger),
    *RECOMPUTE,
    phrase(r"(?:torch\.?)?compiled?", transformers__torch_compile=True),
    phrase(r"(?:act(?:ivation)?s?[ _])?(?:ckpt |checkpoint )?offload(?:ing)?", lambda d, m: d.leave_out(
        "offloaded activations: counted on the GPU", Effect.DOWN, "what is checkpointed of every layer")),
    phrase(r"tiled[ _]?(?:mlp|loss|logits|compute)|tiledmlp|alst", lambda d, m: d.leave_out(
        f"{m.group()}: whole tensors are counted", Effect.DOWN, "all tiles but one of an MLP or of the logits")),
)  # fmt: skip


def _weights_offloaded(draft: Draft, match: Match) -> None:
    draft.fact("weights offloaded", True)


OFFLOADED: tuple[Phrase, ...] = (
    phrase(r"(?:optim(?:izer)?(?: states?)?)(?: offload(?:ed|ing)?)?", _offloaded),
    phrase(r"(?:weights?|param(?:eter)?s?)(?: offload(?:ed|ing)?)?", _weights_offloaded),
    phrase("none|off|false|no|cpu|host"),
)  # fmt: skip
EXTRAS = (*EXTRAS, *OFFLOADED[:2])


def _fp32_states(draft: Draft, match: Match) -> None:
    draft.leave_out(
        "fp32_ssm_state (a fork's): a scan's states between chunks are counted in the activations' dtype", Effect.UP,
        "2 bytes for each element of one Mamba layer's chunk states, while its scan runs",
    )


def _checkpointed_scan(draft: Draft, match: Match) -> None:
    _fp32_states(draft, match)
    draft.fact("scan recomputed", True)


SSM_STATE: tuple[Phrase, ...] = (
    phrase(r"off|false|none|stock|no|0"),
    phrase("true|on|fp32|patch|yes|1", _fp32_states),
    phrase("checkpoint(?:ed|ing)?(?: scan)?(?: patch)?|scan recomput(?:ed|ation)|recomputed scan", _checkpointed_scan),
    phrase(r"(?:[a-z]+_)?fp32_ssm_state|scan|recomputed|patch"),
)  # fmt: skip

LORA: tuple[Phrase, ...] = (
    phrase(r"(?:q?lora|adapters?)(?:[ ,(]*(?:r|rank|dim)[ =]?(?P<rank>\d{1,4}))?",
           lambda d, m: d.fact("lora", m["rank"])),
    phrase(r"(?:r|rank|dim)[ =:]?(?P<rank>\d{1,4})", lambda d, m: d.fact("lora", m["rank"])),
    phrase(r"alpha[ =:]?\d+|dropout[ =:]?[\d.]+"),
    phrase("dora", peft__use_dora=True), phrase("none|off|false|no|full(?: parameter| finetuning)?"),
)  # fmt: skip
__all__ = [
    "ATTENTION", "CROSS_ENTROPY", "DATA", "DISPATCHER", "DOUBT", "EXPERTS", "EXTRAS", "GRAPHS", "LORA", "OPTIMIZER",
    "PRECISION", "RECOMPUTE", "SSM_STATE", "UNKNOWN_SIZE",
]  # fmt: skip
