"""What the tasks share and is no task: the run, its ledger and records, pages, and cancelling."""
