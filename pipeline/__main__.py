"""`python -m pipeline` is the `pipeline` command."""

try:
    from pretraining_pipeline import main
except ImportError:  # a job in a container has the copy of the packages alone
    from pipeline.cli.main import main

if __name__ == "__main__":
    main()
