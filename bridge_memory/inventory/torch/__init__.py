"""Blocks of Hugging Face transformers, torchtitan and torchtune: plain torch modules under autograd, on one GPU.

Recorders follow the classes of ``models/*/modeling_*.py`` line by line with the operations of ``ops``, which save what
autograd's formulas save (``tools/autograd/derivatives.yaml`` of torch). ``spec.transformers`` lists the supported
families; references/transformers.md says what is counted and how it was tested.
"""
