"""What other frameworks need of us; importing a module here never imports its framework."""
