"""What the server that tests fork from has done once, so that none of its children needs to: Hydra's first reading of a
command line takes a tenth of a second more than the next.
"""

from utils.command_line import read_config

read_config("pretrain", ["debug=tiny", "arch.hidden_size=32", "lr=1e-3", "data_paths=[a,b]"])
