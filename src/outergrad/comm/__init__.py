"""The transport over torch.distributed, and parts of all transports, without layers or methods."""
