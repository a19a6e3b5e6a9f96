"""The serverless layer: leases (what is billed), instances (what is warm), pools of them, and the ledger."""
