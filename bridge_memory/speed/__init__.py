"""How long a step takes: work by stage, hardware, a few fitted constants. For ranking layouts, not for promises.

``step_time.step_time(run, hardware)`` gives seconds with their parts. ``references/search.md`` says what the model is
good for.
"""
