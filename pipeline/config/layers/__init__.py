"""Keys of the layers of a model."""
