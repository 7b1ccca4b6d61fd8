"""Publishing: model cards, converters, export."""
