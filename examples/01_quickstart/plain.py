"""Plain DDP, as anybody writes it: torchrun --standalone --nproc-per-node 4 plain.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
x = torch.randn(4096, 32)
data = TensorDataset(x, x.sum(1, keepdim=True).sin())
loader = DataLoader(data, batch_size=16, sampler=DistributedSampler(data))

for features, wanted in loader:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(features), wanted)
    loss.backward()
    optimizer.step()

if dist.get_rank() == 0:
    total = sum(p.detach().double().sum().item() for p in model.parameters())
    print(f"done, weights sum to {total:.12f}")
