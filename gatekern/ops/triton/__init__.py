"""Triton kernels: imported at first need by the operator that launches them, never by ``import gatekern``.

No kernel splits the hidden width over programs, uses atomics or picks its tile from the number of rows, so a row's
result does not depend on the rows beside it. Offsets are 64-bit: ``row * stride`` passes 2**31 at 20 000 rows of a
150 000-wide matrix. Launch configurations are fixed (`configs`); nothing is tuned at run time.
"""
