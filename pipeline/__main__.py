"""`python -m pipeline` is the `pipeline` command."""

import os

if os.path.isfile(__file__):
    try:
        from pretraining_pipeline import main
    except ImportError:  # a job in a container has the copy of the packages alone
        from pipeline.cli.main import main
else:  # a job's archive has both packages; what is installed in its container may know of no archive
    from pipeline.cli.main import main

if __name__ == "__main__":
    main()
