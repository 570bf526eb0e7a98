"""See the README's tree: the package `hetero_megatron.recipes`."""

if __name__ == "recipes":
    raise ImportError("import hetero_megatron.recipes, not recipes")
