"""The defined graph of a model, traced once with torch.fx (paper §3, §6)."""

from collections.abc import Iterable
from operator import add, iadd
from typing import Any

import torch
from torch import fx, nn

from hetero_megatron.errors import GraphError
from hetero_megatron.graph.nodes import Graph, Kind, Node
from hetero_megatron.graph.shapes import infer_shape
from hetero_megatron.graph.signature import Signature, addition
from hetero_megatron.graph.symbols import Shape, Symbol

# A factor that stands only inside composite dims, and the module attribute that says its size.
SIZE_ATTRIBUTES = {"k": "head_dim"}
_ADDITIONS = (add, iadd, torch.add)


def trace(model: nn.Module) -> Graph:
    """The graph of `model.forward`, which may call leaf modules and write `+`, and nothing else.

    A module with a `signature`, or with `is_reshard`, is a leaf and is not looked into. Nodes are named by
    module path; the second call of one module gets '#1'. Arguments of forward are named without their shape
    suffix, whose letters are their dims: `tokens_T` is the leaf `tokens` of shape (T). One
    without a suffix is opaque.

    Raises:
        GraphError: forward does something else, or an operator does not fit its operands.
    """
    tracer = _Tracer()
    try:
        traced = tracer.trace(model)
    except (fx.proxy.TraceError, TypeError) as error:
        raise GraphError(f"{type(model).__name__}.forward cannot be traced: {error}") from error
    return _Builder(model).build(traced)


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return hasattr(m, "signature") or getattr(m, "is_reshard", False)


class _Builder:
    """Turns fx nodes into nodes, one by one."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self._nodes: dict[str, Node] = {}
        self._names: dict[fx.Node, str] = {}
        self._parameters: dict[int, str] = {}
        self._calls: dict[str, int] = {}
        self._additions: dict[int, Signature] = {}

    def build(self, traced: fx.Graph) -> Graph:
        output = ""
        for node in traced.nodes:
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "call_module":
                self._call_module(node)
            elif node.op == "call_function" and node.target in _ADDITIONS:
                self._add(node)
            elif node.op == "output":
                if not isinstance(node.args[0], fx.Node):
                    raise GraphError(f"forward must return one value, the loss; it returns {node.args[0]}")
                output = self._names[node.args[0]]
            else:
                what = getattr(node.target, "__name__", node.target)
                raise GraphError(
                    f"forward calls {what!r} (node {node.name}): make it a leaf with a signature"
                )
        return Graph(tuple(self._live(output)), output)

    def _placeholder(self, node: fx.Node) -> None:
        name, _, letters = str(node.target).rpartition("_")
        if not name or not letters.isupper():
            name, letters = str(node.target), ""
        shape = tuple(Symbol(letter) for letter in letters)
        self._put(node, Node(name, Kind.LEAF, shape=shape, role="input" if letters else "opaque"))

    def _call_module(self, node: fx.Node) -> None:
        path = str(node.target)
        calls = self._calls[path] = self._calls.get(path, -1) + 1
        name = f"{path}#{calls}" if calls else path
        module = self._modules[path]
        arguments = self._arguments(name, node)
        if getattr(module, "is_reshard", False):
            if len(arguments) != 1:
                raise GraphError(f"{name}: a Reshard takes one value, it is given {len(arguments)}")
            shape = self._nodes[arguments[0]].shape
            self._put(
                node, Node(name, Kind.RESHARD, arguments, shape=shape, module=path, arguments=arguments)
            )
            return
        signature = module.signature
        if not isinstance(signature, Signature):
            found = type(signature).__name__
            raise GraphError(
                f"{name}: the signature of {type(module).__name__} is a {found}, not a Signature"
            )
        own = module.named_parameters(recurse=False)
        parameters = tuple(self._parameter(path, key, tensor) for key, tensor in own)
        annotated = len(signature.operands) - len(parameters)
        if len(arguments) != annotated + len(signature.opaque):
            raise GraphError(
                f"{name}: called with {len(arguments)} arguments and {len(parameters)} parameters, "
                f"rule {signature} wants {len(signature.operands)} operands, {len(signature.opaque)} opaque"
            )
        for place, argument in enumerate(arguments):
            if (self._nodes[argument].role == "opaque") != (place >= annotated):
                wanted = "annotated" if place < annotated else "opaque"
                raise GraphError(
                    f"{name}: argument {place} ({argument}) must be {wanted} by rule {signature}"
                )
        given = {
            factor: int(getattr(module, attribute))
            for factor, attribute in SIZE_ATTRIBUTES.items()
            if factor in signature.factors and hasattr(module, attribute)
        }
        inputs = arguments[:annotated] + parameters
        self._compute(node, name, signature, inputs, arguments, given, module=path)

    def _add(self, node: fx.Node) -> None:
        arguments = self._arguments(node.name, node)
        ndim = len(self._nodes[arguments[0]].shape)
        signature = self._additions.setdefault(ndim, addition(ndim))
        self._compute(node, node.name, signature, arguments, arguments, {}, function="add")

    def _compute(
        self,
        node: fx.Node,
        name: str,
        signature: Signature,
        inputs: tuple[str, ...],
        arguments: tuple[str, ...],
        given: dict[str, int],
        module: str = "",
        function: str = "",
    ) -> None:
        shapes: list[Shape] = [self._nodes[operand].shape for operand in inputs]
        try:
            sizes, shape = infer_shape(signature, shapes, given)
        except GraphError as error:
            raise GraphError(f"{name}: {error}") from None
        self._put(
            node, Node(name, Kind.COMPUTE, inputs, signature, shape, None, sizes, module, arguments, function)
        )

    def _arguments(self, name: str, node: fx.Node) -> tuple[str, ...]:
        passed: Iterable[Any] = node.args
        if node.kwargs or not all(isinstance(argument, fx.Node) for argument in passed):
            passed_by_name = dict(node.kwargs)
            raise GraphError(
                f"{name}: pass values of the graph, by position; found {node.args}, {passed_by_name}"
            )
        return tuple(self._names[argument] for argument in passed)

    def _parameter(self, path: str, key: str, tensor: nn.Parameter) -> str:
        """The leaf of a parameter; one that several modules share keeps its first name."""
        name = self._parameters.setdefault(id(tensor), f"{path}.{key}")
        if name not in self._nodes:
            self._nodes[name] = Node(name, Kind.LEAF, shape=tuple(tensor.shape), role="parameter")
        return name

    def _put(self, origin: fx.Node, node: Node) -> None:
        self._names[origin] = node.name
        self._nodes[node.name] = node

    def _live(self, output: str) -> Iterable[Node]:
        """The nodes that the output depends on."""
        live = {output}
        for node in reversed(self._nodes.values()):
            if node.name in live:
                live.update(node.inputs, node.arguments)
        return [node for node in self._nodes.values() if node.name in live]
