"""What runs used of what they had asked for, where their time went, and what to ask for next time.

`efficiency.gather` reads it all; `ledger` and `advice` are pure.
"""
