"""The ledger: it reads the records and judges the claims."""
