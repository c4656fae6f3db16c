"""The inventory: which parameters a rank owns, which tensors it saves for backward, what it holds in passing.

Every block writes its forward pass as a ``Tape`` (see ``tape.py``); saved bytes and peaks follow from it.
"""
