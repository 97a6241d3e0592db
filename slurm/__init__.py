"""Running stages: on this machine and on SLURM, with one ledger of attempts."""
