"""Read a command line once, in the server from which tests fork.

Hydra's first reading takes a tenth of a second more than later ones, and the forks inherit it.
"""

from utils.command_line import read_config

read_config("pretrain", ["debug=tiny", "arch.hidden_size=32", "lr=1e-3", "data_paths=[a,b]"])
