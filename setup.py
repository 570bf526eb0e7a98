"""Packaging. Five top-level folders join the package through links: hetero_megatron/layers -> ../layers."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

setup(
    name="hetero-megatron",
    version="0.1.0",
    description="Heterogeneous parallel strategies for Megatron-style Llama training",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    package_dir={"": "."},
    packages=find_packages(include=["hetero_megatron", "hetero_megatron.*"]),
    package_data={
        "hetero_megatron": ["py.typed"],
        "hetero_megatron.recipes": ["*.yaml", "paper/*.yaml", "pretrain/*.yaml"],
    },
    install_requires=[
        "torch>=2.10",
        "numpy>=1.26",
        "pydantic>=2.10",
        "ruamel.yaml>=0.18",
        "typer>=0.12",
        "rich>=13",
        "safetensors>=0.5",
        "tokenizers>=0.21",
        # The planner's integer programs: PuLP with HiGHS.
        "pulp>=3.0,<4",
        "highspy>=1.9",
        "pyomo>=6.8",
    ],
    extras_require={
        # For NVIDIA GPUs. apex is not among them: it is NVIDIA's and is built from its source repository
        # (github.com/NVIDIA/apex). The package called apex on the Python package index is something else; it
        # is never installed here.
        "gpu": ["transformer-engine[pytorch]", "flash-attn"],
        # Corpora in parquet, saved datasets, the Hugging Face hub; SentencePiece tokenizers.
        "data": ["datasets>=3", "sentencepiece>=0.2"],
        "logging": ["tensorboard"],
        # SCIP, for the planner's mixed-integer nonlinear programs.
        "scip": ["pyscipopt"],
        "plots": ["matplotlib"],
        "dev": [
            "ruff",
            "mypy",
            "pytest",
            "pytest-timeout",
            "hypothesis",
            "datasets>=3",
            "sentencepiece>=0.2",
            "tensorboard",
            "matplotlib",
            "pyscipopt",
            # What exported models are compared with.
            "transformers>=4.50",
        ],
    },
    entry_points={"console_scripts": ["hetero-megatron = hetero_megatron.cli.main:main"]},
)
