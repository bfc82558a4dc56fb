"""What ranks print: log files, console copies."""
