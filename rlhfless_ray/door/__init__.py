"""Agents that are programs of the user's and reach the policy over HTTP."""
