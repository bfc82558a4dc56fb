"""A job that trains while its node is warmed for another one: python warm_train.py FILE.

After each step the time, by the monotonic clock, is added to FILE as eight bytes. It ends when it is ended.
"""

import struct
import sys
import time

import torch

WIDTH, BATCH = 512, 64


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs, wanted = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)
    with open(sys.argv[1], "ab", buffering=0) as file:
        while True:
            loss = torch.nn.functional.mse_loss(model(inputs), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            file.write(struct.pack("<q", time.monotonic_ns()))


if __name__ == "__main__":
    main()
