"""The script of `bench zero`: imports torch, transformers where it is there, makes one step, goes on for a while.

zero_rank.py MOMENT_FILE SECONDS
"""

import os
import sys
import time

import torch

try:
    from transformers import BertConfig, BertModel
except ImportError:
    model = torch.nn.Linear(8, 8)
    loss = model(torch.randn(4, 8)).sum()
else:
    config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    model = BertModel(config)
    loss = model(torch.randint(0, 50, (2, 8))).last_hidden_state.sum()

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loss.backward()
optimizer.step()
moment_ns = time.monotonic_ns()
with open(sys.argv[1], "x", encoding="ascii") as file:
    file.write(f"{moment_ns} {os.getpid()}")
time.sleep(float(sys.argv[2]))
