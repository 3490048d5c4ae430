"""Which operators work on the simulated accelerator: PyTorch's own database of operators, run on it and on the CPU.

``database`` says what there is to run, ``comparison`` runs one operator on both devices, ``workers`` runs many in
several processes, ``table`` keeps the outcome as ``OPERATORS.md``.
"""
