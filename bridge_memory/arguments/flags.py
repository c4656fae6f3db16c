"""The flags that describe a run, shared by every command that needs one.

Short names (``--tp``) and Megatron's long ones (``--tensor-model-parallel-size``) mean the same. What a flag takes is
what its field does.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from bridge_memory.releases import parse_release
from bridge_memory.spec.fields import Rule, rules_of
from bridge_memory.spec.parts import ENGINE_OF_FRAMEWORK
from bridge_memory.spec.run import GROUPS

DEFAULT_SEQ_LENGTH = 4096
#: Megatron Bridge's (``peft/lora.py: LoRA``).
DEFAULT_LORA_DIM = 32
_UNSET: Any = argparse.SUPPRESS

#: Group of the spec -> its title in the help.
_TITLES = {
    "parallel": "parallelism", "batch": "batch", "precision": "precision", "optimizer": "optimizer",
    "data_parallel": "gradients and data parallelism", "peft": "adapters",
    "recompute": "activation recomputation", "implementation": "implementation",
    "transformers": "Hugging Face transformers", "ddp": "PyTorch DDP", "fsdp": "PyTorch FSDP",
    "deepspeed": "DeepSpeed ZeRO", "checkpoint": "checkpoints of Megatron",
}  # fmt: skip
#: Groups of a RunSpec that flags describe.
SPECS = {name: GROUPS[name] for name in _TITLES}


class Flag(NamedTuple):
    """One flag: its spellings, and the field of the spec that it sets, "group.field"."""

    names: str
    field: str
    help: str
    metavar: str = "N"


FLAGS = (
    # Parallelism
    Flag("--tp --tensor-model-parallel-size", "parallel.tensor_model_parallel_size", "tensor parallel size"),
    Flag("--pp --pipeline-model-parallel-size", "parallel.pipeline_model_parallel_size", "pipeline parallel size"),
    Flag("--vpp --virtual-pipeline-model-parallel-size --num-virtual-stages-per-pipeline-rank",
         "parallel.virtual_pipeline_model_parallel_size", "virtual stages per pipeline stage (interleaved schedule)"),
    Flag("--cp --context-parallel-size", "parallel.context_parallel_size", "context parallel size"),
    Flag("--ep --expert-model-parallel-size", "parallel.expert_model_parallel_size", "expert parallel size"),
    Flag("--etp --expert-tensor-parallel-size", "parallel.expert_tensor_parallel_size",
         "tensor parallel size inside experts (default: --tp, as in Megatron)"),
    Flag("--num-gpus --world-size", "parallel.world_size", "GPUs of the job; the data parallel size follows"),
    Flag("--sequence-parallel", "parallel.sequence_parallel", "sequence parallelism (default: on when --tp > 1)"),
    Flag("--num-layers-in-first-pipeline-stage --decoder-first-pipeline-num-layers",
         "parallel.num_layers_in_first_pipeline_stage", "layers on the first pipeline stage"),
    Flag("--num-layers-in-last-pipeline-stage --decoder-last-pipeline-num-layers",
         "parallel.num_layers_in_last_pipeline_stage", "layers on the last pipeline stage"),
    Flag("--pipeline-model-parallel-layout", "parallel.pipeline_model_parallel_layout",
         "Megatron's layout string, such as \"Et*3|(tt|)*29,m|L\"", metavar="LAYOUT"),
    Flag("--account-for-embedding-in-pipeline-split", "parallel.account_for_embedding_in_pipeline_split",
         "count the embedding as a layer when splitting"),
    Flag("--account-for-loss-in-pipeline-split", "parallel.account_for_loss_in_pipeline_split",
         "count the loss as a layer when splitting"),
    Flag("--microbatch-group-size-per-vp-stage", "parallel.microbatch_group_size_per_vp_stage",
         "microbatches that a virtual stage runs in a row (default: --pp)"),
    Flag("--num-distributed-optimizer-instances", "parallel.num_distributed_optimizer_instances",
         "copies of the distributed optimizer's shards over data-parallel ranks"),
    # Batch
    Flag("--micro-batch-size", "batch.micro_batch_size", "sequences per microbatch on one data-parallel rank"),
    Flag("--global-batch-size", "batch.global_batch_size", "sequences per step, over the whole job"),
    Flag("--seq-length", "batch.seq_length", f"tokens per sequence (default: {DEFAULT_SEQ_LENGTH})"),
    Flag("--packed-sequences", "batch.packed_sequences",
         "pack shorter sequences into each of --seq-length tokens; a microbatch is one row (THD layout)"),
    Flag("--images-per-sample", "batch.images_per_sample",
         "images of each sequence, for models with a vision encoder (default: 1)"),
    Flag("--image-size", "batch.image_size",
         "size of an image as the processor hands it on (default: its largest)", metavar="WxH"),
    Flag("--patches", "batch.patches_per_image", "patches of an image, instead of --image-size"),
    Flag("--video-frames", "batch.video_frames", "frames of one video of each sequence, of the size of its images"),
    Flag("--audio-seconds", "batch.audio_seconds",
         "audio of each sequence, for models with an audio encoder (default: 30)", metavar="S"),
    # Precision
    Flag("--precision", "precision.params_dtype", "dtype of parameters and activations"),
    Flag("--fp8 --fp8-format", "precision.fp8", "compute linears in fp8"),
    Flag("--fp8-recipe", "precision.fp8_recipe", "fp8 scaling recipe"),
    Flag("--fp8-param-gather --fp8-param", "precision.fp8_param", "keep parameters in fp8"),
    Flag("--fp8-dot-product-attention", "precision.fp8_dot_product_attention", "compute attention in fp8 too"),
    Flag("--fp4 --fp4-format", "precision.fp4", "compute linears in NVFP4"),
    Flag("--fp4-param-gather --fp4-param", "precision.fp4_param", "keep parameters in NVFP4"),
    Flag("--num-layers-at-start-in-bf16", "precision.num_layers_at_start_in_bf16",
         "layers at the start that stay in bf16 under fp8 or fp4"),
    Flag("--num-layers-at-end-in-bf16", "precision.num_layers_at_end_in_bf16",
         "layers at the end that stay in bf16 under fp8 or fp4"),
    Flag("--fp32-residual-connection", "precision.fp32_residual_connection", "residual stream in fp32"),
    # Optimizer and data parallelism
    Flag("--optimizer", "optimizer.optimizer", "optimizer"),
    Flag("--use-distributed-optimizer", "data_parallel.use_distributed_optimizer",
         "shard the optimizer over data-parallel ranks (default: on)"),
    Flag("--engine", "data_parallel.engine", "data-parallel engine: what ranks replicate, shard and gather"),
    Flag("--data-parallel-sharding-strategy", "data_parallel.data_parallel_sharding_strategy",
         "what Megatron-FSDP shards over data-parallel ranks"),
    Flag("--fsdp-double-buffer", "data_parallel.fsdp_double_buffer",
         "Megatron-FSDP: two persistent communication buffers in place of buffers allocated per unit"),
    Flag("--fsdp-db-use-persist-buf-on-alloc-fail", "data_parallel.fsdp_db_use_persist_buf_on_alloc_fail",
         "Megatron-FSDP: persistent buffers also for parameters that do not fit the double buffers"),
    Flag("--megatron-fsdp-max-pool-double-buffer", "data_parallel.megatron_fsdp_max_pool_double_buffer",
         "Megatron-FSDP: double buffers sized for the largest FSDP unit, shared by all units"),
    Flag("--suggested-communication-unit-size", "data_parallel.suggested_communication_unit_size",
         "Megatron-FSDP: most elements waiting for reduce-scatter; half as many are prefetched"),
    Flag("--grad-comm-dtype --megatron-fsdp-grad-comm-dtype", "data_parallel.grad_comm_dtype",
         "Megatron-FSDP: dtype of gradient reduction (default: that of the gradients)"),
    Flag("--grad-reduce-in-fp32 --accumulate-allreduce-grads-in-fp32", "data_parallel.grad_reduce_in_fp32",
         "fp32 gradient buffers (default: on)"),
    Flag("--overlap-grad-reduce", "data_parallel.overlap_grad_reduce",
         "reduce gradients in buckets, overlapped with backward"),
    Flag("--overlap-param-gather", "data_parallel.overlap_param_gather",
         "all-gather parameters in buckets, overlapped with forward"),
    Flag("--ddp-bucket-size", "data_parallel.bucket_size", "elements per gradient bucket"),
    Flag("--sync-each-batch", "data_parallel.sync_each_batch",
         "DDP and FSDP reduce gradients in every microbatch (default: only in the last of a step)"),
    Flag("--torch-implementation", "optimizer.torch_implementation",
         "implementation of torch's own optimizers (default: foreach, as in torch)"),
    Flag("--paged", "optimizer.paged", "bitsandbytes' paged optimizer states"),
    Flag("--clip-grad --max-grad-norm --gradient-clipping", "optimizer.clip_grad",
         "clip gradients to this norm", metavar="NORM"),
    Flag("--use-precision-aware-optimizer", "optimizer.use_precision_aware_optimizer",
         "optimizer states in the dtypes of the four options below"),
    Flag("--main-grads-dtype", "optimizer.main_grads_dtype", "dtype of main gradients (bf16: gradient buffers too)"),
    Flag("--main-params-dtype", "optimizer.main_params_dtype", "dtype of main parameters"),
    Flag("--exp-avg-dtype", "optimizer.exp_avg_dtype", "dtype of Adam's first moment"),
    Flag("--exp-avg-sq-dtype", "optimizer.exp_avg_sq_dtype", "dtype of the second moment"),
    Flag("--store-param-remainders", "optimizer.store_param_remainders",
         "fp32 main parameters store only the 16 bits that bf16 weights lack (default: on)"),
    Flag("--optimizer-cpu-offload", "optimizer.optimizer_cpu_offload", "optimizer states in host memory"),
    Flag("--optimizer-offload-fraction", "optimizer.optimizer_offload_fraction",
         "fraction of optimizer states in host memory", metavar="FRACTION"),
    # Adapters
    Flag("--peft", "peft.scheme",
         "train LoRA adapters on frozen weights, or freeze the language model beside an encoder that trains"),
    Flag("--lora-dim", "peft.dim", f"rank of the adapters (default: {DEFAULT_LORA_DIM})"),
    Flag("--lora-target-modules", "peft.target_modules",
         "linears that get an adapter; * matches anything (default: linear_qkv,linear_proj,linear_fc1,linear_fc2)",
         metavar="A,B"),
    # Recomputation
    Flag("--recompute-granularity", "recompute.granularity", "recompute whole layers or selected modules"),
    Flag("--recompute-method", "recompute.method",
         "full recomputation of all layers in groups (uniform), or of the first ones (block)"),
    Flag("--recompute-num-layers", "recompute.num_layers", "layers per group (uniform) or per virtual stage (block)"),
    Flag("--recompute-modules", "recompute.modules",
         "modules that selective recomputation covers, such as core_attn,moe_act,layernorm", metavar="A,B"),
    Flag("--distribute-saved-activations", "recompute.distribute_saved_activations",
         "shard saved layer inputs over TP"),
    # Implementation
    Flag("--transformer-impl --implementation", "implementation.transformer_impl",
         "layers of megatron-core (with Transformer Engine or local), transformers, torchtitan or torchtune"),
    Flag("--attention-backend", "implementation.attention_backend", "attention kernel"),
    Flag("--cp-comm-type", "implementation.cp_comm_type", "communication of context parallelism"),
    Flag("--tp-comm-overlap", "implementation.tp_comm_overlap",
         "overlap tensor-parallel communication with GEMMs (Userbuffers)"),
    Flag("--cross-entropy-loss-fusion", "implementation.cross_entropy_loss_fusion", "fused cross entropy"),
    Flag("--cross-entropy-fusion-impl", "implementation.cross_entropy_fusion_impl",
         "implementation of the fused cross entropy"),
    Flag("--gradient-accumulation-fusion", "implementation.gradient_accumulation_fusion",
         "GEMMs accumulate weight gradients into main_grad (default: on)"),
    Flag("--bias-activation-fusion", "implementation.bias_activation_fusion", "fused activation (default: on)"),
    Flag("--bias-dropout-fusion", "implementation.bias_dropout_fusion", "fused bias-dropout-add (default: on)"),
    Flag("--use-transformer-engine-op-fuser", "implementation.use_transformer_engine_op_fuser",
         "build MLPs from Transformer Engine's fusible operations"),
    Flag("--masked-softmax-fusion", "implementation.masked_softmax_fusion", "fused softmax (default: on)"),
    Flag("--apply-rope-fusion", "implementation.apply_rope_fusion", "fused rotary embedding (default: on)"),
    Flag("--deallocate-pipeline-outputs", "implementation.deallocate_pipeline_outputs",
         "free outputs sent to the next stage (default: on)"),
    Flag("--calculate-per-token-loss", "implementation.calculate_per_token_loss",
         "average the loss over the tokens of the global batch"),
    Flag("--deterministic-mode", "implementation.deterministic_mode", "deterministic kernels"),
    Flag("--moe-imbalance", "implementation.moe_imbalance",
         "tokens of the most loaded expert-parallel rank, over the mean (default: 1, balanced)", metavar="FACTOR"),
    Flag("--moe-token-dispatcher-type", "implementation.moe_token_dispatcher_type", "MoE token dispatcher"),
    Flag("--moe-flex-dispatcher-backend", "implementation.moe_flex_dispatcher_backend",
         "backend of --moe-token-dispatcher-type flex"),
    Flag("--moe-flex-dispatcher-num-sms --moe-deepep-num-sms", "implementation.moe_flex_dispatcher_num_sms",
         "SMs that DeepEP uses for communication (default: 20)"),
    Flag("--moe-hybridep-ranks-per-nvlink-domain", "implementation.moe_hybridep_ranks_per_nvlink_domain",
         "ranks that HybridEP reaches over NVLink (default: 8 at most)"),
    Flag("--moe-grouped-gemm", "implementation.moe_grouped_gemm", "grouped GEMM in experts (default: on)"),
    Flag("--moe-permute-fusion", "implementation.moe_permute_fusion", "fused token permutation"),
    Flag("--moe-router-fusion", "implementation.moe_router_fusion", "fused router"),
    Flag("--moe-router-dtype", "implementation.moe_router_dtype", "dtype of router logits and probabilities"),
    Flag("--moe-z-loss-coeff", "implementation.moe_z_loss_coeff",
         "coefficient of the router's z-loss", metavar="COEFF"),
    Flag("--moe-expert-capacity-factor", "implementation.moe_expert_capacity_factor",
         "expert capacity, over the balanced number of tokens; tokens above it are dropped", metavar="FACTOR"),
    Flag("--moe-pad-expert-input-to-capacity", "implementation.moe_pad_expert_input_to_capacity",
         "pad each expert's tokens to its capacity"),
    Flag("--moe-router-padding-for-quantization --moe-router-padding-for-fp8",
         "implementation.moe_router_padding_for_quantization",
         "pad each expert's tokens in the router to the multiple that fp8 or fp4 needs"),
    Flag("--moe-expert-rank-capacity-factor", "implementation.moe_expert_rank_capacity_factor",
         "HybridEP: tokens allocated for a rank's experts, over the balanced number", metavar="FACTOR"),
    Flag("--moe-paged-stash", "implementation.moe_paged_stash",
         "store saved activations of experts in one paged buffer"),
    Flag("--moe-paged-stash-buffer-size-factor-cuda", "implementation.moe_paged_stash_buffer_size_factor_cuda",
         "size of the --moe-paged-stash buffer, over the average need (default: 1.1)", metavar="FACTOR"),
    Flag("--moe-mlp-glu-interleave-size", "implementation.moe_mlp_glu_interleave_size",
         "block width of the interleaved gate and up projections of experts"),
    Flag("--moe-shared-expert-overlap", "implementation.moe_shared_expert_overlap",
         "overlap shared experts with token dispatch"),
    Flag("--overlap-moe-expert-parallel-comm", "implementation.overlap_moe_expert_parallel_comm",
         "overlap expert-parallel communication with compute of another microbatch"),
    Flag("--delay-wgrad-compute", "implementation.delay_wgrad_compute",
         "compute weight gradients after the input gradients of a layer, or of its experts"),
    Flag("--cpu-offloading-num-layers", "implementation.cpu_offloading_num_layers",
         "layers whose activations go to host memory"),
    Flag("--cuda-graph-impl", "implementation.cuda_graph_impl", "implementation of CUDA graphs"),
    Flag("--cuda-graph-modules --cuda-graph-scope", "implementation.cuda_graph_modules",
         "modules that CUDA graphs cover, such as attn,moe_router,moe_preprocess (default: whole layers)",
         metavar="A,B"),
    Flag("--offload-modules", "implementation.offload_modules",
         "modules whose saved tensors go to host memory (fine-grained offloading)", metavar="A,B"),
    Flag("--min-offloaded-tensor-size", "implementation.min_offloaded_tensor_size",
         "saved tensors with fewer elements stay on the GPU (default: 1048576)", metavar="ELEMENTS"),
    # Hugging Face transformers
    Flag("--transformers-version", "transformers.transformers_version", "release of transformers", metavar="X.Y"),
    Flag("--attn-implementation", "transformers.attn_implementation", "transformers' attn_implementation"),
    Flag("--sdpa-kernel", "transformers.sdpa_kernel",
         "kernel of torch's scaled_dot_product_attention (default: flash without a mask, efficient with one)"),
    Flag("--gradient-checkpointing", "transformers.gradient_checkpointing", "recompute decoder layers in backward"),
    Flag("--checkpoint-submodules", "transformers.checkpoint_submodules",
         "recompute norms, attention and MLP separately in backward (NeMo Automodel)"),
    Flag("--use-reentrant", "transformers.use_reentrant",
         "reentrant gradient checkpointing (default: on before transformers 5)"),
    Flag("--autocast", "transformers.autocast", "dtype of torch.autocast; parameters stay fp32 (--precision fp32)"),
    Flag("--attention-mask", "transformers.attention_mask",
         "attention mask of the batch: all ones, with padding, or absent"),
    Flag("--use-cache", "transformers.use_cache", "transformers' use_cache: keep the KV cache in training too"),
    Flag("--keeps-outputs", "transformers.keeps_outputs",
         "the training loop holds the model's outputs (logits) through backward"),
    Flag("--liger-kernel", "transformers.liger_kernel",
         "Liger kernels in use, such as rms_norm,swiglu,fused_linear_cross_entropy", metavar="A,B"),
    Flag("--autocast-adapter-dtype", "transformers.autocast_adapter_dtype", "LoRA adapters in fp32 (default: on)"),
    Flag("--lora-dropout", "transformers.lora_dropout", "dropout before LoRA adapters", metavar="P"),
    Flag("--use-dora", "peft.use_dora", "DoRA: LoRA with a magnitude per output feature"),
    Flag("--load-in-4bit", "transformers.load_in_4bit", "frozen linears in NF4 or FP4 (QLoRA)"),
    Flag("--load-in-8bit", "transformers.load_in_8bit", "frozen linears in int8"),
    Flag("--bnb-4bit-use-double-quant", "transformers.bnb_4bit_use_double_quant",
         "double quantization: 8-bit scales for 4-bit weights"),
    Flag("--bnb-4bit-compute-dtype", "transformers.bnb_4bit_compute_dtype",
         "dtype in which 4-bit linears compute (default: fp32, as in bitsandbytes)"),
    Flag("--prepare-model-for-kbit-training", "transformers.prepare_model_for_kbit_training",
         "peft's function of this name: cast unquantized parameters to fp32"),
    Flag("--selective-ac-option", "transformers.selective_ac_option",
         "torchtitan's selective checkpointing: op, or every Nth layer"),
    Flag("--mixer-kernels", "transformers.mixer_kernels",
         "causal_conv1d and flash-linear-attention, or mamba_ssm, are installed"),
    Flag("--torch-compile", "transformers.torch_compile",
         "torch.compile the model; torchtitan and torchtune compile each layer"),
    Flag("--compile-loss", "transformers.compile_loss",
         "torchtitan, torchtune: torch.compile the loss (default: as the recipe does)"),
    Flag("--num-output-chunks", "transformers.num_output_chunks",
         "torchtune: chunks of tokens in which the loss is computed (default: 8)", metavar="N"),
    Flag("--cut-cross-entropy", "transformers.cut_cross_entropy",
         "cut-cross-entropy: the loss without materialized logits"),
    Flag("--optimizer-in-bwd", "transformers.optimizer_in_bwd", "step each parameter's optimizer in backward"),
    Flag("--enable-activation-offloading", "transformers.enable_activation_offloading",
         "offload inputs of checkpointed layers to host memory (torchtune)"),
    Flag("--experts-implementation", "transformers.experts_implementation",
         "implementation of experts, from transformers 5 on"),
    # Engines outside of megatron-core
    Flag("--ddp-bucket-cap-mb", "ddp.bucket_cap_mb", "MiB per gradient bucket (default: 25)", metavar="MIB"),
    Flag("--gradient-as-bucket-view", "ddp.gradient_as_bucket_view", "gradients are views into their buckets"),
    Flag("--ddp-static-graph", "ddp.static_graph", "DDP's static_graph: the same parameters are used in every step"),
    Flag("--ddp-find-unused-parameters", "ddp.find_unused_parameters", "DDP's find_unused_parameters"),
    Flag("--fsdp-sharding-strategy", "fsdp.sharding_strategy", "FSDP1's sharding strategy (default: FULL_SHARD)"),
    Flag("--fsdp-reshard-after-forward --reshard-after-forward", "fsdp.reshard_after_forward",
         "FSDP2 reshards parameters after forward (default: all but the root's)"),
    Flag("--fsdp-auto-wrap-policy", "fsdp.auto_wrap_policy", "which modules are wrapped as FSDP units"),
    Flag("--fsdp-param-dtype", "fsdp.param_dtype",
         "param_dtype of MixedPrecision: dtype of gathered parameters and of compute"),
    Flag("--fsdp-reduce-dtype", "fsdp.reduce_dtype", "reduce_dtype of MixedPrecision: dtype of gradient reduction"),
    Flag("--fsdp-forward-prefetch", "fsdp.forward_prefetch", "prefetch the next unit in forward"),
    Flag("--fsdp-backward-prefetch", "fsdp.backward_prefetch", "when backward prefetches the next unit"),
    Flag("--fsdp-limit-all-gathers", "fsdp.limit_all_gathers", "at most two all-gathers in flight (default: on)"),
    Flag("--fsdp-use-orig-params", "fsdp.use_orig_params", "FSDP1's use_orig_params"),
    Flag("--fsdp-offload-params --fsdp-cpu-offload", "fsdp.offload_params",
         "parameters, gradients and optimizer states in host memory"),
    Flag("--fsdp-pin-memory", "fsdp.pin_memory", "pin offloaded parameters in host memory (default: on)"),
    Flag("--data-parallel-shard-degree --fsdp-shard-degree", "fsdp.shard_degree",
         "ranks in a sharding group; groups replicate (HSDP; default: all data-parallel ranks)"),
    Flag("--zero-stage", "deepspeed.stage", "ZeRO stage of --engine megatron_deepspeed (default: 1)"),
    Flag("--reduce-bucket-size", "deepspeed.reduce_bucket_size", "elements per gradient reduction bucket"),
    Flag("--allgather-bucket-size", "deepspeed.allgather_bucket_size",
         "elements per all-gather of updated parameters, after the step"),
    Flag("--overlap-comm", "deepspeed.overlap_comm", "overlap gradient reduction with backward, with a second bucket"),
    Flag("--contiguous-gradients", "deepspeed.contiguous_gradients",
         "copy gradients into the reduction bucket (default: on)"),
    Flag("--reduce-scatter", "deepspeed.reduce_scatter",
         "reduce-scatter gradients in place of an all-reduce (default: on)"),
    Flag("--round-robin-gradients", "deepspeed.round_robin_gradients", "assign parameters to partitions round-robin"),
    Flag("--stage3-prefetch-bucket-size", "deepspeed.stage3_prefetch_bucket_size", "ZeRO-3: most elements prefetched"),
    Flag("--stage3-param-persistence-threshold", "deepspeed.stage3_param_persistence_threshold",
         "ZeRO-3: parameters of at most this many elements are never partitioned"),
    Flag("--stage3-model-persistence-threshold", "deepspeed.stage3_model_persistence_threshold",
         "ZeRO-3: most elements of all unpartitioned parameters together"),
    Flag("--stage3-max-live-parameters", "deepspeed.stage3_max_live_parameters",
         "ZeRO-3: most gathered elements at once"),
    Flag("--stage3-max-reuse-distance", "deepspeed.stage3_max_reuse_distance",
         "ZeRO-3: keep a gathered parameter that is used again within this many elements"),
    Flag("--sub-group-size", "deepspeed.sub_group_size",
         "ZeRO-3: elements per optimizer sub-group, updated one after the other"),
    Flag("--offload-optimizer-device", "deepspeed.offload_optimizer_device", "device of optimizer states"),
    Flag("--offload-optimizer-pin-memory", "deepspeed.offload_optimizer_pin_memory",
         "pin offloaded optimizer states in host memory (default: on)"),
    Flag("--offload-optimizer-ratio", "deepspeed.offload_optimizer_ratio",
         "fraction of optimizer states to offload", metavar="FRACTION"),
    Flag("--offload-param-device", "deepspeed.offload_param_device", "device of parameters (ZeRO-3)"),
    Flag("--offload-param-pin-memory", "deepspeed.offload_param_pin_memory",
         "pin offloaded parameters in host memory (default: on)"),
    Flag("--offload-param-buffer-count", "deepspeed.offload_param_buffer_count",
         "buffers for parameters offloaded to NVMe"),
    Flag("--offload-param-buffer-size", "deepspeed.offload_param_buffer_size",
         "elements per buffer for parameters offloaded to NVMe"),
    Flag("--zero-hpz-partition-size", "deepspeed.zero_hpz_partition_size",
         "ranks in a secondary partition group (ZeRO++ hpZ)"),
    Flag("--communication-data-type", "deepspeed.communication_data_type",
         "dtype of DeepSpeed's gradient communication"),
    Flag("--grad-accum-dtype", "deepspeed.grad_accum_dtype", "dtype in which DeepSpeed accumulates gradients"),
    Flag("--bf16-master-weights-and-grads", "deepspeed.bf16_master_weights_and_grads",
         "main parameters and gradients in bf16"),
    Flag("--bf16-optimizer-states", "deepspeed.bf16_optimizer_states", "optimizer states in bf16"),
    Flag("--stage3-gather-16bit-weights-on-model-save", "deepspeed.stage3_gather_16bit_weights_on_model_save",
         "ZeRO-3: gather 16-bit weights when saving"),
    # Checkpoints
    Flag("--ckpt-format", "checkpoint.ckpt_format", "format of checkpoints"),
    Flag("--dist-ckpt-optim-fully-reshardable", "checkpoint.dist_ckpt_optim_fully_reshardable",
         "save the distributed optimizer's states parameter by parameter, for any layout"),
    Flag("--distrib-optim-fully-reshardable-mem-efficient", "checkpoint.distrib_optim_fully_reshardable_mem_efficient",
         "gather those states over gloo, on one data-parallel rank"),
    Flag("--ckpt-fully-parallel-save", "checkpoint.ckpt_fully_parallel_save",
         "divide what is saved among data-parallel ranks (default: on)"),
    Flag("--ckpt-fully-parallel-load", "checkpoint.ckpt_fully_parallel_load",
         "divide what is loaded among data-parallel ranks, which broadcast it"),
    Flag("--async-save", "checkpoint.async_save", "write checkpoints in a persistent process beside training"),
    Flag("--stream-ckpt-dequant", "checkpoint.stream_ckpt_dequant",
         "load quantized weights one at a time (default: on)"),
    Flag("--load-optim", "checkpoint.load_optim", "load the optimizer when resuming (default: on)"),
    Flag("--save-optim", "checkpoint.save_optim", "save the optimizer (default: on)"),
    Flag("--adopt-optim-states", "checkpoint.adopt_optim_states",
         "resume with fp32 moments as loaded (Megatron Bridge from 0.6), not copied (Megatron-LM)"),
    Flag("--also-save-hf-checkpoint", "checkpoint.also_save_hf_checkpoint",
         "with each checkpoint also the weights as Hugging Face has them"),
    Flag("--experts-in-one-tensor", "checkpoint.experts_in_one_tensor",
         "experts of a layer are one tensor, saved transposed"),
)

#: Megatron's switches that say one value of a field: spelling -> (field, value).
VALUES: dict[str, tuple[str, Any]] = {
    "--bf16": ("precision.params_dtype", "bf16"),
    "--fp16": ("precision.params_dtype", "fp16"),
    "--use-megatron-fsdp": ("data_parallel.engine", "megatron_fsdp"),
    "--grad-reduce-in-bf16": ("data_parallel.grad_reduce_in_fp32", False),
    "--no-bias-swiglu-fusion": ("implementation.bias_activation_fusion", False),
    "--no-bias-gelu-fusion": ("implementation.bias_activation_fusion", False),
}
#: Megatron's arguments that no field has, and that others follow from: spelling -> (argparse's name, its help).
SWITCHES = {
    "--num-layers-per-virtual-pipeline-stage": (
        "num_layers_per_virtual_pipeline_stage", "layers per virtual stage, in place of --vpp"
    ),
    "--fine-grained-activation-offloading": (
        "fine_grained_activation_offloading", "Megatron's switch; --offload-modules implies it"
    ),
}
#: What changes the model itself: argparse's name -> its flag.
MODEL_FLAGS = {
    "mtp_num_layers": "--mtp-num-layers", "num_layers": "--num-layers",
    "make_vocab_size_divisible_by": "--make-vocab-size-divisible-by", "hidden_dropout": "--hidden-dropout",
    "attention_dropout": "--attention-dropout",
}  # fmt: skip
#: The flag of each package whose releases have rules -> the package's name. Its field is argparse's.
PACKAGES = {"--megatron-core": "megatron-core", "--transformer-engine": "Transformer Engine", "--torch": "PyTorch"}

#: Keyword of ``settings_from_files`` and argparse's name -> the flag, its help.
FILES = {
    "deepspeed": ("--deepspeed", "DeepSpeed's JSON; \"auto\" is resolved as the Hugging Face Trainer does"),
    "accelerate": ("--accelerate", "accelerate's YAML (`accelerate config`)"),
    "training_args": ("--training-args", "Hugging Face TrainingArguments, as JSON or YAML"),
    "torchtitan": ("--torchtitan", "torchtitan's TOML; without MODEL its own model, if known"),
    "peft_config": ("--peft-config", "peft's adapter_config.json: LoRA's rank, targets and dropout"),
}  # fmt: skip
FLAG_OF = {name: flag for name, (flag, _) in FILES.items()}


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare MODEL and every flag of a run on ``parser``."""
    model = parser.add_argument_group("model")
    model.add_argument(
        "model", nargs="?", metavar="MODEL",
        help="a preset (org/name or name), a config.json or its folder, or a Hugging Face Hub id",
    )
    model.add_argument("--custom-config", metavar="JSON", help="a Hugging Face config as JSON text, in place of MODEL")
    model.add_argument(
        "--megatron-args", metavar="ARGS",
        help="Megatron-LM's arguments, as text or in a file (launch script or YAML); MODEL is then optional",
    )
    files = parser.add_argument_group("configuration files of other trainers")
    for name, (spelled, text) in FILES.items():
        files.add_argument(spelled, dest=name, metavar="FILE", help=text)
    model.add_argument(
        "--container", metavar="FILE",
        help="a Megatron Bridge ConfigContainer in place of MODEL: the run_config.yaml of a checkpoint",
    )
    model.add_argument(
        "--bridge-recipe", metavar="NAME",
        help="a recipe of the installed Megatron Bridge in place of MODEL, such as llama3_8b_pretrain_config",
    )
    model.add_argument(
        "--mapping", choices=("builtin", "mbridge", "bridge"), default="builtin",
        help="reader of the Hugging Face config: this package's, mbridge's or Megatron Bridge's (if installed)",
    )
    model.add_argument("--mtp-num-layers", type=integer, metavar="N",
                       help="multi-token prediction depths (default: the config's); 0: none")
    model.add_argument("--num-layers", type=integer, metavar="N", help="train only the first N decoder layers")
    model.add_argument("--make-vocab-size-divisible-by", type=integer, metavar="N",
                       help="pad the vocabulary to a multiple of N x TP (Megatron-LM: 128; default: only TP)")
    model.add_argument("--hidden-dropout", type=number, metavar="P", help="dropout of the residual stream")
    model.add_argument("--attention-dropout", type=number, metavar="P", help="dropout of attention probabilities")
    for package, name in PACKAGES.items():
        model.add_argument(package, metavar="X.Y", help=f"{name} release whose rules apply")
    groups = {name: parser.add_argument_group(title) for name, title in _TITLES.items()}
    rules = {name: rules_of(spec) for name, spec in SPECS.items()}
    for flag in FLAGS:
        group, _, field = flag.field.partition(".")
        _add(groups[group], flag, rules[group][field])
    for name, (field, value) in VALUES.items():
        shown = spelling(field).replace("--", "--no-" if value is False else "--")
        groups[field.partition(".")[0]].add_argument(
            name, dest=field, default=_UNSET, action=_OneValue, nargs=0, const=value,
            help=f"the same as {shown}" + f" {value}" * (value is not False),
        )
    (chunk, (chunk_name, chunk_help)), (offload, (offload_name, offload_help)) = SWITCHES.items()
    groups["parallel"].add_argument(chunk, dest=chunk_name, type=integer, metavar="N", help=chunk_help)
    groups["implementation"].add_argument(
        offload, dest=offload_name, action="store_const", const=True, help=offload_help
    )


class _OneValue(argparse.Action):
    """Stores ``const``, unless the value of another such switch was given before."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        given = getattr(namespace, self.dest, self.const)
        if given != self.const and (self.dest, given) in VALUES.values():
            raise argparse.ArgumentError(self, f"{given} was given before it; drop one of them")
        setattr(namespace, self.dest, self.const)


def spelling(field: str) -> str:
    """The first spelling of the flag of "group.field"."""
    return next(flag.names.split()[0] for flag in FLAGS if flag.field == field)


def spelling_or_name(group: str, field: str) -> str:
    """The first spelling of the flag of a field; the field's name where it has none."""
    return next((flag.names.split()[0] for flag in FLAGS if flag.field == f"{group}.{field}"), field)


def _add(group: Any, flag: Flag, rule: Rule) -> None:
    """One flag, whose kind and choices are those of the field."""
    kwargs: dict[str, Any] = {"dest": flag.field, "default": _UNSET, "help": flag.help}
    if bool in rule.types:
        kwargs["action"] = argparse.BooleanOptionalAction
    elif rule.release:
        kwargs |= {"type": _release, "metavar": flag.metavar}
    elif tuple in rule.types:
        kwargs |= {"type": _names, "metavar": flag.metavar}
    elif float in rule.types:
        kwargs |= {"type": number, "metavar": flag.metavar}
    elif int in rule.types:
        kwargs |= {"type": integer, "metavar": flag.metavar}
    else:
        kwargs |= {"choices": rule.names or None, "metavar": "|".join(rule.names) or flag.metavar}
        if rule.names:
            kwargs["type"] = _spelled(rule.names)
    group.add_argument(*flag.names.split(), **kwargs)


def _spelled(names: Sequence[str]) -> Callable[[str], str]:
    """A name with hyphens for the one with underscores: megatron-deepspeed; a framework's for its engine's. Others are
    left for argparse to refuse."""

    def name(text: str) -> str:
        return next((n for n in names if n.replace("_", "-") == text), ENGINE_OF_FRAMEWORK.get(text, text))

    return name


def _release(text: str) -> tuple[int, int]:
    try:
        return parse_release(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a release such as 4.57") from None


def integer(text: str) -> int:
    # int() also reads "1_6" and the digits of other scripts; on a command line those are typing errors.
    try:
        if not text.removeprefix("-").isdecimal() or not text.isascii():
            raise ValueError
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None


def number(text: str) -> float:
    try:
        if not text.isascii() or "_" in text:
            raise ValueError
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.replace(",", " ").split() if name)
