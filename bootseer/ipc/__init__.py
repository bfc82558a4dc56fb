"""Messages between processes of one machine: JSON objects, one a line, over sockets and pipes.

framing.py cuts bytes into objects, channel.py is a blocking connection, replies.py has requests with one reply
each, unix_sockets.py identifies the process at the other end. launcher/base/json_lines.py does the same on the
agent's loop.
"""
