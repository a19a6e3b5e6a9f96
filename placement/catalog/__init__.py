"""Devices, models and settings that ship as data files."""
