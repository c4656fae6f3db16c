"""The inventory: which parameters a rank owns, what each block retains for backward, and its peaks.

A block's recorder writes its forward pass on a tape (``tape``), with sizes that remember how they were worked out
(``sizes``). ``alive`` follows the tape once, ``blocks`` puts in the numbers of a run, ``chain`` and ``stack`` compose
blocks into chunks.
"""
