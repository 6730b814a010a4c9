"""Weights that FSDP2 saved, in Shoal: `torchrun --nproc-per-node 2 fsdp2_weights.py model.pt FOLDER`."""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from task import Sorter

import shoal

dist.init_process_group("shoal")
model = shoal.parallelize(Sorter(), f"dp={dist.get_world_size()},shard=zero3")
state = {"model": model.state_dict()}
dcp.load(state, checkpoint_id=sys.argv[2])
model.load_state_dict(state["model"])

whole = model.full_state_dict()  # all ranks call it; rank 0 gets the weights
if dist.get_rank() == 0:
    torch.save(whole, sys.argv[1])
dist.destroy_process_group()
