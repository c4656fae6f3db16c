"""Checks of a RunSpec, one subject per module. Each raises SpecError: one line with the field, its value and the fix.

The rules are megatron-core's; comments name the functions that enforce them. Where a rule changed between releases, the
one of ``ImplementationSpec.megatron_core`` applies. A search validates hundreds of thousands of runs, so that a valid
one must cost a few dozen comparisons and build no string. ``validation.RULES`` lists the checks in order.

TC = ``transformer/transformer_config.py: TransformerConfig.__post_init__``, MPC = ``model_parallel_config.py:
ModelParallelConfig.__post_init__``, PS = ``parallel_state.py: initialize_model_parallel``, OC =
``optimizer/optimizer_config.py: OptimizerConfig.__post_init__``, all of megatron-core 0.16.1; MLM = Megatron-LM
``megatron/training/arguments.py: validate_args``.
"""
