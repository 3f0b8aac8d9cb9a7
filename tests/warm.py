"""Read a command line once, in the server from which tests fork.

Hydra's first reading takes a tenth of a second more than later ones, and the forks inherit it.
"""

import gc

from utils.command_line import read_config

read_config("pretrain", ["debug=tiny", "arch.hidden_size=32", "lr=1e-3", "data_paths=[a,b]"])

# The forks' collections of garbage leave out what is there now. Otherwise the first one takes a
# fifth of a second, and copies much memory.
gc.freeze()
