"""What a start reads, recorded and read ahead by the next one."""
