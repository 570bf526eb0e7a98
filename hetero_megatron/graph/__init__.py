"""See the README's tree."""
