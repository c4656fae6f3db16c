"""Recorders for models as Hugging Face transformers runs them: plain modules of torch under autograd, on one GPU.

The classes of ``models/*/modeling_*.py`` are followed line by line in the operations of ``ops``, which keep what
autograd's formulas keep (``tools/autograd/derivatives.yaml`` of torch). ``spec.transformers`` says which families are
known; references/transformers.md what is counted and how it was proven.
"""
