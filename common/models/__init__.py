"""What the four architectures share: classifier, windowed stages, embedding, registry, the Hub."""
