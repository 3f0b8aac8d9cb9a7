"""Recipes that several benchmarks share."""

# The first recipe of `make demo`: trm_sudoku_6x6 before it got faster. Tables in docs/lab/log.md
# are of this recipe.
FIRST_DEMO = [
    *("experiment=trm_sudoku_6x6", "max_steps=400", "eval_every_n_steps=100", "global_batch_size=64", "lr=1e-3"),
    *("weight_decay=0.1", "ema=false", "ema_rate=0.999", "arch.L_cycles=3", "arch.expansion=4"),
    *("arch.width_multiple=256", "arch.forward_dtype=float32"),
]
