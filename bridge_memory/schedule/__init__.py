"""The schedule: which microbatches of which chunks are alive when on a pipeline rank. A chunk is three numbers of
bytes.

``events`` follows megatron-core's schedules pass by pass; ``peak.dynamic_peak`` finds the peak in closed form. A
property test asserts that the two agree.
"""
