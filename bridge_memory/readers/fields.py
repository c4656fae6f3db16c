"""Typed access to a config.json that accounts for every key: it is read, harmless, or refused by name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from bridge_memory.spec import SpecError
from bridge_memory.spec.errors import finite, listed, show

#: Sizes above these are typing errors, not models; they would also exhaust memory while laying out layers.
MAX_SIZE = 10**8
MAX_LAYERS = 10_000

#: An unknown key is refused if its name suggests a size or a structure.
_SUSPICIOUS = re.compile(
    r"(expert|rank|layer|head|dim|size|state|kernel|hidden|width|group|latent|mtp|nextn|moe|block|conv"
    r"|ssm|mamba|lora|alibi|pattern|freq|interval|attn|attention|mlp|ffn|inner|norm|bias|share|embed|num_|^n_|adapter)"
)

#: Keys whose names look like sizes but that change no tensor of a training run, grouped by purpose.
_HARMLESS = (
    # Generation, from transformers' PretrainedConfig.
    "num_beams num_beam_groups num_return_sequences no_repeat_ngram_size encoder_no_repeat_ngram_size "
    "chunk_size_feed_forward output_hidden_states output_attentions cross_attention_hidden_size "
    "is_encoder_decoder tie_encoder_decoder pruned_heads num_labels num_logits_to_keep num_assistant_tokens "
    "use_cache return_dict return_dict_in_generate output_scores max_length min_length top_k do_sample early_stopping "
    "bad_words_ids remove_invalid_values id2label label2id task_specific_params is_decoder torchscript use_bfloat16 "
    "forced_bos_token_id suppress_tokens begin_suppress_tokens architectures unsloth_fixed "
    # Numerics, initialisation and constant factors.
    "initializer_range initializer_factor embedding_initializer_range init_std init_method init_method_std "
    "rms_norm_eps layer_norm_eps layer_norm_epsilon layernorm_epsilon norm_eps norm_epsilon hidden_act "
    "hidden_activation attention_softmax_in_fp32 attn_logit_softcapping final_logit_softcapping "
    "query_pre_attn_scalar attention_multiplier embedding_multiplier residual_multiplier logits_scaling "
    "scale_attn_weights scale_attn_by_inverse_layer_idx reorder_and_upcast_attn masked_softmax_fusion "
    "bias_dropout_fusion skip_bias_add skip_bias_add_qkv slow_but_exact offset_alibi residual_in_fp32 "
    "apply_residual_connection_post_layernorm rescale_prenorm_residual norm_topk_prob clip_qkv "
    "embd_pdrop embedding_dropout _attn_implementation attn_implementation _attn_implementation_autoset "
    # Routing choices that change no tensor's shape.
    "n_group topk_group aux_loss_alpha router_aux_loss_coef seq_aux output_router_logits "
    "router_z_loss_coef router_jitter_noise topk_method "
    # Positions (rotary widths are read elsewhere).
    "rope_local_base_freq rope_interleave original_max_position_embeddings initial_context_length "
    "full_attn_mod interpolate_factor use_mrope "
    # The author's own parallel layout, kernels and quantization.
    "ep_size pretraining_tp quantization_config auto_map use_mamba_kernels mamba_ssm_cache_dtype "
    "time_step_rank summary_hidden_size image_token_index mm_tokens_per_image num_image_tokens "
    "dual_chunk_attention_config dim_model_base"
)
HARMLESS = frozenset(_HARMLESS.split())

_REQUIRED: Any = object()


#: A user's value as messages quote it.
shown = show


class Fields:
    """A config with typed getters that record which keys were read.

    ``null`` counts as absent, as in transformers. Getters raise SpecError naming the field. Several keys in one call
    are aliases; aliases with different values are refused.
    """

    def __init__(
        self, config: Mapping[str, Any], name: str, model_type: str, vocabulary_multiple: int | None = None
    ) -> None:
        self.config = config
        self.name = name
        self.model_type = model_type
        #: make_vocab_size_divisible_by as the user gave it, or None.
        self.vocabulary_multiple = vocabulary_multiple
        self.assumptions: list[str] = []
        self.not_modelled: list[str] = []
        #: Nobody has read what this model_type's class does: no field is harmless because its name sounds so.
        self.unknown_class = False
        self._read: set[str] = set()

    def error(self, message: str) -> SpecError:
        return SpecError(f"{self.name}: {message}")

    def has(self, key: str) -> bool:
        return self.config.get(key) is not None

    def raw(self, *keys: str) -> tuple[str, Any]:
        """(key, value) of the first key that is present, or (first key, None)."""
        self._read.update(keys)
        found = [(k, self.config[k]) for k in keys if self.config.get(k) is not None]
        if not found:
            return keys[0], None
        key, value = found[0]
        for other, also in found[1:]:
            if also != value:
                raise self.error(f"{key} ({shown(value)}) and {other} ({shown(also)}) disagree; keep one")
        return key, value

    def _missing(self, key: str) -> SpecError:
        return self.error(f"{key} is missing from this {shown(self.model_type)} config; add it")

    def integer(self, *keys: str, default: Any = _REQUIRED, least: int = 1, most: int = MAX_SIZE) -> Any:
        """An int in [least, most]; ``default`` (of any type, also None) if absent."""
        key, value = self.raw(*keys)
        if value is None:
            if default is _REQUIRED:
                raise self._missing(key)
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(f"{key} is {shown(value)}; it must be an integer")
        if value < least:
            kind = "a positive" if least == 1 else "a non-negative" if least == 0 else f"at least {least}, an"
            raise self.error(f"{key} is {shown(value)}; it must be {kind} integer")
        if value > most:
            raise self.error(f"{key} is {shown(value)}; more than {most} cannot be right")
        return value

    def count(self, *keys: str, default: int = 0) -> int:
        """A non-negative int."""
        value: int = self.integer(*keys, default=default, least=0)
        return value

    def flag(self, *keys: str, default: bool = False) -> bool:
        key, value = self.raw(*keys)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(f"{key} is {shown(value)}; it must be true or false")
        return value

    def number(self, *keys: str, default: float, least: float = 0.0, most: float = float("inf")) -> float:
        key, value = self.raw(*keys)
        if value is None:
            return default
        if not finite(value):
            raise self.error(f"{key} is {shown(value)}; it must be a number")
        if not least <= value <= most:
            raise self.error(f"{key} is {shown(value)}; it must lie in [{least:g}, {most:g}]")
        return float(value)

    def text(self, *keys: str, default: str) -> str:
        key, value = self.raw(*keys)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.error(f"{key} is {shown(value)}; it must be a string")
        return value

    def choice(self, key: str, choices: Mapping[str, str], default: str) -> str:
        """``choices[value]`` for the config's string."""
        value = self.text(key, default=default)
        if value not in choices:
            known = ", ".join(sorted(choices))
            raise self.error(f"{key} is {shown(value)}, which is not known here; known: {known}")
        return choices[value]

    def items(self, key: str) -> Sequence[Any] | None:
        """A list, or None if absent."""
        _, value = self.raw(key)
        if value is None:
            return None
        if not isinstance(value, (list, tuple)):
            raise self.error(f"{key} is {shown(value)}; it must be a list")
        return value

    def mapping(self, key: str) -> Mapping[str, Any]:
        """A dict, empty if absent."""
        _, value = self.raw(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self.error(f"{key} is {shown(value)}; it must be an object")
        return value

    def ignore(self, *keys: str) -> None:
        """Mark keys as read: they change nothing for this family."""
        self._read.update(keys)

    def assume(self, sentence: str) -> None:
        if sentence not in self.assumptions:
            self.assumptions.append(sentence)

    def finish(self) -> None:
        """Raise SpecError for unread keys that may change memory. Falsy values (0, false, null, []) count as off."""
        unknown = [
            f"{key}={shown(value)}"
            for key, value in self.config.items()
            if value and key not in self._read and key not in HARMLESS and not key.endswith("_token_id")
            and (_SUSPICIOUS.search(key.lower()) or (self.unknown_class and not isinstance(value, (float, str))))
        ]
        if unknown:
            fields = "field" if len(unknown) == 1 else "fields"
            raise self.error(
                f"{fields} not understood for model_type {shown(self.model_type)} that may change memory: "
                + listed(unknown)
                + "; remove what does not apply, or set it to null"
            )
