"""The runtime: the only room that knows torch.distributed (paper §6.3, §7, A.2)."""
