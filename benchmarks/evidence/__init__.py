"""What `gpu_evidence.py` runs: items, the machine they ran on, the files they imported, the page of results."""
