"""Runs that people described in words (``config.kind`` "described"): words -> a RunSpec and figures with their meaning.

``words`` has the names of options, ``texts`` the phrases of their values, ``setting`` those of framework, model and
GPU, ``figures`` what was measured, ``run`` puts a row together, ``outcomes`` compares.
"""
