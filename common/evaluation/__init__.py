"""Evaluation: metrics, equivariance, speed, tables and plots."""
