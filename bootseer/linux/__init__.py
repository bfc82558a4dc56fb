"""Linux system calls and files that Python lacks. Standard library only; imported by all packages."""
