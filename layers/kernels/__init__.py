"""Kernels by capability: each operator's backends, what each needs, and the choice made once per run (DESIGN 2).

A layer that is not bound uses the torch ones. Nothing here is imported that need not be installed: a library is
imported by `Kernel.load` in the one file that uses it.
"""

from hetero_megatron.layers.kernels.choice import KERNELS, Kernels, choose, choose_all
from hetero_megatron.layers.kernels.kernel import Choice, Facts, Kernel

__all__ = ["KERNELS", "Choice", "Facts", "Kernel", "Kernels", "choose", "choose_all"]
