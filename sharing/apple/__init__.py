from utils.errors import UserError

try:
    import mlx.core  # noqa: F401 (for the message below)
except ImportError:
    raise UserError("MLX is not installed; run pip install -r requirements-mlx.txt") from None
