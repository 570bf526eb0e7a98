"""See the README's tree: the package `hetero_megatron.planner`."""

if __name__ == "planner":
    raise ImportError("import hetero_megatron.planner, not planner")
