"""Why SLURM keeps a job waiting: its reasons, and the limits of accounts and QOS behind them."""
