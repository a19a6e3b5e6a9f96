"""Forecasts of response lengths, before and during a rollout."""
