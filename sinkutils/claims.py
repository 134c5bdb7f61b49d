"""The ledger of claims (stub replaced below)."""
