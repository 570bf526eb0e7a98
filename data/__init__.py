"""See the README's tree: the package `hetero_megatron.data`."""

if __name__ == "data":
    raise ImportError("import hetero_megatron.data, not data")
