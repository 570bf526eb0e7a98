"""The command line `hetero-megatron`: one file per command, each a thin layer over pure functions."""
