"""Container images: from and to registries, as trees."""
