"""`python -m hetero_megatron` is `hetero-megatron`."""

from hetero_megatron.cli.main import main

if __name__ == "__main__":
    main()
