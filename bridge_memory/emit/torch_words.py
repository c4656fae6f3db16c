"""A configuration of PyTorch's engines or of DeepSpeed in words."""

from __future__ import annotations

from bridge_memory.spec import RunSpec


def checkpointing_words(run: RunSpec) -> str:
    """Of what runs again in backward."""
    spec, r = run.transformers, run.recompute
    if spec.selective_ac_option is not None:
        return "op" if spec.selective_ac_option == "op" else f"every {spec.selective_ac_option} layers"
    if spec.gradient_checkpointing and not run.implementation.torchtitan:
        return "full, reentrant" if spec.reentrant else "full"
    if r.granularity == "selective":
        return ",".join(r.modules)
    return "full" if spec.gradient_checkpointing or r.granularity == "full" else "none"


def sharded_words(run: RunSpec) -> str:
    """What an engine shards, and over which ranks where not over all."""
    engine, f, z = run.data_parallel.engine, run.fsdp, run.deepspeed
    if engine == "fsdp2":
        words = "all, no reshard" if f.reshard_after_forward is False else "all"
        return words + (f" over {f.shard_degree}" if f.shard_degree else "")
    if engine == "fsdp1":
        return f.sharding_strategy + (f" over {f.shard_degree}" if f.shard_degree else "")
    if engine == "zero3" and z.zero_hpz_partition_size > 1:
        return f"all, hpZ {z.zero_hpz_partition_size}"
    return {"zero1": "states", "zero2": "states, gradients", "zero3": "all"}.get(engine, "none")


def overlap_words(run: RunSpec) -> str:
    """How gradients are reduced beside backward, "" where as by default."""
    if run.data_parallel.engine == "ddp" and run.ddp.gradient_as_bucket_view:
        return "bucket views"
    if run.data_parallel.sync_each_batch and run.num_microbatches > 1:
        return "sync each batch"
    z = run.deepspeed
    if run.data_parallel.engine.startswith("zero") and z.overlap_comm is not None:
        return "overlap_comm" if z.overlap_comm else "no overlap_comm"
    return ""


def offload_words(run: RunSpec) -> str:
    """What is in host memory."""
    z = run.deepspeed
    words = ["all"] if run.fsdp.offload_params else []
    words += ["optimizer"] if z.offload_optimizer_device != "none" else []
    words += ["parameters"] if z.offload_param_device != "none" else []
    return ", ".join(words) or "none"


def liger_words(run: RunSpec) -> str:
    """Liger's kernels: "none", one by its name, or "on"."""
    names = run.transformers.liger_kernel
    return {0: "none", 1: names[0] if names else ""}.get(len(names), "on")
