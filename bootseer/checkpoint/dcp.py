"""Reader and writer for torch.distributed.checkpoint: `dcp.load(state, storage_reader=BootseerReader(url))`."""

from bootseer.checkpoint.dcp_reader import BootseerReader
from bootseer.checkpoint.dcp_writer import BootseerWriter

__all__ = ["BootseerReader", "BootseerWriter"]
