"""Training runs: `swinv2_moe.train.run.train`."""
