"""Health checks of a node, as bootrun runs them."""
