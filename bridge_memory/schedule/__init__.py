"""The schedule: when the chunks of a pipeline rank are alive. A chunk is three numbers; nothing here knows a layer.

``events`` follows megatron-core's schedules pass by pass; ``peak.dynamic_peak`` finds the moment of most bytes in
closed form. A property test holds the two equal.
"""
