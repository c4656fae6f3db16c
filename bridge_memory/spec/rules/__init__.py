"""What a RunSpec refuses: one line each, naming the field, its value and the fix. One subject a module.

Rules are megatron-core's own, with the function that enforces them named beside; where a rule changed, that of the
release in ``ImplementationSpec.megatron_core``. A search validates hundreds of thousands of runs, so a sound one
costs a few dozen comparisons and builds no string. ``validation.RULES`` calls them, in the order in which a person
sees them.

TC = ``transformer/transformer_config.py: TransformerConfig.__post_init__``, MPC = ``model_parallel_config.py:
ModelParallelConfig.__post_init__``, PS = ``parallel_state.py: initialize_model_parallel``, OC =
``optimizer/optimizer_config.py: OptimizerConfig.__post_init__``, all of megatron-core 0.16.1; MLM = Megatron-LM
``megatron/training/arguments.py: validate_args``.
"""
