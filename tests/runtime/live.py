"""How much memory a forward pass leaves behind: the storages made in it that are still alive."""

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class Live(TorchDispatchMode):
    """Watches every operator's results; `bytes` are those whose storage nobody has let go of.

    Storages that existed before, such as parameters, do not count. `calls` counts operators by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        # Weak references, so that an address is not used again by another storage.
        self._known: dict[int, StorageWeakRef] = {}
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.name()] = self.calls.get(func.name(), 0) + 1
        for tensor in _tensors(args):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._made and storage._cdata not in self._known:
                self._known[storage._cdata] = StorageWeakRef(storage)
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._made and storage._cdata not in self._known:
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    @property
    def bytes(self) -> int:
        """Bytes made under this mode that are still held."""
        return sum(size for reference, size in self._made.values() if not reference.expired())


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [tensor for each in value for tensor in _tensors(each)]
    return []
