"""Options of training scripts in the same file as TrainingArguments: how the model is loaded, and which parameters
train.

Two sets of options are read: TRL's (``trl/trainer/model_config.py: ModelConfig``, which the recipes of
alignment-handbook and open-r1 use), and LLaMA-Factory's (``src/llamafactory/hparams/*.py``; ``model/adapter.py:
init_adapter``, ``model/model_utils/checkpointing.py``). They affect memory more than the Trainer's own options, so that
unsupported ones are refused, not ignored.
"""

from __future__ import annotations

from dataclasses import dataclass

from bridge_memory.readers.engines.peft import targets_of
from bridge_memory.readers.engines.sections import Section
from bridge_memory.readers.engines.settings import DTYPES, Settings, Specified
from bridge_memory.spec import show
from bridge_memory.spec.parts import ALL_LINEAR
from bridge_memory.spec.unmodelled import UNKNOWN_SIZE, Effect

#: ``attn_implementation`` of a model -> its name in specs.
ATTENTION = {
    "eager": "eager", "sdpa": "sdpa", "flash_attention_2": "flash_attention_2",
    "kernels-community/flash-attn": "flash_attention_2", "kernels-community/flash-attn2": "flash_attention_2",
}  # fmt: skip
#: LLaMA-Factory's ``flash_attn``; "auto" leaves it to transformers.
_FLASH = {"auto": None, "sdpa": "sdpa", "fa2": "flash_attention_2", "disabled": "eager"}
#: Options that identify a file of LLaMA-Factory.
_FACTORY = ("finetuning_type", "cutoff_len", "lora_rank", "lora_target", "quantization_bit", "pure_bf16", "flash_attn")
#: Switches of both that select an optimizer, model or kernel that is not modelled.
_REFUSED = (
    "use_galore", "use_apollo", "use_badam", "use_adam_mini", "use_muon", "use_unsloth", "use_llama_pro",
    "mixture_of_depths", "shift_attn", "use_kt", "use_megatron_core", "use_mca", "use_hyper_parallel",
)  # fmt: skip
#: Data, logging, and numbers that are no sizes.
HARMLESS = """
    model_revision base_model_revision model_code_revision lora_alpha lora_task_type use_rslora bnb_4bit_quant_type
    bnb_4bit_quant_storage chat_template dataset_mixer dataset_splits dataset_configs dataset_kwargs eos_token
    dataset dataset_dir eval_dataset template max_samples val_size plot_loss media_dir quantization_type
    loraplus_lr_ratio loraplus_lr_embedding pissa_init pissa_iter pissa_convert create_new_adapter tokenized_path
    buffer_size streaming train_on_prompt mask_history ignore_pad_token_for_loss adapter_name_or_path
    print_param_status use_swanlab completion_only_loss assistant_only_loss use_fast_tokenizer low_cpu_mem_usage
    enable_thinking mix_strategy interleave_probs split_special_tokens hf_hub_token
"""


@dataclass(frozen=True, slots=True)
class Loaded:
    """How a script loads the model."""

    #: Dtype of the weights; None: not specified.
    weights: str | None = None
    #: Whether only adapters train.
    adapters: bool = False
    #: Whether layers are checkpointed, as LLaMA-Factory does by default; None: as in TrainingArguments.
    checkpointing: bool | None = None


def read_script(top: Section, settings: Settings, specified: Specified, mixed: str | None) -> Loaded:
    """Read the options of scripts into ``settings``. ``mixed``: mixed precision of TrainingArguments, or None."""
    top.ignore(*HARMLESS.split())
    for name in _REFUSED:
        if top.raw(name):
            settings.diagnostics.refuse(name, f"is {show(top.data[name])}, which is not counted here", "leave it out")
    top.unmodelled("activation_offloading", False, Effect.DOWN, "activations in host memory",
                   order="what all layers save, less what is on its way")
    given = top.table("model_init_kwargs")
    for name in given.data:
        if name not in ("torch_dtype", "dtype", "attn_implementation", "use_cache", "trust_remote_code", "revision"):
            settings.diagnostics.feature(
                f"model_init_kwargs.{name}: how the model is loaded",
                Effect.UNKNOWN,
                order=UNKNOWN_SIZE,
            )
    weights = specified.weights or _dtype(top) or _dtype(given)
    _attention(top, settings)
    _attention(given, settings)
    if any(top.has(name) for name in _FACTORY):
        return _factory(top, settings, specified, mixed)
    adapters = bool(top.flag("use_peft"))
    quantised = _quantised(top, settings)
    for name in ("lora_r", "lora_dropout", "lora_target_modules", "lora_modules_to_save", "lora_target_parameters",
                 "use_dora", "use_bnb_nested_quant"):
        top.ignore(name)
    if adapters:
        for name in ("lora_modules_to_save", "lora_target_parameters"):
            if top.raw(name):
                settings.diagnostics.refuse(name, "trains other parameters, which are not counted here", "leave it out")
        value = top.raw("lora_target_modules")
        if isinstance(value, list) and len(value) == 1:
            value = value[0] if value[0] == ALL_LINEAR else value
        _lora(top, settings, "lora_r", 16, targets_of(top, "lora_target_modules", value, specified), dropout=0.05)
    elif quantised:
        top.problem(quantised, "is true without use_peft: quantised weights do not train", "set use_peft to true")
    if quantised:
        # SFTTrainer: prepare_model_for_kbit_training, then peft_module_casting_to_bf16 where bf16 is on.
        casts = mixed == "bf16" and weights == "bf16" and quantised == "load_in_4bit"
        settings.set(
            transformers__bnb_4bit_compute_dtype=weights if quantised == "load_in_4bit" else None,
            transformers__bnb_4bit_use_double_quant=top.flag("use_bnb_nested_quant") or None,
            transformers__prepare_model_for_kbit_training=None if casts else True,
        )
        settings.diagnostics.assume(
            "embeddings and output layer in bf16, as TRL's SFTTrainer casts them; its adapters, in bf16 too, are "
            "counted in fp32"
            if casts
            else "what is not quantised in fp32 (prepare_model_for_kbit_training), as TRL's SFTTrainer calls it"
        )
        if not casts:
            weights = "fp32"
    return Loaded(weights, adapters)


def _dtype(section: Section) -> str | None:
    """``dtype`` of transformers 5, ``torch_dtype`` of 4. "auto" is the checkpoint's, assumed to be bf16."""
    known = ("auto", *(name for name in DTYPES if name != "no"))
    words = [section.choice(name, known) for name in ("dtype", "torch_dtype")]
    word = words[0] or words[1]
    if word == "auto":
        section.diagnostics.assume("weights in bf16, the checkpoint's own dtype (auto)")
        return "bf16"
    return None if word is None else DTYPES[word]


def _attention(section: Section, settings: Settings) -> None:
    word = section.text("attn_implementation")
    if section.flag("use_flash_attention_2"):
        word = "flash_attention_2"
    if word is None:
        return
    if word in ATTENTION:
        settings.set(transformers__attn_implementation=ATTENTION[word])
    else:
        settings.set(transformers__attn_implementation="flash_attention_2")
        settings.diagnostics.assume(
            f"{section.named('attn_implementation')} {show(word)} saves what flash_attention_2 does"
        )


def _quantised(top: Section, settings: Settings) -> str | None:
    """The name of the quantisation switch that is on, or None."""
    four, eight = top.flag("load_in_4bit"), top.flag("load_in_8bit")
    if four and eight:
        top.problem("load_in_8bit", "is true, and so is load_in_4bit", "set one")
    if four:
        settings.set(transformers__load_in_4bit=True)
    elif eight:
        settings.set(transformers__load_in_8bit=True)
    return "load_in_4bit" if four else "load_in_8bit" if eight else None


def _lora(
    top: Section, settings: Settings, rank: str, default: int, targets: tuple[str, ...] | None, *, dropout: float
) -> None:
    settings.set(
        peft__scheme="lora", peft__dim=top.integer(rank, default, least=1),
        peft__target_modules=targets, peft__use_dora=top.flag("use_dora") or None,
        transformers__lora_dropout=top.number("lora_dropout", dropout, most=1.0) or None,
    )  # fmt: skip


def _factory(top: Section, settings: Settings, specified: Specified, mixed: str | None) -> Loaded:
    """Read LLaMA-Factory's options. By default layers are checkpointed and trainable weights are in fp32."""
    diagnostics = settings.diagnostics
    stage = top.choice("stage", ("pt", "sft", "rm", "ppo", "dpo", "kto"), "sft")
    if stage not in ("pt", "sft"):
        diagnostics.refuse("stage", f"is {stage}, whose other models and losses are not counted here", "use pt or sft")
    kind = top.choice("finetuning_type", ("lora", "full", "freeze", "oft"), "lora")
    if kind in ("freeze", "oft"):
        diagnostics.refuse("finetuning_type", f"is {kind}, which is not counted here", "use lora or full")
    settings.set(batch__seq_length=top.integer("cutoff_len", 2048, least=1),
                 batch__packed_sequences=top.flag("neat_packing") or None)
    flash = top.choice("flash_attn", (*_FLASH, "fa3"), "auto")
    settings.set(transformers__attn_implementation=_FLASH.get(flash, "flash_attention_2"))
    pure = top.flag("pure_bf16")
    computes = "bf16" if pure else mixed or "bf16"
    adapters = kind == "lora"
    if adapters:
        target = top.raw("lora_target", "all")
        if isinstance(target, str):
            target = [word.strip() for word in target.split(",") if word.strip()]
        targets = targets_of(top, "lora_target", ALL_LINEAR if target == ["all"] else target, specified)
        _lora(top, settings, "lora_rank", 8, targets, dropout=0.0)
        if top.raw("additional_target"):
            diagnostics.refuse(
                "additional_target", "trains other parameters, which are not counted here", "leave it out"
            )
    top.ignore("lora_rank", "lora_target", "lora_dropout", "use_dora", "additional_target")
    bits = top.integer("quantization_bit", None)
    top.ignore("double_quantization", "quantization_method", "quantization_device_map")
    if bits is not None:
        method = str(top.raw("quantization_method", "bnb")).lower()
        if not adapters:
            top.problem("quantization_bit", f"is {bits} without adapters, which LLaMA-Factory refuses",
                        "set finetuning_type to lora")
        elif method not in ("bnb", "bitsandbytes") or bits not in (4, 8):
            diagnostics.refuse(
                "quantization_bit", f"is {bits} by {method}, which is not counted here", "use 4 or 8 of bitsandbytes"
            )
        elif bits == 4:
            settings.set(transformers__load_in_4bit=True, transformers__bnb_4bit_compute_dtype=computes,
                         transformers__bnb_4bit_use_double_quant=top.flag("double_quantization", True) or None)
        else:
            settings.set(transformers__load_in_8bit=True)
    for name, what in (("upcast_layernorm", "norms in fp32"), ("upcast_lmhead_output", "logits in fp32"),
                       ("resize_vocab", "a larger vocabulary"), ("use_unsloth_gc", "inputs of layers in host memory")):
        top.unmodelled(name, False, Effect.EITHER, what, order="as large as the weights or tensors that it names")
    checkpointing = not top.flag("disable_gradient_checkpointing")
    if checkpointing:
        settings.set(transformers__use_reentrant=top.flag("use_reentrant_gc", True))
        diagnostics.assume("every layer is checkpointed, as LLaMA-Factory does (disable_gradient_checkpointing)")
    if top.flag("enable_liger_kernel"):
        settings.set(transformers__liger_kernel=("rope", "rms_norm", "swiglu", "fused_linear_cross_entropy"))
    return Loaded(computes if adapters or pure else "fp32", adapters, checkpointing)
