"""One rank in an interpreter of its own: ``python fresh_rank.py RANK WORLD_SIZE STORE``.

Prints one line of JSON. Leaves its buffer open, so that the interpreter's exit has to release it.
"""

from __future__ import annotations

import ctypes
import json
import sys
from datetime import timedelta

import torch.distributed as dist

from m3_comm.agreement import TorchAgreement
from m3_comm.peer_buffer import PeerBuffer
from m3_comm.transports.shm import ShmTransport

rank, world_size, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
assert dist.group.WORLD is not None
channel = TorchAgreement(dist.group.WORLD, 60.0)
buffer = PeerBuffer.create(channel, ShmTransport(), 4096)
for peer, address in enumerate(buffer.addresses):
    ctypes.c_uint64.from_address(address + 8 * rank).value = 100 * rank + peer + 1
channel.agree("written", None)
words = [ctypes.c_uint64.from_address(buffer.local + 8 * source).value for source in range(world_size)]
print(json.dumps({"words": words, "files": sys.modules["m3_comm.transports.shm"].__name__}))
dist.destroy_process_group()
