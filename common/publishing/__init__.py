"""Publishing: model cards, manifests, converters, export."""
