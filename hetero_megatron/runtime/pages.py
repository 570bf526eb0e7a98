"""Large pages for large buffers in host memory: first use of new memory is a third as slow, or less."""

import ctypes
import sys

from torch import Tensor

_HUGE_PAGE = 2 << 20
# From the system's <sys/mman.h>.
_MADV_HUGEPAGE = 14


def prefer_large_pages(flat: Tensor) -> None:
    """Ask for large pages in a new contiguous buffer that nobody has written to; where there are none, do nothing."""
    if flat.device.type != "cpu" or flat.nbytes < 2 * _HUGE_PAGE or sys.platform != "linux":
        return
    first = -(-flat.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
    size = (flat.data_ptr() + flat.nbytes - first) // _HUGE_PAGE * _HUGE_PAGE
    # It is advice: an error means that pages stay small.
    ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), _MADV_HUGEPAGE)
