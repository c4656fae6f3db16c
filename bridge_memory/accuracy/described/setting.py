"""Where a row ran: the words of its framework (trainer, releases, engine), of its model and of its GPU."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, NamedTuple

from bridge_memory.accuracy.described.draft import Draft, Phrase, UnknownWord, phrase, unread_words, word_of
from bridge_memory.accuracy.described.texts import DOUBT, LORA, PRECISION
from bridge_memory.cards.generations import DEFAULT_GENERATION
from bridge_memory.cards.gpu import Gpu
from bridge_memory.cards.names import gpu_called, gpu_of_name
from bridge_memory.readers import resolve_model
from bridge_memory.readers.megatron_args.run import gpu_architecture
from bridge_memory.readers.presets import find_presets
from bridge_memory.readers.presets.common_names import preset_called
from bridge_memory.releases import Release
from bridge_memory.spec import AttentionSpec, LayerSpec, MLPSpec, ModelSpec, SpecError, show
from bridge_memory.spec.unmodelled import ENCODER, Effect

Match = re.Match[str]

# --------------------------------------------------------------------------------------------------
# Trainers and releases
# --------------------------------------------------------------------------------------------------


class Pins(NamedTuple):
    """The releases in a container."""

    core: Release
    te: Release
    torch: Release
    bridge: Release | None = None


#: NeMo Framework containers: Megatron Bridge's ``docs/releases/software-versions.md``; 24.07 and 24.09 NeMo's own list.
NEMO = {
    "24.07": Pins((0, 8), (1, 8), (2, 3)), "24.09": Pins((0, 9), (1, 10), (2, 4)),
    "25.09": Pins((0, 14), (2, 7), (2, 8), (0, 1)), "25.11": Pins((0, 15), (2, 9), (2, 9), (0, 2)),
    "26.02": Pins((0, 16), (2, 12), (2, 10), (0, 3)), "26.04": Pins((0, 17), (2, 14), (2, 11), (0, 4)),
}  # fmt: skip
#: Release of megatron-core -> the container that ships it.
CONTAINER_OF_CORE = {pins.core: month for month, pins in NEMO.items()}
#: Month -> the newest container of then.
CONTAINER_OF_MONTH = {
    "2025-09": "25.09", "2025-10": "25.09", "2025-11": "25.11", "2025-12": "25.11", "2026-01": "25.11",
    "2026-02": "26.02", "2026-03": "26.02",
}  # fmt: skip
#: Bridge's releases, by the container that ships them.
_BRIDGE = {pins.bridge: month for month, pins in NEMO.items() if pins.bridge}

_BRIDGE_DEFAULTS: dict[str, Any] = {
    # ``recipes/common.py: _pretrain_common`` and the recipes of Llama and Qwen; ``mixed_precision.py``.
    "data_parallel.overlap_grad_reduce": True, "data_parallel.overlap_param_gather": True,
    "implementation.cross_entropy_loss_fusion": True, "implementation.moe_permute_fusion": True,
    "optimizer.fp8_recipe": "tensorwise", "parallel.sequence_parallel": False,
}  # fmt: skip
#: Every model of ``scripts/performance/configs`` reduces gradients in bf16.
PERFORMANCE_SCRIPTS: dict[str, Any] = {"data_parallel.grad_reduce_in_fp32": False}
#: (preset, generation) -> what the scripts add (``configs/llama/llama3_workload_base_configs.py``; the data set makes
#: masks, ``utils/datasets.py`` and megatron-core's ``GPTDatasetConfig``, which a graph of the iteration copies too).
_GRAPH_OF_THE_ITERATION = {
    "implementation.cuda_graph_impl": "full_iteration", "implementation.create_attention_mask": True,
}  # fmt: skip
WORKLOADS: dict[tuple[str, str], dict[str, Any]] = {
    ("meta-llama/Meta-Llama-3-8B", "blackwell"): _GRAPH_OF_THE_ITERATION,
    ("meta-llama/Llama-3.1-8B", "blackwell"): _GRAPH_OF_THE_ITERATION,
}  # fmt: skip
_TITAN_DEFAULTS: dict[str, Any] = {
    "data_parallel.engine": "fsdp2", "implementation.transformer_impl": "torchtitan", "precision.params_dtype": "fp32",
    "fsdp.param_dtype": "bf16", "fsdp.reduce_dtype": "fp32", "fsdp.auto_wrap_policy": "torchtitan",
    "optimizer.optimizer": "adamw", "optimizer.torch_implementation": "fused", "transformers.attention_mask": "none",
    "implementation.expandable_segments": True,  # ``run_train.sh``
}  # fmt: skip
_ZERO_DEFAULTS: dict[str, Any] = {
    "data_parallel.engine": "zero3", "implementation.transformer_impl": "transformers", "optimizer.optimizer": "adamw",
    "optimizer.torch_implementation": "fused",
}  # fmt: skip
#: Trainer -> what it does where the row is silent.
TRAINERS: dict[str, dict[str, Any]] = {
    "Megatron Bridge": _BRIDGE_DEFAULTS, "NeMo": _BRIDGE_DEFAULTS, "Megatron-LM": {"parallel.sequence_parallel": False},
    "Megatron-DeepSpeed": {
        "data_parallel.engine": "megatron_deepspeed", "implementation.transformer_impl": "local",
        "parallel.sequence_parallel": False, "implementation.megatron_core": (0, 9),
    },
    "torchtitan": _TITAN_DEFAULTS,
    "Automodel": {
        "data_parallel.engine": "fsdp2", "implementation.transformer_impl": "transformers",
        "optimizer.optimizer": "adamw", "fsdp.param_dtype": "bf16", "fsdp.reduce_dtype": "bf16",
    },
    "transformers with FSDP": {
        "data_parallel.engine": "fsdp2", "implementation.transformer_impl": "transformers",
        "optimizer.optimizer": "adamw",
    },
    "DeepSpeed": _ZERO_DEFAULTS,
    # ``arctic_training/config/model.py: ModelConfig.disable_activation_checkpoint``, False by default.
    "ArcticTraining": {**_ZERO_DEFAULTS, "transformers.gradient_checkpointing": True},
}  # fmt: skip
_VERSION = r"v?(?P<major>\d{1,2})\.(?P<minor>\d{1,2})(?:\.\d+)*(?:[ab.]|rc|dev|post)*\d*(?:\+\w+)?"


def _trainer(name: str) -> Any:
    def action(draft: Draft, match: Match) -> None:
        if draft.facts.get("trainer") in ("Megatron Bridge", "NeMo") and name in ("Megatron Bridge", "NeMo"):
            return
        if draft.facts.get("trainer") is None or name != "DeepSpeed":
            draft.fact("trainer", name)

    return action


def _release(package: str) -> Any:
    def action(draft: Draft, match: Match) -> None:
        draft.fact(package, (int(match["major"]), int(match["minor"])))

    return action


def _container(draft: Draft, match: Match) -> None:
    draft.facts.setdefault("trainer", "NeMo")
    month = match["month"]
    if month not in NEMO:
        raise UnknownWord("framework", match.group())
    draft.fact("container", month)


def _bridge(draft: Draft, match: Match) -> None:
    _trainer("Megatron Bridge")(draft, match)
    release = (int(match["major"]), int(match["minor"]))
    if release in _BRIDGE:
        draft.facts.setdefault("container", _BRIDGE[release])


def _zero(draft: Draft, match: Match) -> None:
    draft.fact("zero", int(match["stage"]))


def _degree(name: str) -> Any:
    return lambda draft, match: draft.fact(name, int(match["degree"]))


FRAMEWORK: tuple[Phrase, ...] = (
    phrase(r"(?:primus ?\(?)?megatron[- ]bridge|primus", _trainer("Megatron Bridge")),
    phrase(rf"megatron[- ]bridge {_VERSION}", _bridge),
    phrase(r"nemo(?: framework)?(?: ?2(?:\.0)?)?", _trainer("NeMo")),
    phrase(r"nemo[: ]v?(?P<month>2\d\.\d\d)(?:\.[\w.]*)?(?: container)?", _container),
    phrase(r"megatron[- ]lm|megatron", _trainer("Megatron-LM")),
    phrase(r"megatron[- ]deepspeed", _trainer("Megatron-DeepSpeed")), phrase("torchtitan", _trainer("torchtitan")),
    phrase("(?:nemo )?automodel", _trainer("Automodel")), phrase("deepspeed", _trainer("DeepSpeed")),
    phrase("arctictraining", _trainer("ArcticTraining")),
    phrase("(?:hf |hugging ?face )?(?:transformers|accelerate|trl)", _trainer("transformers with FSDP")),
    phrase(rf"(?:megatron[- ]?core|mcore|core)[ _:=]?[rv]?{_VERSION}(?:-ish)?(?: pin)?", _release("core")),
    phrase(rf"(?:te|transformer[- _]?engine)[ _:=]?{_VERSION}", _release("te")), phrase("te|transformer engine"),
    phrase(rf"(?:py)?torch[ _:=]?{_VERSION}", _release("torch")),
    phrase(r"zero[- ]?(?:stage )?(?P<stage>[0123])", _zero), phrase(r"ep ?(?P<degree>\d{1,4})", _degree("ep")),
    phrase("fsdp2?(?: only)?|megatron[- ]fsdp|hsdp"),
    phrase("--use-legacy-models|legacy models?", lambda d, m: d.assume(
        "Megatron's removed legacy GPTModel is counted as megatron-core's of the same implementation")),
    phrase(r"(?:torchao|cuda|cudnn|nccl|triton|apex|transformers|flash[- ]attn) ?v?[\d.]+\w*|cu\d+"),
    phrase(r"perf(?:ormance)? scripts?|llmb", lambda d, m: d.fact("performance scripts", True)),
    phrase(r"fork|container|main|nightly|patch(?:es)?|readme[^;)]*|log of [^;)]*|preset [\w.-]+|\w+\.toml"),
    phrase(r"(?P<month>20\d\d-\d\d)(?:-\d\d)?", lambda d, m: d.facts.setdefault("month", m["month"]) and None),
    phrase(r"[0-9a-f]{7,40}|merge-\d+|v?\d+\.\d+(?:\.\d+)?"),
    phrase("(?:compile|compiled)", transformers__torch_compile=True),
    phrase("ulysses(?: sp)?|alst|hybridep|deepep"), phrase("te (?:attention|experts)|attention|experts"),
    phrase("user notes|notes"), DOUBT, *(p for p in PRECISION if "maybe" not in p.pattern.pattern),
)  # fmt: skip


def read_framework(text: object, draft: Draft) -> None:
    """Trainer, releases and engine. Words that say nothing of these are listed as not read; without a known trainer
    the row is not read."""
    if isinstance(text, dict):
        text = ", ".join(f"{k} {v}" for k, v in text.items() if v)
    unread = unread_words(text, FRAMEWORK, draft, "framework")
    if "trainer" not in draft.facts:
        raise UnknownWord("framework", unread[0] if unread else text)
    if unread:
        draft.assume(f"of the framework these words are not read: {', '.join(unread)[:120]}")


# --------------------------------------------------------------------------------------------------
# GPUs
# --------------------------------------------------------------------------------------------------


def read_gpu(text: object, draft: Draft) -> str:
    """The generation. Raises SpecError for a card that is named and not known."""
    words = str(text or "")
    if gpu_of_name(words) is None and words and not re.search(r"unnamed|unknown|not (?:stated|named)", words.lower()):
        raise UnknownWord("gpu", words)
    if gpu_of_name(words) is None:
        draft.assume(f"the GPU is not named: counted as {DEFAULT_GENERATION}")
    cards = re.findall(r"[a-z]{1,3}\d{2,3}[a-z]?", words.lower())
    if len({gpu_architecture(card) for card in cards}) > 1:
        draft.assume(f"which GPU it was is not settled ({words[:60]}): counted as {gpu_architecture(words)}")
    return gpu_architecture(words)


def card_of(text: object) -> Gpu | None:
    """The card that a row's words name, the first of several; None: none that is known."""
    words = re.sub(r"\(.*", "", str(text or "")[:200])
    names = (words, *re.findall(r"[A-Za-z]{1,3}\d{2,3}[A-Za-z]?", words))
    return next((card for name in names if (card := gpu_called(name)) is not None), None)


# --------------------------------------------------------------------------------------------------
# Models
# --------------------------------------------------------------------------------------------------


def _size(name: str) -> Any:
    return lambda draft, match: draft.fact(name, int(match["n"].replace(",", "")))


def _word(name: str, value: Any) -> Any:
    return lambda draft, match: draft.fact(name, value)


def _first_dense(draft: Draft, match: Match) -> None:
    draft.assume(f"{match.group()} is not in the model's published sizes: not counted")


def _shape(draft: Draft, match: Match) -> None:
    for name, group in (("layers", "n"), ("hidden", "hidden")):
        if match[group]:
            draft.fact(name, int(match[group]))


#: Models of several modalities, by letters and digits -> the preset of their text model.
_TEXT_MODELS = {
    "qwen3omni30ba3b": "Qwen/Qwen3-30B-A3B", "qwen3vl30ba3b": "Qwen/Qwen3-30B-A3B",
    "qwen3vl235ba22b": "Qwen/Qwen3-235B-A22B", "qwen3vl8b": "Qwen/Qwen3-8B", "qwen3vl4b": "Qwen/Qwen3-4B",
    "qwen25vl7b": "Qwen/Qwen2.5-7B", "qwen25vl72b": "Qwen/Qwen2.5-72B",
}  # fmt: skip
_N = r"(?P<n>\d{1,3}(?:,\d{3})+|\d{1,9})"
#: What stands beside a model's name.
BESIDE: tuple[Phrase, ...] = (
    phrase(r"\d+(?:\.\d+)?[bm](?:-a\d+(?:\.\d+)?b)?"), phrase(r"bf16|fp16"),
    phrase("sft|(?:pre|mid)-?train(?:ing)?|cpt|fine-?tun(?:e|ing)|from scratch|full|scratch"),
    phrase("class|like|style|based|model|moe|dense|decoder|text|base|instruct|chat|hf|continual|from"),
    phrase(rf"\+? ?{_N} mtp(?: layers?)?", _size("mtp")), phrase(rf"mtp ?{_N}", _size("mtp")),
    phrase(rf"{_N}[ -]?layers?", _size("layers")), phrase(r"first \d+ layers dense", _first_dense),
    phrase("thinker|vision|audio|frozen|encoders?|language"),
    *(p for p in PRECISION if "fp8" in p.pattern.pattern or "nvfp4" in p.pattern.pattern), *LORA, DOUBT,
)  # fmt: skip
SIZES: tuple[Phrase, ...] = (
    phrase(r"gpt(?:-?[23])?(?: |-)?(?:like)?", _word("kind", "gpt")),
    phrase(r"llama(?:-?[23](?:\.\d)?)?(?:[ -]like)?", _word("kind", "llama")),
    phrase(r"(?P<n>\d{1,4}) ?(?:l|layers)(?: ?x ?(?P<hidden>\d{2,6}))?",
           _shape),
    phrase(rf"(?:hidden|h|d_model)(?: size)?[ =:]?{_N}", _size("hidden")),
    phrase(rf"(?:ffn|ffn_hidden|intermediate|mlp)(?: size)?[ =:]?{_N}", _size("ffn")),
    phrase("(?:ffn )?default(?: ffn)?", _word("ffn", 0)), phrase("ffn"),
    phrase("swiglu|gated", _word("gated", True)), phrase("gelu", _word("gated", False)),
    phrase(rf"{_N} (?:attention )?heads", _size("heads")),
    phrase(rf"{_N} (?:kv|key[- ]value|query) ?(?:heads|groups)", _size("kv heads")),
    phrase("gpt-?2 vocab(?:ulary)?", _word("vocabulary", 50257)),
    phrase(rf"(?:llama-?[23] )?vocab(?:ulary)?[ =:]?{_N}", _size("vocabulary")),
    phrase("untied", _word("tied", False)), phrase("tied", _word("tied", True)), *LORA, DOUBT,
)  # fmt: skip


def read_model(texts: list[str], draft: Draft) -> ModelSpec:
    """The model that the first of ``texts`` means that means one. Raises SpecError naming the last."""
    for text in texts:
        if re.search(r"\d+ ?l(?:ayers)? ?x ?\d+", text.lower()):
            return _by_sizes(text, draft)
        found = _named(text)
        if found is not None:
            preset, beside = found
            for word in unread_words(beside, BESIDE, draft, "model"):
                raise UnknownWord("model", word)
            if re.search(r"\b(?:omni|vl)\b", text.lower()):
                draft.leave_out("the model's other modalities: its text model is counted", Effect.UP, ENCODER)
            return _with_layers(resolve_model(preset), draft)
    raise UnknownWord("model", texts[-1] if texts else "")


def _named(text: str) -> tuple[str, str] | None:
    """(preset, the words beside its name): the longest run of words that is a model's name."""
    text = text[:200]
    if "/" in text and (presets := find_presets(text.split()[0])):
        return presets[0], text[len(text.split()[0]):]
    words = [(m.start(), m.end()) for m in re.finditer(r"[A-Za-z0-9.]+", text)]
    best: tuple[int, str, str] | None = None
    for i, (start, _) in enumerate(words):
        for _, end in words[i : i + 10]:
            if end - start <= (best[0] if best else 3):
                continue
            preset = preset_called(text[start:end]) or _TEXT_MODELS.get(word_of(text[start:end]).replace("_", ""))
            if preset is not None:
                best = (end - start, preset, f"{text[:start]} {text[end:]}")
    return best and (best[1], best[2])


def _with_layers(model: ModelSpec, draft: Draft) -> ModelSpec:
    """Its first layers, where the row names fewer."""
    layers = draft.facts.get("layers", model.num_layers)
    if layers == model.num_layers:
        return model
    if not 0 < layers < model.num_layers:
        raise SpecError(f"layers ({layers}) is not a number of layers of {model.name}; it has {model.num_layers}")
    return replace(model, layers=model.layers[:layers], mtp_num_layers=0, mtp_layer=None)


def _by_sizes(text: str, draft: Draft) -> ModelSpec:
    for word in unread_words(text, SIZES, draft, "model"):
        raise UnknownWord("model", word)
    facts = draft.facts
    missing = [name for name in ("kind", "layers", "hidden", "vocabulary") if not facts.get(name)]
    heads = facts.get("heads")
    if heads is None and facts.get("hidden") and facts.get("kv heads"):
        heads = facts["hidden"] // 128
        draft.assume(f"heads not stated: {heads}, of 128 channels")
    if missing or not heads:
        raise SpecError(f"{(missing or ['heads'])[0]} of the model ({show(text)}) not stated; give it")
    hidden, layers = facts["hidden"], facts["layers"]
    if not 1 <= layers <= 2048 or heads < 1 or hidden % heads:
        raise SpecError(f"the sizes of the model ({show(text)}) make no model; correct them")
    gpt = facts["kind"] == "gpt"
    draft.fact("sizes leave tying open", "tied" not in facts)
    gated = facts.get("gated", not gpt)
    # Megatron's default (``arguments.py``): 4 h, with SwiGLU two thirds of it in steps of 64.
    ffn = facts.get("ffn") or (4 * hidden * 2 // 3 // 64 * 64 if gated else 4 * hidden)
    layer = LayerSpec(
        AttentionSpec(heads, facts.get("kv heads") or heads, hidden // heads, gpt, gpt, rotary=not gpt),
        MLPSpec(ffn, gated=gated, activation="silu" if gated else "gelu", add_bias=gpt),
    )
    base = resolve_model("openai/GPT-3-175B" if gpt else "meta-llama/Llama-2-7b-hf")
    return replace(
        base, name=text[:60], hidden_size=hidden, layers=(layer,) * layers, vocab_size=facts["vocabulary"],
        share_embeddings_and_output_weights=facts.get("tied", gpt),
        **({} if gpt else {"rotary_dim": hidden // heads}),
    )
