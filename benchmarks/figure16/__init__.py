"""The elastic traces of the paper's Figure 16 with real processes at reduced width: `python -m benchmarks.figure16`."""
