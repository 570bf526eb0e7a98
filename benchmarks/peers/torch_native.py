"""Their side: PyTorch's own stack. DTensor tensor parallelism, torch.distributed.pipelining (1F1B), DistributedDataParallel.

The model is the same Llama with a batch dim, written as torchtitan writes it. Shape legend: `B` rows, `S` sequence,
`D` hidden, `H` heads, `K` head size, `V` vocabulary.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.case import LR, SEED, Case, Layout
from hetero_megatron.layers.initial import initial_value, initial_values
from hetero_megatron.models.config import LlamaConfig
from hetero_megatron.models.llama import Llama


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Block(nn.Module):
    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.head_size, self.groups = c.head_size, c.num_query_groups
        self.attention_norm = nn.RMSNorm(c.hidden_size, eps=c.norm_eps)
        self.wq, self.wo = _linear(c.hidden_size, c.query_size), _linear(c.query_size, c.hidden_size)
        self.wk, self.wv = _linear(c.hidden_size, c.kv_size), _linear(c.hidden_size, c.kv_size)
        self.mlp_norm = nn.RMSNorm(c.hidden_size, eps=c.norm_eps)
        self.gate, self.up = (_linear(c.hidden_size, c.ffn_hidden_size) for _ in range(2))
        self.down = _linear(c.ffn_hidden_size, c.hidden_size)

    def forward(self, x_BSD: Tensor, cos_SK: Tensor, sin_SK: Tensor) -> Tensor:
        rows, length, _ = x_BSD.shape
        h_BSD = self.attention_norm(x_BSD)
        q_BHSK, k_BHSK, v_BHSK = (
            w(h_BSD).view(rows, length, -1, self.head_size).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        q_BHSK, k_BHSK = _turn(q_BHSK, cos_SK, sin_SK), _turn(k_BHSK, cos_SK, sin_SK)
        a_BHSK = F.scaled_dot_product_attention(
            q_BHSK, k_BHSK, v_BHSK, is_causal=True, enable_gqa=q_BHSK.shape[1] != k_BHSK.shape[1]
        )
        x_BSD = x_BSD + self.wo(a_BHSK.transpose(1, 2).reshape(rows, length, -1))
        h_BSD = self.mlp_norm(x_BSD)
        return x_BSD + self.down(F.silu(self.gate(h_BSD)) * self.up(h_BSD))


def _turn(x_BHSK: Tensor, cos_SK: Tensor, sin_SK: Tensor) -> Tensor:
    first, second = x_BHSK.chunk(2, -1)
    return x_BHSK * cos_SK + torch.cat((-second, first), -1) * sin_SK


class PlainLlama(nn.Module):
    """Layers [first, last) of the model, with the embedding and the head at its ends; named as our parameters are."""

    def __init__(self, c: LlamaConfig, sequence: int, first: int, last: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(c.vocab_size, c.hidden_size) if first == 0 else None
        self.layers = nn.ModuleDict({str(layer): Block(c) for layer in range(first, last)})
        ends = last == c.num_layers
        self.final_norm = nn.RMSNorm(c.hidden_size, eps=c.norm_eps) if ends else None
        self.head = _linear(c.hidden_size, c.vocab_size) if ends else None
        exponents = torch.arange(0, c.head_size, 2) / c.head_size
        angles = torch.outer(torch.arange(sequence).float(), 1.0 / c.rope_theta**exponents)
        self.register_buffer("cos", angles.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", angles.sin().repeat(1, 2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, S, V], or [B, S, D] for the next stage, from ids [B, S] or the stage before."""
        x_BSD = x if self.embedding is None else self.embedding(x)
        for layer in self.layers.values():
            x_BSD = layer(x_BSD, self.cos, self.sin)
        return x_BSD if self.head is None else self.head(self.final_norm(x_BSD))


def _initialise(model: PlainLlama, config: LlamaConfig) -> None:
    """The values that our side starts from."""
    specs = initial_values(Llama(config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            shape = tuple(parameter.shape)
            parameter.copy_(initial_value(name, specs[name], tuple((0, size) for size in shape), shape, SEED))


def _tensor_parallel(model: PlainLlama, mesh: DeviceMesh) -> None:
    """Megatron's split: whole activations between the blocks, local heads and features inside, split logits."""
    plan: dict[str, ColwiseParallel | RowwiseParallel] = {}
    for layer in model.layers:
        plan |= {f"layers.{layer}.{name}": ColwiseParallel() for name in ("wq", "wk", "wv", "gate", "up")}
        plan |= {f"layers.{layer}.{name}": RowwiseParallel() for name in ("wo", "down")}
    if model.embedding is not None:
        plan["embedding"] = RowwiseParallel(input_layouts=Replicate())
    if model.head is not None:
        plan["head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh, plan)


def _loss(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    return F.cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten())


class TorchNative:
    """A model on one rank, one step at a time."""

    def __init__(self, case: Case, layout: Layout) -> None:
        config, self._layout = case.config, layout
        mesh = init_device_mesh("cpu", (layout.dp, layout.pp, layout.tp), mesh_dim_names=("dp", "pp", "tp"))
        self._copy, stage = mesh.get_local_rank("dp"), mesh.get_local_rank("pp")
        self._count = case.micro_batches // layout.dp
        layers = config.num_layers
        first, last = layers * stage // layout.pp, layers * (stage + 1) // layout.pp
        model: nn.Module = PlainLlama(config, case.sequence, first, last)
        _initialise(model, config)
        self._parallel_loss: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
        if layout.tp > 1:
            _tensor_parallel(model, mesh["tp"])
            self._parallel_loss = loss_parallel
        if layout.dp > 1:
            model = DistributedDataParallel(
                model, process_group=mesh.get_group("dp"), gradient_as_bucket_view=True
            )
        self._model, self._starts, self._ends = model, stage == 0, stage == layout.pp - 1
        # Fused Adam refuses DTensors and Tensors in one group.
        split = [[p for p in model.parameters() if isinstance(p, DTensor) is kind] for kind in (True, False)]
        self._optimizer = torch.optim.AdamW(
            [{"params": group} for group in split if group], lr=LR, weight_decay=0.0, fused=True
        )
        self._schedule: Schedule1F1B | None = None
        if layout.pp > 1:
            group = mesh.get_group("pp")
            held = PipelineStage(model, stage, layout.pp, torch.device("cpu"), group=group)
            self._schedule = Schedule1F1B(held, n_microbatches=self._count, loss_fn=_loss)

    def batches(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and targets of this rank's copy."""
        own = rows.chunk(self._layout.dp)[self._copy]
        return own[:, :-1].contiguous(), own[:, 1:].contiguous()

    def step(self, batches: tuple[Tensor, Tensor]) -> float:
        """One update; the mean loss of this copy's rows, 0 except on the last stage."""
        ids_BS, targets_BS = batches
        with self._parallel_loss():
            losses = (
                self._one_stage(ids_BS, targets_BS)
                if self._schedule is None
                else self._staged(ids_BS, targets_BS)
            )
        self._optimizer.step()
        self._optimizer.zero_grad()
        if not losses:
            return 0.0
        loss = torch.stack(losses).mean()
        return float(loss.full_tensor() if isinstance(loss, DTensor) else loss)

    def _one_stage(self, ids_BS: Tensor, targets_BS: Tensor) -> list[Tensor]:
        losses = []
        for number, (ids, targets) in enumerate(zip(ids_BS.split(1), targets_BS.split(1), strict=True)):
            with self._synchronised(number == self._count - 1):
                loss = _loss(self._model(ids), targets)
                (loss / self._count).backward()
            losses.append(loss.detach())
        return losses

    @contextlib.contextmanager
    def _synchronised(self, last: bool) -> Iterator[None]:
        """Gradients are reduced behind the last micro-batch's backward pass only."""
        if last or not isinstance(self._model, DistributedDataParallel):
            yield
        else:
            with self._model.no_sync():
                yield

    def _staged(self, ids_BS: Tensor, targets_BS: Tensor) -> list[Tensor]:
        assert self._schedule is not None, "several stages have a schedule"
        losses: list[Tensor] = []
        arguments = (ids_BS,) if self._starts else ()
        wanted = {"target": targets_BS, "losses": losses} if self._ends else {}
        self._schedule.step(*arguments, **wanted)
        return [loss.detach() for loss in losses]

    def mean_loss(self, losses: Tensor) -> Tensor:
        """The losses of all rows on every rank, from what `step` returned on each; not timed."""
        losses = losses.clone()
        dist.all_reduce(losses)
        return losses / (self._layout.dp * self._layout.tp)
