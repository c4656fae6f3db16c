"""The schedule: when the chunks of a pipeline rank are alive, event by event and in closed form.

A chunk is three numbers; nothing here knows a layer. ``peak.dynamic_peak`` finds the moment of most bytes.
"""
