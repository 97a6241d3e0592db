"""Run files as text: their lines, references, problems, and the keys that sections have."""
