"""Reader and writer for torch.distributed.checkpoint: `dcp.load(state, storage_reader=BootseerReader(url))`."""

from bootseer.checkpoint.dcp.reader import BootseerReader
from bootseer.checkpoint.dcp.writer import BootseerWriter

__all__ = ["BootseerReader", "BootseerWriter"]
